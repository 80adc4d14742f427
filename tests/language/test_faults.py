"""Faults that people plant into runs of a real model, each named by the alarm or the caution that is meant for it.

One or two steps show most of them; a learning rate that is too high needs some more.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.training.planted import Told, alarms, found, trained

from klamp.diagnostics.doctor import Diagnosis
from klamp.scoring.completions import Completions
from klamp.tasks import named_model_folder
from klamp.training.trainer import Trainer

RUN: dict[str, Any] = {
    "model": "smollm2",
    "task": "describe",
    "reward": "",
    "train_size": 0,
    "lora_r": 16,
    "beta": 0.05,
    "learning_rate": 5e-4,
    "warmup_steps": 3,
    "lr_scheduler_type": "constant",
    "temperature": 0.7,
    "max_completion_length": 12,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_steps": 1,
    "eval_size": 1,
    "scale_rewards": "none",
}
"""The settings of examples/describe.yaml, on fewer and shorter completions."""


def run(folder: Path, *, plant: Any = None, **changes: Any) -> Diagnosis:
    return trained(folder, plant=plant, **{**RUN, **changes})


def test_a_sound_beginning_is_quiet(tmp_path: Path) -> None:
    assert alarms(run(tmp_path, max_steps=2)) == set()


def test_a_learning_rate_thirty_times_too_high(tmp_path: Path) -> None:
    diagnosis = run(tmp_path, learning_rate=1.5e-2, max_steps=6)
    named = [finding for finding in diagnosis.findings if finding.evidence.causes]
    assert any(finding.evidence.causes[0].startswith("the learning rate (up to 0.015)") for finding in named), [
        (finding.alarm.name, finding.evidence.text, finding.evidence.causes) for finding in diagnosis.findings
    ]


def test_a_wrong_reference(model: Any, tmp_path: Path) -> None:
    """Another fine-tune of the same model: a tenth of noise on the weights of its last layers."""
    torch.manual_seed(0)
    other = tmp_path / "other"
    shutil.copytree(named_model_folder("smollm2"), other)
    kept = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.model.layers[-8:].parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0)
    try:
        model.save_pretrained(other)
    finally:
        model.load_state_dict(kept)
    diagnosis = run(tmp_path / "run", ref_model=str(other))
    assert alarms(diagnosis) == {"reference-differs"}


def test_a_prompt_that_the_mask_hides_from_the_trainer(tmp_path: Path) -> None:
    def plant(trainer: Trainer, told: Told) -> None:
        scorer = trainer.context.scorer
        assert scorer is not None
        real = scorer.forward

        def forward(completions: Completions, *args: Any, **kwargs: Any) -> Any:
            hidden = torch.zeros_like(completions.prompt_mask)
            hidden[:, -1] = 1
            return real(replace(completions, prompt_mask=hidden), *args, **kwargs)

        scorer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]

    mismatch = found(run(tmp_path, plant=plant), "sampler-mismatch")
    assert "the trainer does not see the prompt" in mismatch.evidence.causes[0]


def test_a_dropout_that_was_left_on(tmp_path: Path) -> None:
    def plant(trainer: Trainer, told: Told) -> None:
        for module in trainer.context.policy.modules():
            if isinstance(getattr(module, "lora_dropout", None), torch.nn.ModuleDict):
                module.lora_dropout["default"] = torch.nn.Dropout(0.1)
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        trainer.context.policy.train()

    diagnosis = run(tmp_path, plant=plant)
    assert alarms(diagnosis) & {"step-zero-kl", "sampler-mismatch"}
