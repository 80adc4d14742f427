"""The example for one GPU: its configuration as it stands, and a few of its steps on a tiny Qwen2 on a CPU."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.examples.test_trl import run
from tests.hosts.trl import hosts

from klamp.doctor.readers import read_record

pytestmark = pytest.mark.slow

FILE = Path(__file__).resolve().parents[2] / "examples" / "trl_one_gpu.py"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trl_one_gpu", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_qwen(folder: Path) -> str:
    """Random weights and a tokenizer that was trained here, in the files of a model."""
    hosts.saved(hosts.model(tie_word_embeddings=True), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("so 6 * 12 = 72", 1.0), ("72.0", 1.0), ("it is 1,072", 0.0), ("no idea", 0.0), ("72 or 27", 0.0)],
)
def test_the_reward_reads_the_last_number(example: ModuleType, text: str, reward: float) -> None:
    assert example.last_number("She sold 1,234 clips. #### 1,072") == "1072"
    assert example.right_number([[{"role": "assistant", "content": text}]], ["72"]) == [reward]


def test_a_few_steps_on_a_tiny_qwen(tmp_path: Path) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [{"question": f"{i} + 5 =", "answer": "they are #### 5"} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = ["--steps", "4", "--prompts", "2", "--num-generations", "8", "--max-completion-length", "16"]
    model = tiny_qwen(tmp_path / "model")
    printed = run(
        str(FILE), "--model", model, "--data", str(data), "--output-dir", str(out), "--learning-rate", "0.01", *sizes
    )
    shown = dict(re.findall(r"^(\w+) +(.+)$", printed, re.M))
    assert shown["term"] == "klamp's" and "0.01" in shown["controller"]
    assert shown["note"].startswith("completions are scored by klamp")
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    logged = [row for row in state["log_history"] if "kl/k3" in row]
    assert len(logged) == 4
    assert logged[0]["kl/k3"] == pytest.approx(0.0, abs=1e-6)
    assert logged[-1]["kl/k3"] > 1e-3 and any(row["reward_std"] > 0 for row in logged), "it learns, and moves"
    assert read_record(out).last("kl/k3", 4) == [row["kl/k3"] for row in logged]
