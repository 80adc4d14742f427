"""Each rule of the check is needed: with it a case is named, without it the same case is misnamed or accused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import advantages, k2, k3, plus, ppo, ratio_k3
from tests.audit.bench.worlds import BETA, Case, World, make_world, verdict_of, worth_of, wrong
from tests.audit.test_bench_numerics import small

import klamp
from klamp.audit import conclude, fit, forms, inputs, micro_batch
from klamp.audit.verdict import Verdict

RIGHT = Case("right", plus(ppo, ratio_k3))
K2 = Case("k2", plus(ppo, k2))
FORWARD = wrong("k3", plus(ppo, lambda w: k3(w.d)), "kl-forward", "forward")
NO_KL = Case("no KL", lambda w: (w.token(ppo(w)), {"beta": 0.0}), kl=("none",), beta=None)
STAGES = fit._stages
ZERO = {"drift": 0.0, "lag": 0.0}
Patch = tuple[Any, str, Any]


def worth(case: Case, world: World) -> str:
    return worth_of(case, verdict_of(case, world))


def clamped(w: World) -> torch.Tensor:
    r = w.log_r.clamp(-3, 3).exp()
    return w.token(-w.a * r + BETA * r * k3(w.d))


def far() -> World:
    """A batch with tokens far from the old policy."""
    world = make_world(100)
    old = world.old.clone()
    old[0, 1], old[1, 2], old[4, 2] = old[0, 1] - 7, old[1, 2] - 5, old[4, 2] - 4.5
    return replace(world, old=old)


def faulty_inputs() -> Iterator[tuple[Case, World, list[Patch]]]:
    """Faults of the inputs alone: the loss is right. Without a look at them nothing is found."""
    w = make_world(113)
    infinite, ends, pads = w.ref.clone(), w.ids.clone(), torch.where(w.mask & (w.places >= 4), 7, 1)
    infinite[0, 0], ends[0, 2] = -math.inf, 99
    faults: dict[str, dict[str, Any]] = {
        "not-finite": {"ref_logprobs": infinite},
        "not-log-probabilities": {"ref_logprobs": w.ref.exp()},
        "shift": {"ref_logprobs": w.ref.roll(1, 1)},
        "after-end-trained": {"ids": ends, "eos": 99},
        "padding-trained": {"ids": pads, "pad": 7},
    }
    blind = [(conclude, "examine_inputs", lambda *_: iter(())), (conclude._Reading, "_try_shifts", lambda _: None)]
    for code, extra in faults.items():
        yield wrong(code, lambda w, e=extra: (RIGHT.loss(w), e), code), w, blind


def rules() -> Iterator[tuple[Case, World, list[Patch]]]:
    """A case, its world, and what takes the rule away that the case needs."""
    yield Case("1, far tokens are left out", clamped), far(), [(fit, "FARTHEST", math.inf)]
    yield RIGHT._replace(name="2, rounding is accepted"), make_world(103), [(fit, "ACCEPTED", 1e-4)]
    yield FORWARD._replace(name="2, no more is accepted"), make_world(103), [(fit, "ACCEPTED", 1e12)]
    last_first = lambda *args, **more: reversed([*STAGES(*args, **more)])  # noqa: E731
    yield NO_KL._replace(name="3, no KL wins"), make_world(104), [(fit, "_stages", last_first)]
    for beta, w in ((1e-7, make_world(30)), (1e-5, make_world(30, drift=0.03))):
        yield small(beta)._replace(name="4, power", ok=None), w, [(fit, "_visible", lambda *_: 0.0)]
    bfloat16 = make_world(106, dtype=torch.bfloat16)
    yield small(0.01)._replace(name="4, power, bf16", ok=None), bfloat16, [(fit, "_visible", lambda *_: 0.0)]
    table = dict.fromkeys(conclude.AT_ZERO, "reverse")
    yield FORWARD._replace(name="6, table"), make_world(111, **ZERO), [(conclude, "AT_ZERO", table)]
    yield FORWARD._replace(name="6, step zero"), make_world(111, **ZERO), [(conclude, "NEAR_ZERO", -1.0)]
    yield from faulty_inputs()
    rewarded = next(x for x in advantages() if x.name.startswith("mean, KL summed"))
    blind = lambda *_: inputs.AdvantageForm()  # noqa: E731
    yield rewarded, make_world(115, shape=(16, 12)), [(conclude, "advantage_form", blind)]


@pytest.mark.parametrize(("case", "world", "without"), [pytest.param(*x, id=x[0].name) for x in rules()])
def test_a_case_is_named_with_its_rule_and_not_without_it(
    monkeypatch: pytest.MonkeyPatch, case: Case, world: World, without: list[Patch]
) -> None:
    assert worth(case, world) == "right"
    for patch in without:
        monkeypatch.setattr(*patch)
    assert worth(case, world) != "right"


def test_forms_that_a_batch_cannot_tell_apart_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(101, lag=0)
    assert "ppo_clip" in (verdict_of(K2, world).surrogate or "")
    monkeypatch.setattr(forms, "SAME", -1.0)
    assert "ppo_clip" not in (verdict_of(K2, world).surrogate or "")


def test_on_completions_of_one_length_the_two_means_are_one() -> None:
    verdict = verdict_of(RIGHT, make_world(102, longest=True))
    assert worth_of(RIGHT, verdict) == "right"
    assert verdict.mean is not None and "token" in verdict.mean and "sequence" in verdict.mean


def test_a_free_factor_of_each_completion_names_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(105)
    assert verdict_of(RIGHT, world).beta == pytest.approx(BETA, rel=1e-4)
    monkeypatch.setattr(fit, "_stages", lambda *args, **more: [x for x in STAGES(*args, **more) if x[0] == "free"])
    verdict = verdict_of(RIGHT, world)
    assert verdict.beta is None and verdict.mean is None and verdict.surrogate is None


def test_the_power_that_is_printed_is_the_one_that_is_there() -> None:
    world = make_world(107)
    seen = verdict_of(small(1e-9), world).beta_seen
    assert seen is not None and 1e-6 < seen < 1e-4
    assert verdict_of(small(3 * seen), world).ok is not False
    assert verdict_of(small(30 * seen), world).kl == "reverse"


def test_of_collinear_forms_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(108)
    alike = replace(world, ref=world.logp.detach() - 0.3)
    assert [verdict_of(case, alike).ok for case in (K2, FORWARD)] == [None, None]
    judge = conclude.judge_kinds
    monkeypatch.setattr(conclude, "judge_kinds", lambda kinds, *rest: judge(kinds[:1], *rest))
    assert {worth(case, alike) for case in (K2, FORWARD)} & {"wrong name", "accused"}


def test_without_advantages_beta_is_known_only_up_to_the_scale_of_the_loss() -> None:
    case = Case("distillation", lambda w: (3 * w.token(ratio_k3(w)), {"advantages": 0 * w.advantages}), beta=None)
    verdict = verdict_of(case, make_world(109))
    assert verdict.ok is True and verdict.beta is None and "beta-scale" in verdict.codes()


def test_an_unknown_gradient_is_shown_against_the_log_ratio() -> None:
    case = Case("odd", plus(lambda w: torch.sin(5 * w.logp), lambda w: w.d.square() * w.d.sin()))
    verdict = verdict_of(case, make_world(112))
    rows = next(x.evidence["bins"] for x in verdict.findings if x.code == "unknown")
    assert len(rows) == 8 and all(0 <= row["pulled_back"] <= 1 for row in rows)
    assert [row["log_ratio"] for row in rows] == sorted(row["log_ratio"] for row in rows)


def test_a_single_pad_at_the_end_and_other_ids_are_no_padding() -> None:
    world = make_world(114)
    ids = torch.where(world.places == world.m.sum(1, keepdim=True) - 1, 7, 1)
    assert verdict_of(Case("", lambda w: (RIGHT.loss(w), {"ids": ids, "pad": 7, "eos": 7})), world).ok is True


def looked_at(monkeypatch: pytest.MonkeyPatch, *, once: bool = True) -> int:
    """How many verdicts are worked out in three steps of one loop."""
    found: list[Verdict] = []
    monkeypatch.setattr(micro_batch, "_SEEN", {})
    monkeypatch.setattr(micro_batch, "conclude", lambda x: found.append(conclude.conclude(x)) or found[-1])
    for step in range(3):
        world = make_world(116 + step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            klamp.check(RIGHT.loss(world), once=once, **world.passed())
    return len(found)


def test_a_call_site_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch) == 1
    assert looked_at(monkeypatch, once=False) == 3
    monkeypatch.setattr(micro_batch, "_checked_before", lambda *_: None)
    assert looked_at(monkeypatch) == 3


def test_only_rank_0_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, looks in ((1, 0), (0, 1)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert looked_at(monkeypatch) == looks


def test_the_check_draws_no_random_number_and_leaves_no_gradient() -> None:
    world = make_world(119, **ZERO)
    before = torch.get_rng_state()
    verdict_of(FORWARD, world.watch())
    assert torch.equal(before, torch.get_rng_state()) and world.logits.grad is None
