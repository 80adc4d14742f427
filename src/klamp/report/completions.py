"""The completions of the page: those that alarms blame first, then those far from the reference."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from klamp.doctor.history import Completion, k3
from klamp.report.run import ReportRun

Anchor: TypeAlias = Literal["reference", "teacher", "sampler"]

LONGEST = 3000
"""The most tokens of a completion that are shown: a stretch around the worst one."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A completion on the page, together with equal ones."""

    run: int
    completion: Completion
    index: int
    """Its place among the completions of its step, from 0; of equal ones, the place of the first."""
    times: int
    """How many completions are equal to it, token for token and number for number."""
    against: Anchor | None
    """The model whose log-probabilities the policy's are compared with."""
    ratios: Sequence[float]
    """log policy - log other of each token; NaN if one is missing, or the token is not trained on."""
    blamed: frozenset[int] = frozenset()

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
        """The sum of k3 over the tokens, in nats; against the sampler, k3 takes the sampler as the policy."""
        sign = -1 if self.against == "sampler" else 1
        return sum(k3(sign * ratio) for ratio in self.ratios if math.isfinite(ratio))

    def towards(self, anchor: Anchor) -> Self:
        """The same completion, compared with another model that scored it."""
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
    """All completions of the runs with equal ones joined, the worst first."""
    found = [shown for number, run in enumerate(runs) for shown in _of_run(run, number)]
    return sorted(found, key=lambda each: (not each.blamed, -each.worst, each.run, each.completion.step, each.index))


def _of_run(run: ReportRun, number: int) -> Iterable[Shown]:
    blamed = _blamed_tokens(run)
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
    """The other models that scored a completion, with their log-probabilities; the first is the default."""
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


def _blamed_tokens(run: ReportRun) -> Mapping[tuple[int, int], frozenset[int]]:
    found: dict[tuple[int, int], frozenset[int]] = {}
    for finding in run.diagnosis.findings:
        for token in finding.evidence.tokens:
            place = (token.step, token.completion)
            found[place] = found.get(place, frozenset()) | {token.position}
    return found


def worst_tokens(completions: Mapping[int, Shown], *, most: int) -> list[tuple[int, int]]:
    """(number of the completion, position) of the tokens with the largest |log-ratio|.

    Completions that begin alike share tokens: of equal tokens at one place of a step, the first counts.
    """
    places: dict[tuple[object, ...], tuple[int, int]] = {}
    sizes: dict[tuple[int, int], float] = {}
    for number, each in completions.items():
        for position in range(*each.span):
            ratio = each.ratios[position]
            if math.isfinite(ratio) and ratio != 0:
                token, step = str(each.completion.tokens[position]), each.completion.step
                same = (each.run, step, token, position, each.completion.policy[position], ratio)
                sizes[places.setdefault(same, (number, position))] = abs(ratio)
    return sorted(sizes, key=lambda place: -sizes[place])[:most]
