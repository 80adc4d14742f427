"""A case for each rule of the check, which is misnamed or accused without the rule.

And which tensor was passed to `klamp.check`: a copy is refused, a path around it is seen, nothing is ignored.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import advantages, exact_kl, k2, k3, plus, ppo, ratio_k3
from tests.audit.bench.worlds import BETA, Case, World, make_world, verdict_of, worth_of, wrong
from tests.audit.test_bench_numerics import small
from torch import Tensor

import klamp
from klamp.audit import micro_batch
from klamp.errors import ConfigError, TensorError

RIGHT = Case("right", plus(ppo, ratio_k3))
K2 = Case("k2", plus(ppo, k2))
FORWARD = wrong("k3", plus(ppo, lambda w: k3(w.d)), "kl-forward", "forward")
NO_KL = Case("no KL", lambda w: (w.token(ppo(w)), {"beta": 0.0}), kl=("none",), beta=None)
IN_REWARD = next(x for x in advantages() if x.name.startswith("mean, KL summed"))
NEAR, COARSE = make_world(103), make_world(106, dtype=torch.bfloat16)
FIRST, MANY = make_world(111, drift=0, lag=0), make_world(115, shape=(16, 12))
FAR = replace(NEAR, old=NEAR.old - 6 * ((NEAR.places == 2) & (torch.arange(8)[:, None] % 3 == 0)))
ALIKE = replace(NEAR, ref=NEAR.logp.detach() - 0.3)  # the log-ratio is constant: k2 and k3 are collinear
INFINITE, ENDS = NEAR.ref.clone(), NEAR.ids.clone()
INFINITE[0, 0], ENDS[0, 2] = -math.inf, 99
PADS = torch.where(NEAR.mask & (NEAR.places >= 4), 7, 1)


def clamped(w: World) -> Tensor:
    r = w.log_r.clamp(-3, 3).exp()
    return w.token(-w.a * r + BETA * r * k3(w.d))


def invisible(beta: float) -> Case:
    """A right KL of a size that must not be judged."""
    return small(beta)._replace(ok=None)


def faulty(code: str, **inputs: Any) -> Case:
    """A right loss beside inputs with one fault. Without a look at them nothing is found."""
    return wrong(code, lambda w: (RIGHT.loss(w), inputs), code)


RULES: dict[str, tuple[Case, World]] = {
    "1, far tokens are left out": (Case("", clamped), FAR),
    "1, equal forms are one": (K2, make_world(101, lag=0)),
    "2, rounding is accepted, and a free factor of each completion comes last": (RIGHT, NEAR),
    "2, no more is accepted": (FORWARD, NEAR),
    "3, no KL wins": (NO_KL, NEAR),
    "4, power": (invisible(1e-7), make_world(30)),
    "4, power near the reference": (invisible(1e-5), make_world(30, drift=0.03)),
    "4, power in bf16": (invisible(0.01), COARSE),
    "5, of collinear forms all are named": (K2._replace(ok=None), ALIKE),
    "5, also where one is wrong": (FORWARD._replace(ok=None), ALIKE),
    "6, step zero": (FORWARD, FIRST),
    "8, finite": (faulty("not-finite", ref_logprobs=INFINITE), NEAR),
    "8, at most 0": (faulty("not-log-probabilities", ref_logprobs=NEAR.ref.exp()), NEAR),
    "8, shift": (faulty("shift", ref_logprobs=NEAR.ref.roll(1, 1)), NEAR),
    "8, end": (faulty("after-end-trained", ids=ENDS, eos=99), NEAR),
    "8, padding": (faulty("padding-trained", ids=PADS, pad=7), NEAR),
    "8, form of the advantages": (IN_REWARD, MANY),
}
STATED = {"1, equal forms are one": "surrogate", "2, rounding is accepted": "beta"}
"""Rules that only let a verdict state more."""


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_kept(name: str) -> None:
    case, world = RULES[name]
    verdict = verdict_of(case, world)
    assert worth_of(case, verdict) == "right", str(verdict)
    assert getattr(verdict, STATED.get(name.partition(", and")[0], "codes")) is not None


def test_what_a_verdict_states_where_it_cannot_state_more() -> None:
    both = verdict_of(RIGHT, make_world(102, longest=True)).mean  # all completions have one length
    assert both is not None and "token" in both and "sequence" in both
    distilled = Case("", lambda w: (3 * w.token(ratio_k3(w)), {"advantages": 0 * w.advantages}))
    verdict = verdict_of(distilled, NEAR)
    assert verdict.ok is True and verdict.beta is None and "beta-scale" in verdict.codes()


def test_the_power_that_is_printed_is_the_one_that_is_there() -> None:
    world = make_world(107)
    seen = verdict_of(small(1e-9), world).beta_seen
    assert seen is not None and 1e-6 < seen < 1e-4
    assert verdict_of(small(3 * seen), world).ok is not False
    assert verdict_of(small(30 * seen), world).kl == "reverse"


def test_a_single_pad_at_the_end_and_other_ids_are_no_padding() -> None:
    ids = torch.where(NEAR.places == NEAR.m.sum(1, keepdim=True) - 1, 7, 1)
    assert verdict_of(RIGHT, NEAR, ids=ids, pad=7, eos=7).ok is True


@pytest.mark.parametrize("case", [RIGHT, FORWARD])
def test_the_check_draws_no_random_number_and_changes_no_gradient(case: Case) -> None:
    before, loss = torch.get_rng_state(), case.loss(FIRST)
    verdict_of(Case("", lambda _: loss), FIRST)
    assert torch.equal(before, torch.get_rng_state()) and FIRST.logits.grad is None
    assert torch.equal(*(torch.autograd.grad(x, FIRST.logits, retain_graph=True)[0] for x in (loss, case.loss(FIRST))))


COPIES: list[Callable[[Tensor], Tensor]] = [lambda x: x * 1.0, lambda x: x[None][0], lambda x: x[:, :-1]]


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_the_log_probabilities_is_refused(copy: Callable[[Tensor], Tensor]) -> None:
    w = make_world(1)
    with pytest.raises(TensorError, match="not computed from this policy_logprobs"):
        klamp.check(w.token(ppo(w)), policy_logprobs=copy(w.logp), once=False)


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
def test_rank_0_checks_a_call_site_once_and_tries_again_where_it_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(steps: int) -> list[tuple[bool | None, bool]]:
        found = []
        for step in range(steps):
            w = make_world(1, lag=0, drift=0.0 if step < 1 else 0.3)
            loss = w.token(-w.live * w.a + 0.05 * klamp.kl_penalty(w.logp, w.ref, w.mask))
            verdict = klamp.check(loss, **w.passed() | {"old_logprobs": None, "sampler_logprobs": None}, beta=0.05)
            found.append((verdict.ok, "earlier call" in verdict.summary))
        return found

    monkeypatch.setattr(micro_batch, "_VERDICTS", {})
    assert answers(5) == [(None, False), (True, False), (True, True), (True, True), (True, True)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert answers(2) == [(None, False)] * 2
