"""What TRL prints of klamp's KLs: the few that one looks at; what is recorded does not change."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.trl.hosts import klamp_trainer, model
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from klamp.diagnostics.metrics import METRICS
from klamp.hosts.trl.console import BOUNDS, GUARD, SHOWN, shorten, shown


def printed(text: str) -> list[dict[str, Any]]:
    """The rows in what a trainer wrote."""
    return [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("bar", [False, True])
def test_the_console_has_a_few_kls_and_the_record_all(
    bar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = klamp_trainer(model(), tmp_path, beta=0.05, kl_estimator="k3", max_steps=2, disable_tqdm=not bar)
    trainer.train()
    recorded = [row for row in trainer.state.log_history if "kl/k3" in row]
    out = capsys.readouterr()
    rows = [row for row in printed(f"{out.out}\n{out.err}") if "kl/k3" in row]
    assert len(rows) == len(recorded) == 2
    kls = {name for name in rows[0] if name.startswith("kl/")}
    assert kls == {"kl/k1", "kl/k3", "kl/exact", "kl/k3_sequence"}
    assert len([name for name in recorded[0] if name.startswith("kl/")]) > 15
    others = {name for name in recorded[0] if not name.startswith("kl/")} - {"step"}
    assert others <= set(rows[0]), "and nothing of anybody else's is left out"


def test_a_bound_that_binds_is_printed() -> None:
    assert all(name in METRICS for name in (*SHOWN, *BOUNDS, GUARD))
    calm = {"kl/k3": 0.1, "kl/k3_saturated": 0.0, "kl/lr_factor": 1.0, "kl/position/1_of_8": 0.2, "loss": 1.0}
    assert shown(calm) == {"kl/k3": 0.1, "loss": 1.0}
    assert shown({"kl/k3_saturated": 0.1, "kl/lr_factor": 0.5}) == {"kl/k3_saturated": 0.1, "kl/lr_factor": 0.5}
    assert shown({"eval_kl/k3": 0.1, "eval_kl/k3_max": 3.0, "kl/mine": 2.0}) == {"eval_kl/k3": 0.1, "kl/mine": 2.0}
    assert shown(None) is None


def test_a_printer_of_the_users_own_is_left_alone() -> None:
    class Mine(PrinterCallback):
        pass

    class Trainer:
        callback_handler: Any

    trainer = Trainer()
    trainer.callback_handler = type("Handler", (), {"callbacks": [Mine(), ProgressCallback(7), TrainerCallback()]})
    shorten(trainer)
    mine, bar, other = trainer.callback_handler.callbacks
    assert type(mine) is Mine and type(other) is TrainerCallback
    assert isinstance(bar, ProgressCallback) and bar.max_str_len == 7 and type(bar) is not ProgressCallback
