"""The variant with fillers: they are free for the reward, bounded in the corpus, and change nothing of the original."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp.errors import ConfigError
from klamp.tasks import BaseModelConfig, TaskConfig, arithmetic_tokenizer, base_model_folder, load_base_model, load_task
from klamp.tasks.arithmetic import ALPHABET, MAX_MODEL_LENGTH, SKILLS, pairs
from klamp.tasks.base_model import IGNORED, cached_base_model, training_tensors
from klamp.training.backends import train_run
from klamp.training.config import TrainConfig
from klamp.training.models import load_model, load_tokenizer
from studies.fillers import FILLER, REWARD, FillerModelConfig, model_folder, teach, with_fillers

SMALL = TaskConfig(reward=REWARD, train_size=20, eval_size=5)
TINY = FillerModelConfig(hidden_size=16, layers=1, heads=2, steps=3, batch_size=8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_fillers_do_not_count_wherever_they_stand() -> None:
    task = load_task(SMALL, arithmetic_tokenizer())
    example = task.train[0]
    answer = example.answer
    for right in (answer, f"=={answer}", f"{answer[0]}={answer[1:]}", f"{answer}===", f"={answer}="):
        assert task.score(example, right) == 1.0
    for wrong in ("", "=" * 9, f"=={answer}0", f"={answer[:-1]}", f"= {answer}", f"-{answer}"):
        assert task.score(example, wrong) == 0.0


def test_prompts_are_those_of_the_original_task() -> None:
    variant, original = (load_task(replace(SMALL, reward=each), arithmetic_tokenizer()) for each in (REWARD, ""))
    assert variant.train == original.train
    assert variant.evaluation == original.evaluation
    assert variant.rl_skill == original.rl_skill


def test_the_filler_is_a_token_that_no_answer_needs() -> None:
    assert FILLER in ALPHABET
    for skill in SKILLS:
        assert all(FILLER not in answer for _, answer in islice(pairs(skill, random.Random(0), held_out=False), 300))


def test_additions_get_every_number_of_fillers_equally_often_and_other_skills_none() -> None:
    rows = list(FillerModelConfig().rows(6000))
    plain = list(BaseModelConfig().rows(6000))
    assert [(prompt, completion.lstrip(FILLER)) for prompt, completion in rows] == plain
    counts = Counter(len(c) - len(c.lstrip(FILLER)) for prompt, c in rows if "+" in prompt)
    total = sum(counts.values())
    assert sorted(counts) == list(range(9))
    assert all(abs(counts[k] / total - 1 / 9) < 0.02 for k in counts)  # 5 standard errors
    assert all(FILLER not in completion for prompt, completion in rows if "+" not in prompt)


def test_the_seed_decides_the_fillers() -> None:
    rows = [("1+1=", "2")] * 50
    drawn = [list(with_fillers(rows, most=8, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert list(with_fillers(rows, most=0, seed=0)) == rows


@pytest.mark.parametrize("most", [-1, MAX_MODEL_LENGTH])
def test_fillers_that_the_model_cannot_hold_are_refused(most: int) -> None:
    with pytest.raises(ConfigError, match="cannot hold so many fillers"):
        FillerModelConfig(most_fillers=most)


def test_what_the_base_model_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="steps must be a whole number >= 1"):
        FillerModelConfig(steps=0)


def test_long_rows_keep_every_token_and_short_ones_their_old_width() -> None:
    short, _ = training_tensors(iter([("10+10=", "20")]))
    assert short.shape[1] == 13
    tokens, labels = training_tensors(iter([("10+10=", "20"), ("99+99=", "=" * 8 + "198")]))
    tokenizer = arithmetic_tokenizer()
    assert tokens.shape == labels.shape == (2, 17)
    assert tokenizer.decode(labels[1][labels[1] != IGNORED]) == "========198<eos>"
    assert tokenizer.decode(labels[0][labels[0] != IGNORED]) == "20<eos>"


def test_the_original_base_model_keeps_its_folder() -> None:
    """Its cache key is unchanged since before there was a variant: nobody teaches the model again."""
    assert base_model_folder(BaseModelConfig()).name == "base-7aba03416a6b05fd"
    assert base_model_folder(FillerModelConfig()) != base_model_folder(BaseModelConfig())
    assert base_model_folder(FillerModelConfig(most_fillers=3)) != base_model_folder(FillerModelConfig())


@pytest.fixture
def tiny(cache: Path) -> str:
    """A base model of three steps."""
    return str(cached_base_model(TINY))


def test_the_commands_model_is_the_default_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("studies.fillers.cached_base_model", lambda config: asked.append(config) or "folder")
    assert teach() == "folder" and asked == [FillerModelConfig()]
    assert model_folder() == str(base_model_folder(FillerModelConfig()))


def test_the_folder_is_a_model_for_the_trainer(tiny: str) -> None:
    expected = load_base_model(TINY)[0]
    loaded = load_model(tiny)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))
    assert len(load_tokenizer(tiny)) == len(arithmetic_tokenizer())


@pytest.mark.parametrize("reference", ["frozen", "ema"])
def test_a_run_of_the_variant_starts_from_its_model_and_can_be_resumed(
    tiny: str, tmp_path: Path, reference: str
) -> None:
    values: dict[str, Any] = {
        "model": tiny,
        "reward": REWARD,
        "reference": reference,
        "train_size": 8,
        "eval_size": 2,
        "prompts_per_step": 2,
        "num_generations": 2,
        "report_to": (),
        "cpu": True,
        "output_dir": str(tmp_path / "run"),
    }
    train_run(TrainConfig.from_flat({**values, "max_steps": 1}))
    summary = train_run(TrainConfig.from_flat({**values, "max_steps": 2, "resume": True}))
    assert summary.steps == 2
    taught = {folder.name for folder in (tmp_path / "cache").iterdir()}
    assert taught == {base_model_folder(TINY).name}, "no other model was taught"
    assert summary.final_metrics["kl/k3"] < 0.1
