"""`make docs` fails on what a reader would stumble over: small sites with a planted fault, built by that command."""

import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.pages import ROOT, load

SITE = f"""
INHERIT: {ROOT}/mkdocs.yml
docs_dir: pages
site_dir: site
theme: {{ name: mkdocs }}
extra_css: []
hooks: []
plugins: []
nav: [Start: index.md, Other: other.md]
"""
"""The project's own settings (what is a warning, above all), for pages that build in a second."""


def build(folder: Path, **pages: str) -> subprocess.CompletedProcess[str]:
    """What `make docs` says of a site with these pages beside `other.md`, whose one heading is `#here`."""
    (folder / "pages").mkdir()
    (folder / "mkdocs.yml").write_text(SITE, encoding="utf-8")
    for name, text in {"other": "# Here", **pages}.items():
        (folder / "pages" / f"{name}.md").write_text(text, encoding="utf-8")
    as_it_is = "--old-file=.venv/.installed-for-klamp"  # these tests run in that environment
    command = ["make", "docs", as_it_is, f"DOCS_ARGS=--config-file {folder}/mkdocs.yml"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_site_without_a_fault_is_built(tmp_path: Path) -> None:
    said = build(tmp_path, index="# Start\n\n[other](other.md#here)")
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "site" / "index.html").is_file()


def test_each_planted_fault_is_a_warning_that_fails_the_build(tmp_path: Path) -> None:
    links = ("gone.md", "other.md#gone", "#gone-here", "gone.png", "/other.md")
    index = "".join(f"[gone]({link})\n" for link in links)
    said = build(tmp_path, index=index, unlisted="# In no navigation")
    assert said.returncode != 0 and said.stderr.count("WARNING") == 6, said.stderr
    assert [fault for fault in (*links, "unlisted.md") if fault not in said.stderr] == []


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load("hooks")


@pytest.mark.parametrize(
    ("in_the_repository", "on_the_site"),
    [
        ("[a](docs/trl.md#metrics)", "[a](trl.md#metrics)"),
        ("[a](PAPERS.md)", "[a](papers.md)"),
        ("[a](SECURITY.md)", "a"),
        ("[a](https://github.com/klamp-rl/klamp/blob/main/docs/trl.md#metrics)", "[a](trl.md#metrics)"),
        ("[a]: https://github.com/klamp-rl/klamp/blob/main/PAPERS.md", "[a]: papers.md"),
        ("![a](https://raw.githubusercontent.com/klamp-rl/klamp/main/docs/report.png)", "![a](report.png)"),
        ("[a](https://example.org/docs/trl.md)", "[a](https://example.org/docs/trl.md)"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(hooks: ModuleType, in_the_repository: str, on_the_site: str) -> None:
    assert hooks.relink(in_the_repository) == on_the_site


def test_the_site_fetches_no_page_of_its_own_from_the_network(hooks: ModuleType) -> None:
    for name in hooks.PAGES:
        text = hooks.relink((ROOT / name).read_text(encoding="utf-8"))
        assert f"{hooks.HOME}docs/" not in text and hooks.RAW not in text


def test_what_a_door_exports_is_public_and_its_rooms_are_not(hooks: ModuleType) -> None:
    public = {name for name, _ in hooks.iterate_public()}
    assert {"klamp.tinker.testing.serve", "klamp.trl.attach", "klamp.verl.overrides", "klamp.core.gradients"} <= public
    assert not [name for name in public if name.startswith("klamp.hosts")]
