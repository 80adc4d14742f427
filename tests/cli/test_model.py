"""`klamp model NAME`: the folder alone on stdout, all else on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from klamp.cli import main
from klamp.cli.options import Named
from klamp.tasks import NAMED_MODELS


def test_the_command_prints_the_folder_alone(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("klamp.cli.model.load_named_model", lambda name: tmp_path / name)
    assert main(["model", "smollm2"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'smollm2'}\n"
    assert "SmolLM2-135M-Instruct: 134.5M parameters, Apache-2.0, from https://huggingface.co/" in err


def test_the_help_says_which_models_there_are(capsys: Any) -> None:
    assert main(["model"]) == 0
    assert capsys.readouterr().out.endswith(f"models: {', '.join(NAMED_MODELS)}\n")


def test_names_in_the_command_are_those_of_the_table() -> None:
    assert set(get_args(Named)) == set(NAMED_MODELS)


def test_another_name_is_refused_with_those_that_there_are(capsys: Any) -> None:
    assert main(["model", "smollm3"]) == 2
    assert "smollm2" in capsys.readouterr().err
