"""Losses of NeMo-RL, called from a checkout as its trainer calls them: a trainer that no other bench uses.

`right` of each case was written before the first run. Nothing of NeMo-RL is copied: its files are imported by path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.audit.bench.worlds import BETA, Case, World

PROJECT = "NeMo-RL"
STANDINS = {
    "nemo_rl.data.chat_templates": ("COMMON_CHAT_TEMPLATES",),
    "nemo_rl.models.policy": ("TokenizerConfig",),
    "nemo_rl.utils.fastokens": ("maybe_patch_fastokens",),
    "nemo_rl.utils.logger": ("Logger",),
    "nemo_rl.distributed.batched_data_dict": ("BatchedDataDict",),
    "nemo_rl.models.dtensor.parallelize": ("to_local_if_dtensor",),
}
"""Modules that need Ray or a cluster, and the names that are imported from them. None is used by a loss."""


@contextmanager
def imported(folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """The modules of the losses, of the advantages, and of the distributed helpers."""
    parts = [path.parent for path in folder.joinpath("nemo_rl").rglob("*.py")]
    packages = {".".join(path.relative_to(folder).parts): path for path in dict.fromkeys(parts)}
    for name, path in packages.items():
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(path)]
    for name, members in STANDINS.items():
        sys.modules.setdefault(name, ModuleType(name))
        vars(sys.modules[name]).update(dict.fromkeys(members, dict))
    try:
        losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
        vars(sys.modules["nemo_rl.algorithms.loss"]).update(vars(losses))
        names = ("nemo_rl.algorithms.advantage_estimator", "nemo_rl.distributed.model_utils")
        yield losses, *(importlib.import_module(name) for name in names)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "nemo_rl"]:
            del sys.modules[name]


def shifted(x: Tensor) -> Tensor:
    """Its tensors are [B, S], and the loss leaves the first place out."""
    return torch.cat([torch.zeros_like(x[:, :1]), x], 1)


def batch(w: World, **more: Tensor) -> dict[str, Tensor]:
    """What its data loader passes to a loss."""
    per_token = {"prev_logprobs": w.old, "generation_logprobs": w.sampler, "reference_policy_logprobs": w.ref}
    per_token |= {"token_mask": w.m, "advantages": w.a.expand_as(w.logp)} | more
    return {name: shifted(x) for name, x in per_token.items()} | {"sample_mask": torch.ones(len(w.logp))}


def counts(w: World, times: int = 1) -> tuple[Tensor, Tensor]:
    """The global counts of sequences and tokens, over so many micro-batches."""
    return torch.tensor(float(times * len(w.logp))), times * w.m.sum()


REVERSE: dict[str, Any] = {"kl": ("reverse",), "ok": True}
SAMPLED: dict[str, Any] = {"use_on_policy_kl_approximation": True}
SEQUENCE: dict[str, Any] = {"sequence_level_importance_ratios": True, "token_level_loss": False}
WEIGHTED: dict[str, Any] = {"use_importance_sampling_correction": True}


def truncated(kind: str, high: float, low: float | None = None) -> dict[str, Any]:
    """Settings of a truncated sampler weight."""
    name = "truncated_importance_sampling"
    return WEIGHTED | {f"{name}_type": kind, f"{name}_ratio": high, f"{name}_ratio_min": low}


SETTINGS: dict[str, dict[str, Any]] = {
    "k3": {},
    "k1": {"reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_type": "k2"},
    "k3, ratio to the sampler": SAMPLED,
    "k1, ratio to the sampler": SAMPLED | {"reference_policy_kl_type": "k1"},
    "k2, ratio to the sampler": SAMPLED | {"reference_policy_kl_type": "k2"},
    "k3, sequence mean": {"token_level_loss": False},
    "REINFORCE": {"disable_ppo_ratio": True},
    "ratio forced to 1": {"force_on_policy_ratio": True},
    "clip (0.2, 0.28)": {"ratio_clip_max": 0.28},
    "dual clip": {"ratio_clip_c": 1.3},
    "gspo": SEQUENCE,
    "cispo": {"use_cispo": True, "ratio_clip_max": 0.28},
    "sampler weight": WEIGHTED,
    "tis, at most 2": truncated("tis", 2.0),
    "icepop": truncated("icepop", 1.02, 0.98),
    "seq-mask-tis": truncated("seq-mask-tis", 1.002, 0.996),
    "gspo, sampler weight of the sequence": SEQUENCE | WEIGHTED,
    "no KL": {"reference_policy_kl_penalty": 0.0},
    "log-ratio bounded at 0.2": {"kl_input_clamp_value": 0.2},
    "KL bounded at 0.05": {"kl_output_clamp_value": 0.05},
    "KL meant, and in no reward": {"use_kl_in_reward": True},
}
RIGHT: dict[str, dict[str, Any]] = {
    "k3": {"mean": "token"},
    "k3, sequence mean": {"mean": "sequence"},
    "gspo": {"mean": "sequence"},
    "REINFORCE": {"surrogate": "1"},
    "ratio forced to 1": {"surrogate": "1"},
    "no KL": {"kl": ("none",), "beta": None},
    "log-ratio bounded at 0.2": {"beta": None},
    "KL bounded at 0.05": {"beta": None},
    "KL meant, and in no reward": {"kl": ("none",), "ok": False, "codes": ("kl-absent",), "beta": None},
}
"""What is right beside `REVERSE`."""
PASSED: dict[str, dict[str, Any]] = {
    "clip (0.2, 0.28)": {"clip": (0.2, 0.28)},
    "cispo": {"clip": (0.2, 0.28)},
    "no KL": {"beta": 0.0},
    "KL meant, and in no reward": {"kl_in": "loss"},
}


def policy_losses(losses: Any, advantages: Any) -> Iterator[Case]:
    """`ClippedPGLossFn`: estimators, reductions, ratios, clips and sampler weights; the KL in the reward; faults."""

    def loss(w: World, settings: dict[str, Any], times: int = 1, **data: Tensor) -> Tensor:
        settings = {"reference_policy_kl_penalty": BETA} | settings
        host = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**settings))
        return host(w.logp, batch(w, **data), *counts(w, times))[0]

    for name in SETTINGS:
        make = lambda w, x=name: (loss(w, SETTINGS[x]), PASSED.get(x, {}))  # noqa: E731
        yield Case(f"NeMo-RL {name}", make, **(REVERSE | RIGHT.get(name, {})))
    yield Case("NeMo-RL one of four micro-batches", lambda w: loss(w, {}, 4), **REVERSE)

    def in_reward(w: World, kind: str) -> Any:
        settings = losses.ClippedPGLossConfig(
            reference_policy_kl_penalty=BETA, use_kl_in_reward=True, reference_policy_kl_type=kind
        )
        host = advantages.ReinforcePlusPlusAdvantageEstimator(advantages.AdvEstimatorConfig(), settings)
        prompts = torch.arange(len(w.logp)).div(w.group, rounding_mode="floor")[:, None]
        given = {"logprobs_policy": w.old, "logprobs_reference": w.ref}
        a = host.compute_advantage(prompts, w.rewards.float(), w.m, **given)
        return loss(w, {"use_kl_in_reward": True}, advantages=a), {"advantages": a}

    wrong = {"kl": ("k3",), "ok": False, "codes": ("kl-k3-in-advantage",), "beta": None}
    yield Case("NeMo-RL REINFORCE++, k3 in the reward", lambda w: in_reward(w, "k3"), **wrong)
    yield Case("NeMo-RL REINFORCE++, k1 in the reward", lambda w: in_reward(w, "k1"), **(REVERSE | {"beta": None}))

    padding: dict[str, Any] = {"kl": (), "ok": False, "codes": ("off-mask-gradient",), "beta": None}
    yield Case("NeMo-RL, mask of ones", lambda w: loss(w, {}, token_mask=torch.ones_like(w.m)), **padding)

    def as_in_dpo(w: World) -> Any:
        ref = w.ref.roll(-1, 1)
        return loss(w, {}, reference_policy_logprobs=ref), {"ref_logprobs": ref}

    shift: dict[str, Any] = {"kl": (), "ok": False, "codes": ("shift",), "beta": None}
    yield Case("NeMo-RL, the reference rolled as its DPO does", as_in_dpo, **shift)


def other_losses(losses: Any) -> Iterator[Case]:
    """Supervised training and DPO: no KL of a policy loss."""

    def nll(w: World) -> Any:
        value = losses.NLLLossFn()(w.logp, batch(w), *counts(w))[0]
        return value, {"ref_logprobs": None, "advantages": None, "old_logprobs": None, "beta": None}

    def dpo(w: World) -> Any:
        data = batch(w) | {"reference_policy_logprobs": torch.cat([w.ref, torch.zeros_like(w.ref[:, :1])], 1)}
        value = losses.DPOLossFn(losses.DPOLossConfig())(w.logp, data, *counts(w))[0]
        return value, {"advantages": None, "old_logprobs": None, "beta": None}

    for name, make in (("NLL", nll), ("DPO", dpo)):
        yield Case(
            f"NeMo-RL {name}", lambda w, f=make: (f(w)[0], {"sampler_logprobs": None} | f(w)[1]), kl=(), beta=None
        )


def distillation(losses: Any, helpers: Any) -> Iterator[Case]:
    """`DistillationLossFn` on logits: the teacher's top four, its default and its other settings."""

    def loss(w: World, kind: str, zero: bool) -> Any:
        top = w.ref_logits.topk(4)
        s, t, entropy = helpers.get_distillation_topk_logprobs_from_logits(
            w.logits, top.values, top.indices, zero, zero and kind != "forward"
        )
        config = losses.DistillationLossConfig(kl_type=kind, zero_outside_topk=zero)
        data = {"input_ids": w.ids, "token_mask": w.m, "sample_mask": torch.ones(len(w.ids))}
        value = losses.DistillationLossFn(config)(s, t, entropy, data, *counts(w))[0]
        mask = torch.cat([w.mask[:, 1:], torch.zeros_like(w.mask[:, :1])], 1)
        nothing = dict.fromkeys(("policy_logprobs", "ref_logprobs", "old_logprobs", "sampler_logprobs", "advantages"))
        given = {"logits": w.logits, "teacher_logits": w.ref_logits, "mask": mask, "beta": None, "watched": None}
        means = "forward" if kind == "forward" else "reverse"
        return value, nothing | given | {"means": means}

    for kind in ("mixed", "forward", "reverse"):
        for zero in (False, True):
            code = "head-teacher-renormalised" if zero else "head-renormalised"
            case: dict[str, Any] = {"kl": (), "ok": False, "codes": (code,), "beta": None}
            yield Case(f"NeMo-RL distillation, {kind}, zero {zero}", lambda w, k=kind, z=zero: loss(w, k, z), **case)
