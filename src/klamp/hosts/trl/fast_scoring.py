"""klamp's scorer in the place of TRL's scoring method: each distinct prompt once, no padding in the head, no logits.

What the method returns is TRL's up to rounding, gradient included. A model is tried out first, on a few tokens and
against TRL's own method; where it, an input or a setting forbids fast scoring, TRL's method does the work.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from trl.trainer import grpo_trainer

from klamp.core.objective import Objective, Weighted, without_gradient
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import GATE_KL, batch_of, loss_mask
from klamp.hosts.common.step_zero import active_dropouts
from klamp.hosts.trl.exact import plain_model, weights_are_split
from klamp.hosts.trl.grpo_config import liger_bypasses
from klamp.scoring.completions import Completions
from klamp.scoring.model_parts import OpenedModel, Positions, Traits
from klamp.scoring.probe import example, probe
from klamp.scoring.scorer import Ask, Scorer

POSITIONS: tuple[Positions, ...] = ("columns", "tokens")
"""How models may count positions where nobody tells them: most by columns, padding included."""
FIRST_PASS = "; generation by transformers runs each distinct prompt once"
NO_GRADIENT = (
    "with fast_scoring the model's cache cannot carry a prompt's gradient (gradient checkpointing takes the cache "
    "away): prompts are run once in passes without gradient only; gradient_checkpointing=False is faster"
)


@dataclass
class FastScoring:
    """What is known of a trainer's fast scoring."""

    required: bool
    """Whether TRL's own scoring is refused."""
    reason: str = ""
    """Why it is not used at all; empty where it is."""
    traits: dict[int, Traits] = field(default_factory=dict)
    """What each model allows, by the `id` of its innermost module; empty before they were tried out."""
    told: set[str] = field(default_factory=set)
    """The reasons that the user knows."""

    def __str__(self) -> str:
        if self.reason:
            return f"fast_scoring is asked for, and TRL's own scoring is used: {self.reason}"
        if not self.traits:
            return "fast_scoring is asked for; what the model allows is found out at the first batch"
        shared = all(each.sharing == "gradient" for each in self.traits.values())
        once = "each distinct prompt once" if shared else "each completion with its prompt where the cache is no help"
        apart = "".join(f"; but not where {reason}" for reason in sorted(self.told))
        first = FIRST_PASS if shared else ""
        return f"completions are scored by klamp: {once}, no padding in the head, no logits held{first}{apart}"


def asked_for(args: Any) -> FastScoring | None:
    """Fast scoring as a trainer's arguments ask for it; None where they do not."""
    wanted = getattr(args, "fast_scoring", False)
    return FastScoring(required=wanted == "require") if wanted else None


def settle(trainer: Any) -> None:
    """Find out what a trainer's models allow, once they are where they will be used.

    Raises:
        ConfigError: fast scoring is required and impossible.
    """
    fast = trainer._klamp.fast
    if fast is None or fast.reason or fast.traits:
        return
    reason = why_not_fast(trainer)
    if not reason and next(trainer.model.parameters()).device.type != trainer.accelerator.device.type:
        return  # accelerate numbers the CPU by process: cpu:1 is no other device than cpu
    taught = None if trainer._klamp.teacher is None else trainer._klamp.teacher.model
    for model in (trainer.model, trainer.ref_model, taught):
        if model is not None and not reason:
            traits, reason = _tried_out(trainer, model)
            fast.traits[id(plain_model(trainer, model))] = traits
    fast.reason = reason
    if reason:
        fall_back(trainer, reason)
    elif trainer.args.gradient_checkpointing or any(each.sharing != "gradient" for each in fast.traits.values()):
        trainer._caution(NO_GRADIENT)


def fall_back(trainer: Any, reason: str, *, what: str = "TRL's own scoring") -> None:
    """Say once that TRL's own way is taken, and why.

    Raises:
        ConfigError: fast scoring is required.
    """
    fast = trainer._klamp.fast
    if fast.required:
        raise ConfigError(
            "fast_scoring='require' cannot be honoured",
            got=type(trainer.model).__name__,
            why=reason,
            fix=f"set fast_scoring=True: {what} is then used where klamp's cannot be",
        )
    if reason not in fast.told and trainer.accelerator.is_main_process:
        trainer._caution(f"{what} is used in spite of fast_scoring: {reason}")
    fast.told.add(reason)


