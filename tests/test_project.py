"""What stands around the code: citation, changelog, forms for issues."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import klamp

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION: Any = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

# The parts of schema 1.2.0 of the Citation File Format that a citation of software uses; the first four it must have.
CITATION_KEYS = ["authors", "cff-version", "message", "title"]
CITATION_KEYS += ["abstract", "date-released", "doi", "identifiers", "keywords", "license", "preferred-citation"]
CITATION_KEYS += ["references", "repository-code", "type", "url", "version"]


def test_the_citation_has_the_keys_of_its_format() -> None:
    assert set(CITATION_KEYS[:4]) <= set(CITATION) <= set(CITATION_KEYS)
    assert (CITATION["cff-version"], CITATION["type"]) == ("1.2.0", "software")
    names = [author.get("name") or author.get("family-names") for author in CITATION["authors"]]
    assert names and all(names)
    assert all(CITATION[key].startswith("https://") for key in ("url", "repository-code"))


def test_the_citation_says_what_the_package_says() -> None:
    assert CITATION["version"] == klamp.__version__
    assert CITATION["license"] == PROJECT["license"]
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_newest_heading_of_the_changelog_is_the_version_of_the_code() -> None:
    version, note = re.findall(r"^## (\S+) \(([^)]+)\)$", CHANGELOG, re.M)[0]
    assert version == klamp.__version__
    assert note == "unreleased" or str(CITATION["date-released"]) == note


def test_every_release_says_which_numbers_changed() -> None:
    releases = re.split(r"^## ", CHANGELOG, flags=re.M)[1:]
    assert releases and all(release.count("\n### Numbers changed\n") == 1 for release in releases)


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
