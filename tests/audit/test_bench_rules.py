"""Each rule of the check is needed: with it a case is named, without it the same case is misnamed or accused."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from tests.audit.bench import advantages
from tests.audit.bench.numerics import small
from tests.audit.bench.sound import k3, ppo
from tests.audit.bench.variants import plus, ratio_k3
from tests.audit.bench.worlds import BETA, Case, World, make_world, verdict_of, worth_of

import klamp
from klamp.audit import conclude, fit, forms, inputs, micro_batch
from klamp.audit.verdict import Verdict

RIGHT = Case("right", plus(ppo, ratio_k3))
K2 = Case("k2", plus(ppo, lambda w: w.d.square() / 2))
FORWARD = Case("k3", plus(ppo, lambda w: k3(w.d)), kl=("forward",), ok=False, codes=("kl-forward",))


def worth(case: Case, world: World) -> str:
    """The worth of the verdict."""
    return worth_of(case, verdict_of(case, world))


# 1. far tokens are left out, duplicates are dropped


def test_tokens_far_from_the_old_policy_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(100)
    old = world.old.clone()
    old[0, 1], old[1, 2], old[4, 2] = old[0, 1] - 7, old[1, 2] - 5, old[4, 2] - 4.5
    world = replace(world, old=old)

    def clamped(w: World) -> torch.Tensor:
        r = w.log_r.clamp(-3, 3).exp()
        return w.token(-w.a * r + BETA * r * k3(w.d))

    case = Case("ratio clamped at 3 nats", clamped)
    assert worth(case, world) == "right"
    monkeypatch.setattr(fit, "FARTHEST", math.inf)
    assert worth(case, world) != "right"


def test_forms_that_a_batch_cannot_tell_apart_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(101, lag=0)
    named = verdict_of(K2, world)
    assert worth_of(K2, named) == "right" and named.surrogate is not None and "ppo_clip" in named.surrogate
    monkeypatch.setattr(forms, "SAME", -1.0)
    apart = verdict_of(K2, world)
    assert apart.surrogate is None or "ppo_clip" not in apart.surrogate


def test_on_completions_of_one_length_the_two_means_are_one() -> None:
    verdict = verdict_of(RIGHT, make_world(102, longest=True))
    assert worth_of(RIGHT, verdict) == "right"
    assert verdict.mean is not None and "token" in verdict.mean and "sequence" in verdict.mean


# 2. the residual is compared with the rounding


@pytest.mark.parametrize("bound", [1e-4, 1e12])
def test_the_bound_of_the_residual_is_that_of_rounding(monkeypatch: pytest.MonkeyPatch, bound: float) -> None:
    world = make_world(103)
    assert worth(RIGHT, world) == worth(FORWARD, world) == "right"
    monkeypatch.setattr(fit, "ACCEPTED", bound)
    assert {worth(RIGHT, world), worth(FORWARD, world)} != {"right"}


# 3. the simplest explanation comes first


def test_no_kl_wins_where_it_explains_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(104)
    case = Case("no KL", lambda w: (w.token(ppo(w)), {"beta": 0.0}), kl=("none",), beta=None)
    assert worth(case, world) == "right"
    stages = fit._stages
    monkeypatch.setattr(fit, "_stages", lambda *args, **more: reversed([*stages(*args, **more)]))
    assert worth(case, world) != "right"


def test_a_free_factor_of_each_completion_names_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(105)
    assert verdict_of(RIGHT, world).beta == pytest.approx(BETA, rel=1e-4)
    stages = fit._stages
    last = lambda *args, **more: [x for x in stages(*args, **more) if x[0] == "free"]  # noqa: E731
    monkeypatch.setattr(fit, "_stages", last)
    verdict = verdict_of(RIGHT, world)
    assert verdict.beta is None and verdict.mean is None and verdict.surrogate is None


# 4. nothing is called absent that could not have been seen


@pytest.mark.parametrize(
    ("beta", "world"),
    [(1e-7, make_world(30)), (1e-5, make_world(30, drift=0.03)), (0.01, make_world(106, dtype=torch.bfloat16))],
)
def test_a_kl_too_small_to_be_seen_is_not_called_absent(
    monkeypatch: pytest.MonkeyPatch, beta: float, world: World
) -> None:
    verdict = verdict_of(small(beta), world)
    assert verdict.ok is None and verdict.beta_seen is not None and verdict.beta_seen > beta
    monkeypatch.setattr(fit, "_visible", lambda *_: 0.0)
    assert worth(small(beta), world) == "accused"


def test_the_power_that_is_printed_is_the_one_that_is_there() -> None:
    world = make_world(107)
    seen = verdict_of(small(1e-9), world).beta_seen
    assert seen is not None and 1e-6 < seen < 1e-4
    assert verdict_of(small(3 * seen), world).ok is not False
    assert verdict_of(small(30 * seen), world).kl == "reverse"


# 5. the class is named, and all of them where several fit


def test_of_collinear_forms_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(108)
    alike = replace(world, ref=(world.logp.detach() - 0.3).requires_grad_(False))
    for case in (K2, FORWARD):
        assert verdict_of(case, alike).ok is None
    judge = conclude.judge_kinds
    monkeypatch.setattr(conclude, "judge_kinds", lambda kinds, *rest: judge(kinds[:1], *rest))
    assert {worth(case, alike) for case in (K2, FORWARD)} & {"wrong name", "accused"}


def test_without_advantages_beta_is_known_only_up_to_the_scale_of_the_loss() -> None:
    world = make_world(109)
    case = Case("distillation", lambda w: (3 * w.token(ratio_k3(w)), {"advantages": 0 * w.advantages}), beta=None)
    verdict = verdict_of(case, world)
    assert verdict.ok is True and verdict.beta is None and "beta-scale" in verdict.codes()


def test_three_estimators_of_one_gradient_have_one_class() -> None:
    world = make_world(110)
    kls = (ratio_k3, lambda w: w.r.detach() * w.d.square() / 2, lambda w: w.r * w.d.detach())
    assert {verdict_of(Case("", plus(ppo, kl)), world).kl for kl in kls} == {"reverse"}


# 6. at step zero the derivatives tell


@pytest.mark.parametrize("change", ["table", "never"])
def test_the_derivatives_are_read_where_the_policy_is_the_reference(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    world = make_world(111, drift=0, lag=0)
    assert worth(FORWARD, world) == "right" and worth(K2, world) == "right"
    if change == "table":
        monkeypatch.setattr(conclude, "AT_ZERO", dict.fromkeys(conclude.AT_ZERO, "reverse"))
    else:
        monkeypatch.setattr(conclude, "NEAR_ZERO", -1.0)
    assert worth(FORWARD, world) != "right"


# 7. unknown is a verdict, with the course of the coefficient


def test_an_unknown_gradient_is_shown_against_the_log_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(112)
    case = Case("odd", plus(lambda w: torch.sin(5 * w.logp), lambda w: w.d.square() * w.d.sin()))

    def bins(verdict: Verdict) -> list[dict[str, float]]:
        return next(x.evidence.get("bins", []) for x in verdict.findings if x.code == "unknown")

    rows = bins(verdict_of(case, world))
    assert len(rows) == 8 and all(0 <= row["pulled_back"] <= 1 for row in rows)
    assert [row["log_ratio"] for row in rows] == sorted(row["log_ratio"] for row in rows)
    monkeypatch.setattr(conclude, "_bins", lambda *_: [])
    assert not bins(verdict_of(case, world))


# 8. the inputs are looked at first


def inputs_with_faults(w: World) -> dict[str, Case]:
    """Faults of the inputs alone: the loss is right."""
    ends = w.ids.clone()
    ends[0, 2] = 99
    pads = torch.where(w.mask & (torch.arange(w.ids.shape[1]) >= 4), 7, 1)
    infinite = w.ref.clone()
    infinite[0, 0] = -math.inf
    faults = {
        "not-finite": {"ref_logprobs": infinite},
        "not-log-probabilities": {"ref_logprobs": w.ref.exp()},
        "shift": {"ref_logprobs": w.ref.roll(1, 1)},
        "after-end-trained": {"ids": ends, "eos": 99},
        "padding-trained": {"ids": pads, "pad": 7},
    }
    return {
        code: Case(code, lambda w, e=extra: (RIGHT.loss(w), e), kl=(), ok=False, codes=(code,), beta=None)
        for code, extra in faults.items()
    }


@pytest.mark.parametrize(
    "code", ["not-finite", "not-log-probabilities", "shift", "after-end-trained", "padding-trained"]
)
def test_the_inputs_are_looked_at(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    world = make_world(113)
    case = inputs_with_faults(world)[code]
    assert worth(case, world) == "right"
    monkeypatch.setattr(conclude, "examine_inputs", lambda *_: iter(()))
    monkeypatch.setattr(conclude._Reading, "_try_shifts", lambda _: None)
    assert worth(case, world) != "right"


def test_a_single_pad_at_the_end_and_other_ids_are_no_padding() -> None:
    world = make_world(114)
    last = world.m.sum(1).long() - 1
    ids = torch.ones_like(world.ids).scatter(1, last[:, None], 7)
    verdict = verdict_of(Case("", lambda w: (RIGHT.loss(w), {"ids": ids, "pad": 7, "eos": 7})), world)
    assert verdict.ok is True


def test_advantages_are_read_from_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(115, shape=(16, 12))
    case = next(x for x in advantages.cases() if x.name == "mean, KL summed")
    assert worth(case, world) == "right"
    monkeypatch.setattr(conclude, "advantage_form", lambda *_: inputs.AdvantageForm())
    assert worth(case, world) != "right"


# 9. once per call site, on rank 0, without random numbers


def looked_at(monkeypatch: pytest.MonkeyPatch, *, once: bool = True) -> list[Verdict]:
    """The verdicts that are worked out in three steps of one loop."""
    found: list[Verdict] = []

    def counted(capture: conclude.Capture) -> Verdict:
        found.append(conclude.conclude(capture))
        return found[-1]

    monkeypatch.setattr(micro_batch, "_SEEN", {})
    monkeypatch.setattr(micro_batch, "conclude", counted)
    for step in range(3):
        world = make_world(116 + step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            klamp.check(world.token(ppo(world) + BETA * ratio_k3(world)), once=once, **world.arguments())
    return found


def test_a_call_site_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(looked_at(monkeypatch)) == 1
    assert len(looked_at(monkeypatch, once=False)) == 3
    monkeypatch.setattr(micro_batch, "_checked_before", lambda *_: None)
    assert len(looked_at(monkeypatch)) == 3


def test_only_rank_0_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert not looked_at(monkeypatch)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert len(looked_at(monkeypatch)) == 1


def test_the_check_draws_no_random_number_and_leaves_no_gradient() -> None:
    world = make_world(119, drift=0, lag=0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    verdict_of(FORWARD, world.watch())
    assert torch.equal(before, torch.get_rng_state()) and world.logits.grad is None
