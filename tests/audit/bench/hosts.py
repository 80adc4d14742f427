"""Losses of Liger, torchrl, verl and OpenRLHF, called as their trainers call them, and those of four documents."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tests.audit.bench.losses import exact_kl, k3, plus, ppo
from tests.audit.bench.worlds import BETA, Case, World, wrong
from torch import Tensor

FORWARD: dict[str, Any] = {"kl": ("forward",), "ok": False, "codes": ("kl-forward",)}
REVERSE: dict[str, Any] = {"kl": ("reverse",), "ok": True}
ZERO: dict[str, Any] = {"kl": ("zero",), "ok": False, "codes": ("kl-zero",)}
SIGN: dict[str, Any] = {"kl": ("sign",), "ok": False, "codes": ("kl-sign",)}
NO_SAMPLER = {"sampler_logprobs": None}


def liger() -> Iterator[Case]:
    """`ppo_loss_fn` under its loss types, with and without the correction of the KL."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    def loss(w: World, options: dict[str, Any]) -> Any:
        given = {"per_token_logps": w.logp, "ref_per_token_logps": w.ref, "old_per_token_logps": w.old}
        given |= {"attention_mask": w.m, "full_attention_mask": w.m, "advantages": w.advantages}
        given |= {"beta": BETA, "max_completion_length": 64}
        return LigerFusedLinearGRPOFunction.ppo_loss_fn(**given, **options)[0], NO_SAMPLER

    kinds: list[dict[str, Any]] = [{"loss_type": x} for x in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")]
    kinds += [{"loss_type": "cispo", "epsilon_high": 2.0}, {"loss_type": "grpo", "delta": 1.2}]
    kinds += [{"loss_type": "bnpo", "epsilon_low": 0.1, "epsilon_high": 0.35}]
    kinds += [{"loss_type": "grpo", "importance_sampling_level": "sequence"}]
    for options, corrected in product(kinds, (False, True)):
        right = REVERSE if corrected else FORWARD
        if corrected and "importance_sampling_level" in options:
            right = {"kl": ("neither", "forward"), "ok": False}
        chosen = {**options, "use_bias_correction_kl": corrected}
        yield Case(f"Liger {chosen}", lambda w, o=chosen: loss(w, o), **right)
    # Its luspo multiplies the unmasked loss by the length, so that padding is trained.
    yield wrong("Liger luspo", lambda w: loss(w, {"loss_type": "luspo"}), "off-mask-gradient")


def torchrl() -> Iterator[Case]:
    """`GRPOLoss` and `CISPOLoss`: the KL is a mean over padding too."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import CISPOLoss, GRPOLoss

    def loss(w: World, kind: Any, to: str = "ref", **options: Any) -> Any:
        host = kind(None, entropy_bonus=False, **{f"kl_to_{to}_coeff": BETA}, **options)
        vars(host)["_get_cur_log_prob"] = lambda tensordict: (w.logp, SimpleNamespace(mask=w.mask), False)
        batch = TensorDict({"advantage": w.a.expand_as(w.logp)[..., None]}, batch_size=[len(w.logp)])
        keys = host.tensor_keys
        for key, x in ((keys.action, w.ids), (keys.sample_log_prob, w.old), (keys.ref_log_probs, w.ref)):
            batch[key] = x
        out = host(batch)
        return out.loss_objective.sum() + out.get(f"loss_kl_to_{to}"), NO_SAMPLER

    for kind in (GRPOLoss, CISPOLoss):
        for mean, code in (("token_mean", "beta-off"), ("prompt_mean", "kl-forward")):
            name = f"torchrl {kind.__name__} {mean}"
            yield wrong(name, lambda w, k=kind, x=mean: loss(w, k, aggregation=x), code, "forward")
    yield wrong("torchrl, KL to the inference policy", lambda w: loss(w, GRPOLoss, "inference"), "", "old none")
    clipped = {"clip_epsilon": (0.1, 0.3)}
    yield wrong("torchrl, clip (0.1, 0.3)", lambda w: loss(w, GRPOLoss, **clipped), "beta-off", "forward")


@cache
def verl_config(**policy: Any) -> Any:
    """The configuration of verl's actor."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    batch = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return ActorConfig(strategy="fsdp", policy_loss=PolicyLossConfig(**policy), **batch)


KINDS = {"k3": FORWARD, "k1": ZERO, "abs": SIGN, "k2": REVERSE, "k3+": REVERSE, "k1+": REVERSE}
MODES = {"vanilla": "token-mean", "gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "gpg": "token-mean"}
MASKED = {"geo_mean": "k3+", "clip_cov": "k3+", "dppo_tv": "k3+", "cispo": "k3", "kl_cov": "k3", "dppo_kl": "k3"}


def verl() -> Iterator[Case]:
    """verl's policy losses and KLs, put together as its `ppo_loss` does."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty

    def case(mode: str, kind: str, mean: str = "token-mean", **policy: Any) -> Case:
        def loss(w: World) -> Any:
            config = verl_config(loss_mode=mode, **policy)
            given = {"old_log_prob": w.old, "log_prob": w.logp, "advantages": w.a.expand_as(w.logp)}
            given |= {"response_mask": w.mask, "loss_agg_mode": mean, "config": config}
            kl = kl_penalty(logprob=w.logp, ref_logprob=w.ref, kl_penalty=kind)
            kl = agg_loss(loss_mat=kl, loss_mask=w.mask, loss_agg_mode=mean)
            extra = NO_SAMPLER | {"clip": (config.clip_ratio, config.clip_ratio)}
            return get_policy_loss_fn(mode)(**given)[0] + BETA * kl, extra

        return Case(f"verl {mode}, {kind}, {mean}", loss, **KINDS[kind])

    for kind, mean in product(KINDS, ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")):
        yield case("vanilla", kind, mean)
    for (mode, mean), kind in product(MODES.items(), ("k3", "k3+")):
        yield case(mode, kind, mean)
    for mode, kind in MASKED.items():
        yield case(mode, kind)
    yield case("dro", "k3+", dro_beta=0.1)


def openrlhf() -> Iterator[Case]:
    """OpenRLHF's policy loss and KL, put together as its actor does."""
    losses, utils = openrlhf_modules()

    def case(kind: str, fair: bool, right: dict[str, Any], **options: Any) -> Case:
        def loss(w: World) -> Any:
            policy, rolled = losses.PolicyLoss(**options), "is_correction_level" in options
            value = policy(w.logp, w.old, w.a.expand_as(w.logp), w.m, w.sampler if rolled else None)
            value = value[0] if isinstance(value, tuple) else value
            given = {"kl_estimator": kind, "unbiased_gradient": fair}
            kl = utils.compute_approx_kl(w.logp, w.ref, w.old if fair else None, **given)
            kl = losses.aggregate_loss(kl, w.m, token_level_loss=policy.token_level_loss)
            return value + BETA * kl, {} if rolled else NO_SAMPLER

        return Case(f"OpenRLHF {kind}, unbiased {fair}, {options}", loss, **right)

    for kind, right in (("k1", ZERO), ("k2", REVERSE), ("k3", FORWARD)):
        yield case(kind, False, right)
        yield case(kind, True, REVERSE)
    yield case("k3", False, FORWARD, policy_loss_type="gspo")
    yield case("k3", False, FORWARD, token_level_loss=False)
    yield case("k3", True, REVERSE, dual_clip=1.5)
    for mode, gate in (("mask", [0.5, 5.0]), ("clip", [0.9, 1.02])):
        gates = {"is_correction_level": "token", "is_correction_mode": mode, "is_correction_threshold": gate}
        yield case("k3", True, REVERSE, **gates)


def openrlhf_modules() -> list[ModuleType]:
    """Its two files of losses, without the engines that the package imports."""
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    package = ModuleType("klamp_bench_openrlhf")
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / "models")]
    sys.modules[package.__name__] = package
    stub = sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    try:
        return [importlib.import_module(f"{package.__name__}.{name}") for name in ("loss", "utils")]
    finally:
        if not hasattr(stub, "__version__"):
            del sys.modules["deepspeed"]


