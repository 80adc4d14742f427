"""The functions of the core under drawn tensors: log-ratios to 1e5, -inf, NaN under the mask, every type, odd strides.

Four properties, whatever is drawn: the value is finite where the mathematics is (and is that of float64 there), what
stands under a mask changes no bit of value or gradient, the type is float32 or float64 as the inputs ask, and what
cannot be computed is refused in a KlampError with its reason.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.test_bad_input import CALLS, Call
from tests.reliability.drawn import check_says_why, examples
from torch import Tensor

import klamp
from klamp.core.advantages import group_advantages, saturated_share
from klamp.core.clipping import ClipLevel, clip_gate, gate_kl
from klamp.core.surrogates import cispo, importance_ratio, ppo_clip, ratio_clipped, score_function
from klamp.core.types import ClipMethod, Direction, Estimator, Gradient, Horizon
from klamp.errors import KlampError

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # as a user has it

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
POISON = (math.nan, math.inf, -math.inf, 1e30)
SIZES = (0, 1e-30, 1e-6, 0.1, 1, 20, 80, 89, 110, 700, 1e4, 1e5)
"""Sizes of log-probabilities, between which are those where exp in some type under- or overflows."""

sizes = st.sampled_from(SIZES)
shapes = st.one_of(st.tuples(st.integers(1, 4), st.integers(1, 6)), st.sampled_from([(0, 3), (3, 0), (0, 0), (1, 1)]))


def strided(x: Tensor, how: str) -> Tensor:
    """The same numbers with other strides: of a transpose, of every second column, of an expanded row."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "every second":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


strides = st.sampled_from(["plain", "plain", "transposed", "every second"])


@dataclass(frozen=True)
class Drawn:
    """Log-probabilities of a batch in the types and strides that were drawn, and a mask."""

    policy: Tensor
    ref: Tensor
    behavior: Tensor
    mask: Tensor
    poison: float

    @property
    def dtype(self) -> torch.dtype:
        """The type that results have: float64 where any input is."""
        return torch.float64 if torch.float64 in {x.dtype for x in (self.policy, self.ref)} else torch.float32

    def poisoned(self) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probabilities with something else wherever the mask is False."""
        return tuple(torch.where(self.mask, x, self.poison) for x in (self.policy, self.ref, self.behavior))  # pyright: ignore


@st.composite
def batches(draw: st.DrawFn, *, forbidden: bool = False) -> Drawn:
    """Log-probabilities of all sizes to 1e5 nats; with `forbidden` also -inf, as of a token that a model rules out."""
    shape, seed = draw(shapes), draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    dtypes = draw(
        st.one_of(st.sampled_from(FLOATS).map(lambda d: (d, d, d)), st.tuples(*[st.sampled_from(FLOATS)] * 3))
    )
    tensors = []
    for dtype in dtypes:
        found = -torch.rand(shape, generator=generator, dtype=torch.float64) * draw(sizes)
        found = found.clamp(min=torch.finfo(dtype).min)  # float16 ends at 65504
        if forbidden:
            found = found.masked_fill(torch.rand(shape, generator=generator) < 0.2, -math.inf)
        tensors.append(strided(found.to(dtype), draw(strides)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    return Drawn(*tensors, strided(mask, "transposed"), draw(st.sampled_from(POISON)))


def value_and_slope(loss: Callable[[Tensor], Tensor], policy: Tensor) -> tuple[Tensor, Tensor]:
    """A function's value, and the gradient of its sum."""
    leaf = policy.detach().requires_grad_(True)
    value = loss(leaf)
    (slope,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True, materialize_grads=True)
    return value.detach(), slope


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def like_float64(found: Tensor, exact: Tensor, *, roundings: float) -> bool:
    """Whether numbers are those that float64 has, up to roundings, wherever those fit into their type."""
    top = torch.finfo(found.dtype).max * 1e-8  # where a loss saturates
    fits = exact.abs() < top
    error = (found.double() - exact).abs()
    return bool((error[fits] <= roundings * torch.finfo(found.dtype).eps * (1 + exact[fits].abs())).all())


choices = st.fixed_dictionaries(
    {
        "value": st.sampled_from(get_args(Estimator)),
        "gradient": st.sampled_from(get_args(Gradient)),
        "horizon": st.sampled_from(get_args(Horizon)),
        "max_weight": st.sampled_from([None, 0.5, 10.0]),
        "max_log_ratio": st.sampled_from([None, 1e-3, 20.0]),
    }
).filter(lambda chosen: (chosen["gradient"], chosen["horizon"]) != ("own", "sequence"))


