"""Language models so small that every completion can be listed, with their references, teachers and samplers.

A `Chain` holds one row of logits for each prefix and model. Generation ends at `eos` or after `length` tokens, so that
completions differ in length as real ones do; one position (`one_position`) is the chain of length 1. Every completion
that the sampler can produce is listed by `enumerate_outcomes`, as the batch that a trainer would see.

Everything is float64. Nothing here imports klamp's core: the judge must not share code with the accused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klamp.errors import ConfigError, ShapeError

Table: TypeAlias = Float[Tensor, "prefixes vocab"]
Prefix: TypeAlias = tuple[int, ...]
Who: TypeAlias = Literal["policy", "ref", "teacher", "sampler"]
Sampler: TypeAlias = Literal["policy", "other"]
"""Who draws the completions: the policy itself, or a distribution of its own."""

MAX_OUTCOMES = 20_000


class Outcomes(NamedTuple):
    """Every completion that can be sampled, as a batch with one row each; padding holds 0, in `tokens` -1.

    Log-probabilities belong to the sampled tokens, logits are the whole rows at their prefixes; the policy's have the
    gradient. On-policy the sampler's are the policy's, detached.
    """

    probs: Float[Tensor, " outcomes"]  # the sampler's probability of each completion; they sum to 1
    tokens: Int[Tensor, "outcomes tokens"]
    mask: Bool[Tensor, "outcomes tokens"]  # True up to and including the last token
    policy_logprobs: Float[Tensor, "outcomes tokens"]
    ref_logprobs: Float[Tensor, "outcomes tokens"]
    sampler_logprobs: Float[Tensor, "outcomes tokens"]
    policy_logits: Float[Tensor, "outcomes tokens vocab"]
    ref_logits: Float[Tensor, "outcomes tokens vocab"]
    teacher_logprobs: Float[Tensor, "outcomes tokens"]
    teacher_logits: Float[Tensor, "outcomes tokens vocab"]

    @property
    def log_ratio(self) -> Float[Tensor, "outcomes tokens"]:
        """log(policy / ref) of each sampled token, in nats; has the gradient."""
        return self.policy_logprobs - self.ref_logprobs

    @property
    def weight(self) -> Float[Tensor, "outcomes tokens"]:
        """policy / sampler of each sampled token; has the gradient."""
        return (self.policy_logprobs - self.sampler_logprobs).exp()


@dataclass(frozen=True, eq=False)
class Chain:
    """A policy, a reference, a teacher and a sampler given as tables, over completions of at most `length` tokens.

    Args:
        policy_logits: one row per prefix, in the order of `list_prefixes`; kept as a float64 leaf.
        ref_logits: the same for the reference; -inf marks a token that it never produces.
        sampler_logits: the same for the sampler mu; None means that the policy samples (on-policy).
        teacher_logits: the same for a second anchor; None means that the reference is that, too.
        length: the longest completion, in tokens.
        eos: the token that ends a completion; None means that every completion has `length` tokens.

    Raises:
        ShapeError: the tables do not have one row per prefix.
        ConfigError: there are too many completions to enumerate.
    """

    policy_logits: Table
    ref_logits: Table
    sampler_logits: Table | None = None
    teacher_logits: Table | None = None
    length: int = 1
    eos: int | None = None

    def __post_init__(self) -> None:
        vocab = self.policy_logits.shape[-1]
        rows = count_prefixes(vocab, self.length, eos=self.eos)
        for name in ("policy_logits", "ref_logits", "sampler_logits", "teacher_logits"):
            table = getattr(self, name)
            if table is None:
                continue
            if tuple(table.shape) != (rows, vocab):
                why = f"{vocab} tokens, length {self.length} and eos {self.eos} have {rows} prefixes"
                fix = f"give one row of {vocab} logits per prefix"
                raise ShapeError(f"{name} does not fit the chain", got=tuple(table.shape), why=why, fix=fix)
            object.__setattr__(self, name, table.detach().to(torch.float64).clone())
        self.policy_logits.requires_grad_(True)

    @property
    def vocab(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.policy_logits.shape[-1]

    @property
    def on_policy(self) -> bool:
        """Whether the policy itself samples."""
        return self.sampler_logits is None

    def logits(self, who: Who) -> Table:
        """The table of logits of one of the models; only the policy's has a gradient."""
        if who == "sampler":
            return self.policy_logits.detach() if self.sampler_logits is None else self.sampler_logits
        if who == "teacher" and self.teacher_logits is not None:
            return self.teacher_logits
        return self.policy_logits if who == "policy" else self.ref_logits

    def logprobs(self, who: Who) -> Table:
        """The log-probabilities of one of the models: one row, over the next token, per prefix."""
        return torch.log_softmax(self.logits(who), dim=-1)

    def towards(self, who: Who) -> Chain:
        """The chain with one of its models in the reference's place: a KL to the reference is that to it."""
        return replace(self, ref_logits=self.logits(who))


def one_position(
    policy_logits: Float[Tensor, " vocab"],
    ref_logits: Float[Tensor, " vocab"],
    sampler_logits: Float[Tensor, " vocab"] | None = None,
    teacher_logits: Float[Tensor, " vocab"] | None = None,
) -> Chain:
    """A chain of length 1: a single choice among V tokens."""
    sampler, teacher = (None if logits is None else logits[None] for logits in (sampler_logits, teacher_logits))
    return Chain(policy_logits[None], ref_logits[None], sampler, teacher)


