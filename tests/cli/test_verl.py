"""`klamp train --backend verl` from its arguments to its summary, by a stand-in for verl's program."""

from __future__ import annotations

import shlex

import pytest
from tests.training.conftest import TINY, stored, tiny_llama
from tests.training.in_verl.conftest import missing, stand_in

from klamp.cli import main
from klamp.cli.arguments import parse_train
from klamp.cli.describe import plan_text
from klamp.cli.display import columns_for
from klamp.training.config import TrainConfig
from klamp.training.in_verl.overrides import command

__all__ = ["stand_in"]

FLAGS = ["--backend", "verl", "--max_steps", "2", "--eval_every", "0", "--eval_size", "1"]
FLAGS += ["--report_to", "none", "--train_size", "6"]


@pytest.fixture
def words(tmp_path):
    """The words of a small run in tmp_path/run."""
    small = ("reward", "prompts_per_step", "num_generations", "max_completion_length")
    sizes = [word for name in small for word in (f"--{name}", str(TINY[name]))]
    model = stored(tiny_llama(), tmp_path / "model")
    return [*FLAGS, *sizes, "--model", model, "--output_dir", str(tmp_path / "run")]


def test_the_whole_command(words, stand_in, tmp_path, capsys):
    stand_in()
    assert main(["train", *words]) == 0
    text = capsys.readouterr().out
    assert "reference: a frozen copy, in verl" in text
    assert "done: 2 steps" in text
    assert "global_step_2" in text
    folder = tmp_path / "run"
    assert main(["doctor", str(folder)]) in (0, 1)
    assert (
        main(
            ["train", "--config", f"{folder}/config.yaml", "--output_dir", f"{folder}", "--resume", "--max_steps", "3"]
        )
        == 0
    )
    assert "continued after step 2" in capsys.readouterr().out


def test_a_failure_is_one_error_with_the_end_of_the_log(words, stand_in, capsys):
    stand_in(fail=1)
    assert main(["train", *words]) == 1
    text = capsys.readouterr().err
    assert "klamp: error: verl ended after step 0 of 2" in text
    assert "RuntimeError: an engine died" in text and "Traceback" not in text


def test_without_verl_one_error_names_the_environment(words, capsys, monkeypatch):
    monkeypatch.setattr("klamp.hosts.common.versions.metadata.version", missing)
    assert main(["train", *words]) == 1
    text = capsys.readouterr().err
    assert "needs verl, which is not installed here" in text and "scripts/environment.sh verl" in text
    assert "Traceback" not in text


def test_a_dry_run_prints_the_command_ready_to_be_pasted(words, tmp_path):
    request = parse_train([*words, "--dry_run", "--verl_args", "trainer.logger=[console]", "+a.b='two words'"])
    text = plan_text(request.config)
    assert "verl: its own program on a Ray cluster of this machine, 1 GPU; completions by vLLM" in text
    pasted = shlex.split(text.partition("run verl\n")[2])
    assert pasted == command(request.config, tmp_path / "run", "python")
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_prepare_writes_what_the_command_reads(words, tmp_path, capsys):
    assert main(["train", *words, "--prepare"]) == 0
    folder = tmp_path / "run" / "verl"
    assert capsys.readouterr().out.strip() == f"written: {folder}"
    given = parse_train(words).config
    read = [word for word in command(given, tmp_path / "run", "python") if word.startswith("data.") and "files" in word]
    assert len(read) == 2
    assert all((folder / word.rpartition("/")[2]).exists() for word in read)


def test_prepare_is_for_verl_alone(capsys):
    assert main(["train", "--prepare"]) == 2
    assert "--prepare has nothing to write" in capsys.readouterr().err


def test_the_table_has_the_kl_that_verl_logs():
    config = TrainConfig.from_flat({"backend": "verl"})
    titles = {column.title for column in columns_for(config)}
    assert "KL k3" in titles and not titles & {"KL k1", "exact"}
