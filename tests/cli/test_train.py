"""klamp train: parse, show, run, sum up."""

import contextlib
import dataclasses
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tests.cli.fake_trainer import fake_trainer, rise, run_info, summary_of, write_files
from tests.training.conftest import stored, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from klamp.cli import main, train
from klamp.cli.arguments import parse_train, read_entries
from klamp.cli.display import settings
from klamp.cli.text import train_command
from klamp.cli.train import plan_text, print_summary
from klamp.errors import ConfigError, RunFolderError, TrainingStopped
from klamp.lab.config import TrainConfig
from klamp.lab.folders import opened_folder, run_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, tmp_path / "out")
    return tmp_path / "out"


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings) -> None:
    monkeypatch.setattr(train, "train_run", fake_trainer(folder, **settings))


def test_from_start_to_summary_on_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--max_steps", "40", "--kl-beta", "0.02"]) == 0
    out = capsys.readouterr().out
    order = ["folder  ", "evaluation after step 0", "step 2/40: reward", "evaluation after step 40", "done: 40 steps"]
    positions = [out.index(part) for part in order]
    assert positions == sorted(positions)
    assert "\x1b" not in out
    assert "beta 0.02," in out and "fixed at 0.02" in out and "KL k3 0." in out


def test_on_a_terminal_it_is_drawn(folder: Path, capsys) -> None:
    console = Console(force_terminal=True, width=100, height=42)
    assert train.run(["--max_steps", "3"], console=console) == 0
    text = capsys.readouterr().out
    assert "\x1b[?25h" in text, "the cursor is shown again"
    assert text.rindex("3/3") < text.rindex("12,345") < text.index("done: 3 steps")


def test_a_stop_names_resume(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(step: int) -> None:
        if step == 2:
            what = "training was stopped after step 2 of 9"
            raise TrainingStopped(what, got="an interrupt", resumable=True) from KeyboardInterrupt()

    use(monkeypatch, folder, at_step=stop)
    assert main(["train", "--max_steps", "9"]) == 130
    captured = capsys.readouterr()
    assert "klamp: stopped: training was stopped after step 2 of 9" in captured.err
    assert captured.err.rstrip().endswith(f"train --resume {folder}")
    assert "done:" not in captured.out


def test_after_an_alarm_the_run_goes_on_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def stopped(config, observers):
        write_files(config, folder)
        for observer in observers:
            observer.on_start(run_info(config, folder))
            observer.on_alarm(rise("kl-spike", 2))
        raise TrainingStopped("training was stopped by the alarm kl-spike", resumable=True, fix="mend that")

    monkeypatch.setattr(train, "train_run", stopped)
    assert main(["train", "--max_steps", "9", "--stop-on", "kl-spike", "retention"]) == 1
    captured = capsys.readouterr()
    assert "alarm after step 2: kl-spike" in captured.out
    assert captured.err.rstrip().endswith(f"train --resume {folder} --stop_on retention")


def test_the_real_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    stored(tiny_llama(), tmp_path / "tiny")
    flags = ["--max_steps", "2", "--eval_size", "8", "--prompts_per_step", "4", "--num_generations", "4", "--cpu"]
    assert main(["train", *flags, "--model", "tiny", "--output_dir", "out"]) == 0
    out = capsys.readouterr().out
    assert "addition (trained)" in out
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "kl/k3" in row][-1]
    shown = next(line for line in out.splitlines() if line.startswith("  nats per token")).split()[3:]
    assert shown == [f"{last[name]:.4g}" for name in ("kl/k1", "kl/k3", "kl/exact")]
    (load,) = re.findall(r'load it +AutoModelForCausalLM.from_pretrained\("(.+)"\)', out)
    assert len(AutoTokenizer.from_pretrained(load)) == AutoModelForCausalLM.from_pretrained(load).config.vocab_size
    assert main(["report", "out"]) == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    facts = re.findall(r'<p class="source">(.*?)</p>', page)[0]
    assert facts.startswith("klamp train --eval_size 8 --model tiny --prompts_per_step 4 --num_generations 4")
    assert "--max_steps 2 --cpu · seed 0 · CPU (" in facts


def summary_lines(folder: Path, *flags: str, **changes: object) -> list[str]:
    config = parse_train(flags)[0]
    out = io.StringIO()
    summary = dataclasses.replace(summary_of(config, folder, steps=200), **changes)  # pyright: ignore
    with contextlib.redirect_stdout(out):
        print_summary(config, summary)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def after(lines: list[str], start: str) -> list[str]:
    return next(line.strip().removeprefix(start).split() for line in lines if line.strip().startswith(start))


def test_the_kl_per_token_and_per_completion_by_every_estimator(tmp_path: Path) -> None:
    lines = summary_lines(tmp_path, "--target_kl", "0.05")
    assert after(lines, "k1") == ["k3", "exact"]
    assert after(lines, "nats per token") == ["0.01201", "0.01281", "0.01291"]
    assert after(lines, "nats per completion") == ["0.06258", "0.06158", "0.06198"]
    (beta,) = (line for line in lines if line.startswith("beta: "))
    assert beta.startswith("beta: hold controller from 0.01, towards 0.05 nats per token; ")


