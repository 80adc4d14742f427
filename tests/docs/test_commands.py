"""What a page tells to type is understood: commands, flags, presets, keys; each command is shown to newcomers."""

import re
import shlex

import pytest
from tests.docs.pages import DOCS, ROOT

from klamp.cli.arguments import parse_train
from klamp.cli.commands import COMMANDS
from klamp.cli.verify import explain

PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
BLOCK = re.compile(r"^```(?:sh|text)?\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
FORM = re.compile(r"\.\.\.|\$|(?:^| )[A-Z]+(?: |$)|--target_kl$")
"""What only shows the form of a command, or a part of one: left out here."""


def typed(text: str) -> set[str]:
    """The commands in the blocks and the quoted pieces of a page, without what is said of them."""
    pieces = CODE.findall(BLOCK.sub("", text)) + re.sub(r" *\\\n *", " ", "\n".join(BLOCK.findall(text))).splitlines()
    lines = (re.sub(r"(?:^\$ | +#.*| {2,}.*)", "", piece).strip() for piece in pieces)
    return {line for line in lines if re.match(r"klamp [a-z]+(?: |$)", line)}


SHOWN = {page: typed(text) for page, text in PAGES.items()}
WHOLE = sorted(line for line in set().union(*SHOWN.values()) if not FORM.search(line))
NEWCOMERS = sorted({*CODE.findall(BLOCK.sub("", PAGES["which-kl.md"]))})

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_in_the_readme_and_on_a_page(name: str) -> None:
    assert f"klamp {name}" in PAGES["README.md"]
    assert any(line.split()[1] == name for page, lines in SHOWN.items() for line in lines if page != "README.md")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_to_type_is_a_command(page: str) -> None:
    blocks = typed("".join(f"```sh\n{block}```\n" for block in BLOCK.findall(PAGES[page])))
    assert [line for line in blocks if line.split()[1] not in COMMANDS] == []


@pytest.mark.parametrize("command", [line for line in WHOLE if line.startswith(("klamp train ", "klamp explain "))])
def test_a_run_or_an_explanation_that_is_shown_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, name, *words = shlex.split(re.sub(r"\S+\.yaml", "examples/config_demo.yaml", command))
    assert (parse_train if name == "train" else explain)(words)


@pytest.mark.parametrize("flags", [each for each in NEWCOMERS if each.startswith("--")])
def test_flags_for_newcomers_are_understood(flags: str) -> None:
    assert parse_train(shlex.split(flags))[0]


@pytest.mark.parametrize("entry", [each for each in NEWCOMERS if re.fullmatch(r"\w+: \S+", each)])
def test_entries_of_a_file_for_newcomers_are_understood(entry: str) -> None:
    name, value = entry.split(": ")
    assert str(parse_train([f"--{name}", value])[0].flat()[name]) == value
