"""What the README shows is what happens; citation, changelog and forms agree with the package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import klamp
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


def test_the_verdict_on_trl_is_the_one_that_the_example_prints() -> None:
    """Numbers differ between processors, and the first line counts sampled tokens."""
    command = [sys.executable, "examples/check_trl.py"]
    printed = squeezed(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert "klamp check: WRONG" in printed
    assert [part for part in parts(VERDICT.splitlines()[1:]) if part not in printed] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", QUICK, ids=lambda block: block.split()[2])
def test_a_quick_command_prints_what_the_readme_shows(block: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, *lines = block.splitlines()
    main(command.split()[2:])
    printed = squeezed(capsys.readouterr().out)
    assert [part for part in parts(lines) if part not in printed] == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("code", PYTHON)
def test_the_python_examples_run(code: str) -> None:
    exec(code, {})


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
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 900


CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION: Any = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

# The parts of schema 1.2.0 of the Citation File Format that a citation of software uses; the first four it must have.
CITATION_KEYS = ["authors", "cff-version", "message", "title"]
CITATION_KEYS += ["abstract", "date-released", "doi", "identifiers", "keywords", "license", "preferred-citation"]
CITATION_KEYS += ["references", "repository-code", "type", "url", "version"]


def test_the_citation_has_the_keys_of_its_format_and_says_what_the_package_says() -> None:
    assert set(CITATION_KEYS[:4]) <= set(CITATION) <= set(CITATION_KEYS)
    assert (CITATION["cff-version"], CITATION["type"]) == ("1.2.0", "software")
    assert all(CITATION[key].startswith("https://") for key in ("url", "repository-code"))
    assert (CITATION["version"], CITATION["license"]) == (klamp.__version__, PROJECT["license"])
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_changelog_begins_with_the_version_of_the_code_and_each_release_says_which_numbers_changed() -> None:
    version, note = re.findall(r"^## (\S+) \(([^)]+)\)$", CHANGELOG, re.M)[0]
    assert version == klamp.__version__
    assert note == "unreleased" or str(CITATION["date-released"]) == note
    releases = re.split(r"^## ", CHANGELOG, flags=re.M)[1:]
    assert all(release.count("\n### Numbers changed\n") == 1 for release in releases)


@pytest.mark.parametrize("file", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem)
def test_a_form_asks_for_the_versions_and_can_be_filled_in(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert form["name"] and form["description"] and form["labels"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert file.stem == "feature" or any("version" in field["id"] for field in fields)
