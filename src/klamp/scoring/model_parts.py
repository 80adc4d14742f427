"""The parts of a causal language model, each usable alone: decoder, output head, cache.

Log-probabilities are then computed where they are needed and nowhere else, and a prompt's keys and values are computed
once for all of its completions. Whether a model can be opened so is found out by trying: `klamp.scoring.probe`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from klamp.core.estimators import exact_kl
from klamp.core.heads.kl import cut_mass, linear_kl
from klamp.core.heads.logprobs import logprobs_of
from klamp.core.heads.tiles import Head
from klamp.core.topk import Tail, asked_tokens, head_mass, topk_kl, topk_kl_of
from klamp.core.types import Direction
from klamp.errors import ModelError, brief

Sharing: TypeAlias = Literal["no", "values", "gradient"]
Positions: TypeAlias = Literal["tokens", "columns"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Which parts of a model can be used by themselves, as `probe` found out."""

    head: bool = False
    """Whether the model's logits are its last hidden states through its output head."""
    sharing: Sharing = "no"
    """Whether the model's cache can be shared by completions of one prompt: not, without gradient, or with it."""
    positions: Positions = "tokens"
    """What a position id counts: tokens alone, or padding too; the caller's choice."""


class OutputHead(NamedTuple):
    """The output head: logits = scale * cap(hidden @ weight^T + bias), cap(x) = softcap tanh(x / softcap)."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float

    def copied(self) -> OutputHead:
        """A detached copy, which an update of the model does not change."""
        bias = None if self.bias is None else self.bias.detach().clone()
        return self._replace(weight=self.weight.detach().clone(), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states, in float32: [..., H] -> [..., V]."""
        raw = nn.functional.linear(hidden, self.weight, self.bias).float()
        capped = raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)
        return capped if self.scale == 1 else capped * self.scale


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a model predicts at some positions: hidden states with the head they belong to, or logits."""

    values: Tensor
    """[..., H] hidden states; without a head [..., V] logits."""
    head: OutputHead | None

    @property
    def entries(self) -> int:
        """V, the size of the vocabulary."""
        return self.values.shape[-1] if self.head is None else len(self.head.weight)

    def padded(self, length: int) -> Predictions:
        """The predictions [R, t, ...] with zeros appended: [R, length, ...]."""
        whole = [0, 0] * (self.values.ndim - 2)
        return replace(self, values=nn.functional.pad(self.values, (*whole, 0, length - self.values.shape[1])))

    def logits(self) -> Tensor:
        """The predictions as logits in float32, [..., V]."""
        return self.values.float() if self.head is None else self.head.logits(self.values)


@dataclass(frozen=True, kw_only=True)
class Told(Predictions):
    """A server's numbers at some positions: [..., K + 1, 2] the ids of its K likeliest tokens and of the sampled
    token, each with its log-probability; id -1 if it returned fewer. Float32 holds every id below 16.7 million."""

    @property
    def entries(self) -> int:
        """Unknown."""
        return 0

    def logprobs(self, ids: Tensor) -> Tensor:
        """The log-probabilities of given token ids, [N, M]; -inf for ids that the server did not return."""
        same = ids[:, :, None] == self.values[:, None, :, 0].long()
        return torch.where(same, self.values[:, None, :, 1], -torch.inf).amax(-1)


class TokenScores(NamedTuple):
    """What one walk over the vocabulary finds at N positions; log-probabilities in nats, with gradient."""

    logprobs: Tensor  # [N, K]
    entropy: Tensor | None  # [N], detached
    ids: Tensor  # [N, K]


def token_logprobs(
    predictions: Predictions, targets: Tensor, *, temperature: float, entropy: bool = False, top_k: int = 0
) -> TokenScores:
    """Scores the `top_k` likeliest tokens of each position (all where there are fewer), then the targets [N, K]."""
    head, entropies = predictions.head, None
    if isinstance(predictions, Told):
        return TokenScores(predictions.logprobs(targets), None, targets)
    if head is not None:
        policy = Head(head.weight, head.bias, temperature / head.scale, head.softcap)
        return TokenScores(*logprobs_of(predictions.values, policy, targets, entropy=entropy, top_k=top_k))
    logits = predictions.logits() / temperature
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    if entropy:
        entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    ids = torch.cat((logits.topk(min(top_k, logits.shape[-1])).indices, targets), 1)
    return TokenScores(log_p.gather(-1, ids), entropies, ids)


def divergence(policy: Predictions, ref: Predictions, *, temperature: float, direction: Direction) -> Tensor:
    """Exact KL at each position in nats, with gradient in the policy. [N, ...], [N, ...] -> [N]"""
    ours, theirs = policy.head, ref.head
    if ours is None or theirs is None or ours[2:] != theirs[2:]:
        own, other = policy.logits() / temperature, ref.logits() / temperature
        if own.shape == other.shape:
            return exact_kl(own, other, direction=direction)
        p, q = own.log_softmax(-1), other.log_softmax(-1)[..., : own.shape[-1]]  # as in `linear_kl`, not renormalised
        outside = torch.zeros_like(p[..., 0], dtype=torch.bool)
        return topk_kl(p, q, p[..., 0], q[..., 0], outside, direction=direction)
    heads = {"policy_bias": ours.bias, "ref_bias": theirs.bias}
    scale: Any = {"temperature": temperature / ours.scale, "softcap": ours.softcap}
    return linear_kl(policy.values, ours.weight, ref.values, theirs.weight, direction=direction, **heads, **scale)


@dataclass(frozen=True, kw_only=True)
class PrefixKL:
    """A KL summed at each prefix: over the vocabulary, or over a head and a tail (`topk_kl`)."""

    direction: Direction = "reverse"
    top_k: int | None = None
    """Tokens of the head; None: the whole vocabulary."""
    head: Literal["student", "teacher", "union"] = "student"
    """Whose likeliest tokens the head is."""
    tail: Tail = "sampled"


HEAD = ("student_mass", "teacher_mass", "overlap_ratio", "cut_mass")
"""What is seen of the head of a KL to a teacher, and of its mass beyond the policy's vocabulary; names of metrics."""


