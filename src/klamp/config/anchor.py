"""The choices that the KL to a reference and that to a teacher share: texts, rules, and what hosts cannot honour.

A choice of the KL to the reference is the field `kl_NAME` or `reference_NAME`, one of the KL to a teacher
`teacher_NAME`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from klamp.config.fields import HostLimit, like
from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, INSIDE_0_1, limited
from klamp.core.controllers import Schedule
from klamp.core.term import KLTerm
from klamp.errors import Refusal


@dataclass(frozen=True, kw_only=True)
class AnchorChoices:
    """The choices of an anchor beside those of `KLTerm`; its text fills in the names of anchor and coefficient."""

    schedule: Schedule = "constant"
    """Factor on {coefficient} over the run: constant, or linear or cosine to 0."""
    warmup_steps: int = limited(0, AT_LEAST_0)
    """Warm-up: steps over which the factor on {coefficient} grows from 0."""
    url: str | None = None
    """Address of a vLLM server that scores as the {anchor}."""
    name: str | None = None
    """The model's name at that server; None: the only one that it serves."""
    decay: float = limited(0.99, INSIDE_0_1)
    """ema: share of the old {anchor}'s weights that every step keeps, in (0, 1)."""
    reset_steps: int = limited(100, AT_LEAST_1)
    """periodic: steps after which the {anchor} becomes the policy."""


def choice(name: str, anchor: str = "reference", **rest: Any) -> Any:
    """A field of `KLTerm` or `AnchorChoices` as a choice of one anchor; `rest`: see `setting`."""
    words = {"anchor": anchor, "coefficient": "beta" if anchor == "reference" else "teacher_coef"}
    return like(KLTerm if hasattr(KLTerm, name) else AnchorChoices, name, words, **rest)


def build_term(config: Any, prefix: str, **own: Any) -> KLTerm:
    """The term of the fields `prefix_NAME` of a configuration; `own`: what is named otherwise."""
    names = {field.name: f"{prefix}_{field.name}" for field in fields(KLTerm)} | {"value": f"{prefix}_estimator"}
    choices = {name: getattr(config, theirs) for name, theirs in names.items() if hasattr(config, theirs)}
    return KLTerm(**choices | own)


def placement_refusals(config: Any, anchor: str) -> list[Refusal]:
    """What place, horizon and weights of a KL do not allow together."""
    names = ("estimator", "placement", "horizon", "off_policy")
    estimator, placement, horizon, off_policy = (getattr(config, f"{anchor}_{name}") for name in names)
    return [
        Refusal(
            placement != "loss" and estimator != "k1",
            f"{anchor}_placement={placement!r} takes {anchor}_estimator='k1' only, not {estimator!r}",
            why="through the score function only k1 gives the gradient of the reverse KL: that of k3 cancels near the "
            "anchor, k2 is biased, and a KL over the vocabulary or a head has the expected gradient 0",
            fix=f"set {anchor}_estimator='k1' (k3 is logged all the same), or {anchor}_placement='loss'",
        ),
        Refusal(
            placement == "reward" and horizon == "token",
            f"{anchor}_placement='reward' has {anchor}_horizon='sequence'",
            why="a reward belongs to the whole completion, so its KL is the sum over the sequence",
            fix=f"set {anchor}_horizon='sequence', or {anchor}_placement='advantage' for the per-token shift",
        ),
        Refusal(
            placement != "loss" and off_policy != "none",
            f"{anchor}_off_policy has no meaning with {anchor}_placement={placement!r}",
            why="the surrogate's own importance ratio already weighs what is in the advantage",
            fix=f"set {anchor}_off_policy='none'",
        ),
        Refusal(
            horizon == "sequence" and off_policy == "token",
            f"{anchor}_horizon='sequence' needs {anchor}_off_policy='sequence' (or 'none')",
            why="the token ratio does not correct the prefix that a later token was sampled from",
            fix=f"set {anchor}_off_policy='sequence'",
        ),
    ]


