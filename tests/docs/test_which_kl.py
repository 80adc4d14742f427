"""The page for newcomers: every command on it is one that klamp understands, every field and preset exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from klamp.cli.arguments import parse_train, request_of
from klamp.cli.explain import read_request
from klamp.config import PRESETS
from klamp.verify.printed_formulas import FORMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "which-kl.md").read_text(encoding="utf-8")
CODE = [
    *re.findall(r"`([^`\n]+)`", PAGE),
    *(line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()),
]
COMMANDS = sorted({line.partition("#")[0].strip() for line in CODE if line.startswith("klamp ")})


def test_there_are_commands_of_each_kind() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} == {"train", "explain", "verify"}


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("klamp train")])
def test_a_train_command_is_understood(command: str) -> None:
    words = shlex.split(command.replace("NAME", "grpo"))[2:]
    assert parse_train(words).config


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("klamp explain ")])
def test_an_explain_command_names_what_exists(command: str) -> None:
    request = read_request(shlex.split(command)[2:])
    names = [name for name in request.options.names if not name.endswith(".yaml")]
    assert set(names) <= {*PRESETS, *FORMS}
    assert request_of(request.flags).config


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("flags", sorted({c for c in CODE if c.startswith("--")}))
def test_flags_that_stand_alone_are_understood(flags: str) -> None:
    assert parse_train(shlex.split(flags)).config


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("entry", sorted({c for c in CODE if re.fullmatch(r"\w+: \S+", c)}))
def test_entries_of_a_file_are_understood(entry: str) -> None:
    name, value = entry.split(": ")
    assert str(parse_train([f"--{name}", value]).config.flat()[name]) == value
