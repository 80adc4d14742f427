r"""The paragraph on the objective for a paper's section of methods: a configuration in words and one LaTeX equation.

>>> from klamp.config import KLConfig, LossConfig
>>> text = methods(KLConfig(beta=0.0), LossConfig(), Setting(model="m", steps=10))
>>> "There is no KL term" in text
True
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from klamp.config import KLConfig, LossConfig
from klamp.config.describe import (
    DIVERGENCES,
    describe_average,
    describe_both_prices,
    describe_clip,
    describe_controller,
    describe_exclusions,
    describe_gate,
    describe_gradient,
    describe_movement,
    describe_rule,
    describe_value,
)
from klamp.config.loss import LOSS_TYPES, kl_reduction
from klamp.config.price import configured_price
from klamp.core.advantages import Baseline, Scale
from klamp.core.objective import SurrogateName
from klamp.report.latex import equation, is_used, to_text, uses_ratio
from klamp.verify.config_facts import measure_config
from klamp.verify.explain import verdict_of

WIDTH = 100
SURROGATES: Mapping[SurrogateName, str] = {
    "ppo_clip": "the clipped surrogate of PPO",
    "cispo": "the loss of CISPO, whose importance weight is clipped and carries no gradient (sg)",
    "score_function": "the score function (REINFORCE)",
}
BASELINES: Mapping[Baseline, str] = {
    "mean": "the mean reward of all completions of its prompt, its own included (j runs over all G)",
    "leave_one_out": "the mean reward of the other completions of its prompt (j runs over those)",
}
SCALES: Mapping[Scale, str] = {
    "std": ", divided by the standard deviation s of the rewards of that prompt's completions",
    "none": "; it is not divided by a standard deviation",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run says about itself besides its KL and its loss."""

    model: str
    """The name of the policy's starting model, and which weights are trained."""
    steps: int
    """Steps, each with one rollout."""
    reference: str = "a frozen copy of the starting policy"
    """What the reference is."""
    trainer: str = "klamp"
    """Who trains."""
    optimizer: str = "AdamW"
    """The optimizer with its learning rate."""
    prompts: int = 32
    """Prompts per step."""
    group_size: int = 8
    """Completions per prompt."""
    max_length: int = 16
    """Longest completion, in tokens."""
    mean_length: float | None = None
    """Mean length of the completions of the run in tokens; None: not recorded."""
    last_beta: float | None = None
    """Mean beta of the run's last steps; None: not recorded."""
    updates: int = 1
    """Updates per rollout."""
    sampling: str = "temperature 1"
    """How completions are sampled, and which are left out of the loss."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Name of a package -> its version."""


def methods(kl: KLConfig, loss: LossConfig, setting: Setting) -> str:
    """The paragraph on the objective of a run as LaTeX (for `amsmath`): one equation, and words around it.

    What the KL's gradient follows is measured by enumeration, as `klamp explain` does.

    Args:
        kl: the KL.
        loss: the policy loss around it.
        setting: model, reference, sizes, versions.
    """
    before = " ".join([_training(setting), _advantage(loss), "The loss that is minimised is"])
    after = " ".join([_symbols(kl, loss, setting), *_on_kl(kl, loss, setting), _versions(setting)])
    return "\n".join([_filled(before), equation(kl, loss), _filled(after)])


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _training(setting: Setting) -> str:
    updates = "one update" if setting.updates == 1 else f"{setting.updates} updates"
    return to_text(
        f"We trained {setting.model} with GRPO in {setting.trainer} for {setting.steps} steps. Each step draws "
        f"{setting.prompts} prompts with G = {setting.group_size} completions of at most L = {setting.max_length} "
        f"tokens ({setting.sampling}) and takes {updates} ({setting.optimizer})."
    )


def _advantage(loss: LossConfig) -> str:
    against = BASELINES[loss.advantage_baseline]
    return to_text(f"The advantage A of a completion is its reward R minus {against}{SCALES[loss.scale]}.")


def _symbols(kl: KLConfig, loss: LossConfig, setting: Setting) -> str:
    who = [r"policy ($\pi$)"]
    if is_used(kl):
        who.append(r"reference ($\pi^{\mathrm{ref}}$)")
    if uses_ratio(loss):
        who.append(r"policy that sampled ($\pi^{\mathrm{old}}$)")
    names = f"the {', '.join(who[:-1])} and {who[-1]} give" if len(who) > 1 else f"the {who[0]} gives"
    delta = r" $\delta_t = \log \pi_t - \log \pi^{\mathrm{ref}}_t$;" if is_used(kl) else ""
    average = describe_average(LOSS_TYPES[loss.loss_type].reduction, length=str(setting.max_length))
    return (
        rf"where $\pi_t$ is the probability that {names} to token $t$ of a completion $i$ (its index is left out "
        rf"where there is only one);{delta} $\ell_t$ is {to_text(SURROGATES[loss.surrogate])}, and the policy loss is "
        rf"the {to_text(average)}."
    )


