"""`klamp check FILE`: the verdict on a capture, its exit code, and what it does without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.audit.bench.losses import k2, k3, plus, ppo
from tests.audit.bench.worlds import Case, make_world, verdict_of

from klamp.audit.verdict import Verdict
from klamp.cli import main

KLS = {"sound": k2, "wrong": lambda w: k3(w.d), "open": lambda w: torch.sin(9 * w.d)}


def captured(path: Path, kind: str) -> Verdict:
    """A capture of a small loss: its KL is k2 (sound), k3 differentiated (wrong) or a sine (cannot tell)."""
    return verdict_of(Case(kind, plus(ppo, KLS[kind])), make_world(), save=path, sampler_logprobs=None)


@pytest.mark.parametrize(("kind", "code"), [("sound", 0), ("wrong", 1), ("open", 3)])
def test_the_verdict_of_a_file(kind: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = captured(tmp_path / "it.safetensors", kind)
    assert main(["check", str(tmp_path / "it.safetensors")]) == code == verdict.exit_code
    assert capsys.readouterr().out == f"{verdict}\n"
    assert main(["check", str(tmp_path / "it.safetensors"), "--json"]) == code
    assert [x["code"] for x in json.loads(capsys.readouterr().out)["findings"]] == list(verdict.codes())


def test_what_cannot_be_read_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no capture", encoding="utf-8")
    for argv in ([str(tmp_path / "nowhere")], [str(tmp_path / "text")], ["--jsn", "x"]):
        assert main(["check", *argv]) == 2
    assert "klamp: error" in capsys.readouterr().err


def test_it_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    captured(tmp_path / "it.safetensors", "wrong")
    code = "import sys; from klamp.cli import main; code = main(['check', 'it.safetensors']); "
    code += "print({'torch', 'transformers', 'trl'} & set(sys.modules)); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "set()"), done.stderr
