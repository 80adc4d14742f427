"""Reads JSONL files with a completion and its tokens' log-probabilities per line: klamp's, prime-rl's, verl's.

prime-rl exports whole sequences (`trainer.enable_token_export`), prompt included, where the sampler's log-probability
is 0.0; verl keeps the response apart, padded on the right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from klamp.diagnostics.history import (
    Completion,
    History,
    RunSettings,
    check_lengths,
    every,
    flags_of,
    numbers_of,
    texts_of,
)
from klamp.diagnostics.statistics import UNKNOWN, row_of
from klamp.records.files import each_row, json_lines, unreadable

LARGEST = 0.01
"""The largest value that a log-probability may have by rounding."""
POLICY = ("policy_logprobs", "trainer_logprobs", "old_log_probs", "log_probs", "logprobs")
REF = ("ref_logprobs", "ref_log_prob", "ref_log_probs", "reference_logprobs")
TEACHER = ("teacher_logprobs", "teacher_log_probs")
SAMPLER = ("sampler_logprobs", "inference_logprobs", "rollout_log_probs", "sampling_logprobs")
TRAINED = ("trained", "loss_mask", "response_mask", "completion_mask")
TOKENS = ("tokens", "token_ids", "responses", "response_ids", "completion_ids")
GROUP = ("uid", "group", "prompt", "input")
PROMPT = ("prompt", "input", "question")
UNWRITTEN = (0.0, -1.0)
"""What verl pads the log-probabilities of the policy and of the sampler with; others pad the sampler with either."""
CERTAIN = -1.0
"""A token that its sampler was certain of is above this under the policy; a prompt token mostly is not."""


def is_rollout(row: Mapping[str, Any]) -> bool:
    """Whether a line holds log-probabilities of tokens, or one of a completion and its reference, which is refused."""
    return isinstance(_first(row, POLICY), list) or None not in (_first(row, POLICY), _first(row, REF))


def read_rollouts(files: Iterable[Path], *, source: str = "JSONL rollouts") -> History:
    """Read the history in files of completions, in the order of their steps."""
    history, files = History(source=source, settings=RunSettings(other_kernels=True)), list(files)
    history.add_completions(chain.from_iterable(map(_completions_in, files)))
    if not history.completions:
        raise unreadable("there are no completions", files[0] if files else Path(), why="the files are empty")
    history.rows = [row_of(step, history.completions[step]) for step in sorted(history.completions)]
    return history


def _completions_in(file: Path) -> Iterator[Completion]:
    step = step_in(file)
    what = "line {} is no completion with log-probabilities"
    return each_row(json_lines(file), file, lambda row: completion_of(row, default_step=step), what=what)


def completion_of(row: Mapping[str, Any], *, default_step: int = 1) -> Completion:
    """Turn a line into a completion."""
    if (given := _first(row, POLICY)) is None:
        raise ValueError(f"none of {', '.join(POLICY)}")
    policy = numbers_of(given)
    sampler, mask, tokens = _numbers(_first(row, SAMPLER)), _first(row, TRAINED), _first(row, TOKENS)
    trained = flags_of(mask) if isinstance(mask, list) else None
    lists = {"policy": policy, "ref": _numbers(_first(row, REF)), "sampler": sampler, "trained": trained}
    lists["teacher"] = _numbers(_first(row, TEACHER))
    lists["tokens"] = texts_of(tokens) if isinstance(tokens, list) else [UNKNOWN] * len(policy)
    check_lengths(lists)
    on = trained if trained is not None else every(len(policy))
    if any(value > LARGEST for value, counts in zip(policy, on, strict=True) if counts):
        raise ValueError(f"a log-probability of {max(policy):g}: they are never above 0 (are they probabilities?)")
    keep = _without_padding(sampler, trained, len(policy))
    cut: dict[str, Any] = {name: None if values is None else values[:keep] for name, values in lists.items()}
    return Completion(
        step=int(row.get("step", default_step)),
        **cut,
        sampled=_sampled(cut["policy"], cut["sampler"], cut["trained"]),
        ended=_ended(row),
        group=str(_first(row, GROUP) or ""),
        prompt=prompt if isinstance(prompt := _first(row, PROMPT), str) else "",
        reward=_one(row, ("reward", "score", "rewards")),
        advantage=_one(row, ("advantage", "advantages")),
    )


def _without_padding(sampler: Sequence[float] | None, trained: Sequence[bool] | None, length: int) -> int:
    """The number of tokens before the padding on the right."""
    while sampler and trained and length and not trained[length - 1] and sampler[length - 1] in UNWRITTEN:
        length -= 1
    return length


def _sampled(
    policy: Sequence[float], sampler: Sequence[float] | None, trained: Sequence[bool] | None
) -> Sequence[bool] | None:
    """Which tokens the sampler drew; None: it reported nothing, so that nobody knows."""
    if sampler is None:
        return None
    rows = zip(policy, sampler, trained or every(len(policy)), strict=True)
    return flags_of([_is_drawn(p, s, on) for p, s, on in rows])


def _is_drawn(policy: float, sampler: float, trained: bool) -> bool:
    """Whether the sampler drew a token: it scored it, or was certain of it as the policy nearly is."""
    if sampler == 0.0 or math.isnan(sampler):
        return policy > CERTAIN and trained
    return (policy, sampler) != UNWRITTEN


def _ended(row: Mapping[str, Any]) -> bool | None:
    if isinstance(row.get("ended"), bool):
        return row["ended"]
    cut = row.get("is_truncated", row.get("truncated"))
    if isinstance(cut, bool):
        return not cut
    reason = row.get("finish_reason")
    return reason != "length" if isinstance(reason, str) else None


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _numbers(values: Any) -> Sequence[float] | None:
    return numbers_of(values) if isinstance(values, list) else None


def _one(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """A number; of a list, the number that is largest in size."""
    value = _first(row, names)
    if isinstance(value, list):
        numbers = [float(each) for each in value if each is not None]
        return max(numbers, key=abs, default=None)
    return None if value is None else float(value)


def step_in(file: Path) -> int:
    """The step in the name of a file: 12.jsonl, or step_12/rank_0.jsonl."""
    for name in (file.stem, file.parent.name):
        found = re.fullmatch(r"(?:step[_-])?(\d+)", name)
        if found:
            return int(found[1])
    return 1