@torch.no_grad()
def mass_beyond(predictions: Predictions, entries: int, *, temperature: float) -> Tensor:
    """The probability of tokens from `entries` on. [N, ...] -> [N]"""
    values, head = predictions.values, predictions.head
    if predictions.entries <= entries:
        return torch.zeros(len(values), device=values.device)
    if head is None:
        return (predictions.logits() / temperature).softmax(-1)[..., entries:].sum(-1)
    return cut_mass(values, Head(head.weight, head.bias, temperature / head.scale, head.softcap), entries)


def head_kl(
    scored: TokenScores,
    teacher: Predictions,
    theirs: Tensor,
    how: PrefixKL,
    *,
    temperature: float,
    log_weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to a teacher over a head of tokens at N positions, in nats, with gradient, [N]; and `HEAD`'s metrics.

    `scored` is one walk of the policy: its likeliest tokens, `theirs` (any token instead of -1), the target.
    `theirs` [N, K] are the ids of the teacher's likeliest, -1 for ids that the policy lacks, [N, 0] for the student's
    head. `log_weight` is log(policy / sampler) of the targets, detached.
    """
    count = scored.ids.shape[1] - 1 - theirs.shape[1]
    student, usable = scored.ids[:, :count], theirs >= 0
    new = usable & (theirs[:, :, None] != student[:, None, :]).all(-1)  # a token of both heads counts once
    every = torch.ones_like(student, dtype=torch.bool)
    part, counted = {
        "student": (slice(0, count), every),
        "teacher": (slice(count, -1), usable),
        "union": (slice(0, -1), torch.cat((every, new), 1)),
    }[how.head]
    ours, ids = (torch.cat((x[:, part], x[:, -1:]), 1) for x in (scored.logprobs, scored.ids))
    with torch.no_grad():
        anchor = token_logprobs(teacher, ids, temperature=temperature, top_k=0 if theirs.shape[1] else how.top_k or 0)
    logprobs = anchor.logprobs[:, -ids.shape[1] :]
    likeliest = theirs if theirs.shape[1] else anchor.ids[:, : -ids.shape[1]]
    kl = topk_kl_of(ours, logprobs, ids, direction=how.direction, tail=how.tail, log_weight=log_weight, kept=counted)
    if not how.top_k:
        return kl, {}
    masses = [head_mass(x[:, :-1], counted) for x in (ours, logprobs)]
    common = (student[:, :, None] == likeliest[:, None, :]).any(-1)
    return kl, dict(zip(HEAD[:3], (*masses, common.float().mean(-1)), strict=True))


@torch.no_grad()
def top_ids(predictions: Predictions, k: int, entries: int) -> Tensor:
    """The ids of the k likeliest tokens at each position, or of all if there are fewer. [N, ...] -> [N, K]

    An id from `entries` on, where the other model's vocabulary ends, is -1.
    """
    if isinstance(predictions, Told):
        ids = predictions.values[:, :-1, 0][:, :k].long()
    else:
        none = torch.empty(len(predictions.values), 0, dtype=torch.long, device=predictions.values.device)
        ids = token_logprobs(predictions, none, temperature=1.0, top_k=k).ids  # cap and temperature keep the order
    return torch.where(ids < entries, ids, -1)


def prefix_divergence(
    policy: Predictions,
    teacher: Predictions,
    targets: Tensor,
    how: PrefixKL,
    *,
    temperature: float,
    log_weight: Tensor | None = None,
    walk: tuple[TokenScores, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to a teacher at N positions, in nats, with gradient in the policy, [N]; and the metrics of `HEAD`.

    `targets` [N] are the sampled tokens, `log_weight` their log(policy / sampler), detached; None: 0. `walk`: what
    `head_kl` takes, where the policy's vocabulary has been walked already.
    """
    if how.top_k is None:
        kl, head = divergence(policy, teacher, temperature=temperature, direction=how.direction), dict[str, Tensor]()
    else:
        if walk is None:
            theirs = targets[:, None][:, :0] if how.head == "student" else top_ids(teacher, how.top_k, policy.entries)
            asked = asked_tokens(targets, theirs)
            walk = token_logprobs(policy, asked, temperature=temperature, top_k=how.top_k), theirs
        kl, head = head_kl(walk[0], teacher, walk[1], how, temperature=temperature, log_weight=log_weight)
    return kl, head | {"cut_mass": mass_beyond(teacher, policy.entries, temperature=temperature)}


def rows_of(layer: nn.Linear | nn.Embedding) -> int:
    """The rows of a layer's whole weight; DeepSpeed's ZeRO-3 leaves an empty tensor instead."""
    return int(getattr(layer.weight, "ds_shape", layer.weight.shape)[0])


def output_size(model: nn.Module) -> int:
    """Number of vocabulary entries that the model gives a logit to."""
    return rows_of(model.get_output_embeddings())  # pyright: ignore


def check_same_vocabulary(
    anchor: nn.Module, policy: nn.Module, *, who: str = "reference", larger: bool = False
) -> None:
    """Refuse an anchor of another vocabulary; `larger`: it may have more entries, if it was padded further."""
    theirs, ours = output_size(anchor), output_size(policy)
    if theirs != ours and not (larger and theirs > ours):
        raise ModelError(
            f"the {who} has another vocabulary than the policy",
            got=f"{who} {theirs}, policy {ours}",
            why="equal token ids would mean different tokens",
            fix=f"use a {who} of the same model family"
            + f", or cut the policy's padding with resize_token_embeddings({theirs})" * (theirs < ours),
        )


def check_whole(loaded: Mapping[str, Iterable[str]], *, folder: str, spare: bool = True) -> None:
    """Refuse weights that are not all from a model's files: a loader fills with random numbers what is not there.

    `loaded` is transformers' report: `missing_keys` are the model's tensors that the files lack (tied and computed
    tensors do not count), `unexpected_keys` the files' tensors that the model lacks, such as the weights of a head
    that the model does not use.
    """
    lacks, left = (sorted(loaded.get(name, ())) for name in ("missing_keys", "unexpected_keys"))
    if lacks or (left and not spare):
        parts = {"missing": lacks, "without a place in the model": left}
        lists = (f"{what}: {brief(', '.join(names))}" for what, names in parts.items() if names)
        raise ModelError(
            "the weights do not belong to the model",
            got="; ".join((folder, *lists)),
            why="a missing tensor would be random numbers, trained and measured as if they were the model's",
            fix="get the whole folder again; a tensor under another name has to have the one that the model gives it",
        )


def head_of(causal: nn.Module) -> OutputHead | None:
    """The output head of a model if it is a plain linear layer (not adapted, quantised or parametrised); else None."""
    layer = causal.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if type(layer) is not nn.Linear:
        return None
    config = cast(Any, causal).config.get_text_config()
    return OutputHead(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None), _logit_scale(config))


