"""What each of two processes does for test_stages: KIND FOLDER; its results go into FOLDER/KIND-RANK.json."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig
from tests.hosts.trl.hosts import klamp_trainer, model, stock_trainer

from klamp import KLConfig
from klamp.errors import ConfigError
from klamp.scoring import completions
from klamp.trl import attach, effective

STAGES = {"ddp": None, "zero2": 2, "zero3": 3}
STEPS = {"max_steps": 3, "per_device_train_batch_size": 4, "num_generations": 4, "learning_rate": 1e-2}
CLIPPED = {"kl_clip_method": "hard", "kl_clip_threshold": 0.01, "target_kl": 0.05}
CLIPPED |= {"kl_exclude_tokens": ["<eos>"], "gradient_accumulation_steps": 2}
SGD = {"beta": 0.3, "optim": "sgd", "learning_rate": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2}
"""AdamW would make steps of full size out of rounding, where a gradient is 0."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {"beta": 0.3},
    "in memory": {"beta": 0.3},
    "clipped": {"beta": 0.3, **CLIPPED},
    "adapter": {"beta": 0.3},
    "attached": {"beta": 0.0},
    "exact": {"beta": 0.3, "kl_estimator": "exact"},
    "taught": {"beta": 0.3, "teacher_estimator": "k3", "teacher_coef": 0.5},
    "a head": {"beta": 0.3, "teacher_estimator": "topk", "teacher_top_k": 5, "teacher_head": "union"},
    "slow": SGD,
    "fast": SGD | {"fast_scoring": True},
}


def settings(stage: int | None) -> dict[str, Any]:
    """What TRL has to be told for a stage on the CPU, where accelerate itself would find no backend."""
    if stage is None:
        return {}
    sharding: dict[str, Any] = {"stage": stage}
    if stage == 3:
        sharding["stage3_param_persistence_threshold"] = 0  # so small a model would not be split at all
        sharding["stage3_gather_16bit_weights_on_model_save"] = True  # a checkpoint has whole weights
    same = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size")
    config = {**dict.fromkeys(same, "auto"), "zero_optimization": sharding}
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    return {"deepspeed": config, "use_cpu": False, "accelerator_config": {"use_configured_state": True}}


def started(stage: int | None) -> None:
    """The state of the processes, anew for each trainer, with gloo between them."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if stage is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")


def trainer_of(case: str, kind: str, folder: Path) -> Any:
    options = STEPS | settings(STAGES[kind]) | CASES[case]
    path = str(folder / "base")
    if case == "in memory":
        made = model()
        made.config._name_or_path = ""
        return klamp_trainer(made, folder, **options)
    options["model_init_kwargs"] = {"dtype": "float32"}
    if case == "attached":
        return attach(stock_trainer(path, folder, **options), KLConfig(beta=0.3))
    more: dict[str, Any] = {}
    if "teacher_estimator" in options:
        options["teacher_model"] = str(folder / "teacher")
    if case == "adapter":
        more["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return klamp_trainer(path, folder, trainer=more, **options)


def main(kind: str, folder: Path) -> None:
    completions.PASS_TOKENS = 0  # so that short prompts are shared too
    found: dict[str, Any] = {}
    for case in CASES:
        started(STAGES[kind])
        try:
            trainer = trainer_of(case, kind, folder)
        except ConfigError as error:
            found[f"{case} refused"] = str(error)
            continue
        trainer.train()
        names = ("loss", "kl", "entropy", "kl/k1", "kl/k3", "beta", "reward", "grad_norm", "kl/exact")
        names += ("teacher/k1", "teacher/kl", "teacher/student_mass")
        found[case] = {
            "rows": [{n: row[n] for n in names if n in row} for row in trainer.state.log_history if "loss" in row],
            "engine": type(trainer.model_wrapped).__name__,
            "reference": effective(trainer).reference,
            "notes": effective(trainer).notes,
        }
    (folder / f"{kind}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))  # noqa: TID251  (a program of its own)