@given(batch=batches(), estimator=st.sampled_from(get_args(Estimator)))
@examples(60)
def test_kl_estimate_is_that_of_float64_wherever_it_fits(batch: Drawn, estimator: Estimator) -> None:
    found, slope = value_and_slope(lambda x: klamp.kl_estimate(x, batch.ref, estimator=estimator), batch.policy)
    assert found.dtype == batch.dtype and slope.dtype == batch.policy.dtype and found.shape == batch.policy.shape
    assert not found.isnan().any()
    delta = (batch.policy.to(batch.dtype) - batch.ref.to(batch.dtype)).double()
    exact = {"k1": delta, "k2": delta**2 / 2, "k3": torch.expm1(-delta) + delta, "abs": delta.abs()}[estimator]
    growth = 1 + delta.abs().amax().item() if delta.numel() else 1
    assert like_float64(found, exact, roundings=4 * growth)


@given(batch=batches(), chosen=choices, corrected=st.booleans())
@examples(120)
def test_kl_penalty(batch: Drawn, chosen: dict[str, Any], corrected: bool) -> None:
    def penalty(policy: Tensor, ref: Tensor, behavior: Tensor) -> tuple[Tensor, Tensor]:
        behind = behavior if corrected else None
        return value_and_slope(
            lambda x: klamp.kl_penalty(x, ref, batch.mask, behavior_logprobs=behind, **chosen), policy
        )

    found, slope = penalty(batch.policy, batch.ref, batch.behavior)
    assert slope.dtype == batch.policy.dtype and not found.isnan().any()
    assert (found[~batch.mask] == 0).all() and (slope[~batch.mask] == 0).all()
    if not corrected:
        assert found.dtype == batch.dtype
        assert found.isfinite().all() or not slope.isfinite().all(), "the loss is finite wherever its gradient is"
        linear = chosen["gradient"] == "none" or (chosen["gradient"], chosen["horizon"]) == ("reverse", "token")
        assert slope.isfinite().all() or not linear or batch.policy.dtype == torch.float16
    dirty = penalty(*batch.poisoned())
    assert same(found, dirty[0]) and same(slope, dirty[1])


@given(batch=batches(forbidden=True), direction=st.sampled_from(get_args(Direction)), alike=st.booleans())
@examples(80)
def test_exact_kl_is_at_least_0_and_nan_only_without_tokens(batch: Drawn, direction: Direction, alike: bool) -> None:
    policy, ref = batch.policy, batch.policy.to(batch.ref.dtype) if alike else batch.ref
    if policy.shape[-1] == 0:
        return
    found, slope = value_and_slope(lambda x: klamp.exact_kl(x, ref, direction=direction), policy)
    assert found.dtype == (torch.float64 if torch.float64 in (policy.dtype, ref.dtype) else torch.float32)
    possible = ~(policy.isneginf().all(-1) | ref.isneginf().all(-1))
    assert not found[possible].isnan().any() and (found[possible] >= 0).all()
    assert not slope[possible & found.isfinite()].isnan().any()
    if direction == "js":
        assert (found[possible] <= math.log(2) + 1e-5).all()
    if alike and policy.dtype == ref.dtype:
        assert (found[possible] < 1e-12).all() and (slope[possible].abs() < 1e-6).all()


@given(
    batch=batches(),
    method=st.sampled_from(get_args(ClipMethod)),
    threshold=sizes,
    temperature=st.sampled_from([1e-30, 0.1, 1.0, 1e30]),
)
@examples(60)
def test_clips_and_gates(batch: Drawn, method: ClipMethod, threshold: float, temperature: float) -> None:
    kl = batch.policy.abs()
    found, slope = value_and_slope(lambda x: klamp.clip_kl(x, threshold, method=method, temperature=temperature), kl)
    gate = clip_gate(kl, threshold, method=method, temperature=temperature)
    assert found.dtype == gate.dtype == (kl.dtype if kl.dtype == torch.float64 else torch.float32)
    assert found.isfinite().all() and slope.isfinite().all()
    assert (found >= 0).all() and (gate >= 0).all() and (gate <= 1).all()
    if method == "hard":
        assert (found <= upper(kl)).all()


def upper(kl: Tensor) -> Tensor:
    """The KL itself, as a clip sees it."""
    return kl if kl.dtype == torch.float64 else kl.float()


@given(batch=batches(), level=st.sampled_from(get_args(ClipLevel)), own=st.booleans(), size=st.integers(1, 4))
@examples(40)
def test_a_clip_is_decided_by_the_others_unless_asked(batch: Drawn, level: ClipLevel, own: bool, size: int) -> None:
    kl = batch.policy[:, 0].abs() if batch.policy.shape[-1] else batch.policy.sum(-1)
    measured = batch.mask.any(-1)
    try:
        found = gate_kl(kl, level=level, group_size=size, own=own, measured=measured)
    except KlampError as error:
        check_says_why(error)
        return
    assert found.shape == kl.shape and found.isfinite().all() and (found >= 0).all()
    if not own:
        for i in range(len(kl)):
            other = torch.where(torch.arange(len(kl)) == i, math.nan, kl)
            assert gate_kl(other, level=level, group_size=size, own=own, measured=measured)[i] == found[i]