def _on_kl(kl: KLConfig, loss: LossConfig, setting: Setting) -> Iterator[str]:
    """The sentences on the KL."""
    if not kl.needs_reference:
        yield to_text("There is no KL term: beta is 0, and no reference was loaded.")
        return
    if not is_used(kl):
        yield to_text(f"There is no KL term: beta is 0. The KL to the reference ({setting.reference}) was only logged.")
        return
    yield to_text(_placed(kl, loss, setting))
    verdict = verdict_of(kl, loss, measure_config(kl, loss, length=setting.max_length))
    bare = "" if kl.kl_clip_method == "none" and not kl.excludes else " (unclipped, with all tokens in it)"
    yield to_text(f"Enumerated on small language models{bare}, it does this: {verdict[0].lower()}{verdict[1:]}")
    yield to_text(f"The reference is {setting.reference}.")
    if describe_movement(kl):
        yield to_text("The KL to a reference that moves does not bound the distance from the start.")
    yield from (to_text(f"{text}.") for text in _limits(kl))
    yield to_text(_beta(kl, setting))
    yield to_text(_price(kl, loss, setting))


def _placed(kl: KLConfig, loss: LossConfig, setting: Setting) -> str:
    """Where the KL enters, how its value is estimated, whose gradient it has, how it is averaged."""
    if kl.kl_placement == "reward" and kl.kl_clip_method != "none":
        return (
            "The KL, k1 summed over the completion, is formed into an advantage as rewards are (A[x] is that of x), "
            "and taken from that of the reward."
        )
    if kl.kl_placement == "reward":
        return "The KL, k1 summed over the completion, is taken from the reward before advantages are formed."
    if kl.kl_placement == "advantage":
        reach = "of the token and all later ones" if kl.kl_horizon == "sequence" else "of the token"
        return f"The KL, k1 {reach}, is taken from the advantage of each token after advantages are formed."
    divergence = f" ({DIVERGENCES[kl.kl_gradient]})" if kl.kl_gradient in ("reverse", "forward") else ""
    text = f"The KL is estimated by {describe_value(kl)}; its gradient is {describe_gradient(kl)}{divergence}"
    weights = "" if kl.kl_off_policy == "none" else ", the sampler being whoever wrote the tokens"
    average = describe_average(kl_reduction(kl, loss), length=str(setting.max_length))
    own = kl_reduction(kl, loss) != LOSS_TYPES[loss.loss_type].reduction
    return f"{text}{weights}; it is averaged {f'otherwise, as the {average}' if own else 'as the policy loss is'}."


def _limits(kl: KLConfig) -> Iterator[str]:
    """What bounds the KL or leaves tokens, sequences or updates out, each as a sentence without its end."""
    if kl.kl_clip_method != "none":
        width = f", width {kl.kl_clip_temperature:g} nats" if kl.kl_clip_method == "soft" else ""
        yield f"The KL has a {describe_clip(kl)}{width} (the budget b), decided by {describe_gate(kl)} (m)"
    if kl.kl_placement != "loss" and kl.kl_max_log_ratio is not None:
        yield f"The log-ratio is bounded at +-{kl.kl_max_log_ratio:g} nats"
    if kl.excludes:
        yield f"No KL is charged for {describe_exclusions(kl)}"
    if kl.reference_share < 1:
        yield (
            f"The reference scores {100 * kl.reference_share:g}% of the sequences, drawn anew at every step, and their "
            f"KL is weighted by {1 / kl.reference_share:.3g}"
        )
    if kl.kl_early_stop is not None:
        yield (
            f"The remaining updates of a rollout are skipped once the KL of the policy from the one that sampled it "
            f"exceeds {kl.kl_early_stop:g} nats per token"
        )
    if kl.kl_lr_guard is not None:
        yield (
            f"The learning rate is multiplied by {kl.kl_lr_guard:g} / KL while the KL of the last step is above "
            f"{kl.kl_lr_guard:g} nats per token"
        )


def _beta(kl: KLConfig, setting: Setting) -> str:
    rule = describe_rule(kl)
    end = f"The schedule ends at {kl.kl_schedule_end:g} of it. " if kl.kl_schedule != "constant" else ""
    text = f"The coefficient beta: {describe_controller(kl)}{f' ({rule})' if rule else ''}. {end}"
    if setting.last_beta is not None and (rule or kl.kl_schedule != "constant" or kl.kl_warmup_steps):
        text += f"At the end of the run it was {setting.last_beta:.3g}."
    return text.strip()


def _price(kl: KLConfig, loss: LossConfig, setting: Setting) -> str:
    """The price of beta in both units, at the run's own mean length where it is recorded."""
    length = setting.mean_length or float(setting.max_length)
    beta = kl.beta if setting.last_beta is None else setting.last_beta
    price = configured_price(
        kl, loss, group_size=setting.group_size, mean_length=length, max_length=setting.max_length, beta=beta
    )
    which = "the mean of the run" if setting.mean_length else "the longest, since no mean is recorded"
    words = describe_both_prices(price, group_size=setting.group_size, length=round(length, 1))
    return f"At a beta of {beta:.3g} the KL costs {words} ({which})."


def _versions(setting: Setting) -> str:
    known = {name: version for name, version in setting.versions.items() if version != "not installed"}
    if not known:
        return "The versions are not recorded."
    return to_text(f"Versions: {', '.join(f'{name} {version}' for name, version in known.items())}.")
