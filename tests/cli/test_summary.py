"""The end of a run, in a few lines that hold what a person wants to know."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import summary_of, write_files

from klamp.cli.arguments import parse_train
from klamp.cli.train import print_summary


def summary_lines(folder: Path, *flags: str, **changes: object) -> list[str]:
    config = parse_train(flags).config
    console = Console(file=io.StringIO(), width=100, color_system=None)
    summary = dataclasses.replace(summary_of(config, folder, steps=200), **changes)  # pyright: ignore
    print_summary(console, config, summary)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # pyright: ignore


def after(lines: list[str], start: str) -> list[str]:
    return next(line.removeprefix(start).split() for line in lines if line.startswith(start))


def test_skills_in_points_the_trained_one_first(tmp_path: Path) -> None:
    lines = summary_lines(tmp_path)
    assert "done: 200 steps in 1 min 12 s" in lines
    assert after(lines, "addition (trained)") == ["76.2", "93.8", "+17.6"]
    assert after(lines, "subtraction") == ["90.2", "89.5", "-0.8"]
    skills = [line.split()[0] for line in lines if line.startswith(("addition", "subtraction", "reversal"))]
    assert skills == ["addition", "subtraction", "reversal"]


def test_the_kl_per_token_and_per_completion_by_every_estimator(tmp_path: Path) -> None:
    lines = summary_lines(tmp_path, "--target_kl", "0.05")
    assert after(lines, "KL from the reference (last step)") == ["k1", "k3", "exact"]
    assert after(lines, "nats per token") == ["0.0120", "0.0128", "0.0129"]
    assert after(lines, "nats per completion") == ["0.0626", "0.0616", "0.0620"]
    (beta,) = (line for line in lines if line.startswith("beta: "))
    assert beta.startswith("beta: hold controller from 0.01, towards 0.05 nats per token; price: ")
    assert "per nat of a whole completion" in beta


def test_a_moving_reference_shows_the_distance_from_its_start_too(tmp_path: Path) -> None:
    metrics = {"kl/k3": 0.01, "kl/k1_original": 0.2, "kl/k3_original": 0.25}
    lines = summary_lines(tmp_path, "--reference", "ema", final_metrics=metrics)
    assert after(lines, "from its start, per token") == ["0.2000", "0.2500", "-"]
    assert not any(line.startswith("from its start") for line in summary_lines(tmp_path))


def test_without_a_reference_it_says_so(tmp_path: Path) -> None:
    lines = summary_lines(tmp_path, "--beta", "0")
    assert any("no reference was loaded; --kl_monitor loads one" in " ".join(lines) for line in lines)
    assert not any(line.startswith("nats per") for line in lines)


def test_no_step_is_called_that(tmp_path: Path) -> None:
    lines = summary_lines(tmp_path, "--max_steps", "0", steps=0, final_metrics={})
    assert "done: no step was taken (--max_steps 0); the model was evaluated as it is, in 1 min 12 s" in lines
    assert "KL from the reference: not measured; that is done in each step, and none was taken" in lines
    assert not any(line.startswith(("nats per", "beta:")) for line in lines)


def test_files_are_named_where_they_exist(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_files(parse_train([]).config, folder)
    lines = summary_lines(folder)
    assert after(lines, "metrics") == [str(folder / "metrics.jsonl")]
    assert after(lines, "completions") == [str(folder / "completions.jsonl")]
    assert after(lines, "checkpoints") == [f"{folder / 'checkpoints'}:", "step-000100"]
    assert after(lines, "TensorBoard")[-2:] == ["--logdir", str(folder)]
    assert after(lines, "look at it")[-2:] == ["report", str(folder)]
    assert after(lines, "continue")[-3:] == ["--resume", "--max_steps", "400"]
    (folder / "completions.jsonl").unlink()
    assert not any(line.startswith("completions") for line in summary_lines(folder))
    assert not any(line.startswith("TensorBoard") for line in summary_lines(folder, "--report_to"))


def test_scores_that_are_no_shares_stay_as_they_are(tmp_path: Path) -> None:
    lines = summary_lines(tmp_path, before={"addition": -1.5}, after={"addition": 2.25})
    assert after(lines, "addition (trained)") == ["-1.5", "2.25", "+3.75"]


@pytest.mark.parametrize("metrics", [{}, {"beta": 0.3, "kl/k3": 1e-7}])
def test_metrics_that_are_missing_are_dashes(tmp_path: Path, metrics: dict[str, float]) -> None:
    lines = summary_lines(tmp_path, final_metrics=metrics)
    assert after(lines, "nats per token") == ["-", "1e-07" if metrics else "-", "-"]
    assert after(lines, "nats per completion") == ["-", "-", "-"]
