"""klamp's part in verl's trainer: what the loss in the workers needs of a whole batch, as columns of that batch."""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klamp.config.loss import Price
from klamp.core.term import Weighted, prepare
from klamp.errors import ConfigError, KLWarning
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, KL_SCALE, REFERENCE_LENGTH, advantages_less_kl
from klamp.hosts.common.control import KLControl, held_kl, mean_spread, read_state, warn_few_prompts
from klamp.hosts.common.rollout import Alone, Generation, prepared
from klamp.hosts.common.step_metrics import Window
from klamp.hosts.verl.effective_in_verl import BASELINES, REDUCTIONS, divides_by_std, price
from klamp.hosts.verl.overrides import is_driven, is_ours, loss_kl
from klamp.names import IDENTITY

TRAINER = "verl.trainer.ppo.v1.trainer_base"
STATE = "klamp_state.json"
"""The file in a checkpoint of verl's that holds what klamp has to continue from."""
SAMPLER = "rollout_log_probs"
"""verl's column of what the engine reported; not every engine does."""
NAMES = {
    "responses": "completion_ids",
    "response_mask": "completion_mask",
    "ref_log_prob": "ref_per_token_logps",
    "old_log_probs": "old_per_token_logps",
    SAMPLER: "sampling_per_token_logps",
    "advantages": "advantages",
}
"""verl's columns -> what `batch_of` calls them."""
READ = (*NAMES, "uid", "rm_scores")
BETA = "klamp_beta"
"""The coefficient in force; a number in every row."""
PER_ROW = (BETA, KL_SCALE, GATE_KL, REFERENCE_LENGTH)
PER_TOKEN = (KL_MASK,)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How verl's configuration makes a loss of the step's KL."""

    loss_agg_mode: str
    group_size: int
    beta: float  # the coefficient in force
    price: Price | None  # at that coefficient; None: not known for these advantages
    leave_one_out: bool  # whether a completion is compared with the others of its group alone


class Driver:
    """Settles what a KL needs a whole batch for, and keeps its controller with verl's checkpoints.

    `overrides` sets `trainer.checkpoint_callback_class=klamp.verl.Driver`. After the advantages are formed it adds to
    the batch what the loss in the workers needs, shifts the advantages by a KL in the reward or the advantage, and
    measures the KL of the policy that the updates begin with, for the controller and verl's metrics.

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

    def extend(self, form: Callable[[], Any], trainer: Any, _batch: Any, metrics: dict[str, Any]) -> Any:
        """Form the advantages; then put klamp's columns into verl's queue, and its measurements into the metrics."""
        batch = form()
        if self.control is None:
            return batch
        beta = self.control.beta(trainer.global_steps - 1, trainer.total_training_steps)
        queue: Any = importlib.import_module("transfer_queue")
        data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*READ])
        mask, padded = data["response_mask"], data.to_padded_tensor()
        sampled = {name: padded[name] for name in list(padded.keys()) if name != "uid"}
        pairs = zip(data.get("uid").tolist(), batch.tags, strict=True)
        prompts = [None if tag.get("is_padding", False) else str(uid) for uid, tag in pairs]
        added, measured = columns(sampled, prompts, self.control, trainer.tokenizer, self._settings(beta))
        if mask.is_nested:
            added = nested(added, mask)
        metrics.update(measured)
        fields = importlib.import_module("tensordict").TensorDict(added, batch_size=len(batch))
        return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _settings(self, beta: float) -> StepSettings:
        assert self.control is not None
        cost = price(self.config, beta, self.control.kl.kl_placement)
        actor, rollout = self.config["actor_rollout_ref"]["actor"], self.config["actor_rollout_ref"]["rollout"]
        return StepSettings(
            loss_agg_mode=actor["loss_agg_mode"],
            group_size=int(rollout["n"]),
            beta=beta,
            price=None if isinstance(cost, str) else cost,
            leave_one_out=BASELINES.get(self.config["algorithm"]["adv_estimator"]) == "leave_one_out",
        )

    def save(self, save: Callable[[], Any], trainer: Any) -> Any:
        """Write the state, and which run of `klamp train` it is, into the checkpoint before verl makes it."""
        folder = self._folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        if (identity := folder.parents[1] / IDENTITY).is_file():
            shutil.copyfile(identity, folder / IDENTITY)
        if self.control is not None:
            beside = folder / f"{STATE}.new"
            beside.write_text(json.dumps({"loss": self.control.state_dict()}), encoding="utf-8")
            beside.replace(folder / STATE)
        return save()

    def load(self, load: Callable[[], Any], trainer: Any) -> Any:
        """Have verl load its checkpoint, if there is one, and continue from the controller's state in it."""
        loaded = load()
        if trainer.global_steps and self.control is not None:
            options = self.config["trainer"]
            is_named = options["resume_mode"] == "resume_path"
            file = (Path(options["resume_from_path"]) if is_named else self._folder(trainer)) / STATE
            if not file.is_file():
                warnings.warn(f"{file} is missing: beta starts at its configured value", KLWarning, stacklevel=2)
            elif (state := read_state(file).get("loss")) is not None:
                self.control.load_state_dict(state)
        return loaded

    def _folder(self, trainer: Any) -> Path:
        return Path(self.config["trainer"]["default_local_dir"]) / f"global_step_{trainer.global_steps}"


