"""beta in every trainer: which KL they go by, when it stops a run, what a checkpoint holds."""

import json
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from klamp.config import KLConfig
from klamp.config.loss import Price, price_at_distance
from klamp.core.controllers import kl_schedule_factor
from klamp.errors import ConfigError, KLWarning, NonFiniteError
from klamp.hosts.common.control import KLControl, beta_metrics, go_on_from, held_kl, landing_beta, mean_spread

CONTROLLERS = ("fixed", "hold", "step", "proportional")


GROUPS = torch.tensor([[0.0, 1, 1, 0], [1, 1, 1, 1]])
METRICS = {"beta": 0.01, "beta/price": 0.01, "length/mean": 4.0}
pytestmark = pytest.mark.filterwarnings("ignore:kl_controller=:klamp.errors.KLWarning")


def control_of(name: str, state: dict[str, Any] | None = None, **changes: object) -> KLControl:
    """A control, which continues from the saved state of another."""
    target = {} if name == "fixed" else {"target_kl": 0.1}
    control = KLControl(KLConfig(**{"beta": 0.2, "kl_controller": name, **target, **changes}))
    if state is not None:
        control.load_state_dict(json.loads(json.dumps(state)))
    return control


def after(name: str, *kls: float, **changes: object) -> KLControl:
    control = control_of(name, **changes)
    for kl in kls:
        control.update(kl)
    return control


def test_what_is_held_is_the_exact_kl_where_every_completion_has_it() -> None:
    both = {"kl/k3": 0.2, "kl/exact": 0.1}
    assert held_kl(both, exact_everywhere=True) == 0.1
    assert held_kl(both, exact_everywhere=False) == 0.2
    assert held_kl({"kl/k3": 0.2}, exact_everywhere=True) == 0.2
    assert held_kl({"kl/k1": 0.2}, exact_everywhere=True) is None


def test_beta_is_the_controllers_times_the_schedules() -> None:
    control = after("fixed", 0.5, beta=0.3, kl_schedule="cosine", kl_warmup_steps=2)
    for step in range(10):
        factor = kl_schedule_factor(step, 10, schedule="cosine", warmup_steps=2)
        assert control.beta(step, 10) == pytest.approx(0.3 * factor)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_kl_that_is_not_finite_stops_the_run_and_changes_nothing(name: str, kl: float) -> None:
    control = after(name, 0.3, 0.2)
    before = json.dumps(control.state_dict())
    with pytest.raises(NonFiniteError, match="before the optimizer step") as caught:
        control.update(kl)
    assert json.dumps(control.state_dict()) == before
    assert str(kl) in str(caught.value.got) and caught.value.why and "newest checkpoint" in caught.value.fix


@pytest.mark.filterwarnings("ignore:The KL is")
@pytest.mark.parametrize("name", CONTROLLERS)
@settings(max_examples=10)
@given(kls=st.lists(st.floats(0, 2), min_size=1, max_size=8), cut=st.integers(0, 7))
def test_a_checkpoint_continues_where_it_was(name: str, kls: list[float], cut: int) -> None:
    whole, first = after(name, *kls), after(name, *kls[:cut])
    first.reference_length = 12.5
    second = control_of(name, first.state_dict())
    assert second.reference_length == 12.5
    for kl in kls[cut:]:
        second.update(kl)
    assert (second.beta(5, 10), second.last_kl) == (whole.beta(5, 10), whole.last_kl)


def test_the_names_of_the_state_are_a_file_format() -> None:
    state = after("hold", 0.3).state_dict()
    assert state.keys() == {"controller_name", "controller", "asked", "reference_length", "last_kl"}
    assert state["controller"].keys() == {"value", "level", "trend", "landing", "landed"}


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5])
@pytest.mark.parametrize(("saved", "changes"), [*((name, {}) for name in CONTROLLERS), ("fixed", {"beta": 0.0})])
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_fixed_beta_is_the_configured_one_whatever_was_saved(saved: str, changes: Any, beta: float) -> None:
    before = after(saved, 0.3, **changes)
    control = control_of("fixed", before.state_dict(), beta=beta, kl_warmup_steps=4)
    assert (control.beta(2, 10), control.beta(9, 10)) == (beta / 2, beta)
    assert control.last_kl == 0.3


