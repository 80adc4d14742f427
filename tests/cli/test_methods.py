"""`klamp report RUN --methods`: from the folder of a run to a paragraph; what it reads, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from klamp.cli import main
from klamp.cli.methods import MARK, setting_of
from klamp.training.config import TrainConfig
from klamp.training.runlog import plain

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def folder_of(folder: Path, *, rows: int = 0, **changes: object) -> Path:
    """What a run leaves of its configuration, its versions and its steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(TrainConfig.from_flat(changes))))
    (folder / "versions.json").write_text(json.dumps({"klamp": "0.1.0", "torch": "2.13.0", "trl": "not installed"}))
    lines = [json.dumps({"step": i, "length/mean": 4.0 + i, "beta": 0.1 * i}) + "\n" for i in range(rows)]
    if rows:
        (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_configuration_and_versions_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder_of(tmp_path / "run-1", beta=0.04, kl_estimator="k1", model="smollm2", lora_r=8)
    assert main(["report", str(run), "--methods"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{MARK}: run-1\n")
    said = " ".join(text.split())
    assert "a LoRA adapter of rank 8 on smollm2 (float32)" in said and "estimated by k1" in said
    assert "the policy with its adapter off" in said
    assert "0.04 reward per nat of a whole completion" in said and "(the longest, since no mean is recorded)" in said
    assert "Versions: klamp 0.1.0, torch 2.13.0." in said
    assert not (run / "report.html").exists()


def test_what_was_measured_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder_of(tmp_path / "run-1", rows=11, target_kl=0.05)
    assert main(["report", str(run), "--methods"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "At the end of the run it was 0.8." in said, "the mean of the last five steps"
    assert "0.8 reward per nat of a whole completion; of the mean per token, at 9 tokens: 7.2 per nat" in said


def test_a_sweep_gets_a_paragraph_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for beta in (0.0, 0.1):
        folder_of(tmp_path / "sweep" / "runs" / f"beta-{beta:g}", rows=1, beta=beta)
    out = tmp_path / "methods.tex"
    assert main(["report", str(tmp_path / "sweep"), "--methods", "--output", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 paragraphs in LaTeX\n"
    first, second = out.read_text().split("\n\n")
    assert "There is no KL term" in first and "fixed at 0.1" in second
    assert main(["report", str(tmp_path / "sweep"), "--methods", "--output", str(out)]) == 0, "it is written again"


def test_who_trained_and_how(tmp_path: Path) -> None:
    config = TrainConfig.from_flat({"backend": "trl", "top_p": 0.9, "top_k": 5, "mask_truncated_completions": True})
    setting = setting_of(config, {}, {})
    assert setting.trainer == "TRL" and setting.mean_length is None
    recorded = dict.fromkeys(("klamp", "torch", "trl", "peft", "vllm", "ray", "torch_threads"), "1")
    assert list(setting_of(config, {}, recorded).versions) == ["klamp", "torch", "trl"], "what this run used"
    assert setting.sampling == "temperature 1, top-p 0.9, top-k 5, those that reach L are left out of the loss"


def test_nothing_else_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, mine = folder_of(tmp_path / "run-1"), tmp_path / "thesis.tex"
    mine.write_text("% my thesis")
    assert main(["report", str(run), "--methods", "--output", str(mine)]) == 1
    assert "holds no methods of klamp's" in capsys.readouterr().err
    assert mine.read_text() == "% my thesis"
    assert main(["report", str(run), "--methods", "--output", str(tmp_path)]) == 1
    assert main(["report", str(run), "--methods", "--output", str(tmp_path / "no" / "x.tex")]) == 1


def test_what_has_no_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    for path, why in ((tmp_path, "it holds no config.yaml"), (tmp_path / "nowhere", "the path does not exist")):
        assert main(["report", str(path), "--methods"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "the methods of a run need its configuration" in said and why in said