@given(batch=batches(), data=st.data())
@examples(60)
def test_surrogates_are_finite_where_the_ratio_is(batch: Drawn, data: st.DataObject) -> None:
    low, high = data.draw(st.sampled_from([(0.2, 0.2), (0.0, 0.0), (1.0, 1e30)]))
    rows = torch.randn(batch.policy.shape[0]) * data.draw(sizes)
    finite = importance_ratio(batch.policy, batch.behavior).isfinite()
    bounds = {"clip_low": low, "clip_high": high}
    for loss in (
        lambda x: ppo_clip(x, batch.behavior, rows, **bounds),
        lambda x: cispo(x, batch.behavior, rows, **bounds),
        lambda x: score_function(x, batch.behavior, rows),
    ):
        found, slope = value_and_slope(loss, batch.policy)
        assert found.shape == batch.policy.shape and not found[finite].isnan().any()
        assert not slope[finite].isnan().any()
    clipped = ratio_clipped(batch.policy, batch.behavior, rows, **bounds)
    assert clipped.dtype == torch.bool


rewards = st.lists(st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, 3e38, -3e38, 1e-45])), max_size=8)


@given(
    given=rewards,
    size=st.integers(0, 5),
    scale=st.sampled_from(["std", "none"]),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    eps=st.sampled_from([0, 1e-4, 1e30]),
    dtype=st.sampled_from([*FLOATS, torch.int64, torch.bool]),
)
@examples(100)
def test_advantages_are_finite_or_the_rewards_are_refused(
    given: list[float], size: int, scale: Any, baseline: Any, eps: float, dtype: torch.dtype
) -> None:
    drawn = torch.tensor(given, dtype=torch.float64)
    drawn = drawn.to(dtype) if dtype.is_floating_point else drawn.nan_to_num(0, 1, -1).clamp(-9, 9).to(dtype)
    try:
        found = group_advantages(drawn, size, scale=scale, baseline=baseline, eps=eps)
    except KlampError as error:
        check_says_why(error)
        return
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and found.shape == drawn.shape
    assert found.isfinite().all()
    assert 0 <= saturated_share(drawn, size) <= 1 or not len(drawn)


CONTROLLERS: Mapping[str, Callable[[float, float, float], Any]] = {
    "fixed": lambda value, target, rate: klamp.FixedController(value),
    "step": lambda value, target, rate: klamp.StepController(value, target=target, up=rate),
    "proportional": lambda value, target, rate: klamp.ProportionalController(value, target=target, horizon=3),
    "hold": lambda value, target, rate: klamp.HoldController(value, target=target),
}
anything = st.one_of(st.floats(), st.sampled_from([0, 1, 10**400, 2**70, "0.1", None, True]), sizes)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_stays_finite_and_within_its_bounds_or_refuses(name: str) -> None:
    @given(value=anything, target=anything, rate=anything, kls=st.lists(anything, max_size=6), saved=anything)
    @examples(25)
    def holds(value: Any, target: Any, rate: Any, kls: list[Any], saved: Any) -> None:
        try:
            controller = CONTROLLERS[name](value, target, rate)
        except KlampError as error:
            check_says_why(error)
            return
        for kl in kls:
            before = controller.state_dict()
            try:
                assert 0 <= controller.update(kl) < math.inf
            except KlampError as error:
                check_says_why(error)
                after = controller.state_dict()
                assert after == before, "a refused KL changes nothing"
        state = controller.state_dict()
        controller.load_state_dict(state)
        assert controller.state_dict() == state
        try:
            controller.load_state_dict(dict.fromkeys(state, saved))
            assert math.isfinite(controller.value) and math.isfinite(controller.update(0.1))
        except KlampError as error:
            check_says_why(error)

    holds()


KL_CONFIG = Call(
    klamp.KLConfig,
    {},
    dict.fromkeys(("kl_estimator", "kl_gradient", "kl_horizon", "beta", "target_kl", "kl_reference_length"), "any"),
)


@given(data=st.data())
@examples(150)
def test_whatever_is_handed_to_a_public_function_is_computed_or_refused_in_words(data: st.DataObject) -> None:
    """A good call with drawn things in some places: tensors of any type and shape, numbers and names of any kind."""
    dtypes = [*FLOATS, torch.int64, torch.bool, torch.complex64, torch.uint8]
    sizes = st.lists(st.integers(0, 3), max_size=3)
    tensors = st.builds(lambda shape, dtype: (-torch.ones(shape)).to(dtype), sizes, st.sampled_from(dtypes))
    names = st.sampled_from(["k1", "k3", "exact", "reverse", "own", "token", "sequence", "hard", "std", "", 3])
    call = data.draw(st.sampled_from([*CALLS.values(), KL_CONFIG]))
    wrong = st.one_of(tensors, tensors, names, anything, st.integers(-1, 4), st.just(torch.tensor(1.0)))
    try:
        call(**data.draw(st.dictionaries(st.sampled_from([*call.kinds]), wrong, max_size=3)))
    except KlampError as error:
        check_says_why(error)