def _tried_out(trainer: Any, model: Any) -> tuple[Traits, str]:
    """What a model allows; and why fast scoring cannot use it, "" where it can."""
    unwrapped = trainer.accelerator.unwrap_model(model)
    plain = grpo_trainer.disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)
    with plain:
        with trainer.accelerator.autocast():
            traits = probe(unwrapped)
        if not traits.head:
            return traits, "the model's logits are not its last hidden states through a plain output head"
        call = _trial(unwrapped)
        for positions in POSITIONS:
            found = replace(traits, positions=positions)
            if _same_as_host(trainer, model, call, found):
                return found, ""
    return traits, "TRL's scores of the model are others (its positions, or its kernels)"


def _trial(model: nn.Module) -> dict[str, Any]:
    """A call of TRL's method with a few tokens."""
    some = example(model)
    return {
        "input_ids": torch.cat([some.prompt_ids, some.ids], 1),
        "attention_mask": torch.cat([some.prompt_mask, some.mask.to(some.prompt_mask.dtype)], 1),
        "logits_to_keep": some.ids.shape[1],
    }


@torch.no_grad()
def _same_as_host(trainer: Any, model: Any, call: dict[str, Any], traits: Traits) -> bool:
    """Whether fast scores differ from TRL's no more than TRL's own do when it scores in other parts."""
    mask = call["attention_mask"][:, -call["logits_to_keep"] :].bool()
    call = call | {"compute_entropy": model is trainer.model}  # TRL gives a reference's to nobody

    def together(found: Any) -> Tensor:
        return torch.stack([each[mask].float() for each in found[:2] if each is not None])

    try:
        own = partial(getattr(grpo_trainer.GRPOTrainer, SCORING), trainer, model, **call)
        with _as_prepared(trainer, model):
            expected, also = together(own(batch_size=4)), together(own(batch_size=2))
        ours = together(_scores(trainer, model, Call(**call), traits))
    except Exception:  # as in klamp.scoring.probe: models refuse in a dozen ways
        return False
    low = next(model.parameters()).dtype.itemsize < 4 or _is_mixed(trainer)
    bound = 8 * (also - expected).abs().max() + (1e-2 if low else 1e-5) * expected.abs().max()
    return bool(((ours - expected).abs() <= bound).all())


def _is_mixed(trainer: Any) -> bool:
    """Whether a trainer computes in mixed precision."""
    return trainer.accelerator.mixed_precision not in ("no", None)


@contextmanager
def _as_prepared(trainer: Any, model: Any) -> Iterator[None]:
    """A context in which a model computes as accelerate will have it: in mixed precision, with outputs in float32."""
    if not _is_mixed(trainer):
        yield
        return
    causal = plain_model(trainer, model)
    inner = causal.forward

    def forward(*args: Any, **options: Any) -> Any:
        with trainer.accelerator.autocast():
            return inner(*args, **options)

    with replaced(causal, "forward", convert_outputs_to_fp32(forward)):
        yield


@dataclass(frozen=True, kw_only=True)
class Call:
    """What TRL's scoring method is asked, by TRL's names."""

    input_ids: Tensor
    attention_mask: Tensor
    logits_to_keep: int
    batch_size: int | None = None
    compute_entropy: bool = False
    learns: Tensor | None = None
    """[B] bool: rows whose gradient is not 0; None: any may be."""
    hidden: bool = False
    """Whether the hidden states that tokens were predicted from are wanted."""

    def completions(self, rows: slice) -> Completions:
        """Some of the completions, in klamp's words."""
        ids, mask, length = self.input_ids[rows], self.attention_mask[rows], self.logits_to_keep
        blank = torch.zeros(len(ids), length, device=ids.device)
        return Completions(
            prompt_ids=ids[:, :-length],
            prompt_mask=mask[:, :-length],
            ids=ids[:, -length:],
            mask=mask[:, -length:].bool(),
            sampler_logprobs=blank,
            ended=blank[:, 0].bool(),
        )


