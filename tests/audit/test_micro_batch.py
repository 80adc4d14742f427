"""Which tensor was passed to `klamp.check`: a copy is refused, a path around it is seen, nothing is ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.audit.bench.sound import exact_kl, ppo
from tests.audit.bench.worlds import make_world
from torch import Tensor

import klamp
from klamp.audit.micro_batch import reaches_around
from klamp.errors import ConfigError, TensorError

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda x: x * 1.0,
    "another dimension": lambda x: x[None][0],
    "a cast": lambda x: x.double(),
    "a slice": lambda x: x[:, :-1],
    "a transpose": lambda x: x.t(),
    "a clone": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_the_log_probabilities_is_refused(name: str) -> None:
    w = make_world(1)
    with pytest.raises(TensorError, match="not computed from this policy_logprobs"):
        klamp.check(w.token(ppo(w)), policy_logprobs=COPIES[name](w.logp), once=False)


def test_only_a_loss_with_another_path_reaches_around_the_log_probabilities() -> None:
    w = make_world(1)
    for _ in range(20):  # the nodes of a graph are wrapped anew at each look
        assert not reaches_around(w.token(ppo(w)), [w.logp], None)
        assert reaches_around(w.token(ppo(w) + exact_kl(w)), [w.logp], None)


def test_no_capture_is_promised_of_a_loss_on_logits_alone(tmp_path: Path) -> None:
    w = make_world(1)
    loss, more = w.token(exact_kl(w)), {"logits": w.logits, "ref_logits": w.ref_logits, "ids": w.ids}
    with pytest.raises(ConfigError, match="writes no capture"):
        klamp.check(loss, policy_logprobs=w.logp, mask=w.mask, save=tmp_path / "it", once=False, **more)
    assert klamp.check(loss, policy_logprobs=w.logp, mask=w.mask, once=False, **more).kl == "reverse"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("beta", "right"), [(-0.05, -0.05), (0.05, 0.05), (0.05, -0.05), (-0.05, 0.05)])
def test_an_exact_kl_beside_is_right_with_the_sign_of_the_beta_that_was_passed(beta: float, right: float) -> None:
    w = make_world(1)
    loss = w.token(ppo(w) + right * exact_kl(w))
    named = {"logits": w.logits, "ref_logits": w.ref_logits, "ids": w.ids, "ref_logprobs": w.ref, "old_logprobs": w.old}
    verdict = klamp.check(
        loss, policy_logprobs=w.logp, mask=w.mask, advantages=w.advantages, beta=beta, once=False, **named
    )
    assert (verdict.kl, verdict.ok) == (("reverse", True) if beta == right else ("away", False))


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_call_site_that_cannot_tell_is_tried_again_and_later_calls_say_so() -> None:
    answers = []
    for step in range(5):
        w = make_world(1, lag=0, drift=0.0 if step < 1 else 0.3)
        loss = w.token(-w.live * w.a + 0.05 * klamp.kl_penalty(w.logp, w.ref, w.mask))
        verdict = klamp.check(
            loss, policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, advantages=w.advantages, beta=0.05
        )
        answers.append((verdict.ok, "earlier call" in verdict.summary))
    assert answers == [(None, False), (True, False), (True, True), (True, True), (True, True)]
    assert torch.is_grad_enabled()
