"""Scores completions: all that needs the model's weights happens in one module call, as data parallelism requires.

Only unmasked tokens reach the output head, whose logits are never held (`linear_logprobs`); prompts that completions
share are run once where that pays (`run_rows`); rows that take no part in the gradient get none. `score` gives the same
numbers in the plainest way: it is what the scorer is held against, and what one reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from klamp.core.topk import asked_tokens
from klamp.core.types import Direction
from klamp.scoring.completions import Completions, run_rows
from klamp.scoring.model_parts import (
    HEAD,
    OpenedModel,
    OutputHead,
    Predictions,
    PrefixKL,
    TokenScores,
    Traits,
    checkpoints,
    divergence,
    prefix_divergence,
    takes,
    token_logprobs,
    top_ids,
)

MEASURED = ("logprobs", "entropy", "exact", "exact_forward", "teacher")
"""The fields of `Scores` that hold a number for each token, [B, T], and are kept from one pass to the next."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The log-probabilities (and more) of B completions of T tokens under a model."""

    logprobs: Tensor
    """[B, T] log-probabilities of the completions' tokens, in nats; arbitrary where masked."""
    logits: Tensor | None = None
    """[B, T, V] at the sampling temperature, in float32, where they are held at all."""
    entropy: Tensor | None = None
    """[B, T] in nats, detached; None where nobody asked for it."""
    exact: Tensor | None = None
    """[B, T] exact KL(policy||ref) in nats; 0 where it is not measured; `exact_forward` likewise KL(ref||policy)."""
    exact_forward: Tensor | None = None
    teacher: Tensor | None = None
    """[B, T] KL to the teacher at each prefix, with gradient; 0 where no teacher scored."""
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """Of a head of that KL, by the names of `HEAD`, [B, T] each, detached."""
    predictions: Predictions | None = None
    """[R, T, ...] predictions for the rows that were asked for."""

    def rows(self, part: slice) -> Scores:
        """The scores of some rows, without logits and predictions."""
        return Scores(**{name: x[part] for name in MEASURED if (x := getattr(self, name)) is not None})


@dataclass(frozen=True, kw_only=True)
class ExactKL:
    """A request to measure the exact KL too: in which rows [B] bool, against what, with which gradient."""

    rows: Tensor
    ref: Predictions
    """[R, T, ...] predictions of the reference for these rows."""
    directions: tuple[Direction, ...] = ("reverse", "forward")
    learns: tuple[Direction, ...] = ()
    """The directions whose gradient is needed."""


@dataclass(frozen=True, kw_only=True)
class TeacherKL:
    """A request to measure the KL to a teacher at each prefix, with gradient where there is one: in which rows [B]."""

    rows: Tensor
    anchor: Predictions
    """[R, T, ...] predictions of the teacher for these rows."""
    how: PrefixKL
    sampler: Tensor | None = None
    """[B, T] log-probabilities under who sampled; None: the policy did, and the tail has the weight 1."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to a scorer: temperature, and what to measure."""

    temperature: float
    """The temperature of the sampler, so that all models are compared at the same one."""
    entropy: bool = False
    exact: ExactKL | None = None
    taught: tuple[TeacherKL, ...] = ()
    keep: Tensor | None = None
    """[B] bool: rows whose predictions are returned, with gradient where there is one."""
    learns: Tensor | None = None
    """[B] bool: rows that take part in the gradient; None: all of them."""
    known: Scores | None = None
    """Scores of the other rows, if they are known already."""


EXACT = {"reverse": "exact", "forward": "exact_forward"}
"""Direction -> the field of `Scores` that holds it."""


