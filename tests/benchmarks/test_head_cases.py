"""Every head that is timed forms the same gradients: those of a float64 reference."""

import pytest
import torch

from benchmarks import heads
from benchmarks.head_cases import CASES, FLOORS, SEQUENCES, exact_gradients, make_inputs, one, prepared, unavailable

pytestmark = pytest.mark.slow

SIZE = (4 * SEQUENCES, 24, 5000)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
KL_TOLERANCE = {"float32": 3e-5, "bfloat16": 0.2}
"""The gradient of a small KL is a difference of near-equal terms."""


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in FLOORS])
def test_a_case_forms_the_gradients_of_the_reference(case: str, dtype: str) -> None:
    if why := unavailable(case):
        pytest.skip(why)
    kl = "kl" in case
    _, d_hidden, d_weight = exact_gradients(case, make_inputs(SIZE, dtype, reference=kl))
    inputs = make_inputs(SIZE, dtype, reference=kl)
    run = prepared(case, inputs)
    run()
    run()  # gradients of a run, not of both
    close = (KL_TOLERANCE if kl else TOLERANCE)[dtype]
    assert distance(inputs.hidden.grad, d_hidden) < close
    if "frozen" in case:
        assert inputs.weight.grad is None
    else:
        assert distance(inputs.weight.grad, d_weight) < close


def test_a_measured_case_has_the_promised_fields_and_every_case_is_measured() -> None:
    assert set(heads.CASES) == set(CASES)
    seen = one("linear_logprobs", "float32", SIZE, 3)
    assert seen["rows"] == SIZE[0]
    assert [len(seen[clock]) for clock in ("seconds", "cpu_seconds")] == [3, 3]
    assert min(seen["seconds"]) > 0
    assert seen["extra_mib"] >= 0