def _logit_scale(config: Any) -> float:
    """The factor of a model's logits, under the name of its architecture."""
    factors = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    return next((float(factor) for factor in factors if factor), 1 / (getattr(config, "logits_scaling", None) or 1.0))


def steady_length(config: Any) -> int | None:
    """The longest sequence in which a token's values do not depend on later tokens; None: any length.

    Rotary frequencies of `dynamic` and `longrope` (Phi-3) follow the longest sequence of a pass from some length on.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    bounds = [
        rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in (parameters, *(x for x in parameters.values() if isinstance(x, dict)))
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(bounds, default=None)


class OpenedModel:
    """A causal language model (with or without adapter) whose decoder, head and cache are used separately.

    Positions of the kind `columns` are counted from `prompt_width`, the columns of the whole batch's prompts.
    """

    def __init__(self, model: nn.Module, traits: Traits, *, prompt_width: int | None = None) -> None:
        self.causal: nn.Module = getattr(model, "get_base_model", lambda: model)()
        self.traits = traits
        self.runs: nn.Module = self.causal.base_model if traits.head else self.causal  # pyright: ignore
        self.takes_positions = takes(self.runs, "position_ids")
        self.takes_keep = takes(self.runs, "logits_to_keep")
        self.steady_length = steady_length(self.causal.config)
        self.prompt_width = prompt_width if traits.positions == "columns" else None

    def is_steady(self, length: int) -> bool:
        """Whether a prompt gives the same values alone as it does within a sequence of this length."""
        return self.steady_length is None or length <= self.steady_length

    def predictions(self, values: Tensor) -> Predictions:
        """The output of `run` together with the head that it needs, with its present weights."""
        return Predictions(values=values, head=head_of(self.causal) if self.traits.head else None)

    def run(
        self, ids: Tensor, prompt_mask: Tensor, *, keep: int, cache: Any = None, use_cache: bool = False
    ) -> tuple[Tensor, Any]:
        """Runs the model: its predictions at the last `keep` positions, [b, keep, H or V], and the cache.

        `ids` [b, t] are prompts with their completions, or what follows the cache, which is changed. `prompt_mask`
        [b, P] is 1 on tokens of the left-padded prompts; padding on the right needs none: nothing looks at it.
        """
        past, width = 0 if cache is None else int(cache.get_seq_length()), prompt_mask.shape[1]
        columns = torch.arange(past, past + ids.shape[1], device=ids.device)
        padded = not bool(prompt_mask.all())
        options: dict[str, Any] = {"use_cache": use_cache or cache is not None}
        if cache is not None:
            options[cache_name(self.runs)] = cache
        if padded:
            options["attention_mask"] = nn.functional.pad(prompt_mask, (0, past + ids.shape[1] - width), value=1)
        if self.takes_positions:
            tokens = prompt_mask.sum(-1, keepdim=True) if self.prompt_width is None else self.prompt_width
            options["position_ids"] = (columns[None] - (width - tokens)).clamp(min=0)
        if self.takes_keep:
            options["logits_to_keep"] = keep
        out = self.runs(input_ids=ids, **options)
        values = out.last_hidden_state if self.traits.head else out.logits
        made = getattr(out, "cache", None)
        return values[:, values.shape[1] - keep :], getattr(out, "past_key_values", None) if made is None else made


def cache_name(model: nn.Module) -> str:
    """The argument by which a model takes a cache: transformers 5.24 renamed it, except in its older models."""
    return "cache" if takes(model, "cache") else "past_key_values"


def checkpoints(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on, which takes a model's cache away."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward pass takes an argument of this name."""
    base = getattr(model, "get_base_model", lambda: model)()
    return argument in inspect.signature(base.forward).parameters


