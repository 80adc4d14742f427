"""TRL's records from a real run of TRL: a policy with dropout, a KL under dr_grpo, a model that seldom ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.training.conftest import stored, tiny_gpt2

from klamp.diagnostics.doctor import Diagnosis, examine
from klamp.records import read_record


def accuracy_reward(completions: list[str], **_: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of six steps of TRL's own GRPOTrainer, with TensorBoard."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from klamp.tasks.arithmetic import arithmetic_tokenizer

    folder = tmp_path_factory.mktemp("trl")
    model = stored(tiny_gpt2(), folder / "model")  # GPT-2 comes with dropout, and TRL leaves it on
    torch.manual_seed(0)
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        beta=0.04,
        loss_type="dr_grpo",
        max_steps=6,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=accuracy_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+3=", "4-1=", "7+2="] * 4}),
        processing_class=arithmetic_tokenizer(),
    )
    trainer.train()
    (folder / "out" / "checkpoint-6").mkdir(parents=True)
    trainer.state.save_to_json(str(folder / "out" / "checkpoint-6" / "trainer_state.json"))
    return folder / "out"


def found(diagnosis: Diagnosis) -> dict[str, int]:
    return {finding.alarm.name: finding.first_step for finding in diagnosis.findings}


def test_the_state_of_a_real_run(trl_run: Path) -> None:
    history = read_record(trl_run)
    assert history.source == "TRL trainer state"
    assert [row.step for row in history.rows] == [1, 2, 3, 4, 5, 6]
    assert {
        "kl/k3",
        "reward",
        "reward_std",
        "length/mean",
        "length/truncated",
        "train/grad_norm",
        "policy/entropy",
    } <= (history.names)
    assert history.settings.verifier == "rules", "by the name of the reward function"
    totals = [row.metrics["length/total"] for row in history.rows]
    lengths = [row.metrics["length/mean"] for row in history.rows]
    assert totals == pytest.approx([sum(8 * (4 + length) for length in lengths[: n + 1]) for n in range(6)]), (
        "8 completions and their prompts of 4 tokens a step"
    )
    diagnosis = examine(history)
    alarms = found(diagnosis)
    assert alarms["step-zero-kl"] == 1
    assert alarms["dr-grpo-with-kl"] == 1, "TensorBoard's files in the same folder hold the arguments"
    alone = read_record(trl_run / "checkpoint-6" / "trainer_state.json")
    assert alone.rows == history.rows
    assert "settings.loss_type" in examine(alone).unchecked["dr-grpo-with-kl"]


def test_its_tensorboard_folder_holds_the_arguments_too(trl_run: Path) -> None:
    (events,) = trl_run.rglob("events.out.tfevents*")
    history = read_record(events.parent)
    assert history.source == "TensorBoard"
    assert (history.settings.loss_type, history.settings.beta) == ("dr_grpo", 0.04)
    alarms = found(examine(history))
    assert alarms["dr-grpo-with-kl"] == 1
    assert alarms["step-zero-kl"] == 1
    state = read_record(trl_run / "checkpoint-6" / "trainer_state.json")
    assert [row.metrics["kl/k3"] for row in history.rows] == pytest.approx([r.metrics["kl/k3"] for r in state.rows])
