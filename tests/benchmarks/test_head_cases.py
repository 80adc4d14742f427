"""Every head that is timed forms the same gradients: those of a float64 reference."""

from __future__ import annotations

import pytest
import torch

from benchmarks import heads
from benchmarks.head_cases import CASES, FLOORS, SEQUENCES, Inputs, make_inputs, one, prepared

pytestmark = pytest.mark.slow

SIZE = (4 * SEQUENCES, 24, 5000)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
KL_TOLERANCE = {"float32": 3e-5, "bfloat16": 0.2}
"""The gradient of a small KL is a difference of near-equal terms."""


def reference_gradients(given: Inputs, *, kl: bool) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, weight = given.hidden.double().requires_grad_(), given.weight.double().requires_grad_()
    policy = (hidden @ weight.t()).log_softmax(-1)
    if kl:
        ref = (given.ref_hidden.double() @ given.ref_weight.double().t()).log_softmax(-1)
        value = (policy.exp() * (policy - ref)).sum(-1)
    else:
        value = policy.gather(1, given.targets[:, None])[:, 0]
    return torch.autograd.grad((value * given.factor.double()).sum(), (hidden, weight))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in FLOORS])
def test_a_case_forms_the_gradients_of_the_reference(case: str, dtype: str) -> None:
    kl = "kl" in case
    d_hidden, d_weight = reference_gradients(make_inputs(SIZE, dtype, reference=kl), kl=kl)
    given = make_inputs(SIZE, dtype, reference=kl)
    run = prepared(case, given)
    run()
    run()  # gradients of a run, not of both
    close = (KL_TOLERANCE if kl else TOLERANCE)[dtype]
    assert distance(given.hidden.grad, d_hidden) < close
    if "frozen" in case:
        assert given.weight.grad is None
    else:
        assert distance(given.weight.grad, d_weight) < close


def test_a_measured_case_has_the_promised_fields_and_every_case_is_measured() -> None:
    assert set(heads.CASES) == set(CASES)
    seen = one("linear_logprobs", "float32", SIZE, 3)
    assert seen["rows"] == SIZE[0]
    assert [len(seen[clock]) for clock in ("seconds", "cpu_seconds")] == [3, 3]
    assert min(seen["seconds"]) > 0
    assert seen["extra_mib"] >= 0
