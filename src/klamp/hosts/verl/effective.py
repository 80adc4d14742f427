"""Reads back from a verl configuration what its KL will really do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from klamp.core.types import Gradient
from klamp.hosts.common.words import in_lines
from klamp.hosts.verl import names

K3_STOPS = "; its value stops at 10 nats, at log-ratios -2.61 and +11.0, and past them it has no gradient"
OWN: Mapping[str, tuple[str, str]] = {
    "kl": ("k1", "zero in expectation: it holds nothing"),
    "abs": ("|log-ratio|", "that of no divergence"),
    "mse": ("k2", "KL(policy||ref)"),
    "low_var_kl": ("k3", f"KL(ref||policy){K3_STOPS}"),
}
"""verl's own types: (value, gradient as a loss); `klamp audit verl` measures them."""
ALIASES: Mapping[str, str] = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
AVERAGES: Mapping[str, str] = {
    "token-mean": "mean over the tokens of the mini-batch",
    "seq-mean-token-mean": "mean over completions of the mean over tokens",
    "seq-mean-token-sum": "mean over completions of the sum over tokens",
    "seq-mean-token-sum-norm": "sum over tokens / (completions * loss_scale_factor, else the padded length)",
    "token-sum": "sum over the tokens of the mini-batch",
}
GRADIENTS: Mapping[Gradient, str] = {
    "reverse": "KL(policy||ref)",
    "forward": "KL(ref||policy)",
    "own": "the estimator's own",
    "none": "none: it is only logged",
}


@dataclass(frozen=True, kw_only=True)
class Effective:
    """The KL of a run, in words; `str` gives one line per field."""

    loss: str
    """The KL in the loss: whose, its value, gradient and coefficient."""
    reward: str
    """The KL in the reward, likewise."""
    normalizer: str
    """How the tokens of the loss become one number."""
    reference: str
    """Where the reference comes from."""
    notes: tuple[str, ...] = ()
    """What may surprise."""

    def __str__(self) -> str:
        return in_lines(self)


def effective(config: Any) -> Effective:
    """What the KL of a composed verl configuration will really do; changes nothing, needs no verl.

    Args:
        config: verl's whole configuration, as its trainers get it: a DictConfig, or nested mappings.

    Raises:
        ConfigError: a name of klamp's that cannot be read, or that asks for what is refused.
    """
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    in_loss, in_reward = bool(actor["use_kl_loss"]), bool(algorithm["use_kl_in_reward"])
    mode = actor["loss_agg_mode"]
    return Effective(
        loss=_in_loss(actor) if in_loss else "none: use_kl_loss is off",
        reward=_in_reward(algorithm) if in_reward else "none: use_kl_in_reward is off",
        normalizer=f"{AVERAGES.get(mode, 'unknown')} (loss_agg_mode={mode})",
        reference=_reference(config["actor_rollout_ref"]["model"]) if in_loss or in_reward else "none is loaded",
        notes=tuple(_notes(config, in_loss, in_reward)),
    )


def _in_loss(actor: Any) -> str:
    name, beta = actor["kl_loss_type"], actor["kl_loss_coef"]
    if names.is_ours(name):
        kl = names.loss_kl(name)
        gradient = f"{GRADIENTS[kl.kl_gradient]}, horizon {kl.kl_horizon}, off-policy weights: {kl.kl_off_policy}"
        return f"klamp's: {kl.kl_estimator}, gradient {gradient}; beta {beta:g}, fixed"
    value, gradient = _own(name)
    return f"verl's own: {value}, gradient {gradient}; beta {beta:g}, fixed"


def _own(name: str) -> tuple[str, str]:
    """The value and gradient of one of verl's own types as a loss; a + after the name means the gradient of k2."""
    base = ALIASES.get(name.removesuffix("+"), name.removesuffix("+"))
    if base not in OWN:
        return name, "unknown: verl raises NotImplementedError"
    value, gradient = OWN[base]
    return value, OWN["mse"][1] if name.endswith("+") else gradient


def _in_reward(algorithm: Any) -> str:
    name, control = algorithm["kl_penalty"], algorithm["kl_ctrl"]
    rule = f"controller {control['type']}"
    if control["type"] != "fixed":
        rule += f", target {control['target_kl']:g} nats per token"
    if names.is_ours(name):
        bound = names.reward_kl(name).kl_max_log_ratio
        value = "klamp's: k1" + ("" if bound is None else f", log-ratio bounded at {bound:g}")
    else:
        value = f"verl's own: {_own(name)[0]}"
    return f"{value}; beta {control['kl_coef']:g} at the start, {rule}"


def _reference(model: Any) -> str:
    adapter = (model.get("lora_rank") or 0) > 0 or model.get("lora_adapter_path") is not None
    return "the policy with its adapter off" if adapter or _megatron_rank(model) > 0 else "a frozen copy"


def _megatron_rank(model: Any) -> int:
    return int((model.get("lora") or {}).get("rank") or 0)


def _notes(config: Any, in_loss: bool, in_reward: bool) -> list[str]:
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    control, completions = algorithm["kl_ctrl"], _completions(config)
    scaled = algorithm["adv_estimator"] == "grpo" and bool(algorithm.get("norm_adv_by_std_in_grpo", True))
    own = not names.is_ours(algorithm["kl_penalty"])
    value = _own(algorithm["kl_penalty"])[0] if own else "k1"
    rows = [
        (in_loss and in_reward, "the KL counts twice: in the loss and in the reward"),
        (
            in_reward and scaled,
            "norm_adv_by_std_in_grpo divides by the standard deviation of rewards that hold the KL: in a group whose "
            "rewards are all equal beta cancels, and every beta > 0 is the same",
        ),
        (in_reward and value != "k1", f"in the reward {value} is biased: only k1 has the gradient of KL(policy||ref)"),
        (
            in_reward and control["type"] == "adaptive" and completions > 5 * control["horizon"],
            f"the adaptive rule turns beta negative: it multiplies by 1 - 0.2 * {completions} / {control['horizon']} "
            "when the KL is low",
        ),
        (
            in_reward and control["type"] != "fixed",
            "verl's checkpoints do not hold the controller: on resume beta starts at kl_coef",
        ),
        (
            in_loss and _lacks_policy_loss(actor),
            "loss_mode must be klamp, or klamp:MODE: it has to name klamp's policy loss",
        ),
    ]
    return [text for applies, text in rows if applies]


def _completions(config: Any) -> int:
    return int(config["data"]["train_batch_size"]) * int(config["actor_rollout_ref"]["rollout"]["n"])


def _lacks_policy_loss(actor: Any) -> bool:
    name = actor["kl_loss_type"]
    if not names.is_ours(name) or names.is_ours(actor["policy_loss"]["loss_mode"]):
        return False
    return names.needs_policy_loss(names.loss_kl(name).build_term())