def random_chain(
    seed: int, *, vocab: int = 3, length: int = 3, eos: int | None = 0, sampler: Sampler = "policy", spread: float = 1.0
) -> Chain:
    """A chain whose tables hold independent normal numbers with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count_prefixes(vocab, length, eos=eos), vocab)
    tables = (spread * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    policy, ref, other, teacher = tables
    return Chain(policy, ref, other if sampler == "other" else None, teacher, length=length, eos=eos)


def random_positions(count: int, *, vocab: int = 5, sampler: Sampler = "policy", spread: float = 1.0) -> list[Chain]:
    """So many random worlds of a single position."""
    sizes = {"vocab": vocab, "length": 1, "eos": None}
    return [random_chain(seed, sampler=sampler, spread=spread, **sizes) for seed in range(count)]


def truncate_top_p(logits: Float[Tensor, "*rows vocab"], top_p: float) -> Float[Tensor, "*rows vocab"]:
    """Nucleus sampling: -inf outside the smallest set of likeliest tokens whose mass reaches `top_p`."""
    if not 0.0 < top_p <= 1.0:
        why, fix = "it is the mass that stays", "use 1.0 for no truncation"
        raise ConfigError("top_p must be in (0, 1]", got=top_p, why=why, fix=fix)
    ordered, order = torch.sort(torch.softmax(logits.detach(), dim=-1), dim=-1, descending=True)
    dropped = ordered.cumsum(dim=-1) - ordered >= top_p
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def list_prefixes(vocab: int, length: int, *, eos: int | None) -> list[Prefix]:
    """Every prefix that a token can follow, shortest first: the order of the rows of the tables."""
    going_on = [token for token in range(vocab) if token != eos]
    prefixes: list[Prefix] = [()]
    newest = prefixes
    for _ in range(length - 1):
        newest = [(*prefix, token) for prefix in newest for token in going_on]
        prefixes = prefixes + newest
    return prefixes


def count_prefixes(vocab: int, length: int, *, eos: int | None) -> int:
    """How many rows a chain's tables have; refuses worlds that are too large to enumerate."""
    branches = vocab if eos is None else vocab - 1
    outcomes = branches ** (length - 1) * vocab
    if length < 1 or vocab < 2 or outcomes > MAX_OUTCOMES:
        why = f"enumeration needs vocab >= 2, length >= 1 and at most {MAX_OUTCOMES} completions"
        fix = "use a vocabulary of 2-4 tokens and a length of 1-4"
        raise ConfigError("this chain cannot be enumerated", got=f"vocab {vocab}, length {length}", why=why, fix=fix)
    return sum(branches**depth for depth in range(length))


def prefix_probs(chain: Chain, who: Who) -> Float[Tensor, " prefixes"]:
    """The probability that a model's completion begins with each prefix; differentiable for the policy."""
    tokens, rows = _index_completions(chain.vocab, chain.length, chain.eos)
    logprobs = chain.logprobs(who)
    probs = _at_tokens(logprobs, rows, tokens).sum(dim=-1).exp()
    passed = tokens >= 0
    return probs.new_zeros(len(logprobs)).index_add(0, rows[passed], probs[:, None].expand_as(rows)[passed])


def enumerate_outcomes(chain: Chain, *, unreachable: bool = False) -> Outcomes:
    """Lists every completion that the sampler can produce; with `unreachable`, the others too."""
    tokens, rows = _index_completions(chain.vocab, chain.length, chain.eos)
    mask = tokens >= 0
    chosen = {who: _at_tokens(chain.logprobs(who), rows, tokens) for who in get_args(Who)}
    probs = chosen["sampler"].sum(dim=-1).exp()
    outcomes = Outcomes(
        probs=probs,
        tokens=tokens,
        mask=mask,
        policy_logprobs=chosen["policy"],
        ref_logprobs=chosen["ref"],
        sampler_logprobs=chosen["sampler"],
        policy_logits=chain.policy_logits[rows],
        ref_logits=chain.ref_logits[rows],
        teacher_logprobs=chosen["teacher"],
        teacher_logits=chain.logits("teacher")[rows],
    )
    if unreachable:
        return outcomes
    return Outcomes(*(field[probs > 0] for field in outcomes))


@cache
def _index_completions(vocab: int, length: int, eos: int | None) -> tuple[Tensor, Tensor]:
    """The tokens of all completions, and the table row of the prefix before each token; -1 and 0 after the end."""
    row = {prefix: index for index, prefix in enumerate(list_prefixes(vocab, length, eos=eos))}
    tokens, rows = [], []
    for prefix in row:
        last, padding = len(prefix) + 1 == length, length - len(prefix) - 1
        for token in (token for token in range(vocab) if last or token == eos):
            tokens.append([*prefix, token, *[-1] * padding])
            rows.append([*(row[prefix[:t]] for t in range(len(prefix) + 1)), *[0] * padding])
    return torch.tensor(tokens), torch.tensor(rows)


def _at_tokens(table: Table, rows: Tensor, tokens: Tensor) -> Tensor:
    return torch.where(tokens >= 0, table[rows, tokens.clamp_min(0)], 0.0)
