"""`klamp train --backend trl|verl|tinker` from its arguments to its summary, by stand-ins for verl and a service."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts.trl.conftest import precision
from tests.standin import FLAGS as TINKER
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


@pytest.fixture(scope="module")
def tinker() -> Iterator:
    """A stand-in with the tiny Llama of the trainer's tests."""
    pytest.importorskip("tinker")
    from klamp.tasks import arithmetic_tokenizer
    from klamp.tinker.testing import serve

    with serve(tiny_llama(), arithmetic_tokenizer(), name="klamp/tiny") as standin:
        yield standin


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


def test_tinker(tinker, tmp_path, monkeypatch, capsys):
    for name, value in tinker.environment.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "run"
    text = trained([*TINKER, "--max_steps", "2", "--output_dir", str(out)], out, capsys)
    assert f"klamp/tiny · Tinker, {tinker.url}" in text
    assert "reference: klamp/tiny at the service, frozen" in text and "entropy" not in text


def test_a_dry_run_says_where_the_weights_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = " ".join(plan_text(parse_train(TINKER).config).split())
    assert "klamp/tiny at the Tinker service; a LoRA adapter of rank 4 is trained" in text
    assert "reference klamp/tiny at the Tinker service, frozen" in text
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_command_of_verl(words, tmp_path):
    mine = ["--backend", "verl", "--verl_args", "trainer.logger=[console]", "+a.b='two words'"]
    config = parse_train([*words, *mine]).config
    told = plan_text(config).partition("once the run has written its data\n")[2]
    shape = shape_of(config.model.model)
    assert shlex.split(told) == command(config, tmp_path / "run", "python", shape)
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.usefixtures("default_base_model", "tinker")
def test_the_example_runs_offline(capsys):
    spec = importlib.util.spec_from_file_location("tinker_grpo_kl", ROOT / "examples" / "tinker_grpo_kl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    rows = module.main(["--local", "--steps", "3", "--prompts", "2"])
    assert [row["kl/k3"] > 1e-6 for row in rows] == [False, True, True], "requests are scored in batches of any size"
    assert "requests asample 18, forward_backward 2, optim_step 1" in capsys.readouterr().out
    (row,) = module.main(["--local", "--steps", "1", "--prompts", "2", "--kl-coef", "0"])
    assert row.keys() == {"reward"}
    assert "requests asample 2, forward_backward 1, optim_step 1" in capsys.readouterr().out
