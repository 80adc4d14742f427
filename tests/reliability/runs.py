"""The runs that are killed, and all that the folder of a run holds, in a form that can be compared."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.training.conftest import TINY

COMMON: dict[str, Any] = {
    **TINY,
    "beta": 0.05,
    "max_steps": 7,
    "eval_every": 2,
    "save_every": 2,
    "log_completions_every": 1,
    "report_to": ("tensorboard",),
}
IN_ADVANTAGE = {"kl_estimator": "k1", "kl_placement": "advantage"}
HELD = {"kl_controller": "step", "target_kl": 0.002, "kl_clip_method": "hard", "kl_clip_threshold": 1e-4}
CASES: dict[str, dict[str, Any]] = {
    "controller": {"target_kl": 1e-4, "lr_scheduler_type": "linear"},
    "EMA": {"reference": "ema", "reference_decay": 0.5, "kl_controller": "step", "target_kl": 1e-3},
    "periodic": {"reference": "periodic", "reference_reset_steps": 3, "weight_decay": 0.1},
    "LoRA": {"lora_r": 2, "kl_controller": "proportional", "target_kl": 1e-3, **IN_ADVANTAGE},
    "several updates": {"num_iterations": 2, "gradient_accumulation_steps": 3, "gradient_checkpointing": True, **HELD},
}
"""What each run is besides that; a caution tells of gradient checkpointing at every start."""
MOVING = ("EMA", "periodic")
"""Those whose reference moves."""
ALARMED = ("controller", "LoRA", "several updates")
"""Those in which an alarm rises."""
TIMES = "speed/"
"""How the names of metrics begin that no seed fixes."""
LINES = ("metrics", "completions", "answers", "alarms", "cautions")


def contents(folder: Path) -> dict[str, Any]:
    """All that the folder of an ended run holds but times: name -> what can be compared."""
    held: dict[str, Any] = {name: _lines(folder / f"{name}.jsonl") for name in LINES}
    held["files"] = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if "tracking" not in path.relative_to(folder).parts
    )
    held["configuration"] = _without(yaml.safe_load((folder / "config.yaml").read_text()), "output_dir")
    held["versions"] = (folder / "versions.json").read_text()
    held["summary"] = _plain(_without(json.loads((folder / "summary.json").read_text()), "seconds"))
    held["TensorBoard"] = scalars(folder / "tracking")
    for step in sorted((folder / "checkpoints").glob("step-*")):
        held |= {f"{what} of {step.name}": value for what, value in _checkpoint(step).items()}
    return held


def differing(one: dict[str, Any], folder: Path) -> list[str]:
    """The names of what the folder of a killed run holds otherwise than an undisturbed one."""
    try:
        other = contents(folder)
    except (OSError, ValueError, RuntimeError) as error:
        return [f"{type(error).__name__}: {error}"]
    return sorted(name for name in one.keys() | other.keys() if one.get(name, ...) != other.get(name, ...))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder: tag -> its points."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it says what a resume takes back
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    tags = [tag for tag in shown.Tags()["scalars"] if not tag.startswith(TIMES)]
    return {tag: [(point.step, point.value) for point in shown.Scalars(tag)] for tag in tags}


def _lines(file: Path) -> list[str]:
    """The rows of a file, each of which must be whole."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [_plain(json.loads(line)) for line in text.splitlines()]


def _plain(row: Any) -> str:
    """A row or a state as text, without times: NaN is equal to itself there."""
    return json.dumps(_timeless(row), sort_keys=True)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(inner) for name, inner in value.items() if not name.startswith(TIMES)}
    return value


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _checkpoint(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = {
        "weights": {path.name: _tensors(load_file(path)) for path in sorted((folder / "policy").glob("*.safetensors"))},
        "moments": _tensors(torch.load(folder / "optimizer.pt", weights_only=True)),
        "state": _plain(json.loads((folder / "state.json").read_text())),
    }
    if (folder / "reference.safetensors").exists():
        held["reference"] = _tensors(load_file(folder / "reference.safetensors"))
    return held


def _tensors(value: Any) -> Any:
    """The same with a name for the bits of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits.numpy().tobytes()).hexdigest()}"
    if isinstance(value, dict):
        return {name: _tensors(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_tensors(inner) for inner in value]
    return value
