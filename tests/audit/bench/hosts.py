"""Losses of Liger, torchrl, verl and OpenRLHF, called as their trainers call them, and those of four documents."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tests.audit.bench.sound import exact_kl, ppo
from tests.audit.bench.worlds import BETA, Case, World
from torch import Tensor

FORWARD: dict[str, Any] = {"kl": ("forward",), "ok": False, "codes": ("kl-forward",)}
REVERSE: dict[str, Any] = {"kl": ("reverse",), "ok": True}


def liger() -> Iterator[Case]:
    """`ppo_loss_fn` under its loss types, with and without the correction of the KL."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    def loss(w: World, **options: Any) -> Any:
        value, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
            per_token_logps=w.logp,
            attention_mask=w.m,
            advantages=w.advantages,
            full_attention_mask=w.m,
            ref_per_token_logps=w.ref,
            old_per_token_logps=w.old,
            beta=BETA,
            max_completion_length=64,
            **options,
        )
        return value, {"sampler_logprobs": None}

    kinds: list[dict[str, Any]] = [
        *({"loss_type": x} for x in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")),
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "delta": 1.2},
        {"loss_type": "bnpo", "epsilon_low": 0.1, "epsilon_high": 0.35},
    ]
    for options in kinds:
        for corrected in (False, True):
            whole = "importance_sampling_level" in options
            right = REVERSE if corrected and not whole else FORWARD
            if corrected and whole:
                right = {"kl": ("neither", "forward"), "ok": False}
            cap = {"epsilon_high": 2.0} if options["loss_type"] == "cispo" else {}  # it bounds the ratio itself
            chosen = {**options, **cap, "use_bias_correction_kl": corrected}
            yield Case(f"Liger {chosen}", lambda w, o=chosen: loss(w, **o), **right)
    # Its luspo multiplies the unmasked loss by the length, so that padding is trained.
    yield Case("Liger luspo", lambda w: loss(w, loss_type="luspo"), kl=(), ok=False, codes=("off-mask-gradient",))


def torchrl() -> Iterator[Case]:
    """`GRPOLoss` and `CISPOLoss`: the KL is a mean over padding too."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import CISPOLoss, GRPOLoss

    def loss(w: World, kind: Any, coeff: str, **options: Any) -> Any:
        host = kind(None, entropy_bonus=False, **{coeff: BETA}, **options)
        vars(host)["_get_cur_log_prob"] = lambda tensordict: (w.logp, SimpleNamespace(mask=w.mask), False)
        wide = w.advantages[:, None].expand_as(w.logp)
        batch = TensorDict({"advantage": wide[..., None]}, batch_size=[len(w.logp)])
        batch[host.tensor_keys.action] = w.ids
        batch[host.tensor_keys.sample_log_prob] = w.old
        batch[host.tensor_keys.ref_log_probs] = w.ref
        out = host(batch)
        other = "loss_kl_to_ref" if coeff == "kl_to_ref_coeff" else "loss_kl_to_inference"
        return out.loss_objective.sum() + out.get(other), {"sampler_logprobs": None}

    wrong: dict[str, Any] = {"kl": ("forward",), "ok": False, "beta": None}
    for kind in (GRPOLoss, CISPOLoss):
        for aggregation in ("token_mean", "prompt_mean"):
            codes = ("beta-off",) if aggregation == "token_mean" else ("kl-forward",)
            yield Case(
                f"torchrl {kind.__name__} {aggregation}",
                lambda w, k=kind, x=aggregation: loss(w, k, "kl_to_ref_coeff", aggregation=x),
                codes=codes,
                **wrong,
            )
    yield Case(
        "torchrl GRPOLoss, KL to the inference policy alone",
        lambda w: loss(w, GRPOLoss, "kl_to_inference_coeff"),
        kl=("old", "none"),
        ok=False,
        beta=None,
    )
    yield Case(
        "torchrl GRPOLoss, clip (0.1, 0.3)",
        lambda w: loss(w, GRPOLoss, "kl_to_ref_coeff", clip_epsilon=(0.1, 0.3)),
        codes=("beta-off",),
        **wrong,
    )


@cache
def verl_config(**policy: Any) -> Any:
    """The configuration of verl's actor."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**policy)
    )


