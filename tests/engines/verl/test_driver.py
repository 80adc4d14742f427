"""What klamp's driver settles over a whole batch, through verl's own `ppo_loss` and trainer class."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from tests.batches import changed, objective_of
from tests.engines.verl.actor import Step, actor_loss, gradient
from tests.engines.verl.test_hooks import AVERAGES
from tests.engines.verl.test_overrides import IN_REWARD
from torch import Tensor
from verl.trainer.ppo.v1 import trainer_base

from klamp.config import KLConfig
from klamp.core.advantages import group_advantages
from klamp.core.objective import grpo_loss
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import measure, prepare, sequence_gate_kl
from klamp.hosts.common.control import KLControl
from klamp.hosts.verl.driver import BETA, Driver, StepSettings, columns
from klamp.hosts.verl.overrides import LOSS_FIELDS, name_of

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")

GROUP = 3
CLIPPED = {"kl_clip_method": "soft", "kl_clip_threshold": 0.05, "kl_clip_temperature": 0.2, "kl_reference_length": 4}
TERMS: dict[str, dict[str, Any]] = {
    "a hard clip": {"kl_clip_method": "hard", "kl_clip_threshold": 0.1, "kl_reference_length": 3},
    "a soft clip": CLIPPED,
    "a clip over the batch, in nats": {**CLIPPED, "kl_clip_level": "batch", "use_per_token_kl_threshold": False},
    "a clip, horizon and weights": {**CLIPPED, "kl_horizon": "sequence", "kl_off_policy": "sequence"},
    "excluded tokens": {"kl_exclude_tokens": (2, 5)},
    "exclusions and a clip": {**CLIPPED, "kl_exclude_tokens": (2,)},
    "a KL in the advantage": {"kl_placement": "advantage", "kl_estimator": "k1"},
    "a clipped one over the rest": {**CLIPPED, **IN_REWARD, "kl_placement": "advantage"},
    "a KL in the reward, clipped": {**CLIPPED, **IN_REWARD},
    "a KL in the reward, bounded": {**IN_REWARD, "kl_max_log_ratio": 0.3},
    "a target": {"target_kl": 0.05},
    "a schedule": {"kl_warmup_steps": 3, "kl_schedule": "linear"},
}


class Tokenizer:
    """Ten tokens, none of them special."""

    all_special_ids: tuple[int, ...] = ()
    unk_token_id = None

    def __len__(self) -> int:
        return 10

    def convert_tokens_to_ids(self, name: object) -> object:
        return name if isinstance(name, int) else None


def settings(average: str = "token-mean", *, beta: float = 0.3, leave_one_out: bool = False) -> StepSettings:
    return StepSettings(loss_agg_mode=average, group_size=GROUP, beta=beta, price=None, leave_one_out=leave_one_out)


def sampled_of(step: Step, shuffled: Tensor, *, seed: int = 3) -> tuple[dict[str, Tensor], list[str]]:
    """verl's columns of the step's completions in another order, and their prompts, three completions to each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 10, step.mask.shape, generator=generator)
    rewards = torch.randn(len(step.mask), generator=generator, dtype=step.old.dtype)
    prompts = [f"prompt {row // GROUP}" for row in range(len(step.mask))]
    found = {"responses": ids, "response_mask": step.mask, "advantages": step.advantages, "rm_scores": rewards}
    found |= {"old_log_probs": step.old, "rollout_log_probs": step.old, "ref_log_prob": step.ref}
    return {name: column[shuffled] for name, column in found.items()}, [prompts[int(row)] for row in shuffled]


def of_group(rewards: Tensor) -> Tensor:
    return group_advantages(rewards, GROUP, baseline="leave_one_out", scale="none")


def expected_loss(step: Step, ids: Tensor, rewards: Tensor, kl: KLConfig, average: str) -> Tensor:
    """klamp's own loss on whole groups in order, without anything of verl."""
    term = kl.build_term()
    kl_mask = step.mask.clone()
    kl_mask &= ~torch.isin(ids, torch.tensor([int(token) for token in kl.kl_exclude_tokens], dtype=torch.long))
    length = kl.kl_reference_length
    batch = changed(
        step.batch(),
        kl_mask=kl_mask if kl.excludes else None,
        group_size=GROUP,
        reference_length=None if length is None else torch.full((len(ids),), float(length)),
    )
    before = replace(batch, policy_logprobs=step.old)
    batch = changed(batch, gate_kl=sequence_gate_kl(measure(before, term)) if term.clip_method != "none" else None)
    if term.placement == "reward":
        priced = prepare(replace(batch, policy_logprobs=step.old), term)
        batch = replace(batch, advantages=advantages_with_kl(rewards, priced, beta=0.3, advantages=of_group))
    longest = step.mask.shape[1] if average == "seq-mean-token-sum-norm" else None
    objective = objective_of(reduction=AVERAGES[average], max_length=longest, beta=0.3, kl=term)  # pyright: ignore[reportArgumentType]
    return grpo_loss(batch, objective).loss