def in_reward(w: World) -> Any:
    """exp(d) d summed per completion, taken from the reward; advantages are rewards without their mean; no ratio."""
    d = w.d.detach()
    rewards = w.rewards - BETA * w.sums(d.exp() * d)
    advantages = rewards - rewards.mean()
    return w.token(-advantages[:, None] * w.logp), {"advantages": advantages, "rewards": w.rewards}


def of_service(w: World) -> Any:
    """A sum over all tokens of the clipped loss and of beta (ref - policy), completion after completion."""
    rows = zip(ppo(w), w.d, w.mask, strict=True)
    return sum((loss[m].sum() + BETA * (-d[m]).sum() for loss, d, m in rows), torch.zeros(()))


def fourth(w: World) -> Tensor:
    kl = (w.ref - w.logp).exp() - (w.ref - w.logp) - 1
    return ((ppo(w) + BETA * kl) * w.m).sum() / w.m.sum()


def documents() -> Iterator[Case]:
    """001: k1 as a loss. 002: ref - policy. 003: exp(d) d, in the reward or as a loss. 004: k3 as a loss."""
    for name, mean in (("token", World.token), ("sequence", World.sequence)):
        yield wrong(f"001, k1 in the loss, {name} mean", plus(ppo, lambda w: w.d, mean), "kl-zero kl-away", "zero away")
    yield wrong("002, ref - policy, summed", of_service, "kl-zero kl-away", "zero away")
    third = plus(lambda w: -w.a * w.logp, lambda w: w.d.exp() * w.d)
    yield wrong("003, exp(d) d as a loss", third, "kl-neither", "neither")
    yield Case("003, in the reward", in_reward, kl=(), ok=None, beta=None)
    yield Case("003, over the vocabulary", lambda w: (w.token(ppo(w) + BETA * exact_kl(w)), w.logits_passed()))
    yield Case("004, k3 in the loss", fourth, **FORWARD)
    yield wrong("004, its proposed repair", plus(ppo, lambda w: k3(-w.d)), "kl-swapped", "swapped")