class Scorer(nn.Module):
    """A causal LM, with an adapter or not, that scores completions by what `klamp.scoring.probe` found it to allow.

    Equation: log softmax(logits / temperature) at each token of the completion, up to rounding.
    """

    def __init__(self, model: nn.Module, traits: Traits | None = None) -> None:
        super().__init__()
        self.model = model
        self.traits = traits or Traits()

    def can_share(self) -> bool:
        """Whether the cache of prompts can be used now; gradient checkpointing forbids it in training mode."""
        without = not torch.is_grad_enabled() and not self.model.training
        shared = self.traits.sharing == "gradient" or (self.traits.sharing == "values" and without)
        return shared and not checkpoints(self.model)

    def forward(self, completions: Completions, ask: Ask) -> Scores:
        """Score completions, with gradient where that is enabled and asked for."""
        learns, with_gradient = ask.learns, torch.is_grad_enabled()
        if not with_gradient or learns is None:
            runs = [(torch.ones_like(completions.ended), with_gradient)]
        else:
            runs = [(learns, True), *([(~learns, False)] if ask.known is None else [])]
        opened = OpenedModel(self.model, self.traits, prompt_width=completions.prompt_ids.shape[1])
        pieces = _Pieces(completions, ask)
        for chosen, grad in runs:
            if len(rows := chosen.nonzero()[:, 0]):
                with torch.set_grad_enabled(grad):
                    pieces.add(opened, *run_rows(opened, completions, rows, can_share=self.can_share()))
        scores = pieces.scores()
        if bool(runs[0][0].any()) or not with_gradient:
            return scores
        # 0 times every weight: data parallelism must see all weights even without a gradient
        nothing = sum((p.flatten()[:1].sum() * 0 for p in self.model.parameters() if p.requires_grad), torch.zeros(()))
        return replace(scores, logprobs=scores.logprobs + nothing)


Pair: TypeAlias = tuple[Tensor, Predictions, Predictions]


