"""`klamp train --help`: every field, in its section, with the words of its docstring, its default and its aliases."""

from __future__ import annotations

import re

import pytest

from klamp.cli import main
from klamp.cli.fields import fields
from klamp.config import ALIASES, PRESETS


@pytest.fixture(scope="module")
def text() -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        assert main(["train", "--help"]) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_every_flag_is_there(text: str) -> None:
    assert [name for name in (*fields(), *ALIASES) if not re.search(rf"--{name}\b", text)] == []


def test_flags_stand_under_their_sections(text: str) -> None:
    titles = ["train options", "kl options", "loss options", "task options", "model options", "rollout options"]
    positions = [text.index(title) for title in [*titles, "optim options", "run options"]]
    assert positions == sorted(positions)
    assert text.index("kl options") < text.index("--kl_estimator") < text.index("loss options")
    assert text.index("run options") < text.index("--output_dir {None}|STR")


def test_docstrings_defaults_and_presets_show(text: str) -> None:
    flat = " ".join(re.sub("[│]", " ", text).split())
    assert "Longest completion in tokens. (default: 16)" in flat
    assert "--beta FLOAT Coefficient of the KL, in reward (or loss) per nat." in flat
    assert "YAML file: the flags' names as keys" in flat
    assert all(name in flat for name in PRESETS)
    assert "defaults < --preset < --config < flags" in flat


def test_it_fits_into_a_hundred_columns(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 100
