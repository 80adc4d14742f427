"""The whole run through the Tinker SDK, against the stand-in: rewards, KL, checkpoint, a second start, its price."""

import json
import re
from pathlib import Path

import pytest
from tests.examples.conftest import built_in, run
from tests.training.conftest import json_rows

from klamp.cli import main

pytest.importorskip("tinker")
pytestmark = [pytest.mark.slow, built_in]

EXAMPLE = ("examples/tinker_grpo_kl.py", "--local", "--prompts", "2")


def test_a_run_is_saved_and_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    printed = run(*EXAMPLE, "--steps", "3", "--save-every", "2", "--out", str(out))
    assert len(re.findall(r"^step +\d  reward [01]\.\d{4}  kl/k1 -?\d\.\d{4}  kl/k3 \d\.\d{4}$", printed, re.M)) == 3
    assert re.findall(r"^held out  [01]\.\d{4} after step (\d)$", printed, re.M) == ["0", "3"]
    assert "requests asample 18, forward_backward 2, optim_step 1" in printed
    saved = json.loads((out / "state.json").read_text(encoding="utf-8"))
    assert saved["step"] == 3 and saved["tinker_path"].startswith("tinker://")

    printed = run(*EXAMPLE, "--steps", "5", "--out", str(out))
    assert re.findall(r"^step +(\d)", printed, re.M) == ["4", "5"]
    rows = json_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["kl/k3"] > 1e-6 for row in rows] == [False, True, True, True, True]
    assert main(["doctor", str(out)]) in (0, 1)
    assert "5 logged steps" in capsys.readouterr().out


def test_without_a_kl_the_built_in_loss_takes_one_pass() -> None:
    printed = run(*EXAMPLE, "--steps", "1", "--kl-coef", "0")
    assert "kl/" not in printed and "requests asample 2, forward_backward 1, optim_step 1" in printed
