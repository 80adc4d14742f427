"""Which tensor was passed to `klamp.check`: a copy is refused, a path around it is seen, nothing is ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.audit.bench.losses import exact_kl, ppo
from tests.audit.bench.worlds import Case, make_world, verdict_of
from torch import Tensor

import klamp
from klamp.audit.micro_batch import reaches_around
from klamp.errors import ConfigError, TensorError

COPIES: list[Callable[[Tensor], Tensor]] = [lambda x: x * 1.0, lambda x: x[None][0], lambda x: x[:, :-1]]


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_the_log_probabilities_is_refused(copy: Callable[[Tensor], Tensor]) -> None:
    w = make_world(1)
    with pytest.raises(TensorError, match="not computed from this policy_logprobs"):
        klamp.check(w.token(ppo(w)), policy_logprobs=copy(w.logp), once=False)


def test_only_a_loss_with_another_path_reaches_around_the_log_probabilities() -> None:
    w = make_world(1)
    for _ in range(20):  # the nodes of a graph are wrapped anew at each look
        assert not reaches_around(w.token(ppo(w)), [w.logp], None)
        assert reaches_around(w.token(ppo(w) + exact_kl(w)), [w.logp], None)


def test_no_capture_is_promised_of_a_loss_on_logits_alone(tmp_path: Path) -> None:
    w = make_world(1)
    given = {"policy_logprobs": w.logp, "mask": w.mask, **w.logits_passed()}
    with pytest.raises(ConfigError, match="writes no capture"):
        klamp.check(w.token(exact_kl(w)), save=tmp_path / "it", once=False, **given)
    assert klamp.check(w.token(exact_kl(w)), once=False, **given).kl == "reverse"


@pytest.mark.parametrize(("beta", "right"), [(-0.05, -0.05), (0.05, 0.05), (0.05, -0.05), (-0.05, 0.05)])
def test_an_exact_kl_beside_is_right_with_the_sign_of_the_beta_that_was_passed(beta: float, right: float) -> None:
    case = Case("", lambda w: (w.token(ppo(w) + right * exact_kl(w)), {"beta": beta, **w.logits_passed()}))
    verdict = verdict_of(case, make_world(1), sampler_logprobs=None)
    assert (verdict.kl, verdict.ok) == (("reverse", True) if beta == right else ("away", False))


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_call_site_that_cannot_tell_is_tried_again_and_later_calls_say_so() -> None:
    answers = []
    for step in range(5):
        w = make_world(1, lag=0, drift=0.0 if step < 1 else 0.3)
        loss = w.token(-w.live * w.a + 0.05 * klamp.kl_penalty(w.logp, w.ref, w.mask))
        verdict = klamp.check(loss, **w.passed() | {"old_logprobs": None, "sampler_logprobs": None}, beta=0.05)
        answers.append((verdict.ok, "earlier call" in verdict.summary))
    assert answers == [(None, False), (True, False), (True, True), (True, True), (True, True)]
    assert torch.is_grad_enabled()
