"""What each kind of reference costs in memory and time: one run of two steps each, in a process of its own.

Peak memory is the operating system's (ru_maxrss of the process), so it counts weights, gradients, optimizer and
activations; the difference to the run without a reference is what the reference costs.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "none (beta 0)": {"beta": 0.0},
    "frozen": {"reference": "frozen"},
    "frozen, bfloat16": {"reference": "frozen", "reference_dtype": "bfloat16"},
    "ema": {"reference": "ema"},
    "periodic": {"reference": "periodic"},
    "none (beta 0), LoRA": {"beta": 0.0, "lora_r": 8},
    "adapter_off, LoRA": {"reference": "adapter_off", "lora_r": 8},
    "remote": {"reference": "remote"},
}
SIZES = {True: (256, 4), False: (640, 8)}


def make_model(folder: Path, quick: bool) -> float:
    """A random Llama in a folder, with the arithmetic tokenizer; returns its size in MiB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from klamp.tasks.arithmetic import arithmetic_tokenizer
    from klamp.tasks.base_model import without_bars

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


def one(model: str, kind: str) -> dict[str, float]:
    """One run of a kind in this process: peak memory and the time of its second step."""
    from klamp.training.config import TrainConfig
    from klamp.training.observers import Observer
    from klamp.training.trainer import train_run

    class Watch(Observer):
        seconds = 0.0

        def on_step(self, step: int, metrics: Any) -> None:
            self.seconds = metrics["speed/step_seconds"]

    watch = Watch()
    settings: dict[str, Any] = {"model": model, "beta": 0.01, "report_to": (), "eval_size": 1, "train_size": 64}
    settings |= {"prompts_per_step": 4, "num_generations": 4, "max_steps": 2, "save_every": 0, "cpu": True}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.from_flat(settings | KINDS[kind] | {"output_dir": f"{folder}/run"})
        train_run(config, [watch])
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "step_seconds": watch.seconds}


def _served(model: str, kind: str) -> dict[str, float]:
    """The run in a fresh process; for the remote kind the server is here, so that its memory is not counted."""
    arguments = [sys.executable, "-m", "benchmarks.references", model, kind]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if kind != "remote":
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
        return json.loads(done.stdout.splitlines()[-1])
    from klamp.training.models import load_model
    from klamp.training.remote import serve

    with serve(load_model(model)) as url:
        done = subprocess.run([*arguments, url], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main(*, as_json: bool, quick: bool) -> None:
    """Measure every kind and print the record."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        size = make_model(Path(folder) / "model", quick)
        found = {kind: _served(f"{folder}/model", kind) for kind in KINDS}
    record = {
        "command": "python -m benchmarks references" + (" --quick" if quick else ""),
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
        "model_mib": size,
        "kinds": found,
    }
    print(json.dumps(record, indent=2) if as_json else table(record))


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    found, size = record["kinds"], record["model_mib"]
    lines = [
        f"model: {size:.0f} MiB of weights in float32",
        "",
        "| reference | peak memory MiB | over the run without | in models | step seconds |",
        "|---|---|---|---|---|",
    ]
    for kind, seen in found.items():
        base = found["none (beta 0), LoRA" if "LoRA" in kind else "none (beta 0)"]
        over = seen["peak_mib"] - base["peak_mib"]
        lines.append(
            f"| {kind} | {seen['peak_mib']:.0f} | {over:+.0f} | {over / size:+.2f} | {seen['step_seconds']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        KINDS["remote"]["reference_url"] = sys.argv[3]
    print(json.dumps(one(sys.argv[1], sys.argv[2])))
