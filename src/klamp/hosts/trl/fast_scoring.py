"""klamp's scorer, which replaces TRL's scoring method: each distinct prompt once, no padding in the head, no logits.

A model is tried out first, on a few tokens, against TRL's own method. If the model, an input or a setting forbids fast
scoring, TRL's method does the work.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from trl.trainer import grpo_trainer

from klamp.core.objective import Objective, without_gradient
from klamp.hosts.common.anchors import active_dropouts
from klamp.hosts.common.coefficient import GATE_KL, batch_of, loss_mask, replaced
from klamp.hosts.common.effective import that_apply
from klamp.hosts.trl.grpo_config import liger_bypasses
from klamp.hosts.trl.reference import plain_model, weights_are_split
from klamp.hosts.trl.session import TRLTrainer
from klamp.scoring.completions import Completions, distinct, run_prompts
from klamp.scoring.model_parts import OpenedModel, Positions, Traits, cache_name, cache_rows
from klamp.scoring.probe import example, probe
from klamp.scoring.scorer import Ask, Scorer

POSITIONS: tuple[Positions, ...] = ("columns", "tokens")
"""How models count positions if they get no position ids: most by columns, padding included."""
KNOWN = ("disable_compile", "generation_config", "synced_gpus")
"""What `generate` may be asked for besides tokens."""
SETTINGS = ("assistant_early_exit", "cache_implementation", "penalty_alpha", "prompt_lookup_num_tokens")
"""Settings of a generation that bring a cache or a way of decoding of their own."""
SCORING = "_get_per_token_logps_and_entropies"
"""The method of TRL's trainer whose place is taken."""
NO_GRADIENT = (
    "with fast_scoring the model's cache cannot keep a prompt's gradient (gradient checkpointing removes the "
    "cache): each prompt is computed once only in passes without gradient; gradient_checkpointing=False is faster"
)


def settle(trainer: TRLTrainer) -> None:
    """Find out what a trainer's models allow, once they are where they will be used."""
    fast, teacher = trainer._klamp.fast, trainer._klamp.teacher
    if fast is None or fast.reason or fast.traits:
        return
    fast.reason = why_not_fast(trainer)
    if not fast.reason and next(trainer.model.parameters()).device.type != trainer.accelerator.device.type:
        return  # accelerate numbers the CPU by process: cpu:1 is no other device than cpu
    for model in (trainer.model, trainer.ref_model, None if teacher is None else teacher.model):
        if model is not None and not fast.reason:
            fast.traits[id(plain_model(trainer, model))], fast.reason = _tried_out(trainer, model)
    if fast.reason:
        fall_back(trainer, fast.reason)
    elif trainer.args.gradient_checkpointing or any(x.sharing != "gradient" for x in fast.traits.values()):
        trainer._caution(NO_GRADIENT)


def fall_back(trainer: TRLTrainer, reason: str, *, what: str = "TRL's own scoring") -> None:
    """Say once that TRL's own way is taken, and why."""
    fast = trainer._klamp.fast
    if reason not in fast.reasons and trainer.accelerator.is_main_process:
        trainer._caution(f"{what} is used in spite of fast_scoring: {reason}")
    fast.reasons.add(reason)


def _tried_out(trainer: TRLTrainer, model: Any) -> tuple[Traits, str]:
    """What a model allows; and why fast scoring cannot use it, "" if it can."""
    unwrapped = trainer.accelerator.unwrap_model(model)
    with grpo_trainer.disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        with trainer.accelerator.autocast():
            traits = probe(unwrapped)
        if not traits.head:
            return traits, "the model's logits are not its last hidden states through a plain output head"
        call = _trial(unwrapped)
        for candidate in (replace(traits, positions=positions) for positions in POSITIONS):
            if _same_as_host(trainer, model, call, candidate):  # TRL may count columns; generation counts tokens
                return replace(traits, positions="tokens"), ""
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
def _same_as_host(trainer: TRLTrainer, model: Any, call: dict[str, Any], traits: Traits) -> bool:
    """Whether fast scores differ from TRL's no more than TRL's own do when it scores in other parts."""
    mask = call["attention_mask"][:, -call["logits_to_keep"] :].bool()
    call = call | {"compute_entropy": model is trainer.model}  # TRL gives a reference's to nobody

    def together(scores: Any) -> Tensor:
        return torch.stack([values[mask].float() for values in scores if values is not None])

    try:
        own = partial(getattr(grpo_trainer.GRPOTrainer, SCORING), trainer, model, **call)
        with _as_prepared(trainer, model):
            expected, also = together(own(batch_size=4)[:2]), together(own(batch_size=2)[:2])
        ours = together(_scores(trainer, model, ScoringCall(**call), traits).values())
    except Exception:  # as in klamp.scoring.probe: models refuse in a dozen ways
        return False
    bound = 8 * (also - expected).abs().max() + (1e-2 if is_coarse(trainer, model) else 1e-5) * expected.abs().max()
    return bool(((ours - expected).abs() <= bound).all())


