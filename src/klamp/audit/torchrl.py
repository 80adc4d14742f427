"""Audits torchrl: the KL of `GRPOLoss`, the k3 estimate that it publishes, the KL in the reward, and distillation.

`GRPOLoss.forward` runs as it is, on a batch without a model: only the method that asks the actor for log-probabilities
is answered with those of the audit.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from importlib.metadata import version
from types import SimpleNamespace

import torch
from torch import Tensor

from klamp.audit.examine import Distillation, Sequences, Subject, Term


def subject() -> Subject:
    """Prepare the KL of the installed torchrl for an audit."""
    from torchrl.objectives.llm import GRPOLoss, k3_kl_token_estimate

    loss = GRPOLoss(None)
    return Subject(
        title=f"torchrl {version('torchrl')}, GRPOLoss",
        losses=(
            Term(name="GRPOLoss, kl_to_ref_coeff", loss=kl_loss),
            Term(name="k3_kl_token_estimate(ref, policy)", function=lambda p, q: k3_kl_token_estimate(q, p)),
            Term(name="KLComputation, in the reward", function=reward_kl, in_reward=True),
            Distillation(name="DistillationLoss, kl_direction=reverse (default)", loss=distillation, means="reverse"),
        ),
        notes=(f"kl_to_ref_coeff is {loss.kl_to_ref_coeff} by default: without it there is no KL in the loss.",),
    )


def kl_loss(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """The KL part of torchrl's loss, as a `HostLoss`."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import GRPOLoss

    loss = GRPOLoss(None, kl_to_ref_coeff=1.0, entropy_bonus=False)
    loss._get_cur_log_prob = lambda tensordict: (policy, SimpleNamespace(mask=mask), False)  # pyright: ignore
    batch = TensorDict({"advantage": torch.zeros_like(policy)[..., None]}, batch_size=[len(policy)])
    batch[loss.tensor_keys.action] = torch.zeros_like(mask, dtype=torch.long)
    batch[loss.tensor_keys.sample_log_prob] = old
    batch[loss.tensor_keys.ref_log_probs] = ref
    return loss(batch).loss_kl_to_ref


def distillation(batch: Sequences) -> Tensor:
    """torchrl's `DistillationLoss` of a batch, at its defaults."""
    from tensordict import TensorDict, lazy_stack
    from tensordict.nn import TensorDictModule
    from torchrl.objectives.llm import DistillationLoss

    student, teacher, tokens, mask = batch.aligned
    scores, theirs = (x.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in (student, teacher))
    actor = TensorDictModule(lambda _: scores, in_keys=["tokens"], out_keys=[("log_probs", "full")])
    loss = DistillationLoss(actor)
    loss.set_keys(history="tokens")
    rows = [
        TensorDict(
            {
                "tokens": tokens[row],
                ("masks", "all_assistant_mask"): mask[row],
                ("masks", "all_attention_mask"): torch.ones_like(mask[row]),
                ("next", "teacher_log_probs", "full"): theirs[row],
            }
        )
        for row in range(len(tokens))
    ]
    return loss(lazy_stack(rows)).loss_distill


def reward_kl(policy: Tensor, ref: Tensor) -> Tensor:
    """What `KLComputation` takes from the reward of each token at coefficient 1."""
    from tensordict import TensorDict
    from torchrl.envs.llm.transforms.kl import KLComputation

    with warnings.catch_warnings(action="ignore"):  # nested tensors call themselves a prototype
        rewards = torch.nested.as_nested_tensor(list(torch.zeros_like(policy)[..., None]), layout=torch.strided)
    step = TensorDict(
        {"log_probs": {"full": policy.detach()}, "ref_log_probs": {"full": ref}, "reward": rewards},
        batch_size=[len(policy)],
    )
    done = KLComputation(coeff=1.0)(TensorDict({"next": step}, batch_size=[len(policy)]))
    return -torch.stack([*done["next", "reward"].unbind()])[..., 0]