def test_the_summary_says_for_how_much_of_the_run_the_target_was_held(tmp_path: Path) -> None:
    final = {"final_metrics": {"kl/k3": 0.2, "kl/target": 0.05}}
    for level, text in (
        (0.1, "in the band (mean of 20 steps within 30 %) for 12 % of the steps"),
        (0.01, "fewer than 20 steps since the KL"),
    ):
        kl = [level, *[0.05] * 23, *[level] * 71] if level > 0.05 else [level, *[0.05] * 19]
        rows = [{"step": step, "kl/k3": value, "kl/target": 0.05} for step, value in enumerate(kl)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"step": 0, "eval/addition": 1.0}, *rows])))
        (line,) = (line for line in summary_lines(tmp_path, "--target_kl", "0.05", **final) if line[:7] == "target:")
        assert line.startswith(f"target: {text}")
    assert not [line for line in summary_lines(tmp_path) if line.startswith("target:")]


def plan(*flags: str) -> str:
    return plan_text(parse_train(flags)[0])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "frozen"),
        (["--beta", "0"], "none: beta is 0, so no reference is loaded; --kl_monitor loads one"),
        (["--lora_r", "8"], "adapter_off"),
        (["--ref_model", "my/model"], "frozen: my/model"),
        (["--reference", "ema"], "ema: follows the policy, keeping 0.99 of itself at every step"),
    ],
)
def test_the_reference_in_words(flags: list[str], text: str) -> None:
    assert settings(parse_train(flags)[0])["reference"].startswith(text)


@pytest.mark.parametrize(
    ("flags", "beta"),
    [([], 0.0), (["--beta", "0.01"], 0.01), (["--kl_coef", "0.2"], 0.2), (["--preset", "frpo"], 0.01)],
)
def test_beside_reward_none_beta_is_0_unless_it_is_set(flags: list[str], beta: float) -> None:
    config = parse_train(["--teacher_model", "x", "--reward", "none", *flags])[0]
    assert config.kl.beta == beta
    assert ("reward none is the teacher alone" in settings(config)["beta"]) == (beta == 0)
    assert parse_train(["--teacher_model", "x"])[0].kl.beta == 0.01, "a reward is there"


def test_the_configuration_is_yaml_and_the_run_it_describes(folder: Path) -> None:
    argv = ["--preset", "dapo", "--beta", "0.1", "--target_kl", "0.2", "--report_to", "--kl_exclude_tokens", "1", "2"]
    printed = plan(*argv).partition("as a YAML file takes it")[2].partition("\n\n")[2]
    assert TrainConfig.from_flat(read_entries(yaml.safe_load(printed), Path())) == parse_train(argv)[0]


def test_the_inputs_are_opened_and_nothing_is_started(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def never(*args: object, **others: object) -> None:
        raise AssertionError("weights were loaded, or the trainer was started")

    monkeypatch.setattr("klamp.lab.models.load_base_model", never)
    monkeypatch.setattr(train, "train_run", never)
    assert main(["train", "--dry-run", "--train_size", "7", "--eval_size", "2", "--max_steps", "7"]) == 0
    out = capsys.readouterr().out
    assert "task        arithmetic; 7 to train on, 6 held out; longest prompt (tokens): 9" in out
    assert "steps       7, each 32 prompts x 8 completions = 256" in out
    assert list(folder.parent.iterdir()) == []
    assert main(["train", "--dry-run", "--reward", "no_such_module:score"]) == 2
    assert "cannot be imported" in capsys.readouterr().err


def test_the_folder_is_the_one_that_the_trainer_takes(folder: Path) -> None:
    for flags in ([], ["--output_dir", "here"], ["--task", "my.tasks:chess"]):
        config = parse_train(flags)[0]
        expected = run_folder(config)
        assert f"folder      {expected}\n" in plan(*flags)
        with opened_folder(config) as opened:
            assert opened == expected
    folder.mkdir()
    (folder / "config.yaml").touch()
    with pytest.raises(RunFolderError, match="another run"):
        plan("--output_dir", "out")


def test_the_plan_of_a_resume_says_what_changes_or_why_it_cannot(folder: Path) -> None:
    now = parse_train(["--beta", "0.1"])[0]
    write_files(now, folder)
    assert "resume      after step 100; changed: beta 0.1 -> 0.5\n" in plan("--resume", "out", "--beta", "0.5")
    with pytest.raises(ConfigError, match="cannot change seed"):
        plan("--resume", "out", "--seed", "3")
    command = shlex.split(train_command("--resume", str(folder), max_steps=400))
    again = parse_train(command[command.index("train") + 1 :])[0]
    assert again.flat() == now.flat() | {"max_steps": 400, "output_dir": str(folder), "resume": True}
