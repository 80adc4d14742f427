"""The example for one GPU: its configuration as it stands, and a few of its steps on a tiny Qwen2 on a CPU."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.examples.conftest import ROOT, run
from tests.hosts.trl import hosts

from klamp.doctor.readers import read_record

pytestmark = pytest.mark.slow

FILE = str(ROOT / "examples" / "trl_one_gpu.py")
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(FILE, run_name="trl_one_gpu")


@pytest.mark.parametrize(
    ("text", "reward"),
    [("so 6 * 12 = 72", 1.0), ("72.0", 1.0), ("it is 1,072", 0.0), ("no idea", 0.0), ("72 or 27", 0.0)],
)
def test_the_reward_reads_the_last_number(example: dict[str, Any], text: str, reward: float) -> None:
    assert example["last_number"]("She sold 1,234 clips. #### 1,072") == "1072"
    assert example["right_number"]([[{"role": "assistant", "content": text}]], ["72"]) == [reward]


def test_a_few_steps_on_a_tiny_qwen(tmp_path: Path) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [{"question": f"{i} + 5 =", "answer": "they are #### 5"} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = ["--steps", "4", "--prompts", "2", "--num-generations", "8", "--max-completion-length", "16"]
    hosts.saved(hosts.model(tie_word_embeddings=True), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    files = ["--model", str(tmp_path / "model"), "--data", str(data), "--output-dir", str(out)]
    printed = run(FILE, *files, "--learning-rate", "0.01", *sizes)
    shown = dict(re.findall(r"^(\w+) +(.+)$", printed, re.M))
    assert shown["term"] == "klamp's" and "0.01" in shown["controller"]
    assert shown["note"].startswith("completions are scored by klamp")
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    logged = [row for row in state["log_history"] if "kl/k3" in row]
    assert len(logged) == 4
    assert logged[0]["kl/k3"] == pytest.approx(0.0, abs=1e-6)
    assert logged[-1]["kl/k3"] > 1e-3 and any(row["reward_std"] > 0 for row in logged), "it learns, and moves"
    assert read_record(out).last("kl/k3", 4) == [row["kl/k3"] for row in logged]
