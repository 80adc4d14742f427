"""Chooses the completions that the page shows first: those that alarms blame, then those far from the reference."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from klamp.diagnostics.alarms_tokens import k3
from klamp.diagnostics.history import Completion
from klamp.report.run import ReportRun

Anchor: TypeAlias = Literal["reference", "teacher", "sampler"]

BINS = 64
"""The most stretches that the positions of a completion are joined in."""
LONGEST = 3000
"""The most tokens of a completion that are shown: a stretch around the worst one."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A completion on the page, together with equal ones."""

    run: int
    """The number of its run."""
    completion: Completion
    """The completion as the record has it."""
    index: int
    """Its place among those that were written in its step, from 0; of twins, the first's."""
    times: int
    """How many completions are equal to it, token for token and number for number."""
    against: Anchor | None
    """The model whose log-probabilities the policy's are compared with."""
    ratios: Sequence[float]
    """log policy - log other of each token; NaN where one is missing, or the token is not trained on."""
    blamed: frozenset[int] = frozenset()
    """The positions of tokens that an alarm blames."""

    @property
    def worst(self) -> float:
        """The largest |log-ratio| of its tokens."""
        return max((abs(ratio) for ratio in self.ratios if math.isfinite(ratio)), default=0.0)

    @property
    def k1(self) -> float:
        """The sum of the log-ratios, in nats."""
        return sum(ratio for ratio in self.ratios if math.isfinite(ratio))

    @property
    def k3(self) -> float:
        """The sum of k3 over the tokens, in nats; tokens that are compared with their sampler are that one's."""
        sign = -1 if self.against == "sampler" else 1
        return sum(k3(sign * ratio) for ratio in self.ratios if math.isfinite(ratio))

    @property
    def other(self) -> Sequence[float] | None:
        """The log-probabilities that the policy's are compared with."""
        return None if self.against is None else recorded(self.completion)[self.against]

    def towards(self, anchor: Anchor) -> Self:
        """The same, compared with another model that scored it."""
        return replace(self, against=anchor, ratios=_ratios(self.completion, anchor))

    @property
    def span(self) -> tuple[int, int]:
        """The range of tokens that is shown."""
        total = len(self.completion.tokens)
        if total <= LONGEST:
            return 0, total
        sizes = [abs(ratio) if math.isfinite(ratio) else -1.0 for ratio in self.ratios]
        begin = min(max(0, sizes.index(max(sizes)) - LONGEST // 2), total - LONGEST)
        return begin, begin + LONGEST


def ranked(runs: Sequence[ReportRun]) -> list[Shown]:
    """All completions of the runs with equal ones joined, the worst first.

    Args:
        runs: those of the report.
    """
    found = [shown for number, run in enumerate(runs) for shown in _of_run(run, number)]
    return sorted(found, key=lambda each: (not each.blamed, -each.worst, each.run, each.completion.step, each.index))


def _of_run(run: ReportRun, number: int) -> Iterable[Shown]:
    blamed = blamed_tokens(run)
    for step, completions in run.history.completions.items():
        twins: dict[tuple[object, ...], list[int]] = {}
        for index, each in enumerate(completions):
            twins.setdefault(_identity(each), []).append(index)
        for same in twins.values():
            first = completions[same[0]]
            against = next(iter(recorded(first)), None)
            yield Shown(
                run=number,
                completion=first,
                index=same[0],
                times=len(same),
                against=against,
                ratios=_ratios(first, against),
                blamed=frozenset().union(*(blamed.get((step, index), frozenset()) for index in same)),
            )


def _identity(each: Completion) -> tuple[object, ...]:
    lists = (each.tokens, each.policy, each.ref, each.teacher, each.sampler, each.trained)
    return (each.group, each.prompt, each.reward, *(None if values is None else tuple(values) for values in lists))


def recorded(completion: Completion) -> dict[Anchor, Sequence[float]]:
    """The models that scored a completion besides the policy, with their log-probabilities; the first is compared with.

    Args:
        completion: as the record has it.
    """
    every: dict[Anchor, Sequence[float] | None] = {
        "reference": completion.ref,
        "teacher": completion.teacher,
        "sampler": completion.sampler,
    }
    return {anchor: values for anchor, values in every.items() if values is not None}


def _ratios(each: Completion, against: Anchor | None) -> array[float]:
    if against is None:
        return array("d", [math.nan] * len(each.tokens))
    rows = zip(each.policy, recorded(each)[against], each.is_trained, strict=True)
    return array("d", [p - o if on and math.isfinite(p - o) else math.nan for p, o, on in rows])


def blamed_tokens(run: ReportRun) -> Mapping[tuple[int, int], frozenset[int]]:
    """The positions that alarms blame: (step, completion) -> positions.

    Args:
        run: with its findings.
    """
    found: dict[tuple[int, int], frozenset[int]] = {}
    for finding in run.diagnosis.findings:
        for token in finding.evidence.tokens:
            place = (token.step, token.completion)
            found[place] = found.get(place, frozenset()) | {token.position}
    return found


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a token on the page: its completion and its position there."""

    shown: int
    """The number of its completion on the page."""
    position: int
    """Its position in the completion."""
    times: int
    """In how many completions, twins included, the same token has the same numbers at the same place."""


def worst_tokens(completions: Mapping[int, Shown], *, most: int) -> list[Place]:
    """The tokens with the largest |log-ratio|; a token of several equal completions counts once.

    Args:
        completions: those on the page, by number.
        most: how many tokens.
    """
    places: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    sizes: dict[tuple[object, ...], float] = {}
    for number, each in completions.items():
        policy, other = each.completion.policy, each.other
        begin, end = each.span
        for position in range(begin, end):
            ratio = each.ratios[position]
            if other is not None and math.isfinite(ratio) and ratio != 0:
                token = str(each.completion.tokens[position])
                same = (each.run, each.completion.step, token, position, policy[position], other[position])
                places.setdefault(same, []).append((number, position))
                sizes[same] = abs(ratio)
    order = sorted(places, key=lambda same: -sizes[same])[:most]
    return [
        Place(shown=seen[0][0], position=seen[0][1], times=sum(completions[number].times for number, _ in seen))
        for seen in (places[same] for same in order)
    ]
