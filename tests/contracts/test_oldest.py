"""The oldest version of each library that pyproject.toml declares is the one that `make test-oldest` installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("train", "wandb", "trl", "tinker", "ray")
"""Those of verl and unsloth are in the environments of their own targets; dev is nobody's but ours."""


def oldest() -> dict[str, set[Version]]:
    """Library -> the lower ends that are declared for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    found: dict[str, set[Version]] = {}
    for requirement in map(Requirement, lines):
        ends = {Version(each.version) for each in requirement.specifier if each.operator == ">="}
        found.setdefault(canonicalize_name(requirement.name), set()).update(ends)
    return found


def tried() -> dict[str, Version]:
    """Library -> the version in the environment of `make test-oldest`."""
    text = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    return {
        canonicalize_name(name): Version(version) for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)
    }


def test_what_is_declared_as_oldest_is_tried() -> None:
    assert {name: {tried().get(name)} for name in oldest()} == oldest()


def test_all_extras_are_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == {*EXTRAS, "verl", "unsloth", "dev"}
