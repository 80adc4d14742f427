"""Names that several rooms share: a run's files, the KL to prefer, other trainers' names; it imports no library."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

# the files in a run's folder ------------------------------------------------------------------------------------------

CONFIG = "config.yaml"
"""The file that marks a folder as a run's."""
METRICS_FILE, COMPLETIONS, ANSWERS = "metrics.jsonl", "completions.jsonl", "answers.jsonl"
CAUTIONS = "cautions.jsonl"
VERSIONS, SUMMARY, IDENTITY = "versions.json", "summary.json", "identity.json"
ALARMS_FILE = "alarms.jsonl"
"""The alarms of a run, written as they rise: one `AlarmFinding.record` per line."""
OUTCOME = "outcome.json"
"""The result of a run in an ablation, done or failed."""
RUNS = "runs"
"""The folder inside an ablation's folder that holds one folder per run."""
ABOUT = "klamp_report.json"
"""What `klamp.trl.ReportCallback` writes beside TRL's log: settings, versions, model, data, KL, times."""
REPORT = "_klamp_report"
"""The folder in output_dir for it if nobody asked for one; `push_to_hub` uploads no name with this first letter."""
TRAINER_STATE = "trainer_state.json"
"""TRL's log, in each of its checkpoints."""

# the KL of a step -----------------------------------------------------------------------------------------------------

KL_NAMES: Mapping[str, str] = {"kl/exact": "exact", "kl/k3": "k3", "kl/k1": "k1"}
"""Metric of the KL to the reference per token -> estimator; the one with the least noise first."""


def best_kl(logged: Collection[str], names: Iterable[str] = KL_NAMES) -> str:
    """The first of `names` that was logged: of several estimates of one KL, the one with the least noise; else ""."""
    return next((name for name in names if name in logged), "")


# what others call it --------------------------------------------------------------------------------------------------

SHORT_METRICS: Mapping[str, str] = {
    "kl": "kl/k3",
    "k1": "kl/k1",
    "length": "length/mean",
    "truncated": "length/truncated",
    "saturated": "groups/saturated",
    "entropy": "policy/entropy",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
}
"""A short name that `--map` takes -> the metric; `reward`, `reward_std` and `beta` are short already."""
VERL_ESTIMATORS: Mapping[str, str] = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's name of an estimator -> klamp's."""
HINTS: Mapping[str, str] = {
    **VERL_ESTIMATORS,
    "full": "exact",
    "lr": "learning_rate",
    "epochs": "max_steps",
    "dataset": "task",
    "model_name_or_path": "model",
    "batch_size": "prompts_per_step",
    "group_size": "num_generations",
    "max_new_tokens": "max_completion_length",
    "kl_coeff": "beta",
    "reference_policy_kl_penalty": "beta",
    "init_kl_coef": "beta",
    "kl_loss_coef": "beta",
    "kl_loss_type": "kl_estimator",
    "cliprange": "epsilon",
}
"""A name in other trainers that klamp does not accept -> klamp's nearest name, which the error proposes."""
