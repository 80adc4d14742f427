"""`klamp train --backend trl|verl` as a program: what it prints, starts and returns; the plan of a dry run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.training.conftest import TINY, stored, tiny_llama

from klamp.cli import main, train
from klamp.doctor.readers import read_record
from klamp.lab import backends

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("reward", "num_generations", "max_completion_length", "train_size")
SIZES = [word for name in SMALL for word in (f"--{name}", str(TINY[name]))]
FLAGS = ["--prompts_per_step", "4", "--eval_every", "0", "--eval_size", "1", "--report_to", "none", *SIZES]
AROUND = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
LAUNCHED = ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")  # what torchrun and `accelerate launch` set


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return [*FLAGS, "--model", stored(tiny_llama(), tmp_path / "model"), "--output_dir", str(tmp_path / "run")]


def test_trl_trains_reports_and_continues(words, tmp_path, capsys):
    assert main(["train", "--backend", "trl", "--cpu", "--max_steps", "2", *words]) == 0
    assert "train_runtime" in capsys.readouterr().out
    assert main(["train", "--resume", str(tmp_path / "run"), "--max_steps", "3"]) == 0
    assert main(["doctor", str(tmp_path / "run")]) in (0, 1)
    assert "3 logged steps" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0 and (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_several_processes_are_started_by_accelerate(words, tmp_path):
    flags = ["--backend", "trl", "--cpu", "--gpus", "2", "--max_steps", "2", "--target_kl", "0.02", *words]
    around = {name: value for name, value in AROUND.items() if name not in LAUNCHED}
    command = [sys.executable, "-m", "klamp.cli", "train", *flags]
    run = subprocess.run(command, env=around, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    history = read_record(tmp_path / "run")
    assert len(history.rows) == 2 and abs(history.rows[0].metrics["kl/k3"]) < 1e-6
    assert "checksums.json" in {path.name for path in (tmp_path / "run" / "checkpoint-2").iterdir()}


def test_a_program_of_its_own_takes_the_place_of_this_process():
    """Its exit code is that of `klamp train`, and a signal is its own."""
    code = "from klamp.lab.backends import replace_process; import sys; print('before')\n"
    code += "replace_process([sys.executable, '-c', 'import os, sys; print(os.getpid()); sys.exit(7)'])"
    run = subprocess.Popen([sys.executable, "-c", code], env=AROUND, stdout=subprocess.PIPE, text=True)
    said, _ = run.communicate(timeout=60)
    assert (run.returncode, said.split()) == (7, ["before", str(run.pid)])


def test_verl_is_started_with_its_inputs_in_the_folder(words, tmp_path, monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(backends, "check_version", lambda host: "a stand-in")
    monkeypatch.setattr(backends, "replace_process", lambda command: seen.append(list(command)))
    words += ["--lr_scheduler_type", "constant"]
    assert main(["train", "--backend", "verl", "--max_steps", "2", *words]) == 0
    (command,) = seen
    assert command[:3] == [sys.executable, "-m", "verl.trainer.main_ppo"]
    folder, inner = tmp_path / "run", tmp_path / "run" / "verl"
    assert f"data.train_files={inner / 'train.parquet'}" in command
    assert {path.name for path in inner.iterdir()} == {"train.parquet", "held-out.parquet", "task.json", "tokenizer"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["backend"] == "verl"
    (folder / "verl.jsonl").write_text("{}\n")
    assert main(["train", "--resume", str(folder), "--max_steps", "3"]) == 0
    assert "trainer.resume_mode=auto" in seen[1] and "trainer.total_training_steps=3" in seen[1]
    assert (inner / "log-before-resume-1.jsonl").is_file(), "verl writes its log anew"


def test_several_processes_need_a_name_of_their_folder(words, monkeypatch, capsys):
    monkeypatch.setattr(backends, "check_version", lambda host: "a stand-in")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--backend", "trl", *words[:-2]]) == 2
    assert "several processes need output_dir" in capsys.readouterr().err
    assert main(["train", "--backend", "verl", *words]) == 2
    assert "runs in one process" in capsys.readouterr().err


def test_a_dry_run_prints_the_arguments_of_trl(words, tmp_path, capsys):
    assert main(["train", "--backend", "trl", "--gpus", "2", "--beta", "0.3", *words, "--dry_run"]) == 0
    told = capsys.readouterr().out.partition("the arguments of klamp.trl.GRPOConfig\n")[2]
    arguments, _, command = told.partition("the command that runs it")
    given = yaml.safe_load(arguments)
    assert (given["beta"], given["num_generations"], given["per_device_train_batch_size"]) == (0.3, 4, 8)
    assert "accelerate.commands.launch --multi_gpu --num_processes 2" in command
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        ("--backend verl", 0, "this run cannot start here: verl is not installed. pip install"),
        ("--backend verl", 0, "here: vllm is not installed. pip install vllm"),
        ("--backend trl --sampler vllm", 0, "here: vllm is not installed"),
        ("--backend trl", 0, ""),
        ("--report_to mlflow", 2, "a tracker cannot be used"),
        ("--report_to none", 0, ""),
    ],
)
def test_a_dry_run_says_what_is_missing_here(flags, code, text, words, monkeypatch, capsys):
    present = train.installed_version
    monkeypatch.setattr(train, "installed_version", lambda host: None if host in ("verl", "vllm") else present(host))
    assert main(["train", *words, *flags.split(), "--dry_run"]) == code
    err = capsys.readouterr().err
    assert text in err and bool(text) == bool(err)


def test_a_dry_run_prints_the_command_of_verl(words, tmp_path, capsys):
    mine = ["--backend", "verl", "--verl_args", "trainer.logger=[console]", "+a.b='two words'"]
    assert main(["train", *words, *mine, "--dry_run"]) == 0
    told = shlex.split(capsys.readouterr().out.partition("once klamp has made the folder\n")[2])
    assert told[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert told[-2:] == ["trainer.logger=[console]", "+a.b='two words'"]
    assert not (tmp_path / "run").exists(), "nothing is written"
