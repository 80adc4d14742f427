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
from klamp.cli.explain import read_request
from klamp.cli.flags import fields_of, read_options
from klamp.cli.help import PAGES, WIDTH, help_text, list_alarms, list_hosts, list_presets
from klamp.cli.train_fields import fields
from klamp.config import PRESETS
from klamp.diagnostics.alarms import ALARMS
from klamp.errors import UnknownNameError
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
    lines = help_text(command).splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith(f"usage: klamp {command} ")
    assert "examples:" in lines
    assert "--beta FLOAT" in help_text(command)
    assert all(f"{section} (" in " ".join(lines[-2:]) for section in SECTIONS), "the rest is a section away"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_its_fields_with_text_default_and_choices(section: str) -> None:
    text = help_text("train", section)
    own = {name: field for name, field in fields().items() if field.section == section}
    assert flags_in(text) == [f"--{name}" for name in own]
    flat = " ".join(text.split())
    assert all(field.text in flat for field in own.values())
    assert all(",".join(field.choices) in flat.replace(", ", ",") for field in own.values())


def test_everything_is_every_flag_once() -> None:
    text = help_text("train", "all")
    assert flags_in(text) == [f"--{name}" for name in fields()]
    titles = [line.partition(":")[0] for line in text.splitlines() if line and not line.startswith(" ")]
    assert [title for title in titles if title in SECTIONS] == list(SECTIONS)
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_fields_own_name_comes_before_its_aliases_and_its_opposite() -> None:
    assert "  --beta, --kl_coef, --kl_penalty, --kl_beta FLOAT\n" in help_text("train", "kl")
    assert "  --resume, --no_resume " in help_text("train", "run")


def test_defaults_show() -> None:
    flat = " ".join(help_text("train", "all").split())
    assert "Longest completion in tokens. (default: 16)" in flat
    assert "(default: None)" not in flat and "(default: False)" not in flat
    assert "(default: 0.1 0.01 0.1)" in flat


def test_the_names_of_the_presets_show() -> None:
    assert all(name in help_text("train", "train") for name in PRESETS)


@pytest.mark.parametrize("topic", ["beta", "--beta", "kl-coef"])
def test_a_flag_is_a_part_of_its_own(topic: str) -> None:
    lines = help_text("train", topic).splitlines()
    assert lines[0] == "kl:"
    assert lines[1].startswith("  --beta, --kl_coef")
    assert len(lines) < 6


def test_an_unknown_part_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rollout'"):
        help_text("train", "rolout")
    assert main(["train", "--help", "rolout"]) == 2
    assert "rollout" in capsys.readouterr().err


def test_ablate_has_its_own_flags_and_not_what_it_sets_itself() -> None:
    text = help_text("ablate", "all")
    flags = flags_in(text)
    assert {"--seeds", "--plan", "--workers", "--ray", "--preset", "--dry_run", "--beta"} <= set(flags)
    assert not {"--seed", "--resume"} & set(flags)
    assert flags.count("--output_dir") == 1 and "Folder of the ablation" in text and "Folder of the run" not in text
    with pytest.raises(UnknownNameError):
        help_text("ablate", "seed")


@pytest.mark.parametrize("command", [name for name in PAGES if name not in RUNS])
def test_a_small_command_shows_all_that_it_takes(command: str) -> None:
    text, own = help_text(command), PAGES[command].options.__dataclass_fields__
    flags = [name for name, field in own.items() if "word" not in field.metadata]
    assert flags_in(text) == [f"--{name}" for name in (*flags, *PAGES[command].takes)]
    assert all(f"  {field.metadata['word']}" in text for field in own.values() if "word" in field.metadata)
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("command", PAGES)
def test_the_examples_are_calls_of_the_command(command: str) -> None:
    assert PAGES[command].examples
    assert all(example.startswith(f"klamp {command}") for example in PAGES[command].examples)


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


@pytest.mark.parametrize("command", [name for name in PAGES if name not in ("train", "verify")])
def test_a_command_that_needs_to_be_told_something_explains_itself(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    assert capsys.readouterr().out == help_text(command) + "\n"


READERS = {
    "train": parse_train,
    "ablate": parse_ablate,
    "evaluate": read_evaluate,
    "explain": read_request,
}
CALLS = [(command, example) for command, page in PAGES.items() for example in page.examples]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("command", "example"), CALLS)
def test_examples_are_understood(command: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in {"config_demo.yaml": "beta: 0.1\n", "plan.yaml": "sweep: {beta: [0, 0.1]}\n"}.items():
        Path(file).write_text(text, encoding="utf-8")
    words = shlex.split(example.partition(" > ")[0], comments=True)
    assert words[:2] == ["klamp", command]
    read = READERS.get(command)
    assert read(words[2:]) if read else read_options(PAGES[command].options, words[2:], command=f"klamp {command}")


@pytest.mark.parametrize("command", PAGES)
def test_what_is_shown_first_is_there(command: str) -> None:
    page = PAGES[command]
    known = fields_of(page.options).keys() | (fields().keys() if page.takes_configuration else set())
    shown = [name for names in page.first.values() for name in names]
    assert set(shown) <= known
    assert len(shown) == len(set(shown))
    assert set(page.hidden) <= fields().keys()


def test_the_lists_are_complete() -> None:
    presets = " ".join(text for _, text in list_presets())
    assert all(name in presets for name in (*PRESETS, *FORMS))
    assert [name for name, _ in list_hosts()] == [*HOSTS, "module:function"]
    assert [name for name, _ in list_alarms()] == list(ALARMS)
    assert sum(text.endswith(" (a note)") for _, text in list_alarms()) == sum(
        a.level != "alarm" for a in ALARMS.values()
    )
