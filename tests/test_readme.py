"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from klamp.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
TEXT = re.findall(r"```text\n(.*?)```", README, re.S)
VERDICT = next(block for block in TEXT if block.startswith("klamp check:"))
QUICK = [block for block in TEXT if re.match(r"\$ klamp (audit|doctor|explain)", block)]
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
LINKS = sorted({*re.findall(r"\]\(([^)\s]+)\)", PROSE)})
HOME = ("https://github.com/klamp-rl/klamp/blob/main/", "https://raw.githubusercontent.com/klamp-rl/klamp/main/")


def squeezed(text: str) -> str:
    """Text with single spaces: a table of fewer rows has narrower columns."""
    return " ".join(text.split())


def parts(lines: list[str]) -> list[str]:
    """The printed parts of some lines: `...` stands for what the README leaves out."""
    return [squeezed(part) for line in lines for part in line.split("...") if part.strip()]


@pytest.mark.filterwarnings("ignore")
def test_the_verdict_on_trl_is_the_one_that_the_example_prints() -> None:
    """Numbers differ between processors, and the first line counts sampled tokens."""
    run = subprocess.run(
        [sys.executable, "examples/check_trl.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    printed = squeezed(run.stdout)
    assert "klamp check: WRONG" in printed
    assert [part for part in parts(VERDICT.splitlines()[1:]) if part not in printed] == []


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", QUICK, ids=lambda block: block.split()[2])
def test_a_quick_command_prints_what_the_readme_shows(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command, *lines = block.splitlines()
    main(command.split()[2:])
    printed = squeezed(capsys.readouterr().out)
    assert [part for part in parts(lines) if part not in printed] == []


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_examples_run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("link", LINKS)
def test_a_link_is_absolute_and_leads_to_a_file_that_is_there(link: str) -> None:
    """On a package index the README has no files beside it; a picture has to be asked for as it is."""
    (home,) = [home for home in HOME if link.startswith(home)]
    file, _, anchor = link.removeprefix(home).partition("#")
    assert (ROOT / file).is_file()
    assert (home == HOME[1]) == (Path(file).suffix != ".md")
    headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.M) if anchor else [""]
    assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900
