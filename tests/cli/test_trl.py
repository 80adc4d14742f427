"""`klamp train --backend trl` from its arguments to its summary."""

from __future__ import annotations

import pytest
from tests.hosts.trl.conftest import precision
from tests.training.conftest import TINY, stored, tiny_llama

from klamp.cli import main
from klamp.cli.arguments import parse_train
from klamp.cli.describe import plan_text

__all__ = ["precision"]

FLAGS = ["--backend", "trl", "--max_steps", "2", "--eval_every", "0", "--eval_size", "1"]
FLAGS += ["--report_to", "none", "--cpu"]


def test_the_whole_command(tmp_path, capsys):
    model, out = stored(tiny_llama(), tmp_path / "model"), str(tmp_path / "run")
    small = ("reward", "prompts_per_step", "num_generations", "max_completion_length", "train_size")
    sizes = [word for name in small for word in (f"--{name}", str(TINY[name]))]
    assert main(["train", *FLAGS, *sizes, "--model", model, "--output_dir", out]) == 0
    text = capsys.readouterr().out
    assert "reference: loaded by TRL" in text
    assert "done: 2 steps" in text
    assert "checkpoint-2" in text and "--resume" in text
    assert "exact" in text and "entropy" in text
    assert main(["train", "--config", f"{out}/config.yaml", "--output_dir", out, "--resume", "--max_steps", "3"]) == 0
    assert "continued after step 2" in capsys.readouterr().out


def test_a_dry_run_says_who_writes_the_completions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*FLAGS, "--sampler", "vllm", "--dry-run", "--task", "my data.jsonl"]
    assert "completions by vLLM in the training processes" in plan_text(parse_train(words).config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--surrogate", "score_function"], ["--kl_early_stop", "0.1"]])
def test_what_trl_cannot_do_is_said_before_any_work(flags, capsys):
    assert main(["train", *FLAGS, *flags]) != 0
    assert "fix:" in capsys.readouterr().err
