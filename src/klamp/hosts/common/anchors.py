"""What every loop checks of its reference and its teacher: tokens, prompts, and whether the KL starts at 0."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from klamp.audit.pair import PROBE, check_pair
from klamp.config.teacher import TeacherConfig
from klamp.doctor.alarms_kl import STEP_ZERO
from klamp.errors import ConfigError, DataError, KLWarning, ModelError
from klamp.scoring.model_parts import PrefixKL
from klamp.scoring.vllm_reference import Who

STEP_ZERO_KL = STEP_ZERO.value
"""KL in nats per token above which a policy that has not been updated and its reference are not the same model."""


def step_zero_text(kl: float, reasons: Sequence[str]) -> str:
    """The warning for a KL (nats per token) before the first update that is not about 0."""
    likely = "; ".join(reasons) or "a reference that is another model, other kernels, or a mask that covers the prompt"
    return (
        f"The KL before the first update is {kl:.2e} nats per token and should be about 0: policy and reference differ "
        f"already. Likely reason: {likely}."
    )


class ActiveDropout(NamedTuple):
    """A dropout, or a noise of a router, that is above 0."""

    holder: Any  # the layer or the settings that hold the number
    name: str  # the attribute: `p` of an nn.Dropout, `attention_dropout`, `attn_pdrop`,


def active_dropouts(model: nn.Module) -> list[ActiveDropout]:
    """Every dropout of a model that is above 0: in an nn.Dropout, a number of a layer's own, or the settings."""
    holders = [holder for module in model.modules() for holder in (module, getattr(module, "config", None))]
    dropouts = {
        (id(holder), name): ActiveDropout(holder, name)
        for holder in holders
        for name, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, float) and value > 0 and _is_dropout(holder, name)
    }
    return list(dropouts.values())


def _is_dropout(holder: object, name: str) -> bool:
    if isinstance(holder, nn.Dropout):
        return name == "p"
    return "drop" in name or name in ("jitter_noise", "input_jitter_noise")


def likely_reasons(policy: nn.Module, reference: nn.Module | None, *, adapter: bool, loaded: bool = True) -> list[str]:
    """What usually makes policy and reference (None: its adapter off; `loaded`: no copy) differ before any update."""
    dropouts = active_dropouts(policy) if policy.training else []
    layers = sum(isinstance(dropout.holder, nn.Dropout) for dropout in dropouts)
    inside = sorted({dropout.name for dropout in dropouts if not isinstance(dropout.holder, nn.Dropout)})
    reasons: list[str] = []
    if layers:
        reasons.append(f"dropout ({layers} layers with p > 0); set disable_dropout=True, or lora_dropout=0")
    elif inside:
        reasons.append(
            f"dropout of a layer or in its settings ({', '.join(inside)} above 0), which disable_dropout does not "
            f"switch off; load the model with {inside[0]}=0.0"
        )
    if adapter and reference is None:
        reasons.append("an adapter that is not zero at the start, while the reference is the model without it")
    if reference is not None:
        own_dtype, ref_dtype = (next(model.parameters()).dtype for model in (policy, reference))
        if own_dtype != ref_dtype:
            reasons.append(f"data types: the policy is {own_dtype}, the reference {ref_dtype}")
        elif loaded and not adapter:
            reasons.append(
                "weights: the reference was loaded from a path or the Hub and the policy has been changed since; pass "
                "ref_model=copy.deepcopy(model)"
            )
    return reasons


def prefix_kl(config: TeacherConfig) -> PrefixKL | None:
    """The KL, or a baseline, that is summed at each prefix; None: the sampled token's log-ratio is all it takes."""
    sampled = config.teacher_estimator not in ("exact", "topk")
    if sampled and config.teacher_baseline == "none":
        return None
    tail = "bucket" if sampled else config.teacher_tail
    return PrefixKL(direction=config.teacher_direction, top_k=config.head_size, head=config.teacher_head, tail=tail)


def no_prompt(column: str, columns: Collection[str]) -> DataError:
    """The error for a row of the data that does not say what the teacher sees."""
    return DataError(
        f"a prompt has no {column!r} for the teacher",
        got=f"the columns {', '.join(sorted(columns)) or 'none'}",
        why="teacher_prompt names the column with the prompt that the teacher sees",
        fix="name a column of the data, or leave teacher_prompt out",
    )


