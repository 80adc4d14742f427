"""CPU time is booked on the phase that the stack stands in."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.phases import RULES, Sampler, phase

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KLAMP = "/somewhere/src/klamp/training"
SCORER = "/somewhere/src/klamp/scoring/scorer.py"
STACKS = {
    "generation": [
        (f"{KLAMP}/rollouts.py", "collect"),
        (f"{KLAMP}/sampling.py", "generate"),
        ("/torch/nn/modules/linear.py", "forward"),
    ],
    "reference": [(f"{KLAMP}/rollouts.py", "_with_reference"), (SCORER, "forward")],
    "exact KL": [(f"{KLAMP}/rollouts.py", "_with_reference"), (SCORER, "_exact")],
    "backward": [(f"{KLAMP}/updates.py", "update"), ("/x/torch/_tensor.py", "backward")],
    "forward": [(f"{KLAMP}/updates.py", "update"), (SCORER, "forward")],
    "optimizer": [(f"{KLAMP}/updates.py", "update"), (f"{KLAMP}/updates.py", "_step")],
    "other": [(f"{KLAMP}/trainer.py", "train_step")],
}


@pytest.mark.parametrize("expected", STACKS)
def test_a_stack_of_klamp_has_its_phase(expected: str) -> None:
    assert phase(STACKS[expected][::-1], RULES["klamp"]) == expected


def test_trl_scores_policy_and_reference_with_the_same_function() -> None:
    file = "/x/trl/trainer/grpo_trainer.py"
    scored = (file, "_get_per_token_logps_and_entropies")
    assert phase([scored, (file, "_generate_and_score_completions")], RULES["trl"]) == "reference"
    assert phase([scored, (file, "_compute_loss")], RULES["trl"]) == "forward"


@pytest.mark.parametrize("rule", RULES["klamp"], ids=lambda rule: f"{rule[0]}:{rule[1]}")
def test_what_the_rules_of_klamp_name_exists(rule: tuple[str, str, str]) -> None:
    file, function, _ = rule
    if file.startswith("training/"):
        text = (ROOT / "src" / "klamp" / file).read_text(encoding="utf-8")
        assert f"def {function}" in text, f"{file} has no function {function!r}: update benchmarks/phases.py"


def test_what_the_rules_of_trl_name_exists() -> None:
    trl = pytest.importorskip("trl")
    text = (Path(trl.__file__).parent / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8")
    for file, function, _ in RULES["trl"]:
        if file.startswith("trl/"):
            assert f"def {function}" in text


def test_time_is_booked_on_the_phase_and_on_the_innermost_function_of_each_package() -> None:
    sampler = Sampler(RULES["klamp"])
    sampler.note(STACKS["generation"][::-1], 0.25)
    sampler.note(STACKS["generation"][::-1], 0.25)
    sampler.note(STACKS["other"], 1.0)
    assert sampler.phases == {"generation": 0.5, "other": 1.0}
    assert sampler.places["generation", "klamp/training/sampling.py", "generate"] == 0.5
    assert ("generation", "klamp/training/rollouts.py", "collect") not in sampler.places
