"""What each of two processes does: the same distillation in TRL's class and klamp's, over gloo."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import trl
from tests.hosts.trl.hosts import model, noisy
from tests.hosts.trl.test_distillation import EXACT, TOPK, made

from klamp.trl import DistillationTrainer

SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd"}
RUNS: dict[str, tuple[type, dict[str, Any]]] = {
    "stock": (trl.DistillationTrainer, {}),
    "untouched": (DistillationTrainer, {}),
    "exact": (DistillationTrainer, EXACT),
    "topk": (DistillationTrainer, TOPK),
}


def main(folder: Path) -> None:
    base, rank = model(), int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for name, (kind, options) in RUNS.items():
        trainer = made(base, noisy(base, size=0.3, seed=9), folder / "out", kind=kind, **SPLIT, **options)
        torch.manual_seed(11 + rank)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row and row.pop("step_time")]
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        found[name] = {"rows": rows, "weights": weights.tolist()}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(os.environ["FOLDER"]))
