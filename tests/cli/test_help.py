"""The help of every command, and what it says."""

from __future__ import annotations

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
from klamp.cli.help import COMMANDS, help_text
from klamp.cli.text import WIDTH
from klamp.config import PRESETS
from klamp.diagnostics.alarms import ALARMS
from klamp.training.config import section_classes
from klamp.verify.printed_formulas import FORMS

RUNS = ("train", "ablate")
SECTIONS = tuple(section_classes())


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def flags_in(text: str) -> list[str]:
    """The names that stand first in their line."""
    return [line.split()[0].strip(",") for line in text.splitlines() if line.startswith("  --")]


@pytest.mark.parametrize("command", RUNS)
def test_the_first_page_is_one_screen(command: str) -> None:
    text = help_text(command)
    lines = text.splitlines()
    assert 24 <= len(lines) <= 42 and max(map(len, lines)) <= WIDTH
    assert lines[0].startswith(f"usage: klamp {command} ") and "examples:" in lines
    assert "--beta FLOAT" in text and "(builtin)" in text
    assert all(f"{section} (" in " ".join(lines[-2:]) for section in SECTIONS), "the rest is a section away"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_its_fields_with_text_default_and_choices(section: str) -> None:
    text = help_text("train", section)
    own = {name: field for name, field in train_fields().items() if field.section == section}
    assert flags_in(text) == [f"--{name}" for name in own]
    flat = " ".join(text.split())
    for field in own.values():
        assert field.text in flat
        assert all(name in flat for name in (*field.choices, *(f"--{alias}" for alias in field.aliases)))


def test_everything_is_every_flag_once_with_defaults_and_presets() -> None:
    text = help_text("train", "all")
    assert flags_in(text) == [f"--{name}" for name in train_fields()]
    titles = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["train", *SECTIONS] and max(map(len, text.splitlines())) <= WIDTH
    flat = " ".join(text.split())
    assert all(name in flat for name in PRESETS)
    assert "Longest completion in tokens. (default: 16)" in flat and "(default: 1.5 0.75 1.5 0.5)" in flat
    assert "(default: None)" not in flat and "(default: False)" not in flat


def test_an_unknown_part_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "rolout"]) == 2
    assert "did you mean 'rollout'" in capsys.readouterr().err


def test_ablate_has_its_own_flags_and_not_what_it_sets_itself() -> None:
    text = help_text("ablate", "all")
    flags = flags_in(text)
    assert {"--seeds", "--plan", "--workers", "--ray", "--preset", "--dry_run", "--beta"} <= set(flags)
    assert not {"--seed", "--resume"} & set(flags)
    assert flags.count("--output_dir") == 1 and "Folder of the ablation" in text and "Folder of the run" not in text


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in RUNS])
def test_a_small_command_shows_all_that_it_takes(command: str) -> None:
    text, own = help_text(command), COMMANDS[command].options.__dataclass_fields__
    flags = [name for name, field in own.items() if "word" not in field.metadata]
    assert flags_in(text) == [f"--{name}" for name in (*flags, *COMMANDS[command].takes)]
    assert all(f"  {field.metadata['word']}" in text for field in own.values() if "word" in field.metadata)
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_narrow_terminal_gets_narrow_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    lines = help_text("train").splitlines()
    assert max(len(line) for line in lines if not line.startswith("  klamp")) <= 72


@pytest.mark.parametrize(
    "argv", [["train", "--help", "kl"], ["help", "train", "kl"], ["train", "--beta", "0", "-h", "kl"]]
)
def test_how_it_is_asked_for(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == help_text("train", "kl") + "\n"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "verify")])
def test_a_command_that_needs_to_be_told_something_explains_itself(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    assert capsys.readouterr().out == help_text(command) + "\n"


READERS = {
    "train": parse_train,
    "ablate": parse_ablate,
    "evaluate": read_evaluate,
    "explain": explain,
}
CALLS = [(command, example) for command, page in COMMANDS.items() for example in page.examples]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("command", "example"), CALLS)
def test_examples_are_understood(command: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in {"config_demo.yaml": "beta: 0.1\n", "plan.yaml": "sweep: {beta: [0, 0.1]}\n"}.items():
        Path(file).write_text(text, encoding="utf-8")
    words = shlex.split(example.partition(" > ")[0], comments=True)
    assert words[:2] == ["klamp", command]
    read = READERS.get(command)
    assert read(words[2:]) if read else read_options(COMMANDS[command].options, words[2:], command=f"klamp {command}")


@pytest.mark.parametrize("command", RUNS)
def test_what_is_shown_first_is_shown_once(command: str) -> None:
    shown = [name for names in COMMANDS[command].first.values() for name in names]
    assert sorted(flags_in(help_text(command))) == sorted(f"--{name}" for name in set(shown))
    assert len(shown) == len(set(shown)) and set(COMMANDS[command].hidden) <= train_fields().keys()


@pytest.mark.parametrize(("command", "names"), [("explain", [*PRESETS, *FORMS]), ("audit", HOSTS), ("doctor", ALARMS)])
def test_the_lists_are_complete(command: str, names: list[str]) -> None:
    listed = " ".join(help_text(command).rpartition("\n\n")[2].split())
    assert all(name in listed for name in names)
