"""Reads JSONL files with a completion and its tokens' log-probabilities per line: klamp's, prime-rl's, verl's.

prime-rl exports whole sequences; a prompt token has the sampler's log-probability 0.0. verl pads on the right.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Any, TypeAlias

from klamp.doctor.history import Completion, History, Row, RunSettings, Side, bounded, check_lengths, every, k3
from klamp.doctor.metrics import STEP_NAMES, declare_no_reference, step_of
from klamp.doctor.readers.files import TOKEN_LISTS, each_row, json_lines, unreadable

Numbers: TypeAlias = Sequence[float]
UNKNOWN = "?"
"""The token in records without token texts."""
LARGEST = 0.01
"""The largest value that a log-probability may have by rounding."""
LOGPROBS = re.compile(r"_?(?:per_token_|action_)?log_?p(rob)?s?$")
"""How the name of log-probabilities of a completion's tokens ends: policy_logprobs, old_per_token_logps."""
MODELS: Mapping[str, Sequence[str]] = {
    "policy": ("policy", "trainer", "train", "training", "actor", "learner", "old", "prev", ""),
    "ref": ("ref", "reference", "reference_policy", "base"),
    "teacher": ("teacher",),
    "sampler": ("sampler", "inference", "rollout", "sampling", "generation", "vllm", "behavior"),
}
"""Model -> how that name begins, the best first."""
TRAINED = ("trained", "loss_mask", "response_mask", "completion_mask")
TOKENS = ("tokens", "token_ids", "responses", "response_ids", "completion_ids")
GROUP = ("uid", "group", "group_id", "prompt_id", "prompt", "input")
PROMPT = ("prompt", "input", "question")
UNWRITTEN = (0.0, -1.0)
"""What verl pads the log-probabilities of the policy and of the sampler with; others pad the sampler with either."""
CERTAIN = -1.0
"""A token that its sampler was certain of is above this under the policy; a prompt token mostly is not."""


def is_rollout(row: Mapping[str, Any]) -> bool:
    """Whether a line holds log-probabilities of tokens, or one of a completion and its reference, which is refused."""
    policy, ref = (_logprobs(row)[model] for model in ("policy", "ref"))
    return isinstance(policy, list) or None not in (policy, ref)


