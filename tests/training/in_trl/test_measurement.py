"""TRL's loss is klamp's own on the same tokens, for every choice that is translated."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from tests.training.answering import VLLMServer, answering
from tests.training.conftest import IN_REWARD, steps_of
from tests.training.test_teachers import ROWS, prompts_file

from klamp.core.advantages import group_advantages
from klamp.training.backends import train_run
from klamp.training.folders import ANSWERS, COMPLETIONS, lines_of
from klamp.training.models import load_model, load_tokenizer

pytestmark = pytest.mark.slow

THREE_PARTS = {"gradient_accumulation_steps": 3}
CHOICES = {
    "dr_grpo": {},
    "grpo in parts": {"loss_type": "grpo", "gradient_accumulation_steps": 2},
    "dapo in parts": {**THREE_PARTS, "loss_type": "dapo"},
    "bnpo in parts, truncated ones masked": {**THREE_PARTS, "loss_type": "bnpo", "mask_truncated_completions": True},
    "cispo": {"loss_type": "dapo", "surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 0.28},
    "two updates": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "clip": {"kl_clip_method": "soft", "kl_clip_threshold": 0.01},
    "exclusion": {"kl_exclude_tokens": (5, 9), "loss_type": "dapo"},
    "advantage": {"kl_placement": "advantage", "kl_estimator": "k1"},
    "reward": {**IN_REWARD, "advantage_baseline": "mean"},
    "adapter": {"lora_r": 3},
    "bfloat16": {"dtype": "bfloat16"},
    "temperature": {"temperature": 0.7, "kl_horizon": "sequence", "kl_estimator": "k1"},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_loss_is_klamp_s_on_the_same_tokens(choice, quick, tmp_path):
    train_run(quick(**CHOICES[choice], max_steps=2))
    rows = steps_of(tmp_path / "run")
    for row in rows:
        parts = row["train/policy_loss"] + row["train/kl_penalty"]
        assert row["train/loss"] == pytest.approx(parts, abs=1e-6)
    assert rows[0]["kl/k3"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl/k3"] > 0.01
    if choice not in ("advantage", "reward"):
        assert abs(rows[-1]["train/kl_penalty"]) > 1e-3


TAUGHT = {
    "k3": {"teacher_estimator": "k3"},
    "k1 in the advantage": {"teacher_estimator": "k1", "teacher_placement": "advantage", "reward": "none"},
    "exact, beside the exact KL": {"teacher_estimator": "exact", "kl_estimator": "exact", "teacher_schedule": "linear"},
    "a head, two updates": {"teacher_estimator": "topk", "teacher_top_k": 4, "num_iterations": 2},
    "alone, behind another prompt": {"beta": 0.0, "reward": "none", "teacher_prompt": "hint"},
    "a server's head": {
        "teacher_estimator": "topk", "teacher_head": "teacher", "teacher_top_k": 4, "reward": "none", "beta": 0.0,
    },
    "the policy without its adapter": {"teacher_kind": "adapter_off", "teacher_estimator": "exact", "lora_r": 2},
}  # fmt: skip


@pytest.mark.parametrize("choice", TAUGHT)
def test_a_teacher_is_in_the_loss_and_in_the_record(choice, quick, llama, teacher, tmp_path):
    options = {"loss_type": "dapo", "max_steps": 2, "log_completions": 12, "log_completions_every": 1, **TAUGHT[choice]}
    if "teacher_prompt" in options:
        options |= prompts_file(tmp_path, ROWS) | {"train_size": 0}
    model = load_model(teacher)
    server = VLLMServer(model, load_tokenizer(llama), longest=64)
    with answering(server.answer) if choice.startswith("a server") else nullcontext("") as url:
        named = {"teacher_url": url} if url else {} if "teacher_kind" in options else {"teacher_model": teacher}
        train_run(quick(**named, **options))
    rows, last = steps_of(tmp_path / "run"), {}
    for row in rows:
        parts = [row["train/policy_loss"], row.get("train/kl_penalty", 0.0), row.get("train/teacher_penalty", 0.0)]
        assert row["train/loss"] == pytest.approx(sum(parts), abs=1e-6)
        assert ("train/teacher_penalty" in row) == ("advantage" not in choice)
        last = row
    assert last["teacher/kl"] > 0
    course = [row["teacher/coef"] for row in rows]
    assert course == ([1, 0.5] if "teacher_schedule" in options else [1, 1])
    assert ("teacher/student_mass" in last) == ("teacher_top_k" in options)
    lines, answers = (lines_of(tmp_path / "run" / name) for name in (COMPLETIONS, ANSWERS))
    lines = list(lines)
    k1 = [p - q for row in lines[-12:] for p, q in zip(row["policy_logprobs"], row["teacher_logprobs"], strict=True)]
    assert last["teacher/k1"] == pytest.approx(sum(k1) / len(k1), abs=1e-5)
    assert all(row["advantage"] == 0 for row in lines) == (options.get("reward") == "none")
    assert ("teacher" in {row.get("who") for row in answers}) == ("teacher_model" in named)


def test_the_exact_kl_is_in_the_loss(quick, tmp_path):
    train_run(quick(kl_estimator="exact", max_steps=2))
    rows = steps_of(tmp_path / "run")
    assert rows[0]["kl/exact"] == pytest.approx(0, abs=1e-6)
    # beta times the sum over a completion, divided by the length that dr_grpo divides by
    expected = 0.5 * rows[-1]["kl/exact"] * rows[-1]["length/mean"] / 6
    assert rows[-1]["train/kl_penalty"] == pytest.approx(expected, rel=1e-4)
    assert rows[-1]["kl/exact"] > 0.01


def test_advantages_and_tokens_are_written_as_by_the_own_loop(quick, tmp_path):
    train_run(quick(log_completions=12, log_completions_every=1))
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step for step in (1, 2, 3) for _ in range(12)]
    for first in range(0, 36, 12):
        rewards = torch.tensor([row["reward"] for row in rows[first : first + 12]])
        wanted = group_advantages(rewards, 4, scale="none", baseline="leave_one_out")
        assert [row["advantage"] for row in rows[first : first + 12]] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert any(row["advantage"] for row in rows)
    assert {len({row["prompt"] for row in rows[at : at + 4]}) for at in range(0, 36, 4)} == {1}
    for row in rows:
        assert len(row["tokens"]) == len(row["policy_logprobs"]) == len(row["ref_logprobs"])
        assert "sampler_logprobs" not in row, "transformers does not tell them"
    last = rows[-12:]
    lengths = sum(len(row["tokens"]) for row in last) / 12
    step = steps_of(tmp_path / "run")[-1]
    assert step["length/mean"] == pytest.approx(lengths)
    assert step["length/truncated"] == pytest.approx(sum(not row["ended"] for row in last) / 12)
    k1 = [p - r for row in last for p, r in zip(row["policy_logprobs"], row["ref_logprobs"], strict=True)]
    assert step["kl/k1"] == pytest.approx(sum(k1) / len(k1), abs=1e-5)
    assert not any(name.startswith("sampler/") for name in step)


def test_what_vllm_reports_is_the_sampler(quick, tmp_path, monkeypatch):
    from klamp.training.in_trl.trainer import RunTrainer

    score = RunTrainer._generate_and_score_completions

    def reporting(self, inputs):
        output = score(self, inputs)
        assert self.generated is not None
        told = torch.full(output["completion_ids"].shape, -1.5)
        told[0, 0] = torch.nan
        self.generated.batch["sampling_per_token_logps"] = told
        return output

    monkeypatch.setattr(RunTrainer, "_generate_and_score_completions", reporting)
    train_run(quick(max_steps=1, log_completions=12))
    row = json.loads((tmp_path / "run" / "completions.jsonl").read_text().splitlines()[0])
    assert row["sampler_logprobs"][1:] == [-1.5] * (len(row["tokens"]) - 1)
    assert row["sampler_logprobs"][0] == pytest.approx(row["policy_logprobs"][0])
    assert "sampler/k1" in steps_of(tmp_path / "run")[0]
