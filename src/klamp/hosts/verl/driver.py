"""klamp's part in verl's trainer, the one process that has whole groups, the tokens, the step and the checkpoints.

What the loss in verl's workers needs of a whole batch is settled here once, and travels with it as columns.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.config.loss import Price
from klamp.core.term import Gate
from klamp.core.types import Reduction
from klamp.errors import ConfigError, KLWarning
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH
from klamp.hosts.common.control import KLControl, held_kl, mean_spread, read_state
from klamp.hosts.common.rollout import Alone, Generation, prepared
from klamp.hosts.common.step_metrics import Window
from klamp.hosts.verl.effective_in_verl import BASELINES, divides_by_std, price
from klamp.hosts.verl.fields_in_verl import is_ours, loss_kl, needs_driver

TRAINER = "verl.trainer.ppo.v1.trainer_base"
STATE = "klamp_state.json"
"""The file in a checkpoint of verl's that holds what klamp has to continue from."""
READ = ("uid", "responses", "response_mask", "rm_scores", "old_log_probs", "ref_log_prob", "advantages")

BETA = "klamp_beta"
"""The coefficient in force; a number in every row."""

PER_ROW = (BETA, KL_SCALE, GATE_KL, REFERENCE_LENGTH)
PER_TOKEN = (KL_MASK,)

REDUCTIONS: Mapping[str, Reduction] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_length",
    "token-sum": "sequence_sum",
}
"""verl's loss_agg_mode -> how klamp calls that average; of a sum, the tokens that carry the KL change nothing."""

SAMPLER = "rollout_log_probs"
"""verl's column of what the engine reported; not every engine does."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How verl's configuration makes a loss of it.

    Attributes:
        loss_agg_mode: verl's average over tokens.
        group_size: completions per prompt.
        beta: the coefficient in force.
        price: at that coefficient; None: not known for these advantages.
        leave_one_out: whether a completion's advantage leaves its own reward out of what it is compared with.
    """

    loss_agg_mode: str
    group_size: int
    beta: float
    price: Price | None
    leave_one_out: bool


class Driver:
    """Settles what a KL needs a whole batch for, and keeps its controller with verl's checkpoints.

    verl (0.9.1 or newer) makes one in its trainer where `trainer.checkpoint_callback_class=klamp.verl.Driver`, which
    `overrides` sets. After the advantages are formed it adds to the batch what the loss in the workers needs: beta of
    the step, the tokens that carry the KL, the KL and reference length of each completion's clip; with the KL in the
    reward or the advantage it shifts the advantages. The KL of the step that the controller goes by is that of the
    policy which the updates begin with. Its measurements join verl's metrics, under klamp's names.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: a KL in the reward, and advantages that no clip or exclusion can be put into.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.control = _control(config)
        hook(importlib.import_module(TRAINER).PPOTrainer)

    def on_save(self, **_: Any) -> None:
        """Nothing: the state is in the checkpoint before verl calls it complete."""

    def extend(self, trainer: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        """Put klamp's columns into verl's queue, and klamp's measurements into its metrics; the batch that has them."""
        if self.control is None:
            return batch
        beta = self.control.beta(trainer.global_steps - 1, trainer.total_training_steps)
        queue = importlib.import_module("transfer_queue")
        data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*READ, SAMPLER])
        nested, mask = data["response_mask"].is_nested, data["response_mask"]
        padded = data.to_padded_tensor()
        real = torch.tensor([not tag.get("is_padding", False) for tag in batch.tags])
        sampled = {name: padded[name][real] for name in list(padded.keys()) if name != "uid"}
        prompts = [str(uid) for uid, kept in zip(data.get("uid").tolist(), real.tolist(), strict=True) if kept]
        added, found = columns(sampled, prompts, self.control, trainer.tokenizer, self._settings(beta))
        added = for_all_rows(added, real, {"advantages": padded["advantages"]})
        if nested:
            added = _nested(added, mask)
        metrics.update(found)
        fields = importlib.import_module("tensordict").TensorDict(added, batch_size=len(batch))
        return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _settings(self, beta: float) -> StepSettings:
        assert self.control is not None
        found = price(self.config, beta, self.control.kl.kl_placement)
        actor, rollout = self.config["actor_rollout_ref"]["actor"], self.config["actor_rollout_ref"]["rollout"]
        return StepSettings(
            loss_agg_mode=actor["loss_agg_mode"],
            group_size=int(rollout["n"]),
            beta=beta,
            price=None if isinstance(found, str) else found,
            leave_one_out=BASELINES.get(self.config["algorithm"]["adv_estimator"]) == "leave_one_out",
        )

    def save(self, trainer: Any) -> None:
        """Write the state of the controllers into the checkpoint that verl is about to make."""
        state = {name: control.state_dict() for name, control in self._controls(trainer).items()}
        if not state:
            return
        folder = Path(self.config["trainer"]["default_local_dir"]) / f"global_step_{trainer.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{STATE}.new"
        beside.write_text(json.dumps(state), encoding="utf-8")
        beside.replace(folder / STATE)

    def load(self, trainer: Any) -> None:
        """Continue from the checkpoint that verl has loaded, if it has.

        Raises:
            RunFolderError, ConfigError: the state is damaged.
        """
        controls = self._controls(trainer)
        if not trainer.global_steps or not controls:
            return
        file = self._checkpoint(trainer.global_steps) / STATE
        if not file.is_file():
            warnings.warn(f"{file} is missing: beta starts at its configured value", KLWarning, stacklevel=2)
            return
        for name, state in read_state(file).items():
            if name in controls:
                controls[name].load_state_dict(state)

    def _checkpoint(self, step: int) -> Path:
        options = self.config["trainer"]
        if options["resume_mode"] == "resume_path":
            return Path(options["resume_from_path"])
        return Path(options["default_local_dir"]) / f"global_step_{step}"

    def _controls(self, trainer: Any) -> dict[str, KLControl]:
        rewarded = getattr(trainer, "kl_ctrl_in_reward", None)  # only klamp's own has a control
        found = {"loss": self.control, "reward": getattr(rewarded, "control", None)}
        return {name: control for name, control in found.items() if control is not None}


