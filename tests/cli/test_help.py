"""The page of help of every command: each flag once, the examples, the names that it knows."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path

import pytest

from klamp.audit import HOSTS
from klamp.cli import main
from klamp.cli.ablate_arguments import parse_ablate
from klamp.cli.arguments import parse_train
from klamp.cli.evaluate import read_request as read_evaluate
from klamp.cli.explain import explain
from klamp.cli.flags import read_options, train_fields
from klamp.cli.help import COMMANDS, EVALUATED, help_of
from klamp.cli.text import WIDTH
from klamp.config import PRESETS
from klamp.diagnostics.alarms import ALARMS
from klamp.verify.explain import FORMS

IN_A_PLAN = [name for name in train_fields() if name not in ("seed", "output_dir", "resume", "prepare")]
FIELDS = {"train": [*train_fields()], "ablate": IN_A_PLAN, "evaluate": EVALUATED}
READERS = {"train": parse_train, "ablate": parse_ablate, "evaluate": read_evaluate, "explain": explain}
CALLS = [
    (name, line.strip())
    for name, command in COMMANDS.items()
    for line in (inspect.getdoc(command.options) or "").splitlines()
    if line.startswith("  klamp")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_every_flag_of_its_command_once(command: str) -> None:
    text, own = help_of(command), COMMANDS[command].options.__dataclass_fields__
    flags = [line.split()[0].strip(",") for line in text.splitlines() if line.startswith("  --")]
    expected = {f"--{name}" for name, field in own.items() if "word" not in field.metadata}
    assert sorted(flags) == sorted(expected | {f"--{name}" for name in FIELDS.get(command, ())})
    assert all(f"  {field.metadata['word']}" in text for field in own.values() if "word" in field.metadata)
    assert max(len(line) for line in text.splitlines() if not line.startswith("  --")) <= WIDTH


def test_a_flag_has_its_aliases_its_choices_and_its_default() -> None:
    text = " ".join(help_of("train").split())
    assert "--kl_penalty FLOAT" in text and "--kl_beta FLOAT" in text and "(default: 0.01)" in text
    assert "k1, k2, k3, abs" in text and "(default: None)" not in text


@pytest.mark.parametrize("argv", [["train", "--help"], ["help", "train"], ["train", "--beta", "0", "-h"]])
def test_how_to_ask_for_it(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == help_of("train") + "\n"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "verify")])
def test_a_command_that_needs_arguments_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    assert capsys.readouterr().out == help_of(command) + "\n"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("command", "example"), CALLS)
def test_examples_are_understood(command: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in {"config_demo.yaml": "beta: 0.1\n", "plan.yaml": "sweep: {beta: [0, 0.1]}\n"}.items():
        Path(file).write_text(text, encoding="utf-8")
    words = shlex.split(example, comments=True)
    assert words[:2] == ["klamp", command]
    read = READERS.get(command)
    assert read(words[2:]) if read else read_options(COMMANDS[command].options, words[2:], command=f"klamp {command}")


@pytest.mark.parametrize(("command", "names"), [("explain", [*PRESETS, *FORMS]), ("audit", HOSTS), ("doctor", ALARMS)])
def test_the_names_are_complete(command: str, names: list[str]) -> None:
    listed = " ".join(help_of(command).rpartition("\n\n")[2].split())
    assert all(name in listed for name in names)
