"""The rule about a sampler that is not the policy, and what the run shows of why."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from klamp.diagnostics.alarm import Evidence, Limit, number
from klamp.diagnostics.alarms_tokens import blame
from klamp.diagnostics.causes import MISMATCH
from klamp.diagnostics.history import Completion, History

COARSE = Limit(
    value=0.1,
    unit="nats per token, k3, before the first update: more than data types or kernels explain",
    source="klamp's choice; bfloat16 against float32 was .02 to .07 on average in size, so .003 at most in k3",
)
UNSEEN = Limit(
    value=2.0,
    unit="times further apart at first tokens than later: the prompt was not seen",
    source="klamp's choice; a completion is its own context after a few tokens",
)
LATER = 4
"""Tokens of a completion after which it has a context of its own."""


def sampler_mismatch(history: History) -> Evidence | None:
    """Finds a sampler and a trainer that give the sampled tokens different probabilities."""
    last = history.rows[-1].metrics if history.rows else {}
    seen = {name: last[name] for name in ("sampler/k1", "sampler/k3") if name in last}
    if "sampler/abs" in last:  # E[d^2]/2 >= E[|d|]^2/2: what k2 is at least
        seen["sampler/abs"] = last["sampler/abs"]
    sizes = [abs(value) if name != "sampler/abs" else value * value / 2 for name, value in seen.items()]
    if not any(size > MISMATCH.value for size in sizes):
        return None
    text = ", ".join(f"{name} is {number(value)}" for name, value in seen.items())
    tokens = blame(history, history.step, against="sampler")
    return Evidence(f"{text} nats per token", tokens, causes=causes_of(history))


def causes_of(history: History) -> list[str]:
    """What a mismatch comes from, as far as its course and its places show it; nothing where the start is not known.

    Before the first update the weights of sampler and trainer are the same, whatever is synced later.
    """
    first = history.first("sampler/k3", 1)
    if not first or history.rows[0].step > 1:
        return []
    if first[0] <= MISMATCH.value:
        return [
            f"it came with the updates (sampler/k3 was {number(first[0])} before the first one): the sampler's "
            "weights, or those of its adapter, are not synced before each rollout"
        ]
    since = f"it was there before the first update (sampler/k3 {number(first[0])}), so no sync is missing"
    if first[0] <= COARSE.value:
        return [f"{since}: other data types or kernels, or a temperature or truncation that is a little different"]
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