def test_a_controller_that_changed_begins_anew_at_the_beta_in_force_or_at_the_one_that_is_asked_for_now() -> None:
    before = after("hold", 0.1, 0.3, 0.3, 0.2, beta=0.01)
    state, in_force = before.state_dict(), before.controller.value
    assert in_force > 0.02
    for changes in ({"target_kl": 0.4}, {"kl_controller": "step"}):
        control = control_of("hold", state, beta=0.01, **changes)
        assert control.controller.value == in_force
        fresh = control_of("hold", beta=0.01, **changes)
        assert control.controller.state._replace(value=0.01) == fresh.controller.state
    bounded = control_of("hold", state, beta=0.01, beta_max=0.4).controller.state
    assert bounded == before.controller.state._replace(value=min(in_force, 0.4)), "bounds are no other aim"
    assert control_of("hold", state, beta=0.2).controller.value == 0.2
    assert control_of("hold", state, beta=0.01, target_kl=0.001).controller.target == 0.001
    assert control_of("step", control_of("fixed").state_dict()).controller.value == 0.2
    step = control_of("step", state, beta=0.01, target_kl=0.1)
    step.update(0.2)
    assert step.controller.value > in_force, "not the start that it was configured with, one step later"
    higher = control_of("hold", state, beta=0.01, target_kl=3.0)
    for _ in range(30):
        higher.update(0.3)
    assert higher.controller.value < in_force, "a beta that another target needed is not held for ever"


RESUMES = [(0.47, 0.0, 1), (0.3, 9160.0, 1), (0.0, 0.3, 1), (0.05, 0.001, 1), (0.3, 0.1, 0), (0.001, 0.15, 0)]


