"""The loss of a real `trl.GRPOTrainer` under its options, with a world's log-probabilities in place of the model's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from tests.audit.bench.losses import entropy
from tests.audit.bench.worlds import BETA, Case, World, make_world

from klamp.audit import trl as host

MEAN = dict.fromkeys(("grpo", "sapo"), "sequence") | {"vespo": ""}
MEAN |= dict.fromkeys(("bnpo", "dr_grpo", "dapo", "cispo", "luspo"), "token")


@cache
def trainer() -> Any:
    """One trainer for all settings."""
    return host.build_trainer()


def loss_of(w: World, options: dict[str, Any], lag: bool, steps: int, beta: float) -> Any:
    """TRL's own loss."""
    tokens, prompt = w.mask.long(), torch.ones_like(w.ids[:, :1])
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": w.ids, "completion_mask": tokens}
    inputs |= {"advantages": w.advantages, "ref_per_token_logps": w.ref, "num_items_in_batch": steps * tokens.sum()}
    inputs |= {"old_per_token_logps": w.old} if lag else {}
    values = {"epsilon_low": 0.2, "epsilon_high": 2.0 if options["loss_type"] == "cispo" else 0.28}
    values |= {"importance_sampling_level": "token", "delta": None, "top_entropy_quantile": 1.0}
    values |= {"current_gradient_accumulation_steps": steps, "steps_per_generation": steps}
    values |= {"off_policy_mask_threshold": None, **options, "beta": beta}
    scored = (w.logp, entropy(w).detach(), None)
    with host._set(trainer(), _get_per_token_logps_and_entropies=lambda *_, **__: scored, **values):
        loss = trainer()._compute_loss(trainer().model, inputs)
    extra = {"beta": beta, "clip": (values["epsilon_low"], values["epsilon_high"]), "sampler_logprobs": None}
    return loss, extra if lag else extra | {"old_logprobs": None}


def setting(
    loss_type: str, corrected: bool, *, lag: bool = True, steps: int = 1, beta: float = BETA, **more: Any
) -> tuple[Case, bool]:
    """A configuration with what is right about its loss, and whether an older policy sampled (num_iterations 2)."""
    right = {"kl": ("reverse",) if corrected else ("forward",), "ok": corrected, "mean": MEAN[loss_type]}
    right |= {name: more.pop(name) for name in ("kl", "ok", "surrogate", "mean") if name in more}
    options = {"loss_type": loss_type, "use_bias_correction_kl": corrected, **more}
    name = f"{options}, lagging {lag}, {steps} micro-batches, beta {beta}"
    return Case(name, lambda w: loss_of(w, options, lag, steps, beta), beta=beta or None, **right), lag


def settings() -> Iterator[tuple[Case, bool]]:
    """29 configurations."""
    for kind, corrected in product(MEAN, (False, True)):
        yield setting(kind, corrected, lag=kind not in ("bnpo", "dapo"))
    whole = {"importance_sampling_level": "sequence"}
    yield setting("grpo", False, **whole, surrogate="sequence")
    yield setting("grpo", True, **whole, kl=("neither", "forward"), ok=False)
    yield setting("luspo", False, **whole)
    yield setting("grpo", True, lag=False)
    yield setting("grpo", False, lag=False)
    yield setting("grpo", True, steps=4)
    yield setting("dapo", True, steps=4)
    yield setting("grpo", True, beta=0.0, kl=("none",), mean="")
    yield setting("grpo", True, epsilon_low=0.1, epsilon_high=0.4, surrogate="ppo_clip(0.1, 0.4)")
    yield setting("grpo", True, delta=1.15)
    yield setting("grpo", True, top_entropy_quantile=0.4, mean="")
    yield setting("dapo", False, top_entropy_quantile=0.2, mean="")
    yield setting("dapo", True, off_policy_mask_threshold=0.01, mean="")


def cases(pick: slice = slice(None)) -> Iterator[tuple[Case, World]]:
    """Each setting with micro-batches of its kind."""
    for (case, lag), seed in product(settings(), (60, 61, 62, 63)[pick]):
        yield case, make_world(seed, shape=(8, 12), lag=0.25 if lag else 0)
