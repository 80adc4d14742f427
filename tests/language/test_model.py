"""The real model: it speaks, it learns without losing its place, and other trainers take its folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from klamp.cli import main
from klamp.lab.evaluation import probabilities
from klamp.lab.models import load_model, load_tokenizer
from klamp.lab.tasks import TaskConfig, load_task

SMOLLM2 = "examples/language/smollm2"
"""What examples/language/prepare.py writes."""


@pytest.fixture(scope="session")
def model() -> Any:
    return load_model(SMOLLM2)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(SMOLLM2)


def brief(completion: str, **_: Any) -> float:
    """A reward with a spread in every group, as few real texts are equally long: minus the length, in hundreds."""
    return -len(completion) / 100


RUN = "train --config examples/language/describe.yaml --report_to none --eval_size 1 --num_generations 4"
RUN += " --prompts_per_step 2 --max_completion_length 12 --eval_every 0 --log_completions_every 1 --warmup_steps 0"
RUN += " --reward tests.language.test_model:brief"


def steps(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("speed/")} for row in rows if "reward" in row]


def test_it_answers(model: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    out = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


def test_its_own_answers_are_likely_and_others_are_not(model: Any, tokenizer: Any) -> None:
    task = load_task(TaskConfig(task="examples/language/tasks.py:describe", eval_size=8), tokenizer)
    own = task.evaluation["own-answers"]
    found = probabilities(own, tokenizer, model)
    assert all(0.3 < value <= 1 for value in found), "greedy answers: every token is the likeliest one"
    assert math.isclose(sum(found) / len(found), 0.55, abs_tol=0.15)


def test_a_run_that_is_stopped_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*RUN.split(), "--max_steps", "2", "--output_dir", str(whole)]) == 0
    assert main([*RUN.split(), "--max_steps", "1", "--output_dir", str(parts)]) == 0
    assert main([*RUN.split(), "--max_steps", "2", "--output_dir", str(parts), "--resume"]) == 0
    assert steps(parts) == steps(whole)
    assert steps(whole)[0]["kl/k3"] == 0 and steps(whole)[1]["kl/k3"] > 0
    assert main(["doctor", str(whole)]) == 0, "a healthy run"
    assert main(["report", str(whole)]) == 0
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert "What is the capital of" in page and "before" in page
