"""Every command is shown to newcomers, and what is shown is a command."""

from __future__ import annotations

import re

import pytest
from tests.docs.pages import DOCS, ROOT

from klamp.cli.app import COMMANDS

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_in_the_readme_and_on_a_page(name: str) -> None:
    assert f"klamp {name}" in README
    assert any(
        f"`klamp {name}" in text or f"\nklamp {name}" in text for page, text in PAGES.items() if page != "README.md"
    )


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_to_type_is_a_command(page: str) -> None:
    blocks = [text for kind, text in BLOCK.findall(PAGES[page]) if kind in ("", "sh", "text")]
    lines = [line for block in blocks for line in block.splitlines()]
    words = [found[1] for line in lines if (found := re.match(r"(?:\$ )?klamp ([a-z-]+)", line))]
    assert [word for word in words if word not in COMMANDS] == []
