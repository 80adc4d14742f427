"""The core under drawn tensors and in torch's modes: finite, blind to what is masked, or refused with a reason."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.batches import read
from tests.contracts.test_bad_input import CALLS, Call
from tests.reliability.drawn import check_says_why, examples
from tests.reliability.objectives import OBJECTIVES, inputs, loss_and_slopes
from torch import Tensor

import klamp
from klamp.core.objective import Objective, grpo_loss
from klamp.core.types import Estimator, Gradient, Horizon
from klamp.errors import KlampError

ROOT = Path(__file__).resolve().parents[2]
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

    def poisoned(self) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probabilities with something else wherever the mask is False."""
        return tuple(torch.where(self.mask, x, self.poison) for x in (self.policy, self.ref, self.behavior))  # pyright: ignore


@st.composite
def batches(draw: st.DrawFn) -> Drawn:
    """Log-probabilities of all sizes to 1e5 nats."""
    shape, seed = draw(shapes), draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    tensors, floats = [], st.sampled_from(FLOATS)
    for dtype in draw(st.one_of(floats.map(lambda d: (d, d, d)), st.tuples(floats, floats, floats))):
        found = -torch.rand(shape, generator=generator, dtype=torch.float64) * draw(sizes)
        found = found.clamp(min=torch.finfo(dtype).min)  # float16 ends at 65504
        tensors.append(strided(found.to(dtype), draw(strides)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    return Drawn(*tensors, strided(mask, "transposed"), draw(st.sampled_from(POISON)))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


choices = st.fixed_dictionaries(
    {
        "value": st.sampled_from(get_args(Estimator)),
        "gradient": st.sampled_from(get_args(Gradient)),
        "horizon": st.sampled_from(get_args(Horizon)),
        "max_weight": st.sampled_from([None, 0.5, 10.0]),
        "max_log_ratio": st.sampled_from([None, 1e-3, 20.0]),
    }
).filter(lambda chosen: (chosen["gradient"], chosen["horizon"]) != ("own", "sequence"))


@given(batch=batches(), chosen=choices, corrected=st.booleans())
@examples(120)
def test_kl_penalty(batch: Drawn, chosen: dict[str, Any], corrected: bool) -> None:
    def penalty(policy: Tensor, ref: Tensor, behavior: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty, and the gradient of its sum."""
        leaf, behind = policy.detach().requires_grad_(True), behavior if corrected else None
        value = klamp.kl_penalty(leaf, ref, batch.mask, behavior_logprobs=behind, **chosen)
        (slope,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True, materialize_grads=True)
        return value.detach(), slope

    found, slope = penalty(batch.policy, batch.ref, batch.behavior)
    assert slope.dtype == batch.policy.dtype and not found.isnan().any()
    assert (found[~batch.mask] == 0).all() and (slope[~batch.mask] == 0).all()
    if not corrected:
        wide = torch.float64 in (batch.policy.dtype, batch.ref.dtype)
        assert found.dtype == (torch.float64 if wide else torch.float32)
        assert found.isfinite().all() or not slope.isfinite().all(), "the loss is finite wherever its gradient is"
        linear = chosen["gradient"] == "none" or (chosen["gradient"], chosen["horizon"]) == ("reverse", "token")
        assert slope.isfinite().all() or not linear or batch.policy.dtype == torch.float16
    dirty = penalty(*batch.poisoned())
    assert same(found, dirty[0]) and same(slope, dirty[1])


anything = st.one_of(st.floats(), st.sampled_from([0, 1, 10**400, 2**70, "0.1", None, True]), sizes)
KL_CONFIG = Call(klamp.KLConfig, {}, {"any": "kl_estimator kl_gradient kl_horizon beta target_kl kl_reference_length"})


@given(data=st.data())
@examples(75)
def test_whatever_is_handed_to_a_public_function_is_computed_or_refused_in_words(data: st.DataObject) -> None:
    """A good call with drawn things in some places: tensors of any type and shape, numbers and names of any kind."""
    dtypes = [*FLOATS, torch.int64, torch.bool, torch.complex64, torch.uint8]
    sizes = st.lists(st.integers(0, 3), max_size=3)
    tensors = st.builds(lambda shape, dtype: (-torch.ones(shape)).to(dtype), sizes, st.sampled_from(dtypes))
    names = st.sampled_from(["k1", "k3", "exact", "reverse", "own", "token", "sequence", "hard", "std", "", 3])
    call = data.draw(st.sampled_from([*CALLS.values(), KL_CONFIG]))
    wrong = st.one_of(tensors, tensors, names, anything, st.integers(-1, 4), st.just(torch.tensor(1.0)))
    try:
        names = [name for group in call.kinds.values() for name in group.split()]
        call(**data.draw(st.dictionaries(st.sampled_from(names), wrong, max_size=3)))
    except KlampError as error:
        check_says_why(error)


CASES = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@contextmanager
def deterministic() -> Iterator[None]:
    """torch refuses every operation that is not deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "float16": partial(torch.autocast, "cpu", torch.float16),
    "deterministic": deterministic,
}


@CASES
@pytest.mark.parametrize("mode", MODES)
def test_no_mode_changes_a_loss(objective: Objective, mode: str) -> None:
    """Autocast rounds products of matrices, of which a loss has none; scores may be inference tensors."""
    batch, scored = inputs(), dict[str, Tensor]()
    plain = loss_and_slopes(objective, batch)
    if mode == "scored under inference mode":
        names = ("ref_logprobs", "sampler_logprobs")
        with torch.inference_mode():
            scored = {"old_logprobs": batch.old_logprobs.clone(), **{name: read(batch, name).clone() for name in names}}
    with MODES[mode]():
        found = loss_and_slopes(objective, batch, **scored)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@CASES
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_values_need_no_gradient(objective: Objective, mode: Callable[[], AbstractContextManager[None]]) -> None:
    batch = inputs()
    wanted = grpo_loss(batch, objective)
    with mode():
        found = grpo_loss(batch, objective)
    assert not found.loss.requires_grad and torch.equal(found.loss, wanted.loss.detach())
    assert found.metrics.keys() == wanted.metrics.keys()
    assert all(torch.equal(found.metrics[name], value) for name, value in wanted.metrics.items())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_values_and_gradients_are_those_without_torch_compile(backend: str) -> None:
    words = [sys.executable, "-m", "tests.reliability.objectives", backend]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 13
    assert {name: each for name, each in found.items() if not (isinstance(each, float) and each < 1e-5)} == {}
