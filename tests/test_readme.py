"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
((SHOWN, PRINTED),) = re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", README, re.S)
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
DEFINED = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", PROSE, re.M))
LINKS = sorted({*DEFINED.values(), *re.findall(r"\]\(([^)\s]+)\)", PROSE)})
HOME = ("https://github.com/klamp-rl/klamp/blob/main/", "https://raw.githubusercontent.com/klamp-rl/klamp/main/")


def test_the_example_with_an_output_prints_what_the_readme_says():
    done = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True)
    assert done.stdout == PRINTED


def test_the_example_with_an_output_has_no_more_than_the_promised_lines():
    code = [line for line in SHOWN.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 12


@pytest.mark.parametrize("code", [code for code in PYTHON if code != SHOWN])
def test_the_other_examples_run(code):
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("link", LINKS)
def test_a_link_is_absolute_and_leads_to_a_file_that_is_there(link):
    """On a package index the README has no files beside it; a picture has to be asked for as it is."""
    (home,) = [home for home in HOME if link.startswith(home)]
    file, _, anchor = link.removeprefix(home).partition("#")
    assert (ROOT / file).is_file()
    assert (home == HOME[1]) == (Path(file).suffix != ".md")
    headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.M) if anchor else [""]
    assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_that_is_defined_is_used_and_the_other_way_round():
    used = set(re.findall(r"\[[^\]]+\]\[([^\]]+)\]", PROSE)) | set(re.findall(r"\[([\w ]+)\](?![\[(:])", PROSE))
    assert used == set(DEFINED)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 180
