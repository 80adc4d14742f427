"""One program for each source document (docs/sources.md), run as a reader runs it: its lines, names and numbers."""

import json
import re

import pytest
from tests.examples.conftest import DEBUG, ROOT, built_in, run, scalars

pytestmark = [pytest.mark.slow, built_in]

STEP = (
    r"^Step {} \| Loss: -?\d+\.\d{{4}} \| Grad norm: \d+\.\d{{4}} \| Reward: [01]\.\d{{4}} "
    r"\| KL penalty: (-?\d+\.\d{{4}})$"
)


@pytest.mark.parametrize("penalty", [False, True])
def test_001_the_starter(tmp_path, penalty) -> None:
    flags = ["--use_kl_penalty", "--kl_coef", "0.5"] if penalty else []
    printed = run("examples/starter.py", "--steps", "3", "--log_dir", str(tmp_path), *flags)
    parts = ["Running Quick Tests", "✅ masked_mean works! Result: 1.5000", "All Tests Passed!", "Step 1 | Loss: "]
    positions = [printed.index(part) for part in parts]
    assert positions == sorted(positions)
    assert printed.count("✅") == 4 and "printed 0.0000" in printed
    penalties = [float(re.search(STEP.format(step), printed, re.MULTILINE)[1]) for step in (1, 2, 3)]  # type: ignore[index]
    logged = scalars(tmp_path)
    assert logged["train/kl_penalty"] == pytest.approx(penalties, abs=6e-5)
    assert penalties[0] == 0.0 and "-0.0000" not in printed
    assert any(penalties) == penalty, "without a penalty there is no reference"
    assert {"train/loss", "train/grad_norm", "train/reward"} <= logged.keys()


@pytest.mark.parametrize(("kl_coef", "with_kl"), [("0.01", True), ("0", False)])
def test_002_both_options_of_the_tinker_guide(kl_coef, with_kl) -> None:
    pytest.importorskip("tinker")
    printed = run("examples/grpo_with_kl_example.py", "--kl_coef", kl_coef, "--steps", "3")
    steps = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(steps) == 3 and all("reward 0." in line for line in steps)
    k3 = [float(value) for value in re.findall(r"kl/k3 (\S+)", "\n".join(steps))]
    asked = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", printed.splitlines()[-1])}
    assert asked["optim_step"] == 3
    assert asked["asample"] == 8 * 3 + (64 * 3 if with_kl else 0), "one request for each response"
    assert asked["forward_backward"] == (6 if with_kl else 3), "a custom loss takes a forward pass first"
    assert len(k3) == (3 if with_kl else 0)
    if with_kl:
        assert k3[0] == pytest.approx(0.0, abs=1e-3) and k3[-1] > k3[0]


def test_003_the_tutorials_loop_and_its_two_examples(tmp_path) -> None:
    printed = run("examples/kl_tutorial.py", "--max_steps", "8", "--out", str(tmp_path))
    commands = re.findall(r"^\$ klamp (\w+) .*?(--kl_penalty \S+|--checkpoint \S+|--runs)", printed, re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "evaluate"] * 4 + ["ablate"]
    assert [what.split()[1] for name, what in commands if name == "train"] == ["0.0", "0.001", "0.01", "0.1"]
    table = json.loads((tmp_path / "compared" / "table.json").read_text(encoding="utf-8"))
    lines = re.findall(r"^(beta=\S+): Acc=(\S+)%, KL=(\S+), retention=(\S+)%$", printed, re.MULTILINE)
    assert [arm for arm, *_ in lines] == [arm["arm"] for arm in table["rows"]] and len(lines) == 4
    for (_, accuracy, kl, kept), arm in zip(lines, table["rows"], strict=True):
        means = {name: cell["mean"] for name, cell in arm["cells"].items()}
        assert float(accuracy) == pytest.approx(100 * means["rl/after"], abs=0.06)
        assert float(kl) == pytest.approx(means["kl/reverse"], rel=1e-3)
        assert float(kept) == pytest.approx(100 * means["retained/after"], abs=0.06)
    assert (tmp_path / "compared" / "frontier.png").read_bytes().startswith(b"\x89PNG"), "accuracy, KL, retention"
    by_hand = re.search(r"^KL divergence: (\S+); where the answers begin: (\S+)$", printed, re.MULTILINE)
    assert by_hand and float(by_hand[1]) > 0 and float(by_hand[2]) > 0
    lowest = re.search(r"lowest (\S+), last \S+ after 8 steps", printed)
    assert lowest and float(lowest[1]) < 0.01, "before anything is learnt the rule lowers beta"


def test_000_the_three_methods_of_the_clipping_notes() -> None:
    printed = run("examples/simple_kl_grpo.py", "--steps", "4", "--beta", "0.04")
    rows = {line[:26].strip(): line[26:].split() for line in printed.splitlines() if re.match(r"\d\. ", line)}
    assert [name.split()[1] for name in rows] == ["baseline", "hard", "soft"]
    baseline, hard, soft = rows.values()
    assert baseline[3:5] == ["-", "-"], "nothing is clipped"
    assert float(hard[3]) == float(soft[3]) > 0.1, "a threshold per token, times the reference's own length"
    assert printed.count("\nclip") == 3 and "none" in printed


def test_004_the_four_methods_of_the_k3_bug_report() -> None:
    printed = run("examples/kl_formula_methods.py", "--max-steps", "6")
    assert printed.count("grad_norm") >= 2 and "--kl-beta 0.0" in printed and "--kl-beta 0.04" in printed
    rows = re.findall(r"^\d\d\+\d\d= +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert len(rows) == 3
    exact, k3 = ([float(row[i]) for row in rows] for i in (0, 1))
    assert k3 == pytest.approx(exact, rel=0.15, abs=2e-3), "k3 estimates the KL"
    assert max(exact) > 1e-3, "the policy has moved"
    debug = {name: float(value) for name, value in re.findall(r"^(debug/\w+) +(\S+)$", printed, re.MULTILINE)}
    assert set(debug) == DEBUG and 0 <= debug["debug/kl_min"] <= debug["debug/kl_mean"] <= debug["debug/kl_max"]
    assert "GRPOTrainer" in printed and "use_bias_correction_kl" in printed
    assert "it follows the gradient of KL(ref||policy)" in " ".join(printed.split())


def test_every_example_stands_on_the_page_of_sources_or_in_the_readme() -> None:
    page = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("docs/sources.md", "README.md"))
    examples = [f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")]
    assert [name for name in examples if name not in page] == []
