"""A run as the alarms see it: metrics by step under klamp's names, evaluations, some completions, settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, TypeAlias

from klamp.names import KL_NAMES, best_kl

Verifier: TypeAlias = Literal["rules", "model"]
Side: TypeAlias = Literal["ref", "teacher", "sampler"]

EARLY = 50
"""Steps at the beginning of a run that rules may look back to."""
WRITTEN = 3
"""Steps with completions, the latest, that rules may look at besides the first."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What is known of a run's configuration; None where the record does not say."""

    beta: float | None = None
    """Coefficient of the KL at the start."""
    loss_type: str | None = None
    """grpo, dr_grpo, ..., as in TRL."""
    verifier: Verifier | None = None
    """What gives the reward: rules that are right by construction, or a model."""
    scale_rewards: str | None = None
    """`std` where advantages are divided by the group's standard deviation, else `none`."""
    other_reference: bool = False
    """Whether the reference is another model than the one that training starts from."""
    moving_reference: bool = False
    kl_in_loss: bool = False
    """Whether the names in the record say that the KL is a part of the loss."""
    k3_over_updates: bool = False
    """Whether a step's kl/k3 is a mean over all of its updates, so that the first one's is not 0."""
    other_kernels: bool = False
    """Whether policy and reference may have other data types or kernels: another trainer wrote the record."""
    steps_counted: bool = False
    """Whether the record says no steps, so that its first row need not be the first step."""
    prompts: int | None = None
    rl_skill: str | None = None
    """The evaluated skill that is trained; the others should be kept."""
    eval_size: int | None = None
    teacher_coef: float | None = None
    """Coefficient of the KL to a teacher; None also without a teacher."""
    top_p: float | None = None
    """The share of the distribution that the run samples from."""
    top_k: int | None = None
    """The number of likeliest tokens that the run samples from; 0 and below: all."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion, token by token; all sequences have equal length. It may begin with the tokens of its prompt."""

    step: int
    """The step that it was sampled in, from 1."""
    tokens: Sequence[str]
    """The tokens as text, or their ids."""
    policy: Sequence[float]
    """Log-probabilities under the policy being trained; NaN: unknown."""
    ref: Sequence[float] | None = None
    teacher: Sequence[float] | None = None
    sampler: Sequence[float] | None = None
    """Log-probabilities under whoever sampled the tokens; NaN: unknown."""
    trained: Sequence[bool] | None = None
    """The loss mask; None: every token is trained on."""
    sampled: Sequence[bool] | None = None
    """Which tokens the model wrote; False: prompt, or a tool's answer. None: all of them."""
    ended: bool | None = None
    """Whether it ends with an end token, rather than at the length limit."""
    group: str = ""
    """A name that the completions of one prompt share."""
    prompt: str = ""
    reward: float | None = None
    advantage: float | None = None
    """The advantage of the completion; where tokens have their own, the one that is largest in size."""

    def __post_init__(self) -> None:
        names = ("tokens", "policy", "ref", "teacher", "sampler", "trained", "sampled")
        check_lengths({name: getattr(self, name) for name in names})

    @property
    def is_trained(self) -> Sequence[bool]:
        """Which tokens are trained on."""
        return every(len(self.tokens)) if self.trained is None else self.trained

    @property
    def is_sampled(self) -> Sequence[bool]:
        """Which tokens the model wrote."""
        return every(len(self.tokens)) if self.sampled is None else self.sampled

    def log_ratios(self, against: Side = "ref") -> list[tuple[int, float]]:
        """(position, log-ratio) of the trained tokens that have both: policy - it, or sampler - policy."""
        other: Sequence[float] | None = getattr(self, against)
        if other is None:
            return []
        above, below = (other, self.policy) if against == "sampler" else (self.policy, other)
        rows = enumerate(zip(above, below, self.is_trained, strict=True))
        return [(i, bounded(delta)) for i, (a, b, trained) in rows if trained and math.isfinite(delta := a - b)]