@pytest.mark.gate
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("term", TERMS)
def test_the_loss_is_klamps_own(term: str, average: str) -> None:
    """Whatever the order of the rows, padded or nested, whole or in parts."""
    kl, step = KLConfig(beta=0.3, **TERMS[term]), Step.random(6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    back = torch.argsort(order)
    ordered, _ = sampled_of(step, torch.arange(6))
    if kl.kl_placement == "reward":
        step = replace(step, advantages=of_group(ordered["rm_scores"]).unsqueeze(-1) * step.mask)
    added, _ = columns(*sampled_of(step, order), KLControl(kl), Tokenizer(), settings(average, leave_one_out=True))
    added = {name: column[back] for name, column in added.items()}
    name = name_of(kl, LOSS_FIELDS)
    options = {"use_kl_loss": True, "kl_loss_type": name, "kl_loss_coef": 9.0, "loss_agg_mode": average}
    expected = expected_loss(step, ordered["responses"], ordered["rm_scores"], kl, average)
    slope = gradient(expected, step)
    for nested in (False, True):
        found, metrics = actor_loss(step, columns=added, nested=nested, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
        torch.testing.assert_close(gradient(found, step), slope, rtol=0, atol=1e-8)
        assert metrics["kl_coef"] == pytest.approx(0.3), "the batch's, not the configuration's"
    if average == "seq-mean-token-sum-norm":
        return  # the padded length of a part is its own
    totals = {"tokens": int(step.mask.sum()), "rows": 6}
    parts = [
        actor_loss(step.rows(part), columns={name: x[part] for name, x in added.items()}, **totals, **options)[0]
        for part in (slice(0, 2), slice(2, 3), slice(3, 6))
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), expected, rtol=0, atol=1e-8)


class Queue:
    """As much of verl's queue as the driver uses."""

    def __init__(self, data: TensorDict) -> None:
        self.data = data

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return self.data.select(*select_fields, strict=False)

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: TensorDict) -> str:
        self.data.update(fields)
        return "the batch with columns"


class Keys:
    """A batch as verl's trainer passes it around: the keys of its rows."""

    partition_id = "train"

    def __init__(self, tags: list[dict[str, Any]]) -> None:
        self.tags = tags
        self.keys = [str(row) for row in range(len(tags))]

    def __len__(self) -> int:
        return len(self.tags)


def config_of(tmp_path: Any, kl: KLConfig, **algorithm: Any) -> Any:
    name = name_of(kl, LOSS_FIELDS)
    actor = {"use_kl_loss": True, "kl_loss_type": name, "kl_loss_coef": kl.beta, "loss_agg_mode": "token-mean"}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor, "rollout": {"n": GROUP}},
            "algorithm": {"adv_estimator": "rloo", "use_kl_in_reward": False, **algorithm},
            "data": {"train_batch_size": 8},
            "trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"},
        }
    )


def ragged(values: Tensor, lengths: list[int]) -> Tensor:
    rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_columns_go_into_the_queue_and_rows_that_fill_up_carry_nothing(tmp_path: Any, monkeypatch: Any) -> None:
    step = Step.random(7)
    lengths = step.mask.sum(-1).tolist()
    sampled, _ = sampled_of(step, torch.arange(7))
    excluded = int(sampled["responses"][0, 0])
    clip: dict[str, Any] = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1, "kl_reference_length": 4}
    kl = KLConfig(beta=0.3, **clip, kl_exclude_tokens=(excluded,), target_kl=0.05)
    token = {name: sampled[name] for name in ("responses", "old_log_probs", "ref_log_prob", "advantages")}
    token |= {"response_mask": step.mask.long(), "rm_scores": sampled["rm_scores"].unsqueeze(-1) * step.mask}
    data = TensorDict({name: ragged(each, lengths) for name, each in token.items()}, batch_size=[7])
    data["uid"] = NonTensorStack(*["b", "a", "b", "a", "a", "b", "filling"])
    queue, hooked = Queue(data), trainer_base.PPOTrainer
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    for method in ("_compute_advantage", "_save_checkpoint", "_load_checkpoint"):
        monkeypatch.setattr(hooked, method, lambda self, batch=None, metrics=None: batch)
    driver = Driver(config_of(tmp_path, kl))
    batch = Keys([{"is_padding": row == 6} for row in range(7)])
    trainer: Any = SimpleNamespace(
        checkpoint_callback=driver, global_steps=1, total_training_steps=5, tokenizer=Tokenizer()
    )
    metrics: dict[str, Any] = {}
    assert hooked._compute_advantage(trainer, batch, metrics=metrics) == "the batch with columns"
    assert queue.data[BETA].tolist() == [pytest.approx(0.3)] * 7 and metrics["beta"] == 0.3
    carried = [row.tolist() for row in queue.data["klamp_kl_mask"].unbind()]
    assert [len(row) for row in carried] == lengths
    expected = [[token != excluded for token in row.tolist()] for row in data["responses"].unbind()]
    assert carried == [*expected[:6], [False] * lengths[6]] and not all(map(all, expected[:6]))
    assert queue.data["klamp_reference_length"].tolist()[:6] == [4.0] * 6
    assert metrics["kl/k3"] > 0 and driver.control is not None and driver.control.controller.value != 0.3
