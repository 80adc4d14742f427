"""The whole objective in torch's modes: autocast, deterministic algorithms, inference_mode, no_grad, torch.compile."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.batches import read
from tests.reliability.objectives import OBJECTIVES, inputs, loss_and_slopes

from klamp.core.objective import Objective, grpo_loss

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

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
def test_autocast_and_deterministic_algorithms_change_no_loss(objective: Objective, mode: str) -> None:
    """Autocast rounds products of matrices; there is none between log-probabilities and the loss."""
    plain = loss_and_slopes(objective, inputs())
    with MODES[mode]():
        found = loss_and_slopes(objective, inputs())
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


@CASES
def test_log_probabilities_that_were_scored_under_inference_mode_are_data_like_any_other(objective: Objective) -> None:
    batch = inputs()
    with torch.inference_mode():
        names = ("old_logprobs", "ref_logprobs", "sampler_logprobs")
        scored = {name: (batch.old_logprobs if name == "old_logprobs" else read(batch, name)).clone() for name in names}
    plain, found = loss_and_slopes(objective, batch), loss_and_slopes(objective, batch, **scored)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_values_and_gradients_are_those_without_torch_compile(backend: str) -> None:
    words = [sys.executable, "-m", "tests.reliability.objectives", backend]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 13
    assert {name: each for name, each in found.items() if not (isinstance(each, float) and each < 1e-5)} == {}