# what hosts cannot honour --------------------------------------------------------------------------------------------

TINKER = ("tinker",)

NO_LOGITS = HostLimit(
    ("verl", "tinker"),
    "its loss is given log-probabilities of the sampled tokens, and no logits of the reference",
    "use kl_estimator='k3' (its value is unbiased, its gradient the same in expectation)",
    values=("exact",),
)
NO_EXACT_BASELINE = replace(NO_LOGITS, fix="leave kl_baseline unset")
ONE_AVERAGE = HostLimit(
    ("verl",),
    "its loss_agg_mode averages the policy loss and the KL alike",
    "leave kl_normalizer unset, and set actor_rollout_ref.actor.loss_agg_mode",
)
ONE_KL = HostLimit(("unsloth", "verl"), "its loss takes one KL; klamp train, klamp.trl and klamp.tinker take two")
OWN_STEP = HostLimit(
    ("trl", "unsloth", "verl"),
    "its loop always takes the optimizer step; a loss of 0 would still move the weights by momentum and weight decay",
    "leave kl_early_stop unset, and lower num_iterations or the learning rate; klamp train has it",
)
OWN_PROCESS = HostLimit(
    ("trl", "unsloth"),
    "it scores the reference with a model of its own process",
    "pass a model as ref_model, or use klamp train",
    values=("remote",),
)
ITS_REFERENCE = HostLimit(("verl",), "it takes the policy without its adapter if lora_rank is set, else a frozen copy")
MADE_AT_ONCE = HostLimit(
    ("unsloth",),
    "its reference is loaded, and its callback made, while the trainer is built",
    "build it with sync_ref_model=True, ref_model_mixup_alpha and ref_model_sync_steps, and leave reference unset",
    values=("ema", "periodic"),
)
ITS_DTYPE = HostLimit(("verl",), "its own engine loads the reference")

ONE_TEACHER = "klamp scores a whole batch with one teacher, whose weights no checkpoint of TRL's would hold"
FIXED_TEACHER = "name one teacher_model or teacher_url, or set teacher_kind='adapter_off' or 'live'; klamp train has it"
MOVING_TEACHER = HostLimit(("trl",), ONE_TEACHER, FIXED_TEACHER, values=("ema", "periodic"))
SEVERAL_TEACHERS = HostLimit(("trl",), ONE_TEACHER, FIXED_TEACHER)
ADVANTAGES_FIRST = HostLimit(
    ("trl",),
    "its advantages are formed before the teacher has scored",
    "set teacher_placement='advantage': the KL enters after the division by the deviation",
    values=("reward",),
)
FROM_A_FOLDER = HostLimit(
    ("verl",),
    "it loads its teachers from a folder into engines that it starts itself, and never writes to them",
    "name teacher_model; klamp train has it",
    values=("adapter_off", "ema", "periodic", "live"),
)
NO_SERVER = replace(FROM_A_FOLDER, values=None)
ONE_PROMPT = HostLimit(("verl",), "its agent loop sends the teacher the policy's own prompt and answer")
NO_VOCABULARY = HostLimit(
    ("verl",),
    "the teacher's engine returns some log-probabilities of each token, not of the whole vocabulary",
    "use teacher_estimator='k3', 'k1', or 'topk' with teacher_top_k=0 for another direction",
    values=("exact",),
)
IN_THE_LOSS = HostLimit(
    ("verl",),
    "its way to an advantage (use_policy_gradient) is a second policy loss with bounds of its own",
    "set teacher_placement='loss': the expected gradient of k1 is the same",
)
WITHOUT_A_NUMBER = HostLimit(("verl",), "it calls a loss of distillation by a registered name, without a number")
NO_BASELINE = HostLimit(("verl",), "its loss of distillation has no place for a second number per token")
READ_ONCE = HostLimit(("verl",), "distillation_loss_coef is read once, when its workers start")
