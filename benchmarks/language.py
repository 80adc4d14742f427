"""A GRPO step of a real language model, SmolLM2-135M: klamp's and TRL's seconds and memory, against the floor."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import floor
from benchmarks.measure import isolated, middle, pooled, rounds, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict
from benchmarks.step_model import TOKENIZER
from benchmarks.step_runs import Setting

MODEL = "smollm2"
PROMPTS, GROUP, COMPLETION, LORA = 4, 8, 24, 16
"""A step of examples/describe.yaml."""
NEVER = "<reponame>"
"""An end token that the model never writes, so that every completion has its 24 tokens."""
TARGET = 1.4
"""LoRA's step over its floor, at most."""
CASES: Mapping[str, tuple[str, int, float]] = {
    "klamp, LoRA": ("klamp", LORA, 0.05),
    "TRL, LoRA": ("trl", LORA, 0.05),
    "klamp, LoRA, no KL": ("klamp", LORA, 0.0),
    "klamp, full": ("klamp", 0, 0.05),
    "TRL, full": ("trl", 0, 0.05),
    "klamp, full, no KL": ("klamp", 0, 0.0),
}
"""Name -> trainer, rank of the adapter (0: all weights), beta."""
FLOORS = {"floor, LoRA": LORA, "floor, full": 0}
QUICK = ("klamp, LoRA", "floor, LoRA")


def run(quick: bool) -> dict[str, Any]:
    """Every case in turn, each in a process of its own, twice; quick: klamp's LoRA and its floor, once."""
    with tempfile.TemporaryDirectory() as place:
        model, prompts, length = write_setting(Path(place))
        shape = {"prompts": PROMPTS, "prompt": length, "group": GROUP, "completion": COMPLETION}
        steps = {"steps": 2, "warmup": 1}
        common = {"model": model, "prompts": prompts, "reward": "benchmarks.language:happy_words", **steps}
        sizes = {"group": GROUP, "prompts_per_step": PROMPTS, "completion": COMPLETION}
        runs = {
            name: partial(
                isolated,
                "benchmarks.step_runs:one",
                {"setting": Setting(trainer=trainer, lora_r=rank, beta=beta, **sizes, **common).to_dict()},
            )
            for name, (trainer, rank, beta) in CASES.items()
        } | {
            name: partial(isolated, "benchmarks.floor:one", {"model": model, "shape": shape, "lora_r": rank})
            for name, rank in FLOORS.items()
        }
        chosen = {name: each for name, each in runs.items() if not quick or name in QUICK}
        found = rounds(chosen, 1 if quick else 2)
    return {
        "shape": shape,
        "runs": [{"case": name} | pooled(results) for name, results in found.items()],
    }


def write_setting(folder: Path) -> tuple[str, str, int]:
    """The model with an end token that never comes, a file of prompts, and their mean length in tokens."""
    from klamp.tasks import TaskConfig, load_named_model, load_task
    from klamp.tasks.named_models import named_model_folder
    from klamp.training.models import load_tokenizer

    load_named_model(MODEL)
    source, model = named_model_folder(MODEL), folder / "model"
    tokenizer = load_tokenizer(MODEL)
    task = load_task(TaskConfig(task="describe"), tokenizer)
    texts = [example.prompt for example in task.train[:64]]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    model.mkdir()
    for name in ("config.json", "generation_config.json"):
        content = json.loads((source / name).read_text(encoding="utf-8"))
        content |= {"eos_token_id": tokenizer.convert_tokens_to_ids(NEVER)}
        (model / name).write_text(json.dumps(content), encoding="utf-8")
    shutil.copy(source / "model.safetensors", model)
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]  # pyright: ignore
    tokenizer.eos_token, tokenizer.chat_template = NEVER, None
    tokenizer.save_pretrained(model / TOKENIZER)
    return str(model), str(prompts), round(sum(lengths) / len(lengths))


def happy_words(completions: Sequence[str], **_: object) -> list[float]:
    """The reward of `describe`, in TRL's convention, and a little for length so that no group is without a spread."""
    from klamp.tasks.language import score_happy

    return [score_happy(text) + 1e-3 * len(text) for text in completions]


def text(results: Mapping[str, Any]) -> str:
    """The tables and the target."""
    runs = {seen["case"]: seen for seen in results["runs"]}
    rows, verdicts = [], []
    for name, seen in runs.items():
        least = runs.get("floor, LoRA" if "LoRA" in name else "floor, full")
        ratio = middle(seen["seconds"]) / middle(least["seconds"]) if least else None
        over = "" if ratio is None or "phases" in seen else f"{ratio:.2f}"
        memory = f"{seen['extra_mib']:,.0f}" if "extra_mib" in seen else ""
        rows.append((name, spread(seen["seconds"]), f"{seen['tokens'] / middle(seen['seconds']):,.0f}", over, memory))
        if name == "klamp, LoRA" and ratio is not None:
            verdicts.append(verdict("klamp, LoRA: step over its floor", ratio, TARGET))
    first = table(("case", "seconds per step, median (range)", "tokens/s", "over its floor", "extra peak MiB"), rows)
    floors = [(name, seen) for name, seen in runs.items() if "phases" in seen]
    parts = [(name, *(f"{middle(seen['phases'][phase]):.2f}" for phase in floor.PHASES)) for name, seen in floors]
    second = table(("floor, seconds", *floor.PHASES), parts)
    return "\n\n".join((first, second, "\n".join(verdicts)))


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of seconds and memory."""
    seconds = {seen["case"]: middle(seen["seconds"]) for seen in results["runs"]}
    memory = {seen["case"]: seen["extra_mib"] for seen in results["runs"] if "extra_mib" in seen}
    draw(
        [
            Panel(title="a GRPO step of SmolLM2-135M", label="seconds per step", bars=seconds),
            Panel(title="memory above the loaded models", label="extra peak MiB", bars=memory),
        ],
        file,
    )


BENCHMARK = Benchmark(
    name="language",
    title="A GRPO step of a real language model: klamp, TRL, and the floor",
    about=f"SmolLM2-135M-Instruct, float32; a step of examples/describe.yaml: {PROMPTS} prompts, {GROUP} completions "
    f"each of exactly {COMPLETION} tokens (the end token is one that the model never writes), one on-policy update, "
    f"beta 0.05 or none; LoRA of rank {LORA} on every linear layer, or all weights with AdamW. The floor is what no "
    "trainer can leave out: the matrix products, the attention and the reading of the weights in prompts, decoding, "
    "scoring, backward pass and reference, timed with the same weights in the same session. Memory is above the loaded "
    "models.",
    run=run,
    text=text,
    plot=plot,
)
