"""Losses of NeMo-RL, called from a checkout as its trainer calls them; nothing of NeMo-RL is copied.

No bench used this trainer before the thresholds were fixed; the right answers were written before the first run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tests.audit.bench.worlds import BETA, Case, World, wrong
from torch import Tensor

FOLDER = Path(os.environ.get("KLAMP_CHECKOUTS", "none")) / "NeMo-RL"
STANDINS = {
    "data.chat_templates": "COMMON_CHAT_TEMPLATES",
    "models.policy": "TokenizerConfig",
    "utils.fastokens": "maybe_patch_fastokens",
    "utils.logger": "Logger",
    "distributed.batched_data_dict": "BatchedDataDict",
    "models.dtensor.parallelize": "to_local_if_dtensor",
}
"""Modules that need Ray or a cluster, and the name that is imported from them. None is used by a loss."""


def imported() -> tuple[Any, Any]:
    """The modules of the losses and of the advantages."""
    for path in {path.parent for path in FOLDER.joinpath("nemo_rl").rglob("*.py")}:
        name = ".".join(path.relative_to(FOLDER).parts)
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(path)]
    for name, member in STANDINS.items():
        vars(sys.modules.setdefault(f"nemo_rl.{name}", ModuleType(name)))[member] = dict
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    vars(sys.modules["nemo_rl.algorithms.loss"]).update(vars(losses))
    return losses, importlib.import_module("nemo_rl.algorithms.advantage_estimator")


SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}
WEIGHTED = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.02}
SAMPLED, TYPE = {"use_on_policy_kl_approximation": True}, "truncated_importance_sampling_type"
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"reference_policy_kl_type": kind}, {"mean": "token"}) for kind in ("k1", "k2", "k3")),
    *((SAMPLED | {"reference_policy_kl_type": kind}, {}) for kind in ("k1", "k2", "k3")),
    ({"token_level_loss": False}, {"mean": "sequence"}),
    ({"disable_ppo_ratio": True}, {"surrogate": "1"}),
    ({"force_on_policy_ratio": True}, {"surrogate": "1"}),
    ({"ratio_clip_max": 0.28}, {}),
    ({"ratio_clip_c": 1.3}, {}),
    ({"use_cispo": True, "ratio_clip_max": 0.28}, {}),
    (SEQUENCE, {"mean": "sequence"}),
    ({"use_importance_sampling_correction": True}, {}),
    (WEIGHTED | {TYPE: "tis", "truncated_importance_sampling_ratio": 2.0}, {}),
    (WEIGHTED | {TYPE: "icepop", "truncated_importance_sampling_ratio_min": 0.98}, {}),
    (WEIGHTED | {TYPE: "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.996}, {}),
    (SEQUENCE | {"use_importance_sampling_correction": True}, {}),
    ({"kl_input_clamp_value": 0.2}, {"beta": None}),
    ({"kl_output_clamp_value": 0.05}, {"beta": None}),
]
"""Settings, and what is right beside a KL that is `reverse`."""


def cases() -> Iterator[Case]:
    """Estimators, reductions, ratios, clips and sampler weights; the KL in the reward; faults."""
    losses, advantages = imported()

    def loss(w: World, settings: dict[str, Any], **more: Tensor) -> Tensor:
        """Its tensors are [B, S] with one place in front."""
        config = losses.ClippedPGLossConfig(**{"reference_policy_kl_penalty": BETA, **settings})
        tensors = {"prev_logprobs": w.old, "generation_logprobs": w.sampler, "reference_policy_logprobs": w.ref}
        tensors |= {"token_mask": w.m, "advantages": w.a.expand_as(w.logp)} | more
        data = {name: torch.nn.functional.pad(x, (1, 0)) for name, x in tensors.items()}
        data["sample_mask"] = torch.ones(len(w.logp))
        return losses.ClippedPGLossFn(config)(w.logp, data, data["sample_mask"].sum(), w.m.sum())[0]

    def in_reward(w: World, kind: str) -> Any:
        settings = {"use_kl_in_reward": True, "reference_policy_kl_type": kind, "reference_policy_kl_penalty": BETA}
        config, estimator = losses.ClippedPGLossConfig(**settings), advantages.AdvEstimatorConfig()
        prompts = torch.arange(len(w.logp)).div(w.group, rounding_mode="floor")[:, None]
        host = advantages.ReinforcePlusPlusAdvantageEstimator(estimator, config)
        given = {"logprobs_policy": w.old, "logprobs_reference": w.ref}
        a = host.compute_advantage(prompts, w.rewards.float(), w.m, **given)
        return loss(w, settings, advantages=a), {"advantages": a}

    for settings, right in SETTINGS:
        extra = {"clip": (0.2, 0.28)} if "ratio_clip_max" in settings else {}
        yield Case(f"NeMo-RL {settings}", lambda w, s=settings, e=extra: (loss(w, s), e), **right)
    no_kl = {"reference_policy_kl_penalty": 0.0}
    yield Case("NeMo-RL no KL", lambda w: (loss(w, no_kl), {"beta": 0.0}), kl=("none",), beta=None)
    yield wrong("NeMo-RL KL forgotten", lambda w: (loss(w, no_kl), {"kl_in": "loss"}), "kl-absent", "none")
    yield wrong("NeMo-RL k3 in the reward", lambda w: in_reward(w, "k3"), "kl-k3-in-advantage", "k3")
    yield Case("NeMo-RL k1 in the reward", lambda w: in_reward(w, "k1"), beta=None)
    ones = lambda w: loss(w, {}, token_mask=torch.ones_like(w.m))  # noqa: E731
    yield wrong("NeMo-RL mask of ones", ones, "off-mask-gradient")