Found = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities [B, T], entropies [B, T] and hidden states [B, T, H]; None where nobody asked."""


def scored(trainer: Any, args: tuple[Any, ...], options: dict[str, Any], *, hidden: bool) -> Found | None:
    """What TRL's scoring method was asked, by klamp's scorer; None where TRL has to do it.

    Args:
        trainer: with a session.
        args, options: what the method was called with.
        hidden: whether the hidden states are wanted.

    Raises:
        ConfigError: fast scoring is required and impossible.
    """
    session = trainer._klamp
    if session.fast is None or session.fast.reason:
        return None
    if not session.fast.traits:
        fall_back(trainer, "the weights are not where the trainer computes")
        return None
    given = inspect.signature(getattr(grpo_trainer.GRPOTrainer, SCORING)).bind(trainer, *args, **options).arguments
    model = given.pop("model")
    traits = session.fast.traits.get(id(plain_model(trainer, model)))
    if traits is None:  # a model of somebody else's
        return None
    own = {name: value for name, value in given.items() if name in Call.__dataclass_fields__}
    call = Call(**own, hidden=hidden, learns=session.learns if torch.is_grad_enabled() else None)
    others = {name: value for name, value in given.items() if name not in own and name != "self"}
    reason = why_not_these(trainer, call.attention_mask, call.logits_to_keep, others)
    opened = OpenedModel(plain_model(trainer, model), traits)
    if not reason and not opened.is_steady(call.input_ids.shape[1]):
        reason = "the rotary frequencies of such long sequences follow the longest of a pass"
    if reason:
        fall_back(trainer, reason)
        return None
    return _scores(trainer, model, call, traits)


def _scores(trainer: Any, model: Any, call: Call, traits: Traits) -> Found:
    """The scores of all rows, a batch of them at a time."""
    count = len(call.input_ids)
    size = call.batch_size or count
    parts = [_pass(trainer, model, call, slice(i, min(i + size, count)), traits) for i in range(0, count, size)]
    names = ("logprobs", "entropy", "hidden")
    logprobs, entropy, hidden = (torch.cat([p[n] for p in parts]) if n in parts[0] else None for n in names)
    assert logprobs is not None
    return logprobs, entropy, hidden


def _pass(trainer: Any, model: Any, call: Call, rows: slice, traits: Traits) -> dict[str, Tensor]:
    """The scores of some rows, out of one call of the model as it is wrapped (DDP, DeepSpeed, an adapter)."""
    causal, completions = plain_model(trainer, model), call.completions(rows)
    learns = None if call.learns is None or bool(call.learns[rows].all()) else call.learns[rows]
    every = torch.ones(len(completions.ids), dtype=torch.bool, device=completions.ids.device)
    ask = Ask(
        temperature=trainer.temperature,
        entropy=call.compute_entropy,
        keep=every if call.hidden else None,
        learns=learns,
    )

    def forward(*_given: Any, **_options: Any) -> dict[str, Tensor]:
        scores = Scorer(causal, traits)(completions, ask)
        kept = None if scores.predictions is None else scores.predictions.values
        found = {"logprobs": scores.logprobs, "entropy": scores.entropy, "hidden": kept}
        return {name: each for name, each in found.items() if each is not None}

    with replaced(causal, "forward", forward), trainer.accelerator.autocast():
        return model(input_ids=call.input_ids[rows], attention_mask=call.attention_mask[rows])


@contextmanager
def replaced(model: nn.Module, method: str, function: Any) -> Iterator[None]:
    """A context in which a method of this model is another function; its wrappers and hooks stay."""
    before = vars(model).get(method)
    setattr(model, method, function)
    try:
        yield
    finally:
        if before is None:
            delattr(model, method)
        else:
            setattr(model, method, before)


def learning_rows(trainer: Any, inputs: Any, beta: float) -> Tensor | None:
    """Which completions of a micro-batch have a gradient; None: all may. [B] bool

    Args:
        trainer: whose loss it is; only of TRL's own is it known.
        inputs: the micro-batch.
        beta: klamp's coefficient in force.
    """
    session = trainer._klamp
    if session.fast is None or trainer._host_class("_compute_loss") is not grpo_trainer.GRPOTrainer:
        return None
    if trainer._entropy_bonus_enabled or trainer.aux_loss_enabled:
        return None
    controlled = session.control is not None and session.control.kl.needs_reference
    if trainer.beta != 0 and not controlled:
        return loss_mask(inputs).any(-1)
    if controlled and session.term.clip_method != "none" and inputs.get(GATE_KL) is None:
        return None
    batch = batch_of(inputs, torch.zeros(inputs["completion_ids"].shape, device=inputs["completion_ids"].device))
    taught = session.teacher
    others = () if taught is None else (Weighted(taught.coefficient(trainer), taught.term),)
    return ~without_gradient(batch, Objective(beta=beta if controlled else 0.0, kl=session.term, others=others))


SCORING = "_get_per_token_logps_and_entropies"
"""The method of TRL's trainer whose place is taken."""