def is_coarse(trainer: TRLTrainer, model: Any) -> bool:
    """Whether the model computes in fewer than 32 bits."""
    return next(model.parameters()).dtype.itemsize < 4 or _is_mixed(trainer)


def _is_mixed(trainer: TRLTrainer) -> bool:
    return trainer.accelerator.mixed_precision not in ("no", None)


@contextmanager
def _as_prepared(trainer: TRLTrainer, model: Any) -> Iterator[None]:
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
class ScoringCall:
    """What TRL's scoring method is asked, by TRL's names."""

    input_ids: Tensor
    attention_mask: Tensor
    logits_to_keep: int
    batch_size: int | None = None
    compute_entropy: bool = False
    learns: Tensor | None = None  # [B] bool: rows whose gradient is not 0; None: any may be
    hidden: bool = False  # whether the hidden states that tokens were predicted from are wanted

    def completions(self, rows: slice = slice(None)) -> Completions:
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


def scored(trainer: TRLTrainer, args: Any, options: dict[str, Any], *, hidden: bool) -> dict[str, Tensor] | None:
    """What TRL's scoring method was asked for: `logprobs`, `entropy`, `hidden` by klamp's scorer; None: TRL scores."""
    fast = trainer._klamp.fast
    if fast is None or fast.reason:
        return None
    if not fast.traits:
        fall_back(trainer, "the weights are not where the trainer computes")
        return None
    arguments = inspect.signature(getattr(grpo_trainer.GRPOTrainer, SCORING)).bind(trainer, *args, **options).arguments
    model = arguments.pop("model")
    traits = fast.traits.get(id(plain_model(trainer, model)))
    if traits is None:  # a model of somebody else's
        return None
    own = {name: value for name, value in arguments.items() if name in ScoringCall.__dataclass_fields__}
    learns = trainer._klamp.calls.learns if torch.is_grad_enabled() else None
    call = ScoringCall(**own, hidden=hidden, learns=learns)
    others = {name: value for name, value in arguments.items() if name not in own and name != "self"}
    reason = why_not_these(trainer, call.attention_mask, call.logits_to_keep, others)
    if not reason and not OpenedModel(plain_model(trainer, model), traits).is_steady(call.input_ids.shape[1]):
        reason = "the rotary frequencies of such long sequences follow the longest of a pass"
    if reason:
        fall_back(trainer, reason)
        return None
    return _scores(trainer, model, call, traits)