def _control(config: Any) -> KLControl | None:
    """The control of a KL that needs the driver; None where there is none."""
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    if not actor["use_kl_loss"] or not is_ours(actor["kl_loss_type"]):
        return None
    kl = loss_kl(actor["kl_loss_type"], float(actor["kl_loss_coef"]))
    _check_advantages(kl, algorithm)
    return KLControl(kl) if needs_driver(kl) else None


def _check_advantages(kl: KLConfig, algorithm: Any) -> None:
    if kl.kl_placement != "reward" or (algorithm["adv_estimator"] in BASELINES and not divides_by_std(algorithm)):
        return
    raise ConfigError(
        "this KL in the reward needs advantages that are rewards less their group's mean, and nothing else",
        got=f"adv_estimator={algorithm['adv_estimator']}, norm_adv_by_std_in_grpo="
        f"{algorithm.get('norm_adv_by_std_in_grpo', True)}",
        why="it enters once the advantages are formed, as the deviation of each completion's KL from the group's",
        fix="set algorithm.adv_estimator=rloo, or grpo with algorithm.norm_adv_by_std_in_grpo=False",
    )


def _nested(added: Mapping[str, Tensor], mask: Any) -> dict[str, Tensor]:
    """Per-token columns without padding, as verl's queue has them."""
    lengths = mask.offsets().diff().tolist()
    return {
        name: column
        if name in PER_ROW
        else torch.nested.as_nested_tensor(
            [row[:length] for row, length in zip(column, lengths, strict=True)], layout=torch.jagged
        )
        for name, column in added.items()
    }


def hook(trainer: Any) -> None:
    """Let verl's trainer class call the driver where it has formed advantages, and around checkpoints; once."""
    if hasattr(trainer._compute_advantage, "__wrapped__"):
        return
    trainer._compute_advantage = _hooked(trainer._compute_advantage, _advantages)
    trainer._save_checkpoint = _hooked(trainer._save_checkpoint, _saving)
    trainer._load_checkpoint = _hooked(trainer._load_checkpoint, _loading)