def _control(config: Any) -> KLControl | None:
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    if not actor["use_kl_loss"] or not is_ours(actor["kl_loss_type"]):
        return None
    kl = loss_kl(actor["kl_loss_type"], float(actor["kl_loss_coef"]))
    scaled = divides_by_std(algorithm)
    if kl.kl_placement == "reward" and (scaled or algorithm["adv_estimator"] not in BASELINES):
        raise ConfigError(
            "this KL in the reward needs advantages that are rewards less their group's mean, and nothing else",
            got=f"adv_estimator={algorithm['adv_estimator']}, divided by the group's standard deviation: {scaled}",
            why="it enters once the advantages are formed, as the deviation of each completion's KL from the group's",
            fix="set algorithm.adv_estimator=rloo, or grpo with algorithm.norm_adv_by_std_in_grpo=False",
        )
    warn_few_prompts(kl, int(config["data"]["train_batch_size"]))
    return KLControl(kl) if is_driven(kl) else None


def nested(added: Mapping[str, Tensor], mask: Any) -> dict[str, Tensor]:
    """Per-token columns without padding, as verl's queue has them."""
    lengths = mask.offsets().diff().tolist()

    def ragged(column: Tensor) -> Tensor:
        rows = [row[:length] for row, length in zip(column, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return {name: column if name in PER_ROW else ragged(column) for name, column in added.items()}


def hook(trainer: Any) -> None:
    """Let verl's trainer class call the driver where it has formed advantages, and around checkpoints; once."""
    if hasattr(trainer._compute_advantage, "__wrapped__"):
        return
    methods = {"_compute_advantage": Driver.extend, "_save_checkpoint": Driver.save, "_load_checkpoint": Driver.load}
    for name, ours in methods.items():
        setattr(trainer, name, _hooked(getattr(trainer, name), ours))


def _hooked(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A method of verl's trainer; where a driver is there, its method calls the trainer's."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        driver = self.checkpoint_callback
        whole = functools.partial(original, self, *args, **named)
        return ours(driver, whole, self, *args, **named) if isinstance(driver, Driver) else whole()

    return method


def columns(
    sampled: Mapping[str, Tensor],
    prompts: Sequence[str | None],
    control: KLControl,
    tokenizer: Any,
    settings: StepSettings,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The columns to add to verl's (`sampled`, [B, T]), and the metrics; the controller takes in the KL of the step.

    `prompts` are the uids of the rows, None for those that verl fills a batch up with, which carry no KL.
    """
    order = by_prompt(prompts, settings.group_size)
    generation = _generation(sampled, order, settings.group_size)
    reduction = REDUCTIONS.get(settings.loss_agg_mode)
    coefficient = settings.beta
    if control.kl.kl_placement == "reward" and settings.leave_one_out:  # the group's mean has the completion's own KL
        coefficient *= settings.group_size / (settings.group_size - 1)
    inputs = prepared(generation, control, tokenizer, beta=coefficient, reduction=reduction)
    term, batch = control.kl.build_term(), replace(generation, inputs=inputs).batch()
    window = Window()
    window.add(prepare(batch, term))
    metrics = window.emit(Alone())
    scores = sampled["rm_scores"][order]
    rewards = (scores.sum(-1) if scores.ndim == 2 else scores).view(-1, settings.group_size)
    metrics |= control.metrics(settings.price or Price(beta=settings.beta), mean_spread(rewards.double()))
    if settings.price is None:
        metrics.pop("beta/price")
    kl = held_kl(metrics, exact_everywhere=False)
    if kl is not None:
        control.update(kl, metrics, rewards)
    added = {name: inputs[name] for name in (*PER_ROW, *PER_TOKEN) if name in inputs}
    if control.kl.kl_placement != "loss":
        shifted = advantages_less_kl(batch, [Weighted(settings.beta, term)])
        shifted = shifted if shifted.ndim == 2 else shifted.unsqueeze(-1)
        added["advantages"] = shifted * generation.inputs["completion_mask"]
    added[BETA] = torch.full((len(order),), settings.beta, dtype=torch.float64)
    return {name: _for_all_rows(name, column, order, sampled) for name, column in added.items()}, metrics


def by_prompt(prompts: Sequence[str | None], group_size: int) -> Tensor:
    """The rows that have a prompt, in an order in which the completions of one stand next to each other. [n]"""
    sizes = set(Counter(prompt for prompt in prompts if prompt is not None).values())
    if sizes != {group_size}:
        raise ConfigError(
            "the completions of a prompt are not all in verl's batch",
            got=f"groups of {', '.join(map(str, sorted(sizes)))}",
            why=f"a group of rollout.n={group_size} decides together what its KL is clipped at, and is compared with",
            fix="use a trainer_mode that trains on whole groups (sync), and agent loops with one output per completion",
        )
    pairs = sorted((prompt, row) for row, prompt in enumerate(prompts) if prompt is not None)
    return torch.tensor([row for _, row in pairs])


def _for_all_rows(name: str, column: Tensor, order: Tensor, sampled: Mapping[str, Tensor]) -> Tensor:
    """A column of the rows in `order` in the whole batch; the other rows carry no KL."""
    filling = torch.zeros_like(column[:1]) if name in PER_TOKEN else column[:1]
    rows = sampled.get(name, filling.expand(len(sampled["responses"]), *column.shape[1:])).clone()
    rows[order] = column.to(rows.dtype)
    return rows


def _generation(sampled: Mapping[str, Tensor], order: Tensor, group_size: int) -> Generation:
    inputs = {name: sampled[column][order] for column, name in NAMES.items() if column in sampled}
    return Generation(
        inputs=inputs,
        old_logprobs=inputs["old_per_token_logps"],
        rows=[{}] * len(order),
        lengths=inputs["completion_mask"].sum(-1),
        group_size=group_size,
        accelerator=Alone(),
    )