KINDS: dict[str, dict[str, Any]] = {
    "k3": FORWARD,
    "k1": {"kl": ("zero",), "ok": False, "codes": ("kl-zero",)},
    "abs": {"kl": ("sign",), "ok": False, "codes": ("kl-sign",)},
    "k2": REVERSE,
    "k3+": REVERSE,
    "k1+": REVERSE,
}
MODES = {"vanilla": "token-mean", "gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "gpg": "token-mean"}
MASKED = ("geo_mean", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")


def verl() -> Iterator[Case]:
    """verl's policy losses and KLs, put together as its `ppo_loss` does."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty

    def loss(w: World, mode: str, kind: str, mean: str, **policy: Any) -> Any:
        config = verl_config(loss_mode=mode, **policy)
        value, _ = get_policy_loss_fn(mode)(
            old_log_prob=w.old,
            log_prob=w.logp,
            advantages=w.advantages[:, None].expand_as(w.logp),
            response_mask=w.mask,
            loss_agg_mode=mean,
            config=config,
        )
        kld = kl_penalty(logprob=w.logp, ref_logprob=w.ref, kl_penalty=kind)
        kl = agg_loss(loss_mat=kld, loss_mask=w.mask, loss_agg_mode=mean)
        return value + BETA * kl, {"sampler_logprobs": None, "clip": (config.clip_ratio, config.clip_ratio)}

    for kind, right in KINDS.items():
        for mean in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
            yield Case(f"verl vanilla, {kind}, {mean}", lambda w, k=kind, m=mean: loss(w, "vanilla", k, m), **right)
    for mode, mean in MODES.items():
        for kind in ("k3", "k3+"):
            case = KINDS[kind]
            yield Case(f"verl {mode}, {kind}", lambda w, x=mode, k=kind, m=mean: loss(w, x, k, m), **case)
    for mode in MASKED:
        kind = "k3+" if mode in MASKED[::2] else "k3"
        yield Case(f"verl {mode}, {kind}", lambda w, x=mode, k=kind: loss(w, x, k, "token-mean"), **KINDS[kind])
    yield Case("verl dro, k3+", lambda w: loss(w, "dro", "k3+", "token-mean", dro_beta=0.1), **REVERSE)


def openrlhf() -> Iterator[Case]:
    """OpenRLHF's policy loss and KL, put together as its actor does."""
    losses, utils = openrlhf_modules()

    def loss(w: World, kl: dict[str, Any], **options: Any) -> Any:
        policy = losses.PolicyLoss(**options)
        rolled = w.sampler if options.get("is_correction_level") else None
        value = policy(w.logp, w.old, w.a.expand_as(w.logp), w.m, rolled)
        value = value[0] if isinstance(value, tuple) else value
        old = w.old if kl.get("unbiased_gradient") else None
        kld = utils.compute_approx_kl(w.logp, w.ref, old, **kl)
        mean = losses.aggregate_loss(kld, w.m, token_level_loss=policy.token_level_loss)
        return value + BETA * mean, {} if options.get("is_correction_level") else {"sampler_logprobs": None}

    estimators: dict[str, dict[str, Any]] = {"k1": KINDS["k1"], "k2": REVERSE, "k3": FORWARD}
    for kind, right in estimators.items():
        for unbiased in (False, True):
            kl = {"kl_estimator": kind, "unbiased_gradient": unbiased}
            yield Case(f"OpenRLHF {kl}", lambda w, k=kl: loss(w, k), **(REVERSE if unbiased else right))
    k3 = {"kl_estimator": "k3"}
    fair = {"kl_estimator": "k3", "unbiased_gradient": True}
    yield Case("OpenRLHF gspo", lambda w: loss(w, k3, policy_loss_type="gspo"), **FORWARD)
    yield Case("OpenRLHF sequence mean", lambda w: loss(w, k3, token_level_loss=False), **FORWARD)
    yield Case("OpenRLHF dual clip", lambda w: loss(w, fair, dual_clip=1.5), **REVERSE)
    for mode, gate in (("mask", [0.5, 5.0]), ("clip", [0.9, 1.02])):
        options = {"is_correction_level": "token", "is_correction_mode": mode, "is_correction_threshold": gate}
        yield Case(f"OpenRLHF correction {mode}", lambda w, o=options: loss(w, fair, **o), **REVERSE)


def openrlhf_modules() -> tuple[ModuleType, ModuleType]:
    """Its two files of losses, without the engines that the package imports."""
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models"
    package = ModuleType("klamp_bench_openrlhf")
    package.__path__ = [str(folder)]
    stub = sys.modules.get("deepspeed") is None
    sys.modules[package.__name__] = package
    if stub:
        sys.modules["deepspeed"] = ModuleType("deepspeed")
    try:
        utils, losses = (importlib.import_module(f"{package.__name__}.{name}") for name in ("utils", "loss"))
    finally:
        if stub:
            del sys.modules["deepspeed"]
    return losses, utils


# what the documents print


def in_reward(w: World) -> Any:
    """exp(d) d summed per completion, taken from the reward; advantages are rewards without their mean; no ratio."""
    d = w.d.detach()
    rewards = w.rewards - BETA * w.sums(d.exp() * d)
    advantages = rewards - rewards.mean()
    return w.token(-advantages[:, None] * w.logp), {"advantages": advantages, "rewards": w.rewards}


def of_service(w: World) -> Any:
    """A sum over all tokens of the clipped loss and of beta (ref - policy), completion after completion."""
    total = torch.zeros(())
    for loss, d, m in zip(ppo(w), w.d, w.mask, strict=True):
        total = total + loss[m].sum() + BETA * (-d[m]).sum()
    return total


def documents() -> Iterator[Case]:
    """001: k1 as a loss. 002: ref - policy. 003: exp(d) d, in the reward or as a loss. 004: k3 as a loss."""
    zero: dict[str, Any] = {"kl": ("zero", "away"), "ok": False, "codes": ("kl-zero", "kl-away"), "beta": None}
    yield Case("001, k1 in the loss", lambda w: w.token(ppo(w) + BETA * w.d), **zero)
    yield Case("001, k1 in the loss, sequence mean", lambda w: w.sequence(ppo(w) + BETA * w.d), **zero)
    yield Case("002, ref - policy, summed", of_service, **zero)
    neither: dict[str, Any] = {"kl": ("neither",), "ok": False, "codes": ("kl-neither",), "beta": None}
    yield Case("003, exp(d) d as a loss", lambda w: w.token(-w.a * w.logp + BETA * w.d.exp() * w.d), **neither)
    yield Case("003, in the reward", in_reward, kl=(), ok=None, beta=None)
    yield Case("003, over the vocabulary", lambda w: (w.token(ppo(w) + BETA * exact_kl(w)), logits_of(w)), **REVERSE)

    def fourth(w: World) -> Tensor:
        kl = (w.ref - w.logp).exp() - (w.ref - w.logp) - 1
        return ((ppo(w) + BETA * kl) * w.m).sum() / w.m.sum()

    yield Case("004, k3 in the loss", fourth, **FORWARD)
    swapped: dict[str, Any] = {"kl": ("swapped",), "ok": False, "codes": ("kl-swapped",)}
    yield Case("004, its proposed repair", lambda w: w.token(ppo(w) + BETA * (w.d.exp() - w.d - 1)), **swapped)


def logits_of(w: World) -> dict[str, Any]:
    """What shows a KL beside the log-probabilities."""
    return {"logits": w.logits, "ref_logits": w.ref_logits, "ids": w.ids}
