"""The commands of the studies: the plan in its folder, and `klamp ablate` with what else was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.ablation.plan import read_plan
from klamp.cli.text import FAILED
from studies import clipping, command
from studies.clipping import clipping_plan
from studies.language import language_plan


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words that `klamp` was given, in a folder of its own."""
    words: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "klamp", lambda argv: words.append(argv) or 0)
    return words


def test_the_plan_is_in_the_folder_and_the_same_command_finds_it_again(asked: list[list[str]]) -> None:
    for _ in range(2):
        code, folder = command.ablate(language_plan(), ["--seeds", "0", "1", "--workers", "2"])
        assert (code, folder) == (0, Path("runs/ablation-language-001"))
        assert read_plan(folder) == language_plan(seeds=(0, 1))
    assert asked == [["ablate", "--plan", f"{folder}/plan.yaml", "--output_dir", str(folder), "--workers", "2"]] * 2


def test_a_folder_of_another_study_is_refused(
    asked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.ablate(language_plan(), ["--output_dir", "out"])[0] == 0
    assert command.ablate(clipping_plan(), ["--output_dir", "out"])[0] == FAILED
    assert "holds another ablation" in capsys.readouterr().err and len(asked) == 1


@pytest.mark.parametrize("plan", [clipping_plan, language_plan])
def test_klamp_ablate_takes_the_plan_for_its_own(plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = command.ablate(plan(), ["--output_dir", str(tmp_path / "out"), "--dry_run"])
    assert code == 0 and f"{len(plan().arms)} arms x 3 seeds" in capsys.readouterr().out


def test_the_clipping_study_teaches_its_model_and_writes_its_own_table(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[object] = []
    monkeypatch.setattr(clipping, "teach", lambda: done.append("taught"))
    monkeypatch.setattr(clipping, "write_saturation", lambda every, folder: done.append(len(every)) or (folder / "a",))
    assert clipping.main(["--seeds", "0"]) == 0
    assert done == ["taught", 15] and "wrote runs/ablation-clipping-001/a" in capsys.readouterr().out
