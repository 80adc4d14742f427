"""`klamp train --backend tinker` from its arguments to its summary, and the example, against the stand-in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from tests.standin import FLAGS

from klamp.cli import main

pytest.importorskip("tinker")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny():
    """A stand-in with the tiny Llama of the trainer's tests."""
    from tests.training.conftest import tiny_llama

    from klamp.tasks import arithmetic_tokenizer
    from klamp.tinker.testing import serve

    with serve(tiny_llama(), arithmetic_tokenizer(), name="klamp/tiny") as standin:
        yield standin


def test_the_whole_command(tiny, tmp_path, monkeypatch, capsys):
    for name, value in tiny.environment.items():
        monkeypatch.setenv(name, value)
    out = str(tmp_path / "run")
    assert main(["train", *FLAGS, "--max_steps", "2", "--output_dir", out]) == 0
    text = capsys.readouterr().out
    assert f"klamp/tiny · Tinker, {tiny.url}" in text
    assert "reference: klamp/tiny at the service, frozen" in text
    assert "done: 2 steps" in text
    assert "entropy" not in text
    assert main(["train", "--config", f"{out}/config.yaml", "--output_dir", out, "--resume", "--max_steps", "3"]) == 0
    assert "continued after step 2" in capsys.readouterr().out


def test_a_dry_run_says_where_the_weights_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert main(["train", *FLAGS, "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "klamp/tiny at the Tinker service; a LoRA adapter of rank 4 is trained" in text
    assert "reference klamp/tiny at the Tinker service, frozen" in text


def test_what_the_service_cannot_do_is_said_before_any_work(capsys):
    assert main(["train", *FLAGS, "--temperature", "0.5"]) != 0
    assert "backend='tinker' cannot do this" in capsys.readouterr().err


def test_the_example_runs_offline(default_base_model, capsys):
    spec = importlib.util.spec_from_file_location("tinker_grpo_kl", ROOT / "examples" / "tinker_grpo_kl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    rows = module.main(["--local", "--steps", "3", "--prompts", "2"])
    assert [row["kl/k3"] > 1e-6 for row in rows] == [False, True, True], "requests are scored in batches of any size"
    assert "requests asample 18, forward_backward 2, optim_step 1" in capsys.readouterr().out
    (row,) = module.main(["--local", "--steps", "1", "--prompts", "2", "--kl-coef", "0"])
    assert row.keys() == {"reward"}
    assert "requests asample 2, forward_backward 1, optim_step 1" in capsys.readouterr().out
