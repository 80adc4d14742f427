"""One page of help per command, as it is printed; `KLAMP_PAGES=1` writes the pages anew."""

import inspect
import os
import shlex
from pathlib import Path

import pytest

from klamp.cli import main
from klamp.cli.ablate import parse_ablate
from klamp.cli.arguments import parse_train
from klamp.cli.commands import COMMANDS, EVALUATED, fields_after, help_of, read_command
from klamp.cli.text import WIDTH

PAGES = Path(__file__).parent / "pages"
CALLS = [
    (name, line.strip())
    for name, command in COMMANDS.items()
    for line in (inspect.getdoc(command.options) or "").splitlines()
    if line.startswith("  klamp")
]


@pytest.mark.parametrize("command", ["klamp", *COMMANDS])
def test_the_page_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the fields of the configuration, which are the same for several commands."""
    assert main(["--help"] if command == "klamp" else [command, "--help"]) == 0
    printed = capsys.readouterr().out.partition("\nkl:\n")[0].partition("\ntask:\n")[0].rstrip() + "\n"
    file = PAGES / f"{command}.txt"
    if os.environ.get("KLAMP_PAGES"):
        file.write_text(printed, encoding="utf-8")
    assert printed == file.read_text(encoding="utf-8")
    assert max(map(len, printed.splitlines())) <= WIDTH


@pytest.mark.parametrize("command", ["train", "ablate", "evaluate"])
def test_a_page_has_every_field_that_its_command_takes(command: str) -> None:
    text = help_of(command)
    flags = [line.split()[0].strip(",") for line in text.splitlines() if line.startswith("  --")]
    assert sorted(flags) == sorted(f"--{name}" for name in fields_after(command))
    assert "--max_completion_length" in flags and ("--kl_horizon" in flags) == (command != "evaluate")
    assert ("--seed" in flags) == (command == "train") and set(EVALUATED) <= fields_after(command).keys()
    train = " ".join(help_of("train").split())
    assert "--kl_penalty FLOAT" in train and "(default: 0.01)" in train and "k1, k2, k3, abs" in train


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
    read = {"train": parse_train, "ablate": parse_ablate}.get(command)
    assert read(words[2:]) if read else read_command(command, words[2:])
