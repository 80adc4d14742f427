"""`klamp check FILE`: the verdict on a capture, its exit code, and what it does without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import klamp
from klamp.audit.verdict import Verdict
from klamp.cli import main


def captured(path: Path, kind: str) -> Verdict:
    """A capture of a small loss: its KL is k2 (sound), k3 differentiated (wrong) or a sine (cannot tell)."""
    generator = torch.Generator().manual_seed(0)
    policy = (-3 * torch.rand(6, 9, generator=generator)).requires_grad_()
    ref = (policy.detach() + 0.3 * torch.randn(6, 9, generator=generator)).clamp(max=-1e-3)
    delta, mask = policy - ref, torch.ones(6, 9, dtype=torch.bool)
    kl = {"sound": delta**2 / 2, "wrong": torch.expm1(-delta) + delta, "open": torch.sin(9 * delta)}[kind]
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    loss = (-(policy - policy.detach()).exp() * advantages[:, None] + 0.1 * kl).mean()
    given = {"policy_logprobs": policy, "ref_logprobs": ref, "mask": mask, "advantages": advantages, "beta": 0.1}
    return klamp.check(loss, save=path, once=False, **given)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
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


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
def test_it_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    captured(tmp_path / "it.safetensors", "wrong")
    code = "import sys; from klamp.cli import main; code = main(['check', 'it.safetensors']); "
    code += "print({'torch', 'transformers', 'trl'} & set(sys.modules)); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "set()"), done.stderr
