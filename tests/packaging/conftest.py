"""The wheel, built once, in the environments that scripts/environment.sh has made for it."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """An environment with the wheel in it; what runs in it knows nothing of this checkout."""

    folder: Path
    cwd: Path
    """An empty folder to run in."""

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KLAMP"))}
        program = [str(self.folder / "bin" / words[0]), *words[1:]]
        return subprocess.run(
            program, capture_output=True, text=True, check=False, cwd=self.cwd, env=variables, timeout=300
        )

    def python(self, code: str, *flags: str) -> str:
        """What a piece of Python prints; it has to succeed."""
        done = self.run("python", *flags, "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Callable[[str], Path]:
    """Puts the wheel into .venv-NAME, in the place of a klamp that is there; gives the environment's folder."""

    @functools.cache
    def install(name: str) -> Path:
        folder = ROOT / f".venv-{name}"
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps", "--force-reinstall"]
        subprocess.run([*pip, str(wheel)], check=True)
        return folder

    return install
