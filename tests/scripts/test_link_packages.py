"""scripts/link_packages.py: what one environment has is put into another one as hard links."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "link_packages.py"
HERE = Path(sysconfig.get_path("purelib"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    venv.create(tmp_path / "new", with_pip=False)
    return tmp_path / "new"


def link(target: Path, pins: str, *names: str) -> None:
    constraints = target.parent / "pins.txt"
    constraints.write_text(pins)
    subprocess.run([sys.executable, SCRIPT, target, constraints, *names], check=True)


def packages_of(target: Path) -> Path:
    return next(target.glob("lib/python*/site-packages"))


def run(target: Path, *command: str) -> str:
    done = subprocess.run([target / "bin" / command[0], *command[1:]], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_pinned_version_is_linked_and_another_one_is_not(target: Path) -> None:
    link(target, f"# what goes in\npluggy=={version('pluggy')}\nrich==1.0\nno-such-package==3\n")
    assert run(target, "python", "-c", "from importlib.metadata import version; print(version('pluggy'))") == version(
        "pluggy"
    )
    assert (packages_of(target) / "pluggy" / "__init__.py").samefile(HERE / "pluggy" / "__init__.py")
    assert not (packages_of(target) / "rich").exists()
    assert not (packages_of(target) / "klamp").exists()


def test_what_is_compiled_for_the_processor_counts_as_the_same_version(target: Path) -> None:
    """torch calls itself 2.13.0+cpu, and is pinned as 2.13.0."""
    link(target, f"torch=={version('torch').split('+')[0]}\nfilelock=={version('filelock')}", "torch")
    assert (packages_of(target) / "torch" / "__init__.py").samefile(HERE / "torch" / "__init__.py")
    assert not (packages_of(target) / "filelock").exists()  # only what was named


def test_scripts_run_in_the_new_environment(target: Path) -> None:
    names = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
    link(target, "".join(f"{name}=={version(name)}\n" for name in names))
    assert version("pytest") in run(target, "pytest", "--version")
    assert str(target) in (target / "bin" / "pytest").read_text().splitlines()[0]


def test_what_is_there_stays(target: Path) -> None:
    pins = f"pluggy=={version('pluggy')}"
    link(target, pins)
    (packages_of(target) / "pluggy" / "__init__.py").unlink()
    link(target, pins)
    assert not (packages_of(target) / "pluggy" / "__init__.py").exists()
    assert (HERE / "pluggy" / "__init__.py").exists()


def test_another_python_gets_nothing(target: Path) -> None:
    packages_of(target).parent.rename(target / "lib" / "python3.9")
    link(target, f"pluggy=={version('pluggy')}")
    assert not list(packages_of(target).iterdir())
