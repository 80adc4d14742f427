"""The rules about single tokens, the search for the tokens to blame for a KL, and a sampler that is not the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from klamp.diagnostics.alarm import Blamed, Evidence, Limit, is_beyond, least_and_most, number
from klamp.diagnostics.causes import MISMATCH
from klamp.diagnostics.history import Completion, History, Side

MANY = 5
PROMPT = Limit(value=1, unit="token that the model did not write", source="the KL and the reward are about its own")
END_TOKEN = Limit(
    value=0.5,
    unit="of the completions that ended, their last token left out of the loss",
    source="klamp's choice: without it no length is ever learned",
)
SURPRISE = Limit(
    value=5,
    unit="standard errors below 0 over the tokens of a step, at least 200",
    source="E[exp(-k1)] <= 1 under the policy bounds the lower tail",
)


def blame(history: History, step: int, *, against: Side = "ref") -> list[Blamed]:
    """The tokens with most of the k3 among the completions that were written in a step, or in the nearest one.

    Args:
        history: the run.
        step: when the KL was seen.
        against: the KL to the reference, or that of the sampler to the policy.
    """
    if not history.completions:
        return []
    nearest = min(history.completions, key=lambda written: abs(written - step))
    found: dict[tuple[str, int, float, float], list[tuple[float, int]]] = {}
    for index, each in enumerate(history.completions[nearest]):
        other = (each.ref if against == "ref" else each.sampler) or ()
        for position, delta in each.log_ratios(against):
            token = (str(each.tokens[position]), position, each.policy[position], other[position])
            found.setdefault(token, []).append((k3(delta), index))
    sums = {token: sum(value for value, _ in seen) for token, seen in found.items()}
    total = sum(sums.values())
    return [
        Blamed(
            step=nearest,
            completion=found[token][0][1],
            position=token[1],
            token=token[0],
            policy_logprob=token[2],
            other_logprob=token[3],
            share=sums[token] / total,
            times=len(found[token]),
        )
        for token in sorted(sums, key=lambda token: -sums[token])[:MANY]
        if sums[token] > 0
    ]


def k3(delta: float) -> float:
    """The estimator k3 of one log-ratio, bounded so that sums of it stay finite."""
    return math.expm1(min(-delta, 600.0)) + delta


def mask_on_prompt(history: History) -> Evidence | None:
    """Finds a loss mask that covers tokens which the model did not write."""
    rows = history.completions.get(history.step, [])
    wrong: list[tuple[list[int], int, Completion]] = []
    for index, each in enumerate(rows):
        pairs = zip(each.is_trained, each.is_sampled, strict=True)
        positions = [i for i, (trained, sampled) in enumerate(pairs) if trained and not sampled]
        wrong += [(positions, index, each)] if positions else []
    if not wrong:
        return None
    positions, index, each = wrong[0]
    shown = " ".join(repr(str(each.tokens[i])) for i in positions[:MANY])
    return Evidence(
        f"in {len(wrong)} of {len(rows)} sequences; {len(positions)} in sequence {index} alone, from position "
        f"{positions[0]}: {shown}"
    )


def end_token_lost(history: History) -> Evidence | None:
    """Finds a loss mask that leaves out the last token of completions that ended."""
    rows = [each for each in history.completions.get(history.step, []) if each.ended is not False]
    rows = [each for each in rows if any(each.is_trained) and any(each.is_sampled)]
    lost = [each for each in rows if not each.is_trained[_last_written(each)]]
    if not lost or len(lost) <= END_TOKEN.value * len(rows):
        return None
    token = lost[0].tokens[_last_written(lost[0])]
    return Evidence(f"in {len(lost)} of {len(rows)} completions the last token ({str(token)!r}) is not trained on")


def _last_written(row: Completion) -> int:
    return max(i for i, sampled in enumerate(row.is_sampled) if sampled)


def improbable_k1(history: History) -> Evidence | None:
    """Finds a k1 that is below 0 by more than chance, over the tokens of one step."""
    deltas = [delta for each in history.completions.get(history.step, []) for _, delta in each.log_ratios()]
    if len(deltas) < 200 or fmean(deltas) >= 0:  # the second spares most steps the exact variance below
        return None
    error = stdev(deltas) / math.sqrt(len(deltas))
    if fmean(deltas) >= -SURPRISE.value * error or error == 0:
        return None
    return Evidence(
        f"k1 is {number(fmean(deltas))} nats per token over {len(deltas)} tokens, {number(-fmean(deltas) / error)} "
        "standard errors below 0"
    )


OTHER_KERNELS = Limit(
    value=0.1,
    unit="nats per token, k3, before the first update: more than data types or kernels explain",
    source="klamp's choice; bfloat16 against float32 was .02 to .07 on average in size, so .003 at most in k3",
)
UNSEEN = Limit(
    value=2.0,
    unit="times further apart at first tokens than later: the prompt was not seen",
    source="klamp's choice; a completion is its own context after a few tokens",
)
STEADY = 5
"""Steps until which the mean counts with a margin by tokens; later the scatter of 2 and 4 times as many does."""
ONE_SIDED = 50
"""Tokens of which not one is likelier under the policy: other weights or kernels make some of them so."""
SAME = 1e-4
"""Nats by which arithmetic alone sets the two apart."""
GREW = 4.0
"""Times as far apart as before the first update: it came with the updates, else nothing is said of that."""
COURSE = 20
"""Steps over which two distances are held against each other; the KL has doubled in them, else they tell nothing."""
START_LIKE = 1.5
"""Times that two distances of one pair of models differ at most, as two estimates of them."""
LATER = 4
"""Tokens of a completion after which it has a context of its own."""


def sampler_mismatch(history: History) -> Evidence | None:
    """Finds a sampler and a trainer that give the sampled tokens different probabilities."""
    sizes = _sizes(history.latest)
    if not any(_beyond_chance(history, name) for name in sizes):
        return None
    seen = {name: history.last(name, 2 * STEADY) for name in sizes}
    means = {name: f" ({number(fmean(x))}, mean of {len(x)})" if len(x) > 1 else "" for name, x in seen.items()}
    text = ", ".join(f"{name} is {number(history.latest[name])}{mean}" for name, mean in means.items())
    tokens = blame(history, history.step, against="sampler")
    return Evidence(f"{text} nats per token", tokens, causes=causes_of(history))


def _beyond_chance(history: History, name: str) -> bool:
    """Whether a distance of sampler and policy is out of order: steadily by its scatter, or at once by its tokens."""
    values = [x * x / 2 if name == "sampler/abs" else x for x in history.last(name, 4 * STEADY)]
    ranges = [least_and_most(values[-steps:]) for steps in (2 * STEADY, 4 * STEADY) if len(values) >= steps]
    if any(least > MISMATCH.value or most < -MISMATCH.value for least, most in ranges):
        return True
    seen, limit = (values, MISMATCH.value) if len(values) < STEADY else (values[-1:], OTHER_KERNELS.value)
    return bool(seen) and is_beyond(history, name, fmean(seen), limit, steps=len(seen))


def _sizes(metrics: Mapping[str, float]) -> dict[str, float]:
    """How far sampler and trainer are apart by each measure of a step, in nats per token."""
    seen = {name: abs(metrics[name]) for name in ("sampler/k1", "sampler/k3") if name in metrics}
    if "sampler/abs" in metrics:  # E[d^2]/2 >= E[|d|]^2/2: what k2 is at least
        seen["sampler/abs"] = metrics["sampler/abs"] * metrics["sampler/abs"] / 2
    return seen


def causes_of(history: History) -> list[str]:
    """What a mismatch comes from, as far as its course and its places show it; nothing where the start is not known.

    Before the first update the weights of sampler and trainer are the same, whatever is synced later.
    """
    deltas = [delta for each in history.completions.get(history.step, []) for _, delta in each.log_ratios("sampler")]
    if len(deltas) >= ONE_SIDED and min(deltas) > -SAME and fmean(deltas) > SAME:
        return [
            f"each of {len(deltas)} tokens is at least as likely under the sampler: it cuts the distribution (top-p, "
            "top-k, min-p) or sharpens it (temperature), and the trainer scores another one; no sync mends that"
        ]
    first = {name: size for name, size in _sizes(history.rows[0].metrics).items() if math.isfinite(size)}
    if not first or history.rows[0].step > 1 or history.settings.steps_counted:
        return []
    name = max(first, key=lambda name: first[name])
    apart = first[name] > MISMATCH.value
    shown = name if apart or "sampler/k3" not in first else "sampler/k3"
    said = f"{shown} was {number(history.rows[0].metrics[shown])}"
    if not apart:
        text = _of_start(history) or (
            f"it came with the updates ({said} before the first one): the sampler's weights, or those of its adapter, "
            "are not synced before each rollout"
        )
        return [text] if max(_sizes(history.latest).values()) > GREW * first[name] else []
    since = f"it was there before the first update ({said}), so a missing sync alone does not explain it"
    if first[name] <= OTHER_KERNELS.value:
        slightly = "a temperature or truncation (top-p, top-k) that is a little different"
        return [f"{since}: other data types or kernels, or {slightly}"]
    at_start, later = _distances(history.completions.get(history.rows[0].step, []))
    if at_start and later and fmean(at_start) > UNSEEN.value * fmean(later):
        return [
            f"{since}, and first tokens are {fmean(at_start) / max(fmean(later), 1e-9):.1f} times as far apart as "
            "later ones: the trainer does not see the prompt that was sampled from (attention mask, chat template, "
            "truncation)"
        ]
    return [
        f"{since}: the trainer scores with another temperature, another prompt or template, or without the adapter (or "
        "with one) that the sampler has"
    ]


def _of_start(history: History) -> str | None:
    """Whether the sampler's distance is, step by step, that of the reference: its weights are those of the start."""
    sampler, kl = history.together(COURSE, "sampler/k3", history.kl_name())
    pairs = [(a, b) for a, b in zip(sampler, kl, strict=True) if b > 0]
    elsewhere = history.settings.moving_reference or history.settings.other_reference
    if len(pairs) < STEADY or max(kl) < 2 * min(b for _, b in pairs) or elsewhere:
        return None
    if not all(1 / START_LIKE < a / b < START_LIKE for a, b in pairs):
        return None
    return (
        f"the sampler still has the weights that training started from: it is as far from the policy as the reference "
        f"is ({number(sampler[-1])} and {number(kl[-1])} nats per token). New weights, or the adapter, never reach it"
    )


def _distances(completions: Sequence[Completion]) -> tuple[list[float], list[float]]:
    """The sizes of the log-ratios of sampler and policy at the first sampled token, and at those with a context."""
    at_start: list[float] = []
    later: list[float] = []
    for each in completions:
        begins = next((i for i, own in enumerate(each.is_sampled) if own), 0)
        for position, delta in each.log_ratios("sampler"):
            if position == begins:
                at_start.append(abs(delta))
            elif position >= begins + LATER:
                later.append(abs(delta))
    return at_start, later