class _Pieces:
    """The scores of parts of the tokens, put together at the end."""

    def __init__(self, completions: Completions, ask: Ask) -> None:
        self.completions, self.ask = completions, ask
        self.noted: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Name -> values with their places among the flattened tokens."""
        self.head: OutputHead | None = None

    def add(self, opened: OpenedModel, values: Tensor, places: Tensor) -> None:
        """Add the model's predictions at some positions of the flattened tokens."""
        ask, policy = self.ask, opened.predictions(values)
        targets = self.completions.ids.flatten()[places]
        pairs = [(kl, pair) for kl in ask.taught if (pair := self._pair(kl.rows, kl.anchor, policy, places))]
        theirs = self._likeliest(pairs, targets, policy.entries)
        asked = asked_tokens(targets, theirs)
        k = max((kl.how.top_k or 0 for kl, _ in pairs), default=0)
        scored = token_logprobs(policy, asked, temperature=ask.temperature, entropy=ask.entropy, top_k=k)
        logprobs = scored.logprobs[:, -1]
        self._note("logprobs", logprobs, places)
        if scored.entropy is not None:
            self._note("entropy", scored.entropy, places)
        if ask.exact is not None:
            self._exact(ask.exact, policy, places)
        for kl, pair in pairs:
            self._teacher_kl(kl, pair, places, scored, theirs)
        if ask.keep is not None:
            self.head = policy.head
            at, where = self._among(ask.keep, places)
            self._note("predictions", values[at], where)

    def _note(self, name: str, values: Tensor, places: Tensor) -> None:
        self.noted.setdefault(name, []).append((values, places))

    def _among(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which positions belong to some rows, and their places without the other rows."""
        length = self.completions.ids.shape[1]
        row = places // length
        at = rows[row].nonzero()[:, 0]
        rank = rows.long().cumsum(0) - 1
        return at, rank[row[at]] * length + places[at] % length

    def _pair(self, rows: Tensor, other: Predictions, policy: Predictions, places: Tensor) -> Pair | None:
        """Which positions belong to some rows, with the policy's and another model's predictions; None: no position."""
        at, where = self._among(rows, places)
        if not len(at):
            return None
        values = other.values[:, : self.completions.ids.shape[1]].flatten(0, 1)[where]
        policy = policy if len(at) == len(places) else replace(policy, values=policy.values[at])
        return at, policy, replace(other, values=values)

    @staticmethod
    def _likeliest(pairs: Sequence[tuple[TeacherKL, Pair]], targets: Tensor, entries: int) -> Tensor:
        """The likeliest tokens of each position's teacher, [N, K]; [N, 0] without a head."""
        k = max((kl.how.top_k or 0 for kl, _ in pairs if kl.how.head != "student"), default=0)
        likeliest = targets.new_full((len(targets), k), -1)
        for _, (at, _, teacher) in pairs if k else ():
            ids = top_ids(teacher, k, entries)
            likeliest[at, : ids.shape[1]] = ids
        return likeliest

    def _teacher_kl(self, asked: TeacherKL, pair: Pair, places: Tensor, scored: TokenScores, theirs: Tensor) -> None:
        at, policy, teacher = pair
        ours, places, weight = TokenScores(scored.logprobs[at], None, scored.ids[at]), places[at], None
        if asked.sampler is not None:
            sampler = asked.sampler[:, : self.completions.ids.shape[1]].flatten()[places]
            weight = ours.logprobs[:, -1].detach() - sampler
        options: Any = {"temperature": self.ask.temperature, "log_weight": weight, "walk": (ours, theirs[at])}
        kl, measured = prefix_divergence(policy, teacher, ours.ids[:, -1], asked.how, **options)
        for name, values in {"teacher": kl, **measured}.items():
            self._note(name, values, places)

    def _exact(self, exact: ExactKL, predictions: Predictions, places: Tensor) -> None:
        if (pair := self._pair(exact.rows, exact.ref, predictions, places)) is None:
            return
        at, policy, ref = pair
        for direction in exact.directions:
            with torch.set_grad_enabled(torch.is_grad_enabled() and direction in exact.learns):
                kl = divergence(policy, ref, temperature=self.ask.temperature, direction=direction)
            self._note(EXACT[direction], kl, places[at])

    def scores(self) -> Scores:
        """The scores of all tokens, [B, T]."""
        names = [EXACT[direction] for direction in ([] if self.ask.exact is None else self.ask.exact.directions)]
        names += ["entropy"] * self.ask.entropy + ["teacher"] * bool(self.ask.taught)
        head = {name: self._whole(name) for name in HEAD if name in self.noted}
        values = {name: self._whole(name) for name in ("logprobs", *names)}
        return Scores(**values, head=head, predictions=self._kept())

    def _whole(self, name: str) -> Tensor:
        ids, known = self.completions.ids, self.ask.known
        before = getattr(known, name, None)
        whole = torch.zeros(ids.shape, device=ids.device) if before is None else before[:, : ids.shape[1]]
        if name not in self.noted:
            return whole
        values, places = map(torch.cat, zip(*self.noted[name], strict=True))
        at = (places // ids.shape[1], places % ids.shape[1])
        return whole.to(values.dtype).index_put(at, values)

    def _kept(self) -> Predictions | None:
        if self.ask.keep is None or "predictions" not in self.noted:
            return None
        values, places = map(torch.cat, zip(*self.noted["predictions"], strict=True))
        rows, length = int(self.ask.keep.sum()), self.completions.ids.shape[1]
        whole = values.new_zeros(rows * length, values.shape[1]).index_copy(0, places, values)
        return Predictions(values=whole.view(rows, length, values.shape[1]), head=self.head)


def score(model: nn.Module, completions: Completions, *, temperature: float) -> Scores:
    """Score completions with gradient by any causal LM, at the sampler's temperature.

    Equation: log softmax(logits / temperature) at each token of the completion.
    """
    ids = torch.cat([completions.prompt_ids, completions.ids], dim=1)
    mask = torch.cat([completions.prompt_mask, completions.mask.to(completions.prompt_mask.dtype)], dim=1)
    length = completions.ids.shape[1]
    options: dict[str, object] = {"use_cache": False}
    inner = getattr(model, "module", model)
    if takes(inner, "position_ids"):
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if takes(inner, "logits_to_keep"):
        options["logits_to_keep"] = length + 1
    logits = model(input_ids=ids, attention_mask=mask, **options).logits
    logits = logits[:, -length - 1 : -1].float() / temperature
    chosen = logits.gather(-1, completions.ids.unsqueeze(-1)).squeeze(-1)
    return Scores(logits=logits, logprobs=chosen - logits.logsumexp(-1))


def pad_tokens(x: Tensor, length: int) -> Tensor:
    """A [B, t] tensor with zeros appended on the right: [B, length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[1]))


def joined(parts: Sequence[Scores], length: int) -> Scores:
    """The detached scores of consecutive parts as one, [B, length], without logits and predictions."""
    tables = [{**{name: getattr(part, name) for name in MEASURED}, **part.head} for part in parts]
    scores: Any = {}
    for name in (*MEASURED, *HEAD):
        columns = [(table.get(name), table["logprobs"]) for table in tables]
        if any(values is not None for values, _ in columns):
            present = [torch.zeros_like(logprobs) if values is None else values for values, logprobs in columns]
            scores[name] = torch.cat([pad_tokens(values.detach(), length) for values in present])
    head = {name: scores.pop(name) for name in HEAD if name in scores}
    return Scores(**scores, head=head)