SAME = 0.05  # nats by which the log-probabilities of one model may differ: other kernels, other batches


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], *, instead: str) -> None:
    """Refuse to resume with another task, template, reference or teacher; compares what both have."""
    for name in saved.keys() & now.keys():
        if difference := _difference(saved[name], now[name]):
            why = "the run would go on towards another policy, and its curve would not show it"
            fix = f"use the {name} that the run was started with, or {instead}"
            raise ConfigError(f"the {name} is another one than it was", got=difference, why=why, fix=fix)


def _difference(saved: Any, now: Any) -> str:
    """How two fingerprints differ; empty: they do not."""
    if isinstance(saved, str) or isinstance(now, str):
        return "" if saved == now else f"SHA-256 {saved}, now {now}"
    gap = max((0.0 if x == y else abs(x - y) for x, y in zip(saved, now, strict=False)), default=0.0)
    same = len(saved) == len(now) and gap <= SAME
    return "" if same else f"log-probabilities of the same tokens differ by up to {gap:.3g} nats"


def check_room(model: Any, present: Tensor, *, who: Who) -> None:
    """Refuse rows of prompt and completion, [B, P + T] bool, that are longer than an anchor's positions."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room is None or present.shape[-1] <= room:  # the common case, without a wait for the device
        return
    if (longest := int(present.sum(-1).max())) > room:
        raise DataError(
            f"a prompt is too long for the {who}",
            got=f"{longest} tokens with its completion",
            why=f"the {who} has {room} positions, and no log-probabilities past them",
            fix=f"shorten its prompts or max_completion_length, or use another {who}",
        )


def check_apart(anchor: nn.Module, policy: nn.Module, *, who: Who = "reference") -> None:
    """Refuse an anchor that has trained weights of the policy; warn of weights that are frozen in both."""

    def place(x: Tensor) -> int:
        return x.data_ptr() if type(x.data) is Tensor and x.data_ptr() else id(x)

    own = {place(x): x.requires_grad for x in policy.parameters()}
    shared = [own[place(x)] for x in anchor.parameters() if place(x) in own]
    text = f"{len(shared)} parameters of the {who} are the policy's own"
    if any(shared):
        raise ModelError(
            f"the {who} {'is the policy itself' if len(shared) == len(own) else 'shares weights with the policy'}",
            got=text,
            why=f"a {who} is frozen: these weights would be frozen in the policy too, or move in both",
            fix="pass a copy, as copy.deepcopy(model) makes one",
        )
    if shared and not hasattr(policy, "peft_config"):
        warnings.warn(f"{text}, and frozen in both: the policy does not learn there.", KLWarning, stacklevel=3)


def check_tokens(
    theirs: Any, ours: Any, *, name: str, who: Who = "teacher", template_options: Mapping[str, Any] | None = None
) -> None:
    """Refuse an anchor whose tokenizer gives other ids to the policy's tokens; warn of another end or chat template."""
    if theirs is None:
        text = f"The {who} {name} has no tokenizer beside it: whether its token ids are the policy's is not known."
        warnings.warn(text, KLWarning, stacklevel=2)
        return
    for finding in check_pair(ours, theirs, PROBE, who=who, template_options=template_options).findings:
        numbers = finding.evidence
        if finding.code in ("other-tokenizer", "extra-tokens") and numbers["tokens"]:  # a run may write any of them
            raise ModelError(
                f"the {who} has another tokenizer than the policy",
                got=f"{numbers['tokens']} of {numbers['of']} tokens have another id at {name}, the first "
                f"{numbers['first']!r}",
                why="equal token ids would mean different tokens",
                fix=finding.fix or f"use a {who} of the same model family",
            )
        if finding.code in ("end-id", "templates-differ"):
            fix = finding.fix if finding.code == "end-id" else "use a teacher with the policy's chat template"
            text = f"{finding.what[0].upper()}{finding.what[1:]}. For {name}: {fix}."
            warnings.warn(text, KLWarning, stacklevel=2)