def why_not_fast(trainer: Any) -> str:
    """Why no completion of a trainer can be scored fast, in words; "" where nothing of its settings forbids it."""
    args, models = trainer.args, [each for each in (trainer.model, trainer.ref_model) if each is not None]
    owner = trainer._host_class(SCORING)
    dropouts = sorted({each.name for each in active_dropouts(trainer.accelerator.unwrap_model(trainer.model))})
    rows = [
        (owner is not grpo_trainer.GRPOTrainer, f"{owner.__name__} scores completions in a way of its own"),
        (weights_are_split(trainer), "FSDP or ZeRO-3 splits the weights layer by layer, and processes would run the "
         "layers unequally often"),
        (_sequences_are_split(trainer), "sequences or matrices are split over processes"),
        (args.use_liger_kernel and liger_bypasses(), "the loss is computed in Liger's kernel"),
        (args.torch_compile, "the model is compiled (torch_compile)"),
        (getattr(args, "cast_lm_head_to_fp32", False), "cast_lm_head_to_fp32 gives the head another type than the "
         "hidden states"),
        (any(_on_devices(trainer, model) > 1 for model in models), "the model is spread over several devices"),
        (_adds_tokens(trainer), "the adapter adds virtual tokens to the prompt"),
        (bool(dropouts), f"dropout is on ({', '.join(dropouts)}), and a prompt that is run once would be dropped out "
         "once: set disable_dropout=True, or lora_dropout=0"),
    ]  # fmt: skip
    return next((text for applies, text in rows if applies), "")


def why_not_these(trainer: Any, mask: Tensor, length: int, others: dict[str, Any]) -> str:
    """Why these completions cannot be scored fast, in words; "" where they can.

    Args:
        trainer: whose method was called.
        mask: [B, P + T], 0 on padding.
        length: T.
        others: what the method was asked besides: pictures, types of tokens, a router's loss.
    """
    given = [name for name, value in others.items() if value is not None and value is not False]
    if "compute_aux_loss" in given:
        return "the router's auxiliary loss is made of whole rows, padding included"
    if given:
        return f"the input is more than tokens ({', '.join(given)})"
    if torch.is_grad_enabled() and trainer._entropy_bonus_enabled:
        return "the entropy bonus needs the entropy's gradient"
    tokens = mask.bool()
    prompts, completions = tokens[:, :-length], tokens[:, -length:]
    if bool((prompts[:, :-1] & ~prompts[:, 1:]).any() | (~completions[:, :-1] & completions[:, 1:]).any()):
        return "there is padding amid a prompt or a completion"
    return ""


def _sequences_are_split(trainer: Any) -> bool:
    found = getattr(trainer.accelerator, "parallelism_config", None)
    return any(getattr(found, f"{kind}_enabled", False) for kind in ("cp", "sp", "tp"))


def _on_devices(trainer: Any, model: Any) -> int:
    return len(set((getattr(plain_model(trainer, model), "hf_device_map", None) or {}).values()))


def _adds_tokens(trainer: Any) -> bool:
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    return any(getattr(each, "is_prompt_learning", False) for each in adapters.values())
