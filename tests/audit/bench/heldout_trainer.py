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
from tests.audit.bench.worlds import BETA, Case, World
from torch import Tensor

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


def call(host: Any, w: World, *, times: int = 1, **more: Tensor) -> Tensor:
    """A loss of log-probabilities: its tensors are [B, S] with one place in front, over so many micro-batches."""
    tensors = {"prev_logprobs": w.old, "generation_logprobs": w.sampler, "reference_policy_logprobs": w.ref}
    tensors |= {"token_mask": w.m, "advantages": w.a.expand_as(w.logp)} | more
    front, rows = torch.zeros(len(w.logp), 1), torch.ones(len(w.logp))
    data = {k: x if x.shape[1] > w.m.shape[1] else torch.cat([front, x], 1) for k, x in tensors.items()}
    return host(w.logp, data | {"sample_mask": rows}, times * rows.sum(), times * w.m.sum())[0]


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
    "KL in no reward": {"use_kl_in_reward": True},
}
RIGHT: dict[str, dict[str, Any]] = {
    "k3": {"mean": "token"},
    "no KL": {"kl": ("none",), "beta": None},
    "KL in no reward": {"kl": ("none",), "ok": False, "codes": ("kl-absent",), "beta": None},
}
RIGHT |= {key: {"mean": "sequence"} for key in ("k3, sequence mean", "gspo")}
RIGHT |= {key: {"surrogate": "1"} for key in ("REINFORCE", "ratio forced to 1")}
RIGHT |= {key: {"beta": None} for key in ("log-ratio bounded at 0.2", "KL bounded at 0.05")}
PASSED: dict[str, dict[str, Any]] = {"no KL": {"beta": 0.0}, "KL in no reward": {"kl_in": "loss"}}
PASSED |= {key: {"clip": (0.2, 0.28)} for key in ("clip (0.2, 0.28)", "cispo")}


def policy_losses(losses: Any, advantages: Any) -> Iterator[Case]:
    """`ClippedPGLossFn`: estimators, reductions, ratios, clips and sampler weights; the KL in the reward; faults."""

    def loss(w: World, settings: dict[str, Any], **more: Any) -> Tensor:
        config = losses.ClippedPGLossConfig(**({"reference_policy_kl_penalty": BETA} | settings))
        return call(losses.ClippedPGLossFn(config), w, **more)

    for name in SETTINGS:
        make = lambda w, x=name: (loss(w, SETTINGS[x]), PASSED.get(x, {}))  # noqa: E731
        yield Case(f"NeMo-RL {name}", make, **(REVERSE | RIGHT.get(name, {})))
    yield Case("NeMo-RL one of four micro-batches", lambda w: loss(w, {}, times=4), **REVERSE)

    def in_reward(w: World, kind: str) -> Any:
        settings = {"use_kl_in_reward": True, "reference_policy_kl_type": kind, "reference_policy_kl_penalty": BETA}
        config = losses.ClippedPGLossConfig(**settings)
        host = advantages.ReinforcePlusPlusAdvantageEstimator(advantages.AdvEstimatorConfig(), config)
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


def other_losses(losses: Any, helpers: Any) -> Iterator[Case]:
    """Supervised training, DPO, and distillation on logits with the teacher's top four."""
    hidden = dict.fromkeys(("advantages", "old_logprobs", "sampler_logprobs", "beta"))

    def nll(w: World) -> Any:
        return call(losses.NLLLossFn(), w), hidden | {"ref_logprobs": None}

    def dpo(w: World) -> Any:
        ref = torch.cat([w.ref, torch.zeros_like(w.ref[:, :1])], 1)  # in its place already
        return call(losses.DPOLossFn(losses.DPOLossConfig()), w, reference_policy_logprobs=ref), hidden

    yield Case("NeMo-RL NLL", nll, kl=(), beta=None)
    yield Case("NeMo-RL DPO", dpo, kl=(), beta=None)

    def loss(w: World, kind: str, zero: bool) -> Any:
        top = w.ref_logits.topk(4)
        s, t, entropy = helpers.get_distillation_topk_logprobs_from_logits(
            w.logits, top.values, top.indices, zero, zero and kind != "forward"
        )
        config = losses.DistillationLossConfig(kl_type=kind, zero_outside_topk=zero)
        rows = torch.ones(len(w.ids))
        data = {"input_ids": w.ids, "token_mask": w.m, "sample_mask": rows}
        value = losses.DistillationLossFn(config)(s, t, entropy, data, rows.sum(), w.m.sum())[0]
        mask = torch.cat([w.mask[:, 1:], torch.zeros_like(w.mask[:, :1])], 1)
        nothing = hidden | dict.fromkeys(("policy_logprobs", "ref_logprobs", "watched"))
        means = "forward" if kind == "forward" else "reverse"
        given = {"logits": w.logits, "teacher_logits": w.ref_logits, "mask": mask, "means": means}
        return value, nothing | given

    for kind in ("mixed", "forward", "reverse"):
        for zero in (False, True):
            code = "head-teacher-renormalised" if zero else "head-renormalised"
            case: dict[str, Any] = {"kl": (), "ok": False, "codes": (code,), "beta": None}
            yield Case(f"NeMo-RL distillation, {kind}, zero {zero}", lambda w, k=kind, z=zero: loss(w, k, z), **case)