AHEAD = 128
"""Tokens that memory is taken for at once: copies become rare, and little is taken for completions that end early."""


class RoomyLayer(DynamicLayer):
    """A layer of a cache that appends in place, without gradient; transformers makes a new one at every token.

    Its keys and values are the used part of longer tensors. Where those are full, longer ones take their place.
    """

    keys: Any
    values: Any
    held: tuple[Tensor, Tensor]
    """The longer tensors, [B, heads, room, width] each."""

    @classmethod
    def of(cls, layer: DynamicLayer, rows: Tensor, room: int) -> RoomyLayer:
        """Some rows of a layer, each as often as asked for; so many tokens are to come."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        made._take(rows, min(room, AHEAD))
        return made

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values: all of them, with what was there."""
        start, more = self.get_seq_length(), key_states.shape[-2]
        if start + more > self.held[0].shape[-2]:
            self._take(torch.arange(len(self.keys), device=self.keys.device), max(more, AHEAD))
        for held, states in zip(self.held, (key_states, value_states), strict=True):
            held[:, :, start : start + more] = states
        self._use(start + more)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep some of the rows, in the order given."""
        self._take(beam_idx, self.held[0].shape[-2] - self.get_seq_length())

    def _take(self, rows: Tensor, room: int) -> None:
        length = self.keys.shape[-2]

        def longer(states: Tensor) -> Tensor:
            held = states.new_empty(len(rows), states.shape[1], length + room, states.shape[3])
            held[:, :, :length] = states[rows]
            return held

        self.held = longer(self.keys), longer(self.values)
        self._use(length)

    def _use(self, length: int) -> None:
        self.keys, self.values = (held[:, :, :length] for held in self.held)


def cache_rows(cache: Any, rows: Tensor, *, room: int = 0) -> Any:
    """A copy of a cache of transformers with some of its rows, each as often as asked for.

    `room`: the most tokens that will be appended, without gradient; 0: with gradient, or unknown.
    """
    copied = copy.copy(cache)
    copied.layers = [_layer_rows(layer, rows, room) for layer in cache.layers]
    return copied


def _layer_rows(layer: Any, rows: Tensor, room: int) -> Any:
    if room and type(layer) is DynamicLayer and layer.get_seq_length():
        return RoomyLayer.of(layer, rows, room)
    made: Any = copy.copy(layer)
    # recurrent layers hold their states in lists, which would be shared
    vars(made).update({k: copy.copy(v) for k, v in vars(made).items() if isinstance(v, list | dict)})
    made.reorder_cache(rows)
    return made
