"""The losses of Liger, torchrl, verl and OpenRLHF, and distillation losses, called as their trainers call them."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.audit.bench.worlds import BETA, Case, Score, World, make_world, wrong

from klamp.audit import trainers
from klamp.audit.examine import AuditedLoss
from klamp.verify.sequences import Sequences

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

    def loss(w: World, kind: Any, mean: str) -> Any:
        host = kind(None, entropy_bonus=False, kl_to_ref_coeff=BETA, aggregation=mean)
        vars(host)["_get_cur_log_prob"] = lambda tensordict: (w.logp, SimpleNamespace(mask=w.mask), False)
        batch = TensorDict({"advantage": w.a.expand_as(w.logp)[..., None]}, batch_size=[len(w.logp)])
        keys = host.tensor_keys
        for key, x in ((keys.action, w.ids), (keys.sample_log_prob, w.old), (keys.ref_log_probs, w.ref)):
            batch[key] = x
        out = host(batch)
        return out.loss_objective.sum() + out.loss_kl_to_ref, NO_SAMPLER

    for kind in (GRPOLoss, CISPOLoss):
        for mean, code in (("token_mean", "beta-off"), ("prompt_mean", "kl-forward")):
            yield wrong(f"{kind.__name__} {mean}", lambda w, k=kind, x=mean: loss(w, k, x), code, "forward")


KINDS = {"k3": FORWARD, "k1": ZERO, "abs": SIGN, "k2": REVERSE, "k3+": REVERSE, "k1+": REVERSE}
MEANS = {"token-mean": ("vanilla", "gpg"), "seq-mean-token-mean": ("gspo", "sapo")}
MASKED = {"geo_mean": "k3+", "clip_cov": "k3+", "dppo_tv": "k3+", "cispo": "k3", "kl_cov": "k3", "dppo_kl": "k3"}


def verl() -> Iterator[Case]:
    """verl's policy losses and KLs, put together as its `ppo_loss` does."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
    from verl.workers.config import ActorConfig, PolicyLossConfig

    def case(mode: str, kind: str, mean: str = "token-mean") -> Case:
        policy, batch = PolicyLossConfig(loss_mode=mode), {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
        config = ActorConfig(strategy="fsdp", policy_loss=policy, **batch)

        def loss(w: World) -> Any:
            given = {"old_log_prob": w.old, "log_prob": w.logp, "advantages": w.a.expand_as(w.logp)}
            given |= {"response_mask": w.mask, "loss_agg_mode": mean, "config": config}
            kl = kl_penalty(logprob=w.logp, ref_logprob=w.ref, kl_penalty=kind)
            kl = agg_loss(loss_mat=kl, loss_mask=w.mask, loss_agg_mode=mean)
            return get_policy_loss_fn(mode)(**given)[0] + BETA * kl, NO_SAMPLER | {"clip": (0.2, 0.2)}

        return Case(f"verl {mode}, {kind}, {mean}", loss, **KINDS[kind])

    for kind, mean in product(KINDS, (*MEANS, "seq-mean-token-sum")):
        yield case("vanilla", kind, mean)
    for mean, kind in product(MEANS, ("k3", "k3+")):
        yield from (case(mode, kind, mean) for mode in MEANS[mean])
    for mode, kind in MASKED.items():
        yield case(mode, kind)


def openrlhf() -> Iterator[Case]:
    losses, utils = openrlhf_modules()

    def case(kind: str, fair: bool, right: dict[str, Any], **options: Any) -> Case:
        def loss(w: World) -> Any:
            policy = losses.PolicyLoss(**options)
            value = policy(w.logp, w.old, w.a.expand_as(w.logp), w.m, None)
            value = value[0] if isinstance(value, tuple) else value
            given = {"kl_estimator": kind, "unbiased_gradient": fair}
            kl = utils.compute_approx_kl(w.logp, w.ref, w.old if fair else None, **given)
            kl = losses.aggregate_loss(kl, w.m, token_level_loss=policy.token_level_loss)
            return value + BETA * kl, NO_SAMPLER

        return Case(f"OpenRLHF {kind}, unbiased {fair}, {options}", loss, **right)

    for kind, right in (("k1", ZERO), ("k2", REVERSE), ("k3", FORWARD)):
        yield case(kind, False, right)
        yield case(kind, True, REVERSE)
    yield case("k3", False, FORWARD, policy_loss_type="gspo")
    yield case("k3", False, FORWARD, token_level_loss=False)
    yield case("k3", True, REVERSE, dual_clip=1.5)


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


SERVER, IWOPD, SDFT = "ServerDistillation, beta=", "IWOPD, objective=", "SDFT, mode=topk_logits, alpha="
BUCKET, RENORMALISED = (True, "head-bucket"), (False, "head-renormalised")
HEADS: dict[str, tuple[tuple[str, ...], bool, str]] = {
    SERVER + "1.0 (default)": (("reverse",), *BUCKET),
    SERVER + "1.0, temperature=2.0": (("reverse",), *BUCKET),
    SERVER + "1.0, loss_add_tail=False": (("none", "reverse"), False, ""),
    SERVER + "0.5": (("js",), *BUCKET),
    SERVER + "0.0, loss_top_k=64": (("forward",), *BUCKET),
    SERVER + "0.0, loss_top_k=64, loss_add_tail=False": (("forward",), *RENORMALISED),
    IWOPD + "jsd, beta=1.0, loss_top_k=1": (("reverse",), *BUCKET),
    IWOPD + "jsd, beta=1.0, loss_top_k=64, loss_add_tail=False": (("reverse",), *RENORMALISED),
    SDFT + "0.5, topk=100 (default)": (("js",), *RENORMALISED),
    SDFT + "1.0, topk=100, add_tail=True": (("reverse",), *BUCKET),
    "DistillationLoss, kl_direction=reverse (default)": (("forward",), False, "kl-forward"),
}
"""Losses of some tokens (torchrl differentiates k3): class, sound, code. All others follow what they mean."""


def distillations(batch: Sequences) -> Iterator[Case]:
    """31 losses of a batch; a position predicts the token after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_of_them = [*trainers.trl().losses, *trainers.liger().losses, *trainers.torchrl().losses]
    mask = torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], 1)
    given = {"logits": batch.student, "teacher_logits": batch.teacher, "mask": mask, "ids": batch.tokens.roll(-1, 1)}
    for each in (x for x in all_of_them if x.takes == "sequences"):

        def loss(w: World, each: AuditedLoss = each) -> Any:
            return each.compute(batch), w.teacher_passed(means=each.means, temperature=each.temperature, **given)

        kl, ok, code = HEADS.get(each.name, ((each.means,), True, ""))
        yield Case(each.name, loss, kl=kl, ok=ok, codes=tuple(code.split()), beta=None)


SLOW = pytest.mark.slow


def needs(package: str) -> Any:
    """A mark that skips a test, visibly, where a package is not installed."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"NOT RUN: {package} is not installed")


HOSTS = {"liger_kernel": liger, "torchrl": torchrl, "verl": verl, "openrlhf": openrlhf}


@pytest.mark.parametrize("watched", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("host", [pytest.param(x, marks=needs(name)) for name, x in HOSTS.items()])
def test_losses_of_other_trainers_are_named(host: Any, watched: bool) -> None:
    world = make_world(70 + watched, shape=(8, 12), lag=0.25)
    Score(product(host(), [world.watch() if watched else world])).demand(0.889 if watched else 0.829)


@needs("trl")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_distillation_losses_are_named_by_their_logits(seed: int) -> None:
    score = Score(product(distillations(Sequences.drawn(seed=seed)), [make_world()]))
    assert len(score.rows) == 31
    score.demand(0.87)
