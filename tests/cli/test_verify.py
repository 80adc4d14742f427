"""klamp verify, explain and check: verdicts, numbers and exit codes."""

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.audit.bench.losses import k2, k3, plus, ppo
from tests.audit.bench.worlds import Case, make_world, verdict_of

from klamp.audit.verdict import Verdict
from klamp.cli import main, verify
from klamp.cli.verify import LENGTH, explain, run, run_explain
from klamp.core.estimators import ESTIMATORS
from klamp.verify.proofs import ESTIMATOR_PROOFS


def shown(*argv: str, command: Callable[..., int] = run) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return command(argv), out.getvalue()


def test_what_passes_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """All proofs are run by tests/verify/test_proofs.py, and printed by tests/golden."""
    monkeypatch.setattr(verify, "PROOFS", ESTIMATOR_PROOFS)
    code, text = shown()
    assert code == 0
    assert all(section in text for section in ESTIMATOR_PROOFS) and "FAIL" not in text
    assert "checks passed, in" in text.splitlines()[-1]
    assert text.count("\n  ok  ") > 20


def test_a_broken_sign_fails_with_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: -(torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    monkeypatch.setattr(verify, "PROOFS", ESTIMATOR_PROOFS)
    code, text = shown()
    assert code == 1
    assert "\n  FAIL  E[k3] - KL(policy||ref) " in text
    assert "checks FAILED:" in text
    assert "values: tokens of the policy: E[k3] - KL(policy||ref): expected 0, got " in text


def test_a_question_is_answered_in_numbers_and_words() -> None:
    code, text = shown("direction")
    assert code == 0
    assert "As a loss it does not follow its value" in " ".join(text.split())
    assert " +- " in text
    again = shown("direction")[1]
    assert text.rsplit(",", 1)[0] == again.rsplit(",", 1)[0]


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "directoin"]) == main(["verify", "direction", "--samples", "3"]) == 2
    assert "did you mean 'direction'" in capsys.readouterr().err


def explained(*argv: str) -> str:
    code, text = shown(*argv, command=run_explain)
    assert code == 0
    return " ".join(text.split())


def test_flags_and_aliases_alone() -> None:
    text = explained("--kl_penalty", "0.04", "--kl-gradient", "own", "--kl_estimator", "k3", "--length", "1000")
    assert text.startswith("these flags: Pulls the policy along the gradient of KL(ref||policy)")
    assert "0.04 reward per nat of a whole completion" in text
    assert "caution kl_estimator='k3' with kl_gradient='own' follows the gradient" in text


def test_a_file_and_flags_on_top_of_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: grpo\nmax_completion_length: 200\n", encoding="utf-8")
    text = explained(str(file), "--beta", "0.1")
    assert "gradient of KL(ref||policy)" in text
    assert "per nat of a whole completion" in text and "beta 0.1 x 1.14" in text
    assert "DeepSeekMath" in text
    assert "gradient of KL(policy||ref), token by token" in explained("grpo", "--kl_gradient", "reverse")


def test_a_teacher_by_flags_and_from_a_file(tmp_path: Path) -> None:
    text = explained("--teacher_model", "DIR", "--teacher_coef", "0.3", "--teacher_horizon", "sequence", "--beta", "0")
    assert "DIR: 0.3 x k1, KL(policy||teacher)" in text and "at the optimum" in text
    file = tmp_path / "run.yaml"
    file.write_text("teacher_model: DIR\nreward: none\nbeta: 0\nnum_generations: 1\n", encoding="utf-8")
    text = explained(str(file))
    assert "ends at the teacher (" in text and "ref)" not in text
    assert explained("dapo", "--teacher_model", "DIR", "--teacher_coef", "0") == explained("dapo")


@pytest.mark.parametrize(
    ("argv", "length"),
    [
        ([], LENGTH),
        (["--max_completion_length", "64"], 64),
        (["--max_completion_length", "64", "--kl_reference_length", "30"], 30),
        (["--kl_reference_length", "30", "--length", "7"], 7),
    ],
)
def test_the_expected_length(argv: list[str], length: int) -> None:
    summed = ["--kl_normalizer", "sequence_sum", "--loss_type", "dapo", "--advantage_baseline", "leave_one_out"]
    (found,) = explain([*summed, "--beta", "0.5", *argv])
    assert f"= beta 0.5 x {length:g} " in dict(found.lines)["price"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["grpoo"], "did you mean 'grpo'"),
        (["grpo", "--kl_betta", "1"], "kl_beta"),
        (["minus-k1", "--beta", "1"], "takes no flags"),
        (["grpo", "--length", "0"], "1 or more"),
        (["--preset", "minus-k1"], "unknown preset"),
        (["nowhere.yaml"], "cannot be read"),
        (["ppo", "--scale_rewards", "std"], "group's std"),
    ],
)
def test_what_cannot_be_explained(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *argv]) == 2
    assert said in capsys.readouterr().err


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