def _hooked(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A method of verl's trainer; where a driver is there, `ours` calls it and the driver."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        driver = self.checkpoint_callback
        whole = functools.partial(original, self, *args, **named)
        return ours(driver, whole, self, *args, **named) if isinstance(driver, Driver) else whole()

    return method


def _advantages(driver: Driver, form: Callable[[], Any], trainer: Any, _batch: Any, metrics: dict[str, Any]) -> Any:
    return driver.extend(trainer, form(), metrics)


def _saving(driver: Driver, save: Callable[[], Any], trainer: Any) -> Any:
    driver.save(trainer)
    return save()


def _loading(driver: Driver, load: Callable[[], Any], trainer: Any) -> Any:
    found = load()
    driver.load(trainer)
    return found


def columns(
    sampled: Mapping[str, Tensor], prompts: Sequence[str], control: KLControl, tokenizer: Any, settings: StepSettings
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(columns, metrics): what is added to the batch in the order of its rows, and what was measured, klamp's names.

    The advantages are among the columns where the KL shifts them. The controller takes in the KL of the step.

    Args:
        sampled: verl's columns of the whole batch by verl's names, tokens at the left, padded at the right, [B, T]; of
            the rewards (`rm_scores`) one number for each completion [B], or for each token.
        prompts: verl's uid of each row: which prompt a completion belongs to.
        control: of the run.
        tokenizer: finds the excluded tokens.
        settings: of the run and the step.

    Raises:
        ConfigError: a prompt with more or fewer completions than the others; see `prepared`.
        NonFiniteError: a KL that is NaN or infinite, see `klamp.hosts.common.control.check_kl`.
    """
    order = by_prompt(prompts, settings.group_size)
    generation = _generation(sampled, order, settings.group_size)
    reduction = REDUCTIONS.get(settings.loss_agg_mode)
    found = prepared(generation, control, tokenizer, beta=_taken(control, settings), reduction=reduction)
    metrics = _measured(generation, found, control)
    scores = sampled["rm_scores"][order]
    rewards = (scores.sum(-1) if scores.ndim == 2 else scores).view(-1, settings.group_size)
    metrics |= control.metrics(settings.price or Price(beta=settings.beta), mean_spread(rewards.double()))
    if settings.price is None:
        metrics.pop("beta/price")
    kl = held_kl(metrics, exact_everywhere=False)
    if kl is not None:
        control.update(kl, metrics, rewards)
    back = torch.argsort(order)
    added = {name: found[name][back] for name in (*PER_ROW, *PER_TOKEN) if name in found}
    if control.kl.kl_placement != "loss":
        added["advantages"] = _per_token(found["advantages"], generation.inputs["completion_mask"])[back]
    return added | {BETA: torch.full((len(order),), settings.beta, dtype=torch.float64)}, metrics


def by_prompt(prompts: Sequence[str], group_size: int) -> Tensor:
    """The order of the rows in which the completions of a prompt stand next to each other. [B]

    Raises:
        ConfigError: some prompt has more or fewer completions than `group_size`.
    """
    order = sorted(range(len(prompts)), key=lambda row: prompts[row])
    sizes = set(Counter(prompts).values())
    if sizes != {group_size}:
        raise ConfigError(
            "the completions of a prompt are not all in verl's batch",
            got=f"groups of {', '.join(map(str, sorted(sizes)))}",
            why=f"a group of rollout.n={group_size} decides together what its KL is clipped at, and is compared with",
            fix="use a trainer_mode that trains on whole groups (sync), and agent loops with one output per completion",
        )
    return torch.tensor(order)


def _taken(control: KLControl, settings: StepSettings) -> float:
    """What `prepared` takes a completion's KL times: it compares with the mean of the group, own KL included."""
    if control.kl.kl_placement == "reward" and settings.leave_one_out:
        return settings.beta * settings.group_size / (settings.group_size - 1)
    return settings.beta


def for_all_rows(added: Mapping[str, Tensor], real: Tensor, original: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns of a batch to which verl has added rows that only fill it up; those carry no KL.

    Args:
        added: columns of the rows that are real.
        real: which rows they are, [B] bool.
        original: columns of all rows that were there before.
    """
    found = {}
    for name, column in added.items():
        everywhere = torch.zeros_like(column[:1]) if name in PER_TOKEN else column[:1]
        whole = original.get(name, everywhere.expand(len(real), *column.shape[1:])).clone()
        whole[real] = column.to(whole.dtype)
        found[name] = whole
    return found


def _generation(sampled: Mapping[str, Tensor], order: Tensor, group_size: int) -> Generation:
    mask, old = sampled["response_mask"][order].bool(), sampled["old_log_probs"][order]
    reported = sampled.get(SAMPLER)
    inputs = {
        "completion_ids": sampled["responses"][order],
        "completion_mask": mask,
        "ref_per_token_logps": sampled["ref_log_prob"][order],
        "old_per_token_logps": old,
        "sampling_per_token_logps": None if reported is None else reported[order],
        "advantages": sampled["advantages"][order],
    }
    return Generation(
        inputs=inputs,
        old_logprobs=old,
        rows=[{}] * len(order),
        lengths=mask.sum(-1),
        group_size=group_size,
        accelerator=Alone(),
    )


def _measured(generation: Generation, found: Mapping[str, Any], control: KLControl) -> dict[str, float]:
    batch = replace(generation, inputs=found).batch()
    term = control.kl.build_term()
    window = Window()
    window.add(batch, term, Gate.of(batch, term))
    return window.emit(Alone())


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    return (advantages if advantages.ndim == 2 else advantages.unsqueeze(-1)) * mask