def _scores(trainer: TRLTrainer, model: Any, call: ScoringCall, traits: Traits) -> dict[str, Tensor]:
    """The scores of all rows, one batch at a time."""
    count = len(call.input_ids)
    size = call.batch_size or count
    parts = [_pass(trainer, model, call, slice(i, min(i + size, count)), traits) for i in range(0, count, size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _pass(trainer: TRLTrainer, model: Any, call: ScoringCall, rows: slice, traits: Traits) -> dict[str, Tensor]:
    """The scores of some rows, from one call of the wrapped model (DDP, DeepSpeed, an adapter)."""
    causal, completions = plain_model(trainer, model), call.completions(rows)
    learns = None if call.learns is None or bool(call.learns[rows].all()) else call.learns[rows]
    every = torch.ones(len(completions.ids), dtype=torch.bool, device=completions.ids.device)
    keep = every if call.hidden else None
    ask = Ask(temperature=trainer.temperature, entropy=call.compute_entropy, keep=keep, learns=learns)

    def forward(*_args: Any, **_options: Any) -> dict[str, Tensor]:
        scores = Scorer(causal, traits)(completions, ask)
        hidden = None if scores.predictions is None else scores.predictions.values
        tensors = {"logprobs": scores.logprobs, "entropy": scores.entropy, "hidden": hidden}
        return {name: values for name, values in tensors.items() if values is not None}

    with replaced(causal, "forward", forward), trainer.accelerator.autocast():
        return model(input_ids=call.input_ids[rows], attention_mask=call.attention_mask[rows])


def learning_rows(trainer: TRLTrainer, inputs: Any, beta: float) -> Tensor | None:
    """Which completions of a micro-batch have a gradient by TRL's own loss; None: all may. [B] bool"""
    session = trainer._klamp
    if session.fast is None or trainer._host_class("_compute_loss") is not grpo_trainer.GRPOTrainer:
        return None
    if trainer._entropy_bonus_enabled or trainer.aux_loss_enabled:
        return None
    controlled = session.has_kl
    if trainer.beta != 0 and not controlled:
        return loss_mask(inputs).any(-1)
    if controlled and session.term.clip_method != "none" and inputs.get(GATE_KL) is None:
        return None
    batch = batch_of(inputs, torch.zeros(inputs["completion_ids"].shape, device=inputs["completion_ids"].device))
    return ~without_gradient(batch, Objective(terms=session.terms(trainer, beta)))


def why_not_fast(trainer: TRLTrainer) -> str:
    """Why no completion of a trainer can be scored fast, in words; "" if its settings do not forbid it."""
    args, models = trainer.args, [model for model in (trainer.model, trainer.ref_model) if model is not None]
    owner, policy = trainer._host_class(SCORING), trainer.accelerator.unwrap_model(trainer.model)
    dropouts = sorted({dropout.name for dropout in active_dropouts(policy)})
    devices = [getattr(plain_model(trainer, model), "hf_device_map", None) or {} for model in models]
    virtual_tokens = any(getattr(x, "is_prompt_learning", False) for x in getattr(policy, "peft_config", {}).values())
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    split_sequences = any(getattr(parallel, f"{kind}_enabled", False) for kind in ("cp", "sp", "tp"))
    return next(iter(that_apply([
        (owner is not grpo_trainer.GRPOTrainer, f"{owner.__name__} scores completions in a way of its own"),
        (weights_are_split(trainer), "FSDP or ZeRO-3 splits the weights layer by layer, and processes would run the "
         "layers unequally often"),
        (split_sequences, "sequences or matrices are split over processes"),
        (args.use_liger_kernel and liger_bypasses(), "the loss is computed in Liger's kernel"),
        (args.torch_compile, "the model is compiled (torch_compile)"),
        (args.cast_lm_head_to_fp32, "cast_lm_head_to_fp32 gives the head another type than the hidden states"),
        (any(len({*places.values()}) > 1 for places in devices), "the model is spread over several devices"),
        (virtual_tokens, "the adapter adds virtual tokens to the prompt"),
        (bool(dropouts), f"dropout is on ({', '.join(dropouts)}), and a prompt that is run once would be dropped out "
         "once: set disable_dropout=True, or lora_dropout=0"),
    ])), "")  # fmt: skip


def why_not_these(trainer: TRLTrainer, mask: Tensor, length: int, others: dict[str, Any]) -> str:
    """Why these completions cannot be scored fast, "" if they can; `others` are pictures, types of tokens, ..."""
    names = [name for name, value in others.items() if value is not None and value is not False]
    if "compute_aux_loss" in names:
        return "the router's auxiliary loss is made of whole rows, padding included"
    if names:
        return f"the input is more than tokens ({', '.join(names)})"
    if torch.is_grad_enabled() and trainer._entropy_bonus_enabled:
        return "the entropy bonus needs the entropy's gradient"
    tokens = mask.bool()
    prompts, completions = tokens[:, :-length], tokens[:, -length:]
    if bool((prompts[:, :-1] & ~prompts[:, 1:]).any() | (~completions[:, :-1] & completions[:, 1:]).any()):
        return "there is padding amid a prompt or a completion"
    return ""


@contextmanager
def prompts_once(trainer: TRLTrainer) -> Iterator[None]:
    """A context in which `generate` of a trainer's model runs each distinct prompt once, if that is possible."""
    fast = trainer._klamp.fast
    causal = None if fast is None or fast.reason else plain_model(trainer, trainer.model)
    traits = None if fast is None or causal is None else fast.traits.get(id(causal))
    if causal is None or traits is None or traits.sharing == "no":
        yield
        return
    inner = causal.generate

    def generate(input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any) -> Any:
        cache: dict[str, Any] = {}
        if input_ids is not None and attention_mask is not None:
            settings = options.get("generation_config") or getattr(causal, "generation_config", None)
            if reason := why_not_once(settings, options):
                fall_back(trainer, reason, what="transformers' own first pass")
            elif Scorer(causal, traits).can_share():
                room = getattr(settings, "max_new_tokens", None) or 1
                cache = _cache_of_prompts(causal, input_ids, attention_mask, room)
        return inner(input_ids=input_ids, attention_mask=attention_mask, **options, **cache)

    with replaced(causal, "generate", generate):
        yield


def why_not_once(settings: Any, options: dict[str, Any]) -> str:
    """Why a generation with these options cannot begin with prompts that were run before, in words; "" if it can."""
    if others := sorted(name for name, value in options.items() if name not in KNOWN and value is not None):
        return f"the input is more than tokens ({', '.join(others)})"
    own = [name for name in SETTINGS if getattr(settings, name, None) is not None]
    several = max(getattr(settings, name, None) or 1 for name in ("num_beams", "num_return_sequences")) > 1
    if own or several or getattr(settings, "use_cache", None) is False:
        return f"the generation has a cache or a way of decoding of its own ({', '.join(own) or 'beams, no cache'})"
    return ""


def _cache_of_prompts(causal: nn.Module, ids: Tensor, mask: Tensor, room: int) -> dict[str, Any]:
    """The cache of the prompts but their last token, by its name in the model; empty if useless or not exact."""
    opened = OpenedModel(causal, Traits())  # the called model, with its wrappers
    if ids.shape[1] < 2 or not opened.is_steady(ids.shape[1] + room):
        return {}
    prompts, prompt_mask, which = distinct(ids[:, :-1], mask[:, :-1])
    if len(prompts) == len(ids):
        return {}
    return {cache_name(causal): cache_rows(run_prompts(opened, prompts, prompt_mask, which).cache, which, room=room)}