def _logprobs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Model -> its log-probabilities in a line; a single number counts only under a name with `prob`."""
    ends = {name: end for name in row if (end := LOGPROBS.search(name)) and (end[1] or isinstance(row[name], list))}
    owners = {name[: end.start()]: row[name] for name, end in ends.items()}
    return {model: _first(owners, names) for model, names in MODELS.items()}


def read_rollouts(files: Iterable[Path], *, source: str = "JSONL rollouts") -> History:
    """Read the history in files of completions, in the order of their steps."""
    history, files = History(source=source, settings=RunSettings(other_kernels=True)), list(files)
    history.add_completions(chain.from_iterable(map(_completions_in, files)))
    if not history.completions:
        raise unreadable("there are no completions", files[0] if files else Path(), why="the files are empty")
    taught = any(x.teacher is not None for x in chain(*history.completions.values()))
    history.rows = [row_of(step, history.completions[step], taught=taught) for step in sorted(history.completions)]
    declare_no_reference(history)
    return history


def _completions_in(file: Path) -> Iterator[Completion]:
    default, names = {"_step": step_in(file)}, {*STEP_NAMES} - {"steps", "iterations"}  # an agent may log its own

    def read(row: Mapping[str, Any]) -> Completion:
        return completion_of(row, step=row.get("step", step_of(default | {n: row[n] for n in names & row.keys()})))

    parts = {"what": "line {} is no completion with log-probabilities", "fix": TOKEN_LISTS}
    return each_row(json_lines(file), file, read, **parts)


def completion_of(row: Mapping[str, Any], *, step: Any = 1, written: bool = False) -> Completion:
    """Turn a line into a completion, or raise ValueError or TypeError; `written`: the model wrote all of its tokens."""
    scores = _logprobs(row)
    if scores["policy"] is None:
        raise ValueError("no policy_logprobs, trainer_logprobs, old_log_probs or logprobs")
    if not isinstance(scores["policy"], list):
        raise TypeError(f"{reprlib.repr(scores['policy'])} where a list belongs, with one entry per token")
    lists: dict[str, Any] = {model: numbers_of(x) if isinstance(x, list) else None for model, x in scores.items()}
    policy, mask, tokens = lists["policy"], _first(row, TRAINED), _first(row, TOKENS)
    length, trained = len(policy), flags_of(mask) if isinstance(mask, list) else None
    texts = [sys.intern(str(x)) for x in tokens] if isinstance(tokens, list) else [UNKNOWN] * length
    lists |= {"trained": trained, "tokens": texts}
    check_lengths(lists)
    on = trained if trained is not None else every(length)
    if any(value > LARGEST for value, counts in zip(policy, on, strict=True) if counts):
        raise ValueError(f"a log-probability of {max(policy):g}: they are never above 0 (are they probabilities?)")
    end = length if written else _without_padding(policy, lists["sampler"], trained)
    cut: dict[str, Any] = {name: None if values is None else values[:end] for name, values in lists.items()}
    return Completion(
        step=int(step),
        **cut,
        sampled=every(end) if written else _sampled(cut["policy"], cut["sampler"], cut["trained"]),
        ended=_ended(row),
        group=str(_first(row, GROUP) or ""),
        prompt=prompt if isinstance(prompt := _first(row, PROMPT), str) else "",
        reward=_one(row, ("reward", "score", "rewards")),
        advantage=_one(row, ("advantage", "advantages")),
    )


def numbers_of(values: Sequence[Any]) -> array[float]:
    """A list in a line of a record as numbers, 8 bytes each, since a long run has millions; null is NaN."""
    return array("d", [math.nan if value is None else float(value) for value in values])


def flags_of(values: Sequence[Any]) -> Sequence[bool]:
    """A list of flags in a line of a record; if all are True, in no memory of its own."""
    flags = [bool(value) for value in values]
    return every(len(flags)) if all(flags) else flags


def _without_padding(policy: Sequence[float], sampler: Sequence[float] | None, trained: Sequence[bool] | None) -> int:
    """The length without masked tokens on the right whose numbers are no log-probabilities."""
    length, scored = len(policy), sampler or [math.nan] * len(policy)
    while trained and length and not trained[length - 1]:
        if scored[length - 1] not in UNWRITTEN and not policy[length - 1] > LARGEST:
            break
        length -= 1
    return length


def _sampled(policy: Numbers, sampler: Numbers | None, trained: Sequence[bool] | None) -> Sequence[bool] | None:
    """Which tokens the sampler drew: it scored them, or was certain as the policy nearly is; None: unknown."""
    if sampler is None:
        return None
    rows = zip(policy, sampler, trained or every(len(policy)), strict=True)
    return flags_of(
        [(p > CERTAIN and on) if s == 0 or math.isnan(s) else p <= LARGEST and (p, s) != UNWRITTEN for p, s, on in rows]
    )


def _ended(row: Mapping[str, Any]) -> bool | None:
    if isinstance(row.get("ended"), bool):
        return row["ended"]
    cut = row.get("is_truncated", row.get("truncated"))
    if isinstance(cut, bool):
        return not cut
    reason = row.get("finish_reason", row.get("stop_reason"))
    return reason != "length" if isinstance(reason, str) else None


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _one(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """A number; of a list, the number that is largest in size."""
    value = _first(row, names)
    if isinstance(value, list):
        numbers = [float(entry) for entry in value if entry is not None]
        return max(numbers, key=abs, default=None)
    return None if value is None else float(value)


def step_in(file: Path) -> int:
    """The step in the name of a file: 12.jsonl, or step_12/rank_0.jsonl."""
    matches = (re.fullmatch(r"(?:step[_-])?(\d+)", name) for name in (file.stem, file.parent.name))
    return next((int(match[1]) for match in matches if match), 1)


def completion_metrics(completions: Sequence[Completion], *, taught: bool = False) -> dict[str, float]:
    """The metrics of a step's completions alone, over trained tokens, named as in `METRICS`; `taught`: by a teacher."""
    metrics = _teacher_metrics(completions) if taught else dict[str, float]()
    sides: Mapping[Side, str] = {"ref": "kl/k3", "sampler": "sampler/k3", "teacher": "teacher/kl"}
    for against, name in sides.items():
        if deltas := [delta for completion in completions for _, delta in completion.log_ratios(against)]:
            metrics |= {f"{name[:-2]}k1": fmean(deltas), name: fmean(map(k3, deltas))}
    rewards = [completion.reward for completion in completions if completion.reward is not None]
    if rewards:
        metrics["reward"] = fmean(map(bounded, rewards))
    ended = [completion.ended for completion in completions if completion.ended is not None]
    if ended:
        metrics["length/truncated"] = 1 - fmean(ended)
    lengths = [sum(completion.is_sampled) for completion in completions]
    if lengths:
        metrics["length/mean"] = fmean(lengths)
        if any(token != UNKNOWN for completion in completions for token in completion.tokens):
            metrics["length/repeated"] = sum(map(_repeated, completions)) / max(sum(lengths), 1)
    metrics |= _group_metrics(completions)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _teacher_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """The share of the trained tokens without a number of the teacher's, and of its numbers that are the one before."""
    rows = ((x.policy, x.teacher or [math.nan] * len(x.policy), x.is_trained) for x in completions)
    pairs = [(p, t) for row in rows for p, t, trained in zip(*row, strict=True) if trained and math.isfinite(p)]
    scored = [(p, t) for p, t in pairs if math.isfinite(t)]
    same = [t == before for (p0, before), (p, t) in pairwise(scored) if p != p0]
    metrics = {"teacher/repeated": fmean(same)} if same else {}
    return metrics | ({"teacher/unscored": 1 - len(scored) / len(pairs)} if pairs else {})


def _repeated(completion: Completion) -> int:
    """How many of the model's tokens repeat an earlier pair of neighbours."""
    tokens = [token for token, sampled in zip(completion.tokens, completion.is_sampled, strict=True) if sampled]
    pairs = list(pairwise(tokens))
    return len(pairs) - len(set(pairs))


def _group_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """What rewards say within groups, where every group is named, is whole, and has two completions or more."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for completion in completions:
        if completion.reward is None or not completion.group:
            return {}
        groups.setdefault(completion.group, []).append((bounded(completion.reward), float(sum(completion.is_sampled))))
    if len(set(map(len, groups.values()))) != 1 or min(map(len, groups.values())) < 2:
        return {}
    rewards = [[reward for reward, _ in group] for group in groups.values()]
    metrics = {"reward_std": fmean(map(stdev, rewards)), "groups/saturated": fmean(len({*x}) == 1 for x in rewards)}
    lengths = [[length for _, length in group] for group in groups.values()]
    reward, length = ([x - fmean(group) for group in values for x in group] for values in (rewards, lengths))
    with suppress(StatisticsError):  # equal within each group
        metrics["length/reward_correlation"] = correlation(reward, length)
    return metrics


def row_of(step: int, completions: Sequence[Completion], *, taught: bool = False) -> Row:
    """The row of metrics of a step of which the record has completions, and nothing else."""
    return Row(
        step=step,
        metrics=completion_metrics(completions, taught=taught),
        prompts=len({completion.group for completion in completions}),
    )