def check_lengths(lists: Mapping[str, Sequence[Any] | None]) -> None:
    """Refuse sequences of a completion that differ in length, with a ValueError."""
    lengths = {name: len(values) for name, values in lists.items() if values is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lists of different lengths: {lengths}")


@lru_cache(maxsize=4096)
def every(length: int) -> Sequence[bool]:
    """True for each of so many tokens; held once for each length, since most completions of a long run have it."""
    return (True,) * length


@dataclass(frozen=True, kw_only=True)
class Row:
    """The metrics of one step."""

    step: int
    """The number of the step, from 1; the metrics are those before its first update."""
    metrics: Mapping[str, float]
    prompts: int | None = None
    """How many prompts the metrics rest on, where they were counted from completions alone."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A greedy answer to a held-out question."""

    step: int
    skill: str
    question: str
    """The prompt, without a template."""
    completion: str
    score: float
    who: str = "policy"
    """Who wrote it: policy or teacher."""


def answer_of(row: Mapping[str, Any]) -> Answer:
    """A line of answers.jsonl as an answer; a KeyError, TypeError or ValueError for any other line."""
    texts = {name: str(row[name]) for name in ("skill", "question", "completion")}
    return Answer(step=int(row["step"]), score=float(row["score"]), who=str(row.get("who", "policy")), **texts)


Question: TypeAlias = tuple[str, str]
"""(skill, question)."""


def answers_of(
    answers: Sequence[Answer], evaluation: Literal["first", "last"], *, who: str = "policy"
) -> dict[Question, Answer]:
    """The answers of the first evaluation, which is before training, or of the last one."""
    answers = [answer for answer in answers if answer.who == who]
    steps = [answer.step for answer in answers]
    step = (min if evaluation == "first" else max)(steps, default=0)
    return {(answer.skill, answer.question): answer for answer in answers if answer.step == step}


@dataclass(frozen=True, kw_only=True)
class Details:
    """What is known of a run besides its history; empty where its folder is not klamp's."""

    versions: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()
    """Its model, task and KL, as ReportCallback wrote them."""
    when: float | None = None
    """When it was last written to, in seconds since 1970."""
    seconds: float | None = None
    """How long it took; None: it has not ended."""


@dataclass(kw_only=True)
class History:
    """The record of a run, or of the part of it that has happened."""

    source: str = "klamp run"
    """Who wrote the record, in words."""
    settings: RunSettings = field(default_factory=RunSettings)
    config: Mapping[str, Any] = field(default_factory=dict)
    """The record's configuration, under its writer's names."""
    details: Details = field(default_factory=Details)
    rows: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    """Number of steps done -> (skill -> mean score)."""
    completions: dict[int, list[Completion]] = field(default_factory=dict)
    """Step -> the completions that were written in it; of a run under way, those that rules may look at."""
    answers: list[Answer] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    """What the run was warned of, in words."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Unread column about a KL -> its meaning; empty: unknown."""
    changes: Mapping[int, str] = field(default_factory=dict)
    """Step -> what a resume after it changed, in words."""

    @property
    def is_empty(self) -> bool:
        """Whether the record holds nothing at all."""
        return not (self.rows or self.evaluations or self.completions)

    @property
    def step(self) -> int:
        """The number of the latest step."""
        last = [rows[-1].step for rows in (self.rows, self.evaluations) if rows]
        return max(last, default=0)

    @property
    def latest(self) -> Mapping[str, float]:
        """The metrics of the latest step; none before the first."""
        return self.rows[-1].metrics if self.rows else {}

    @property
    def written(self) -> Sequence[Completion]:
        """The completions of the latest step that the record has."""
        return self.completions.get(self.step, ())

    @property
    def names(self) -> set[str]:
        """The names of the metrics that some step has."""
        return {name for row in self.rows for name in row.metrics}

    @property
    def measures_kl(self) -> bool:
        """Whether some step has a KL to the reference, or to a teacher."""
        return not self.names.isdisjoint(["teacher/kl", *KL_NAMES, *(f"{name}_sequence" for name in KL_NAMES)])

    @property
    def penalized(self) -> bool:
        """Whether a KL holds the policy: the last beta is above 0, or, where no beta is known, a KL is logged."""
        beta = self.latest.get("beta", self.settings.beta)
        return beta > 0 if beta is not None else any(name.startswith("kl/") for name in self.latest)

    @property
    def goes_beyond(self) -> bool:
        """Whether a negative beta takes the policy from the reference, beyond a teacher that bounds it."""
        beta = self.latest.get("beta", self.settings.beta)
        return beta is not None and beta < 0 and any(name.startswith("teacher/kl") for name in self.latest)

    def add_completions(self, completions: Iterable[Completion]) -> None:
        """Add completions to the steps that they were written in."""
        for completion in completions:
            self.completions.setdefault(completion.step, []).append(completion)

    def forget_completions(self) -> None:
        """Drop the completions that no rule looks at any more."""
        for old in sorted(self.completions)[1:-WRITTEN]:
            del self.completions[old]

    def last(self, name: str, count: int, *, before: int = 0) -> list[float]:
        """The finite values of a metric in the last `count` steps that have it, less the latest `before`; bounded."""
        values = self.together(count + before, name)[0]
        return values[: max(len(values) - before, 0)]

    def together(self, count: int, *names: str) -> list[list[float]]:
        """The values of several metrics in the last `count` steps that have all of them, as in `last`."""
        steps = (row.metrics for row in reversed(self.rows[-10 * count :]))
        complete = (step for step in steps if all(math.isfinite(step.get(name, math.nan)) for name in names))
        latest = list(islice(complete, count))[::-1]
        return [[bounded(step[name]) for step in latest] for name in names]

    def first(self, name: str, count: int) -> list[float]:
        """The values of a metric in the first `count` steps, where they have it; finite and bounded as in `last`."""
        values = (row.metrics.get(name, math.nan) for row in self.rows[:count])
        return [bounded(value) for value in values if math.isfinite(value)]

    def kl_name(self) -> str:
        """The name of the KL per token with the least noise that the latest step has; else empty."""
        return best_kl([name for name in KL_NAMES if math.isfinite(self.latest.get(name, math.nan))])

    def kl(self, count: int) -> list[float]:
        """The values of that KL, as `last` has them; none where the latest step has no KL."""
        name = self.kl_name()
        return self.last(name, count) if name else []

    def replay(self) -> Iterator[History]:
        """The run as it was after each step and evaluation; always the same object, which grows."""
        view = History(source=self.source, settings=self.settings, unread=self.unread)
        rows = [(row.step, 1, view.rows, row) for row in self.rows]
        rows += [(row.step, 2, view.evaluations, row) for row in self.evaluations]
        unread = sorted(self.completions, reverse=True)
        for step, _, seen, row in sorted(rows, key=lambda entry: entry[:2]):
            while unread and unread[-1] <= step:
                view.add_completions(self.completions[unread.pop()])
                view.forget_completions()
            seen.append(row)
            yield view


LARGEST = 1e100
"""No arithmetic on values of this size overflows."""


def bounded(value: float) -> float:
    """The nearest value that no arithmetic on it overflows with."""
    return min(max(value, -LARGEST), LARGEST)


def k3(delta: float) -> float:
    """The estimator k3 of one log-ratio, bounded so that its sums stay finite."""
    return math.expm1(min(-delta, 600.0)) + delta
