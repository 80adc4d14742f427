"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
PYTHON, TEXT = (
    re.findall(rf"```{kind}\n(.*?)```", README.read_text(encoding="utf-8"), re.S) for kind in ("python", "text")
)


def test_the_first_example_prints_what_the_readme_says():
    done = subprocess.run([sys.executable, "-c", PYTHON[0]], capture_output=True, text=True, check=True)
    assert done.stdout == TEXT[0]


def test_the_first_example_has_no_more_than_the_promised_lines():
    code = [line for line in PYTHON[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 12


@pytest.mark.parametrize("code", PYTHON[1:])
def test_the_other_examples_run(code):
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
