"""The loss of a real `trl.GRPOTrainer` under its options, with a world's log-probabilities in place of the model's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from tests.audit.bench.sound import entropy
from tests.audit.bench.worlds import BETA, Case, World, make_world

from klamp.audit import trl as host


class Setting(NamedTuple):
    """Options of GRPOConfig and of a batch, and what is right about the loss that they make.

    Attributes:
        options: attributes of the trainer or of its arguments.
        kl: the right classes.
        ok: whether the loss is sound.
        lag: whether the batch was sampled by an older policy (num_iterations 2).
        steps: micro-batches per optimizer step.
        beta: the coefficient of the KL.
        surrogate: part of the name of the policy loss.
        mean: what the loss is a mean over.
    """

    options: dict[str, Any]
    kl: tuple[str, ...]
    ok: bool
    lag: bool = True
    steps: int = 1
    beta: float = BETA
    surrogate: str = ""
    mean: str = ""

    @property
    def name(self) -> str:
        """The options in words."""
        words = [f"{k}={x}" for k, x in self.options.items()]
        extra = ["lagging"] * self.lag + [f"{self.steps} micro-batches"] * (self.steps > 1) + [f"beta={self.beta}"]
        return ", ".join(words + extra)


MEAN = dict.fromkeys(("grpo", "sapo"), "sequence") | dict.fromkeys(
    ("bnpo", "dr_grpo", "dapo", "cispo", "luspo", "vespo"), "token"
)


def settings() -> Iterator[Setting]:
    """29 configurations."""
    forward, reverse = (("forward",), False), (("reverse",), True)
    for kind, mean in MEAN.items():
        for corrected in (False, True):
            kl, ok = reverse if corrected else forward
            options = {"loss_type": kind, "use_bias_correction_kl": corrected}
            yield Setting(options, kl, ok, mean="" if kind == "vespo" else mean, lag=kind not in ("bnpo", "dapo"))
    grpo = {"loss_type": "grpo", "use_bias_correction_kl": True}
    dapo = {"loss_type": "dapo", "use_bias_correction_kl": True}
    whole = {"importance_sampling_level": "sequence"}
    yield Setting({**grpo, **whole, "use_bias_correction_kl": False}, *forward, surrogate="sequence", mean="sequence")
    yield Setting({**grpo, **whole}, ("neither", "forward"), False, mean="sequence")
    yield Setting({**dapo, **whole, "loss_type": "luspo", "use_bias_correction_kl": False}, *forward, mean="token")
    yield Setting(grpo, *reverse, lag=False, mean="sequence")
    yield Setting({**grpo, "use_bias_correction_kl": False}, *forward, lag=False, mean="sequence")
    yield Setting(grpo, *reverse, steps=4, mean="sequence")
    yield Setting(dapo, *reverse, steps=4, mean="token")
    yield Setting(grpo, ("none",), True, beta=0.0)
    yield Setting(grpo | {"epsilon_low": 0.1, "epsilon_high": 0.4}, *reverse, surrogate="ppo_clip(0.1, 0.4)")
    yield Setting(grpo | {"delta": 1.15}, *reverse)
    yield Setting(grpo | {"top_entropy_quantile": 0.4}, *reverse)
    yield Setting(dapo | {"top_entropy_quantile": 0.2, "use_bias_correction_kl": False}, *forward)
    yield Setting(dapo | {"off_policy_mask_threshold": 0.01}, *reverse)


@cache
def trainer() -> Any:
    """One trainer for all settings."""
    return host.build_trainer()


def loss_of(setting: Setting, w: World) -> Any:
    """TRL's own loss."""
    kept = trainer()
    tokens = w.mask.long()
    inputs = {
        "prompt_ids": torch.ones_like(tokens[:, :1]),
        "prompt_mask": torch.ones_like(tokens[:, :1]),
        "completion_ids": w.ids,
        "completion_mask": tokens,
        "advantages": w.advantages,
        "ref_per_token_logps": w.ref,
        "num_items_in_batch": setting.steps * tokens.sum(),
    }
    if setting.lag:
        inputs["old_per_token_logps"] = w.old
    scored = (w.logp, entropy(w).detach(), None)
    epsilon = {"epsilon_low": 0.2, "epsilon_high": 2.0 if setting.options["loss_type"] == "cispo" else 0.28}
    chosen = {"importance_sampling_level": "token", "delta": None, "top_entropy_quantile": 1.0, **epsilon}
    values = {**chosen, "off_policy_mask_threshold": None, **setting.options, "beta": setting.beta}
    values |= {"current_gradient_accumulation_steps": setting.steps, "steps_per_generation": setting.steps}
    with host._set(kept, _get_per_token_logps_and_entropies=lambda *_, **__: scored, **values):
        loss = kept._compute_loss(kept.model, inputs)
    extra = {"beta": setting.beta, "clip": (values["epsilon_low"], values["epsilon_high"])}
    return loss, extra | ({} if setting.lag else {"old_logprobs": None}) | {"sampler_logprobs": None}


def cases(pick: slice = slice(None)) -> Iterator[tuple[Case, World]]:
    """Each setting with micro-batches of its kind."""
    for setting in settings():
        case = Case(
            setting.name,
            lambda w, s=setting: loss_of(s, w),
            kl=setting.kl,
            ok=setting.ok,
            beta=setting.beta or None,
            surrogate=setting.surrogate,
            mean=setting.mean,
        )
        for seed in (60, 61, 62, 63)[pick]:
            yield case, make_world(seed, shape=(8, 12), lag=0.25 if setting.lag else 0)
