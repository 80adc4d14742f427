"""What each of two processes does: the same runs in TRL's classes and klamp's, over gloo; see test_processes."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import trl
from peft import LoraConfig
from tests.hosts.trl.hosts import distiller, klamp_trainer, model, noisy, saved, stock_trainer

from klamp.scoring import completions
from klamp.trl import DistillationTrainer

RUNS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "gradient_accumulation_steps": 2, "num_iterations": 2},
    "grpo": {"loss_type": "grpo", "mask_truncated_completions": True, "max_completion_length": 24},
}
# Four completions per prompt and two per process: without accumulation every group lies on both.
SPLIT = {"num_generations": 4, "per_device_train_batch_size": 2, "max_steps": 2, "beta": 0.3}
CLIPPED = {"kl_clip_method": "hard", "kl_clip_threshold": 0.01, "target_kl": 0.05, "loss_type": "dapo"}
CLIPPED |= {"kl_exclude_tokens": tuple(range(2, 58, 3)), "logging_steps": 1, "max_steps": 4}
PLAIN = {"optim": "sgd", "learning_rate": 0.1}
QUIET = {"loss_type": "grpo", "beta": 0.0}
"""A run in which the second process has no advantage but 0: nothing to learn from."""
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
ADAPTER = {"trainer": {"peft_config": LORA}, "gradient_checkpointing": True, "importance_sampling_level": "sequence"}
DISTILLED: dict[str, tuple[type, dict[str, Any]]] = {
    "stock": (trl.DistillationTrainer, {}),
    "untouched": (DistillationTrainer, {}),
    "exact": (DistillationTrainer, {"teacher_estimator": "exact"}),
    "topk": (DistillationTrainer, {"teacher_estimator": "topk", "teacher_top_k": 3}),
}
FAST = RUNS | {"quiet": QUIET, "adapter": ADAPTER}


def run(make: Any, policy: Any, folder: Path, **options: Any) -> tuple[list[float], Any, list[Any]]:
    torch.manual_seed(7)  # an adapter's weights
    trainer = make(copy.deepcopy(policy), folder, **(SPLIT | options))
    losses, batches = [], []
    inner, generate = trainer.compute_loss, trainer._generate_and_score_completions

    def noting(*args: Any, **kwargs: Any) -> Any:
        losses.append(inner(*args, **kwargs))
        return losses[-1]

    def generating(inputs: Any) -> Any:
        batches.append(generate(inputs))
        if options.get("beta") == 0.0 and trainer.accelerator.process_index == 1:
            batches[-1]["advantages"] *= 0
        return batches[-1]

    trainer.compute_loss, trainer._generate_and_score_completions = noting, generating
    torch.manual_seed(11 + trainer.accelerator.process_index)
    trainer.train()
    return [loss.item() for loss in losses], trainer, batches


def beside_stock(base: Any, folder: Path, ours: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The losses, rows and weights of TRL's class and klamp's; `ours` are fields of klamp's alone."""
    stock, one, _ = run(stock_trainer, base, folder, **options)
    found, two, _ = run(klamp_trainer, base, folder, **options, **ours)
    weights = zip(one.model.parameters(), two.model.parameters(), strict=True)
    return {
        "losses": [stock, found],
        "rows": [one.state.log_history, two.state.log_history],
        "apart": max(float((a - b).detach().abs().max()) for a, b in weights),
        "in force": str(two._klamp.fast),
    }


def distilled(base: Any, folder: Path, rank: int, kind: type, options: dict[str, Any]) -> dict[str, Any]:
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": "sgd"}
    trainer = distiller(base, noisy(base, size=0.3, seed=9), folder, kind=kind, **steps, **options)
    torch.manual_seed(11 + rank)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row and row.pop("step_time")]
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return {"rows": rows, "weights": weights.tolist()}


def main(folder: Path) -> None:
    base, rank, out = model(), int(os.environ["RANK"]), folder / "out"
    path = saved(base, folder / f"base{rank}")  # before there is a process group: then only rank 0 would write
    found: dict[str, Any] = {name: distilled(base, out, rank, *each) for name, each in DISTILLED.items()}
    base.config._name_or_path = path
    found |= {name: beside_stock(base, out, {}, options) for name, options in RUNS.items()}
    completions.PASS_TOKENS = 0  # so that short prompts are shared too
    for name, options in FAST.items():
        found[f"{name}, fast"] = beside_stock(base, out, {"fast_scoring": True}, options | PLAIN)
    base.config._name_or_path = ""  # in memory only: copied on every process
    _, trainer, batches = run(klamp_trainer, base, out, **CLIPPED)
    found["gates"] = [batch["klamp_gate_kl"].tolist() for batch in batches]
    found["lengths"] = [batch["klamp_reference_length"].tolist() for batch in batches]
    found["scales"] = [batch["klamp_kl_scale"].tolist() for batch in batches]
    found["sizes"] = [batch["completion_mask"].sum(-1).tolist() for batch in batches]
    keys = ("beta", "kl/k3", "kl/log_ratio_p99", "kl/exact", "kl/reference_length")
    found["rows"] = [[row[key] for key in keys] for row in trainer.state.log_history if "beta" in row]
    found["beta"] = trainer._klamp.control.controller.value
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(os.environ["FOLDER"]))
