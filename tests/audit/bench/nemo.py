"""Losses of NeMo-RL, called from a checkout as its trainer calls them; nothing of NeMo-RL is copied.

No bench used this trainer before the thresholds were fixed; the right answers were written before the first run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tests.audit.bench.worlds import BETA, Case, World, wrong
from torch import Tensor

FOLDER = Path(os.environ.get("KLAMP_CHECKOUTS", "none")) / "NeMo-RL"
STANDINS = {
    "nemo_rl.data.chat_templates": "COMMON_CHAT_TEMPLATES",
    "nemo_rl.models.policy": "TokenizerConfig",
    "nemo_rl.utils.fastokens": "maybe_patch_fastokens",
    "nemo_rl.utils.logger": "Logger",
    "nemo_rl.distributed.batched_data_dict": "BatchedDataDict",
    "nemo_rl.models.dtensor.parallelize": "to_local_if_dtensor",
}
"""Modules that need Ray or a cluster, and the name that is imported from them. None is used by a loss."""


@contextmanager
def imported() -> Iterator[tuple[Any, ...]]:
    """The modules of the losses, of the advantages, and of the distributed helpers."""
    for path in {path.parent for path in FOLDER.joinpath("nemo_rl").rglob("*.py")}:
        name = ".".join(path.relative_to(FOLDER).parts)
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(path)]
    for name, member in STANDINS.items():
        vars(sys.modules.setdefault(name, ModuleType(name)))[member] = dict
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


SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}
WEIGHTED = {"use_importance_sampling_correction": True}


def truncated(kind: str, high: float, low: float | None = None) -> dict[str, Any]:
    """A truncated sampler weight."""
    name = "truncated_importance_sampling"
    return WEIGHTED | {f"{name}_type": kind, f"{name}_ratio": high, f"{name}_ratio_min": low}


SETTINGS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"mean": "token"}),
    ({"reference_policy_kl_type": "k1"}, {}, {}),
    ({"reference_policy_kl_type": "k2"}, {}, {}),
    ({"use_on_policy_kl_approximation": True}, {}, {}),
    ({"use_on_policy_kl_approximation": True, "reference_policy_kl_type": "k1"}, {}, {}),
    ({"use_on_policy_kl_approximation": True, "reference_policy_kl_type": "k2"}, {}, {}),
    ({"token_level_loss": False}, {}, {"mean": "sequence"}),
    ({"disable_ppo_ratio": True}, {}, {"surrogate": "1"}),
    ({"force_on_policy_ratio": True}, {}, {"surrogate": "1"}),
    ({"ratio_clip_max": 0.28}, {"clip": (0.2, 0.28)}, {}),
    ({"ratio_clip_c": 1.3}, {}, {}),
    (SEQUENCE, {}, {"mean": "sequence"}),
    ({"use_cispo": True, "ratio_clip_max": 0.28}, {"clip": (0.2, 0.28)}, {}),
    (WEIGHTED, {}, {}),
    (truncated("tis", 2.0), {}, {}),
    (truncated("icepop", 1.02, 0.98), {}, {}),
    (truncated("seq-mask-tis", 1.002, 0.996), {}, {}),
    (SEQUENCE | WEIGHTED, {}, {}),
    ({"reference_policy_kl_penalty": 0.0}, {"beta": 0.0}, {"kl": ("none",), "beta": None}),
    ({"kl_input_clamp_value": 0.2}, {}, {"beta": None}),
    ({"kl_output_clamp_value": 0.05}, {}, {"beta": None}),
]
"""Settings, what else is passed, and what is right beside a KL that is `reverse`."""


def cases() -> Iterator[Case]:
    """Estimators, reductions, ratios, clips and sampler weights; the KL in the reward; distillation; faults."""
    with imported() as modules:
        yield from _cases(*modules)


def _cases(losses: Any, advantages: Any, helpers: Any) -> Iterator[Case]:
    def loss(w: World, settings: dict[str, Any], **more: Any) -> Tensor:
        config = losses.ClippedPGLossConfig(**({"reference_policy_kl_penalty": BETA} | settings))
        return call(losses.ClippedPGLossFn(config), w, **more)

    for settings, extra, right in SETTINGS:
        yield Case(f"NeMo-RL {settings}", lambda w, s=settings, e=extra: (loss(w, s), e), **right)
    yield Case("NeMo-RL one of four micro-batches", lambda w: loss(w, {}, times=4))
    yield wrong(
        "NeMo-RL no KL", lambda w: (loss(w, {"use_kl_in_reward": True}), {"kl_in": "loss"}), "kl-absent", "none"
    )

    def in_reward(w: World, kind: str) -> Any:
        settings = {"use_kl_in_reward": True, "reference_policy_kl_type": kind, "reference_policy_kl_penalty": BETA}
        config, estimator = losses.ClippedPGLossConfig(**settings), advantages.AdvEstimatorConfig()
        prompts = torch.arange(len(w.logp)).div(w.group, rounding_mode="floor")[:, None]
        host = advantages.ReinforcePlusPlusAdvantageEstimator(estimator, config)
        given = {"logprobs_policy": w.old, "logprobs_reference": w.ref}
        a = host.compute_advantage(prompts, w.rewards.float(), w.m, **given)
        return loss(w, {"use_kl_in_reward": True}, advantages=a), {"advantages": a}

    yield wrong("NeMo-RL k3 in the reward", lambda w: in_reward(w, "k3"), "kl-k3-in-advantage", "k3")
    yield Case("NeMo-RL k1 in the reward", lambda w: in_reward(w, "k1"), beta=None)
    yield wrong("NeMo-RL mask of ones", lambda w: loss(w, {}, token_mask=torch.ones_like(w.m)), "off-mask-gradient")

    def as_in_dpo(w: World) -> Any:
        ref = w.ref.roll(-1, 1)
        return loss(w, {}, reference_policy_logprobs=ref), {"ref_logprobs": ref}

    yield wrong("NeMo-RL the reference rolled as its DPO does", as_in_dpo, "shift")
    hidden = dict.fromkeys(("advantages", "old_logprobs", "sampler_logprobs", "beta"))

    def dpo(w: World) -> Any:
        ref = torch.cat([w.ref, torch.zeros_like(w.ref[:, :1])], 1)  # in its place already
        return call(losses.DPOLossFn(losses.DPOLossConfig()), w, reference_policy_logprobs=ref), hidden

    nll = lambda w: (call(losses.NLLLossFn(), w), hidden | {"ref_logprobs": None})  # noqa: E731
    yield Case("NeMo-RL NLL", nll, kl=(), beta=None)
    yield Case("NeMo-RL DPO", dpo, kl=(), beta=None)

    def distilled(w: World, kind: str, zero: bool) -> Any:
        top, forward = w.ref_logits.topk(4), kind == "forward"
        get = helpers.get_distillation_topk_logprobs_from_logits
        scored = get(w.logits, top.values, top.indices, zero, zero and not forward)
        config = losses.DistillationLossConfig(kl_type=kind, zero_outside_topk=zero)
        rows = torch.ones(len(w.ids))
        data = {"input_ids": w.ids, "token_mask": w.m, "sample_mask": rows}
        value = losses.DistillationLossFn(config)(*scored, data, rows.sum(), w.m.sum())[0]
        mask = torch.cat([w.mask[:, 1:], torch.zeros_like(w.mask[:, :1])], 1)
        return value, w.teacher_passed(mask=mask, ids=None, means="forward" if forward else "reverse")

    for kind, zero in product(("mixed", "forward", "reverse"), (False, True)):
        code = "head-teacher-renormalised" if zero else "head-renormalised"
        yield wrong(f"NeMo-RL distillation, {kind}, {zero}", lambda w, k=kind, z=zero: distilled(w, k, z), code)
