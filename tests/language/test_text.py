"""What real text does to a run, its records and its report: bytes that are no character, the end token."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from klamp.cli import main
from klamp.report.text import decoded


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


def test_the_end_token_is_the_pad_token_and_counts_once(small_run: Any, tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert main([*small_run, "--max_steps", "1", "--max_completion_length", "3"]) == 0
    for row in lines(tmp_path / "run" / "completions.jsonl"):
        assert row["tokens"].count("<|im_end|>") == int(row["ended"])
        assert row["tokens"].index("<|im_end|>") == len(row["tokens"]) - 1 if row["ended"] else len(row["tokens"]) == 3
