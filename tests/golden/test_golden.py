"""The numbers that stay: of every case today's number against the one that was frozen.

README.md says what is kept, what is left out, and how a number is frozen again.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.golden import adapter
from tests.golden.worlds import FOLDER

TOLERANCE = {"grpo_loss": 1e-9, "tinker": 1e-9, "verl": 2e-6, "unsloth": 2e-6, "trl": 5e-6}
"""Kind -> the largest error, relative to the size of what is compared.

The core and Tinker's loss compute in float64. klamp's driver for verl makes lengths and quotients of counts in float32,
as does the probe of Unsloth's weights; TRL makes rewards and advantages in float32.
"""
PREFIXES = 5e-5
"""In TRL, of a KL over the vocabulary or a head: it is summed in float32, in an order that depends on the processor."""
CHUNK = 50
PRINTED = 2e-5
"""What `klamp verify` prints has six digits."""
STOPPED = 1e-5
"""An end is where updates are smaller than 1e-7 nats."""


def frozen(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def differences(found: Any, expected: Any, tolerance: float, *, least: float = 1e-3, where: str = "") -> list[str]:
    """Every number that differs by more than the tolerance; of a list the largest number is the scale."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{where}: {sorted(found)} instead of {sorted(expected)}"]
        pairs = [(found[name], x, f"{where} {name}") for name, x in expected.items()]
        return [text for a, b, at in pairs for text in differences(a, b, tolerance, least=least, where=at)]
    got, want = (x if isinstance(x, list) else [x] for x in (found, expected))
    if len(got) != len(want):
        return [f"{where}: {len(got)} numbers instead of {len(want)}"]
    scale = max(least, *(abs(x) for x in want)) if want else least
    wrong = [(a, b) for a, b in zip(got, want, strict=True) if not (a == b or abs(a - b) <= tolerance * scale)]
    return [f"{where}: {a!r} instead of {b!r}" for a, b in wrong]


def tolerance_of(kind: str, case: dict[str, Any]) -> float:
    """How close the numbers of a case are to be."""
    whole = case["kl"].get("kl_estimator") == "exact" or case.get("teacher", {}).get("teacher_estimator") in (
        "exact",
        "topk",
    )
    return PREFIXES if kind == "trl" and whole else TOLERANCE[kind]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        pytest.param(kind, first, marks=pytest.mark.slow if kind == "trl" and first >= 2 * CHUNK else ())
        for kind in TOLERANCE
        for first in range(0, 300, CHUNK)
    ],
)
def test_losses_and_gradients(kind: str, first: int) -> None:
    cases = frozen(kind)
    assert len(cases) >= 300
    wrong = list[str]()
    for number, case in list(enumerate(cases))[first : first + CHUNK]:
        found = getattr(adapter, kind)(case)
        wrong += differences(found, case["is"], tolerance_of(kind, case), where=f"{kind} {number}")
    assert not wrong, "\n".join(wrong[:20])


def test_what_verify_prints() -> None:
    expected, found = frozen("verify"), adapter.proofs()
    assert found.keys() == expected.keys()
    wrong = list[str]()
    for name, rows in expected.items():
        assert len(found[name]) == len(rows), name
        for row, (got, want) in enumerate(zip(found[name], rows, strict=True)):
            wrong += differences(got, want, PRINTED, least=1e-2, where=f"{name} {row}")
    assert not wrong, "\n".join(wrong[:20])


def test_prices_and_ends() -> None:
    cases = frozen("ends")
    assert len(cases) >= 20
    wrong = [
        text
        for number, case in enumerate(cases)
        for text in differences(adapter.ends(case), case["is"], STOPPED, least=0.1, where=f"end {number}")
    ]
    assert not wrong, "\n".join(wrong)


def test_alarms_of_recorded_runs() -> None:
    """Those that users rely on are there; the others are compared for as long as klamp has them."""
    expected, known = frozen("alarms"), adapter.known_alarms()
    assert set(expected["stay"]) <= known
    assert set(adapter.recorded_runs()) <= expected["runs"].keys()
    everything = set(expected["known"])
    for record in adapter.recorded_runs():
        found = {name: step for name, step in adapter.alarms(record).items() if name in everything}
        assert found == {name: step for name, step in expected["runs"][record].items() if name in known}, record


def test_names() -> None:
    missing = [
        f"{module}.{name}: {', '.join(sorted(lost))}"
        for module, names in frozen("names").items()
        for name, needed in names.items()
        if (lost := set(needed) - set(adapter.parameters(module, name)))
    ]
    assert not missing, "\n".join(missing)
