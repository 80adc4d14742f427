"""What real text does to a run, its records and its report: bytes that are no character, lengths, the end token."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import torch

from klamp.cli import main
from klamp.report.text import decoded
from klamp.scoring.completions import Completions
from klamp.scoring.scorer import score
from klamp.training.sampling import encode_prompts


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_bytes_that_are_no_character_go_through_run_report_and_resume(small_run: Any, tmp_path: Path) -> None:
    assert main(small_run) == 0
    run = tmp_path / "run"
    rows = lines(run / "completions.jsonl")
    tokens = [token for row in rows for token in row["tokens"]]
    broken = {token for token in tokens if "\\x" in decoded(token)}
    assert broken, "the babbler writes bytes that are only a part of a character"
    assert all(len(row["tokens"]) == len(row["policy_logprobs"]) == len(row["ref_logprobs"]) for row in rows)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert any(escape(decoded(token).strip()) in page for token in broken)
    assert main(["doctor", str(run)]) in (0, 1)
    written = (run / "metrics.jsonl").read_text().splitlines()
    assert main([*small_run, "--resume", "--max_steps", "3"]) == 0
    assert (run / "metrics.jsonl").read_text().splitlines()[: len(written)] == written


def test_prompts_of_different_lengths_are_scored_as_each_alone(model: Any, tokenizer: Any) -> None:
    texts = ["What is the capital of France?", "Describe an old house by the sea in one sentence.", "Hi"]
    answers = tokenizer(["Paris.", "It stands alone.", "Hello"], add_special_tokens=False)["input_ids"]
    longest = max(map(len, answers))

    def of(rows: list[int]) -> Completions:
        ids, mask = encode_prompts([texts[row] for row in rows], tokenizer, torch.device("cpu"))
        kept = torch.tensor([[i < len(answers[row]) for i in range(longest)] for row in rows])
        padded = torch.tensor([answers[row] + [tokenizer.pad_token_id] * (longest - len(answers[row])) for row in rows])
        zeros = torch.zeros(padded.shape)
        return Completions(
            prompt_ids=ids, prompt_mask=mask, ids=padded, mask=kept, sampler_logprobs=zeros, ended=kept.any(-1)
        )

    with torch.no_grad():
        together = score(model, of([0, 1, 2]), temperature=1.0).logprobs
        for row in range(3):
            alone = score(model, of([row]), temperature=1.0).logprobs[0]
            kept = slice(0, len(answers[row]))
            assert torch.allclose(together[row, kept], alone[kept], atol=2e-4)


def test_the_end_token_is_the_pad_token_and_counts_once(small_run: Any, tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert main([*small_run, "--max_steps", "1", "--max_completion_length", "3"]) == 0
    for row in lines(tmp_path / "run" / "completions.jsonl"):
        assert row["tokens"].count("<|im_end|>") == int(row["ended"])
        assert row["tokens"].index("<|im_end|>") == len(row["tokens"]) - 1 if row["ended"] else len(row["tokens"]) == 3