@pytest.mark.parametrize(("before", "now", "told"), RESUMES)
def test_a_kl_that_a_resume_changed_is_told_once(before: float, now: float, told: int) -> None:
    state = after("fixed", before).state_dict()
    control, periodic = (control_of("fixed", state, reference=name) for name in ("auto", "periodic"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kl in (now, before):
            control.update(kl)
            periodic.update(kl)
    assert ["the reference is another model, or" in str(each.message) for each in caught] == [True] * told


@pytest.mark.filterwarnings("error")
def test_a_run_that_goes_on_without_its_kl_is_told() -> None:
    before = after("fixed", 0.3).state_dict()
    with pytest.warns(KLWarning, match=r"had a KL of 0.3 nats per token .* goes on without one: beta is 0"):
        control_of("fixed", before, beta=0.0)
    control_of("fixed", before, beta=0.0, kl_monitor=True)


def test_a_damaged_state_is_refused() -> None:
    fixed, hold = control_of("fixed").state_dict(), control_of("hold").state_dict()
    for damage in ({"controller": {}}, {"asked": {}}, {"asked": 7}):
        with pytest.raises(ConfigError, match="does not fit"):
            control_of("fixed", fixed | damage)
    with pytest.raises(ConfigError, match="trend"):
        control_of("hold", hold | {"controller": {"value": 0.2}})
    for unfit in (hold | {"last_kl": "much"}, {name: value for name, value in hold.items() if name != "last_kl"}):
        with pytest.raises(ConfigError, match="why: missing, or no number: last_kl"):
            control_of("hold", unfit)
    for length in (0, -12.5):
        with pytest.raises(ConfigError, match="reference_length"):
            control_of("fixed", fixed | {"reference_length": length})


def rates_after_resume(rate: float) -> list[float]:
    """The last six rates of ten on a straight line from `rate` to 0, after four of ten that began at 1."""

    def made(peak: float) -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 - count / 10)

    def rates(schedule: Any, steps: int) -> Iterator[float]:
        for _ in range(steps):
            yield schedule.optimizer.param_groups[0]["lr"]
            schedule.optimizer.step()
            schedule.step()

    begun, again = made(1.0), made(rate)
    assert list(rates(begun, 4)) == [1 - count / 10 for count in range(4)]
    again.load_state_dict(begun.state_dict() | {"lr_lambdas": [None]})
    again.optimizer.load_state_dict(begun.optimizer.state_dict())
    go_on_from(again, begun.last_epoch, rate)
    return list(rates(again, 6))


def test_a_schedule_goes_on_by_its_own_plan_at_the_rate_that_is_asked_for() -> None:
    assert rates_after_resume(1.0) == [1 - count / 10 for count in range(4, 10)], "to the bit, if nothing changed"
    assert rates_after_resume(0.1) == pytest.approx([0.06, 0.05, 0.04, 0.03, 0.02, 0.01])


def test_beta_is_logged_with_its_price_by_the_mean_spread_of_groups_that_are_not_saturated() -> None:
    assert mean_spread(torch.tensor([[1.0, 1.0], [0.0, 2.0]])) == pytest.approx(math.sqrt(2))
    assert mean_spread(torch.ones(2, 3)) is None
    assert beta_metrics(Price(beta=0.06, length_ratio=2.0), None) == {"beta": 0.06, "beta/price": 0.12}
    scaled = Price(beta=0.06, scaled=True)
    assert beta_metrics(scaled, 0.5) == {"beta": 0.06, "beta/price": 0.03}
    assert beta_metrics(scaled, None) == {"beta": 0.06}, "all groups are saturated: nothing has a price"


@pytest.mark.filterwarnings("error")
def test_a_soft_clip_that_is_too_wide_for_the_length_that_was_measured_is_warned_of_then() -> None:
    """At 2.4 tokens a budget of .5 nats per token is 1.2 nats, and at a KL of 0 a soft clip passes 23 % of the pull."""
    control = KLControl(KLConfig(kl_clip_method="soft", kl_clip_threshold=0.5))
    with pytest.warns(KLWarning, match=r"length is 2.4 tokens.* budget of 1.2 nats .* 23 % of"):
        control.take_length(2.4)
    assert control.reference_length == 2.4
    control.take_length(20.0)
    KLControl(KLConfig(kl_clip_method="hard", kl_clip_threshold=0.5)).take_length(2.4)


def test_it_lands_where_the_optimum_of_the_rewards_has_the_target() -> None:
    """Against the optimum itself, ref exp(reward / price), where a second order would not do."""
    rewards = torch.tensor([[0.0, 0, 0.4, 1, 1], [0.2, 0.9, 0.9, 0.3, 0.1]], dtype=torch.float64)
    length, target = 5.0, 0.05
    metrics = {"beta": 0.3, "beta/price": 0.6, "length/mean": length}
    beta = landing_beta(target, metrics, rewards)
    assert beta is not None
    ref = torch.full_like(rewards, 1 / 5).log()
    best = (ref + rewards / (2 * beta)).log_softmax(-1)
    shown = float((best.exp() * (best - ref)).sum(-1).mean())
    assert shown == pytest.approx(length * target * 4 / 5, rel=1e-6), "five completions show four fifths of it"
    assert landing_beta(2.0, metrics, rewards) == 0.0, "no room for so large a KL"
    for untold, known in (({}, rewards), (metrics, None), (metrics | {"length/mean": 0.0}, rewards)):
        assert landing_beta(target, untold, known) is None


@pytest.mark.parametrize(
    ("estimator", "gradient", "direction"),
    [("k3", "reverse", "reverse"), ("k3", "forward", "forward"), ("k3", "own", "forward"), ("k2", "own", "reverse")],
)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_it_lands_by_the_kl_whose_gradient_is_taken(estimator: Any, gradient: Any, direction: Any) -> None:
    control = KLControl(KLConfig(beta=0.01, target_kl=0.05, kl_estimator=estimator, kl_gradient=gradient))
    control.update(0.01, METRICS, GROUPS)
    expected = price_at_distance(GROUPS, 4 * 0.05, direction=direction)
    assert control.controller.state.landing == pytest.approx(expected)


def test_another_target_is_landed_at_by_what_the_first_rollouts_said() -> None:
    """Case: the policy of the resume is trained, so that its groups hardly differ."""
    first, now = GROUPS, 0.01 * GROUPS
    control = control_of("hold", beta=0.01)
    for kl in (0.01, 0.02, 0.11, 0.15, 0.02, 0.001):
        control.update(kl, METRICS, first if kl < 0.05 and not control.controller.state.landed else now)
    landing = price_at_distance(first, 4 * 0.1)
    assert control.controller.state.landing == pytest.approx(landing), "not by what a later policy earns"
    for beta in (0.01, 0.02):
        lowered = control_of("hold", control.state_dict(), beta=beta, target_kl=0.025)
        lowered.update(0.1, METRICS, now)
        assert lowered.controller.value == pytest.approx(2.0 * landing)
    raised = control_of("hold", control.state_dict(), beta=0.01, target_kl=0.4)
    assert raised.controller.state.landing == pytest.approx(landing / 2)
    unknown = control_of("hold", beta=0.01).state_dict()
    assert control_of("hold", unknown, beta=0.01, target_kl=0.4).controller.state.landing == -1


def test_a_controller_lands_there_once() -> None:
    control, landing = control_of("hold", beta=0.01, target_kl=0.05), price_at_distance(GROUPS, 4 * 0.05)
    for kl in (0.01, 0.03, 0.06, 0.1):
        control.update(kl, METRICS, GROUPS)
    assert control.beta(0, 1) == pytest.approx(landing, rel=0.2)
    again = control_of("hold", control.state_dict(), beta=0.01, target_kl=0.05)
    for each in (control, again):
        each.update(0.1, METRICS, 100 * GROUPS)
    assert control.beta(0, 1) == again.beta(0, 1) < 1.2 * landing
