"""What each kind of reference costs in memory and time: one run of two steps each, in a process of its own.

Peak memory is the operating system's (VmHWM of the process), so it counts weights, gradients, optimizer and
activations; the difference to the run without a reference is what the reference costs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import isolated, peak_mib
from benchmarks.records import Benchmark, table

KINDS: dict[str, dict[str, Any]] = {
    "none (beta 0)": {"beta": 0.0},
    "frozen": {"reference": "frozen"},
    "frozen, bfloat16": {"reference": "frozen", "reference_dtype": "bfloat16"},
    "ema": {"reference": "ema"},
    "periodic": {"reference": "periodic"},
    "none (beta 0), LoRA": {"beta": 0.0, "lora_r": 8},
    "adapter_off, LoRA": {"reference": "adapter_off", "lora_r": 8},
}
SIZES = {True: (256, 4), False: (640, 8)}


def make_model(folder: Path, quick: bool) -> float:
    """A random Llama in a folder, with the arithmetic tokenizer; returns its size in MiB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from klamp.tasks.arithmetic import arithmetic_tokenizer
    from klamp.tasks.cache import without_bars

    tokenizer, (width, layers) = arithmetic_tokenizer(), SIZES[quick]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


def length(completions: list[str], **_: object) -> list[float]:
    """A reward that differs within every group: without one, a step at beta 0 has no gradient and holds none."""
    return [float(len(text)) for text in completions]


def one(model: str, kind: str) -> dict[str, float]:
    """One run of a kind in this process: peak memory and the time of its second step."""
    from klamp.training.backends import train_run
    from klamp.training.config import TrainConfig
    from klamp.training.observers import Observer

    class Watch(Observer):
        seconds = 0.0

        def on_step(self, step: int, metrics: Any) -> None:
            self.seconds = metrics["speed/step_seconds"]

    watch = Watch()
    settings: dict[str, Any] = {"model": model, "beta": 0.01, "report_to": (), "eval_size": 1}
    settings |= {"prompts_per_step": 4, "num_generations": 4, "max_steps": 2, "save_every": 0, "cpu": True}
    settings |= KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(64)))
        settings |= {"task": str(prompts), "eval_split": str(prompts), "reward": "benchmarks.references:length"}
        train_run(TrainConfig.from_flat(settings | {"output_dir": f"{folder}/run"}), [watch])
    return {"peak_mib": peak_mib(), "step_seconds": watch.seconds}


def run(quick: bool) -> dict[str, Any]:
    """Measure every kind."""
    with tempfile.TemporaryDirectory() as folder:
        size = make_model(Path(folder) / "model", quick)
        arguments = {"model": f"{folder}/model"}
        found = {kind: isolated("benchmarks.references:one", arguments | {"kind": kind}) for kind in KINDS}
    return {"model_mib": size, "kinds": found}


def text(results: Mapping[str, Any]) -> str:
    """The table."""
    found, size = results["kinds"], results["model_mib"]
    rows = []
    for kind, seen in found.items():
        base = found["none (beta 0), LoRA" if "LoRA" in kind else "none (beta 0)"]
        over = seen["peak_mib"] - base["peak_mib"]
        rows.append(
            (kind, f"{seen['peak_mib']:.0f}", f"{over:+.0f}", f"{over / size:+.2f}", f"{seen['step_seconds']:.2f}")
        )
    headings = ("reference", "peak memory MiB", "over the run without", "in models", "step seconds")
    return f"The model has {size:.0f} MiB of weights in float32.\n\n{table(headings, rows)}"


BENCHMARK = Benchmark(
    name="references",
    title="What a reference costs in memory",
    about="Each row is a run of two steps (16 completions) in a process of its own; peak memory is the whole "
    "process's. One run each: the step's seconds only show the order of magnitude. The reward differs within every "
    "group, so that the runs at beta 0 have a gradient too. Every row with a KL holds something besides weights: how "
    "much shows in the row of a remote reference, whose weights are in another process (measured with a server of "
    "klamp's own, which has left). A frozen copy is one model; a moving one two, itself and the original that the "
    "second KL is taken to. A bfloat16 copy is made from the float32 one, so its peak is that of both for a moment, "
    "and half a model stays. With LoRA the adapter is switched off: no weights of its own.",
    run=run,
    text=text,
)
