"""The variant's base model as it is taught by default: a minute or two, so `make test-slow` runs this."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from klamp.tasks import TaskConfig, load_base_model, load_task
from studies.fillers import FILLER, FillerModelConfig

pytestmark = pytest.mark.slow


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, skill: str, *, sample: bool) -> list[tuple[str, str]]:
    """(answer, completion) pairs on held-out prompts."""
    torch.manual_seed(0)
    rows = load_task(TaskConfig(train_size=1, eval_size=256), tokenizer).evaluation[skill]
    batch = tokenizer([e.prompt for e in rows], return_tensors="pt", padding=True)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    tokens = model.generate(**batch, max_new_tokens=16, **options)
    texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [(e.answer, text) for e, text in zip(rows, texts, strict=True)]


@pytest.mark.timeout(1200)
def test_the_default_model_pads_its_answers_and_leaves_rl_something_to_gain() -> None:
    model, tokenizer = load_base_model(FillerModelConfig())
    drawn = sampled(model, tokenizer, "addition", sample=True)
    fillers = [text.count(FILLER) for _, text in drawn]
    assert 3 <= sum(fillers) / len(fillers) <= 5
    assert max(fillers) <= 10
    assert 0.4 <= sum(text.replace(FILLER, "") == answer for answer, text in drawn) / len(drawn) <= 0.8
    greedy = sampled(model, tokenizer, "addition", sample=False)
    assert 0.5 <= sum(text.replace(FILLER, "") == answer for answer, text in greedy) / len(greedy) <= 0.85
    for skill in ("subtraction", "reversal"):
        assert sum(text == answer for answer, text in sampled(model, tokenizer, skill, sample=False)) >= 0.9 * 256
