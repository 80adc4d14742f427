"""Every Python that pyproject.toml names installs the wheel, imports klamp and proves its claims."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.packaging.conftest import ROOT, Environment

import klamp

NAMED = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("version", [version for version in NAMED if version != OURS])
def test_klamp_verify(version: str, installed: Callable[[str], Path], tmp_path: Path) -> None:
    if not (ROOT / f".venv-python{version}" / ".installed-for-klamp").is_file():
        pytest.skip(f"no Python {version} on this machine")
    environment = Environment(installed(f"python{version}"), tmp_path)
    assert environment.python("import sys; print('%d.%d' % sys.version_info[:2])") == version
    assert environment.python("import klamp; print(klamp.__version__)", "-W", "error") == klamp.__version__
    assert "klamp" not in environment.run("pip", "check").stdout, "all that klamp asks for is there"
    done = environment.run("klamp", "verify")
    assert done.returncode == 0 and "checks passed" in done.stdout, done.stdout + done.stderr
