"""A host that klamp plugs into is whole: room, door, contract, extra, pages, tests. A new one is told what it lacks."""

import tomllib
from typing import Any

import pytest
from tests.contracts.test_public_names import HOST_SIGNATURES, MODULES
from tests.docs.pages import DOCS, ROOT, load

SOURCE = ROOT / "src" / "klamp"
SETTINGS: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = SETTINGS["tool"]["importlinter"]["contracts"]
HOSTS = sorted(path.parent.name for path in (SOURCE / "hosts").glob("*/__init__.py") if path.parent.name != "common")


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_has_a_door_which_knows_nothing_of_the_laboratory(host: str) -> None:
    assert (SOURCE / f"{host}.py").is_file() or (SOURCE / host / "__init__.py").is_file()
    (arrows,) = [each for each in CONTRACTS if each["type"] == "layers"]
    (doors,) = [layer for layer in arrows["layers"] if "trl" in layer]
    assert host in doors.split(" : ")
    (apart,) = [each for each in CONTRACTS if "klamp.hosts" in each.get("source_modules", ())]
    assert f"klamp.{host}" in apart["source_modules"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_is_installed_described_pinned_and_tested(host: str) -> None:
    assert host in SETTINGS["project"]["optional-dependencies"]
    assert (DOCS / f"{host}.md").is_file()
    assert f"from klamp.{host} import" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"klamp.{host}" in load("hooks").DOORS
    assert f"klamp.{host}" in {*HOST_SIGNATURES, *MODULES}
    assert any((ROOT / "tests" / kind / host).is_dir() for kind in ("hosts", "engines"))
