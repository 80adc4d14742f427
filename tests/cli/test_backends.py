"""`klamp train --backend trl|verl` from its arguments to its summary, by a stand-in for verl."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.hosts.trl.conftest import precision
from tests.training.conftest import TINY, stored, tiny_llama
from tests.training.in_verl.conftest import stand_in

from klamp.cli import main
from klamp.cli.arguments import parse_train
from klamp.cli.describe import plan_text
from klamp.training.in_verl.overrides import command
from klamp.training.models import shape_of

__all__ = ["precision", "stand_in"]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("reward", "prompts_per_step", "num_generations", "max_completion_length", "train_size")
SIZES = [word for name in SMALL for word in (f"--{name}", str(TINY[name]))]
FLAGS = ["--max_steps", "2", "--eval_every", "0", "--eval_size", "1", "--report_to", "none", *SIZES]


@pytest.fixture
def words(tmp_path) -> list[str]:
    """The words of a small run in tmp_path/run, but for its backend."""
    return [*FLAGS, "--model", stored(tiny_llama(), tmp_path / "model"), "--output_dir", str(tmp_path / "run")]


def trained(words: list[str], folder: Path, capsys) -> str:
    """What a run of two steps says, which is continued to a third."""
    assert main(["train", *words]) == 0
    text = capsys.readouterr().out
    assert "done: 2 steps" in text
    assert main(["train", "--resume", str(folder), "--max_steps", "3"]) == 0
    assert "continued after step 2" in capsys.readouterr().out
    return text


def test_trl(words, tmp_path, capsys):
    text = trained(["--backend", "trl", "--cpu", *words], tmp_path / "run", capsys)
    assert all(part in text for part in ("reference: loaded by TRL", "checkpoint-2", "--resume", "exact", "entropy"))


def test_verl(words, stand_in, tmp_path, capsys):
    stand_in()
    text = trained(["--backend", "verl", "--lr_scheduler_type", "constant", *words], tmp_path / "run", capsys)
    assert "reference: a frozen copy, in verl" in text and "global_step_2" in text
    assert main(["doctor", str(tmp_path / "run")]) in (0, 1)


def test_a_dry_run_prints_the_command_of_verl(words, tmp_path):
    mine = ["--backend", "verl", "--verl_args", "trainer.logger=[console]", "+a.b='two words'"]
    config = parse_train([*words, *mine]).config
    told = plan_text(config).partition("once the run has written its data\n")[2]
    shape = shape_of(config.model.model)
    assert shlex.split(told) == command(config, tmp_path / "run", "python", shape)
    assert not (tmp_path / "run").exists(), "nothing is written"
