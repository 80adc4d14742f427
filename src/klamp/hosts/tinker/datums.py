"""The SDK's datums: built with every number at the position of its token, and read as padded tensors.

full = prompt + response; the model reads full[:-1] and is asked about full[1:]. Every row has N = len(full) - 1
entries, of which the first len(prompt) - 1 speak of the prompt and are 0; position t speaks of token t + 1. Reading
checks what the SDK does not (lengths, NaN, missing keys), and names the datum that is wrong, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from klamp.core.arguments import FLOATS, check_tensors, describe
from klamp.core.masking import Totals, check_logprobs, masked
from klamp.core.topk import asked_tokens
from klamp.core.types import Batch
from klamp.errors import DataError, EmptyMaskError, NonFiniteError, ShapeError
from klamp.hosts.common.versions import load_tinker

ANCHORS = ("ref_logprobs", "teacher_logprobs")
HEAD = ("teacher_head_tokens", "teacher_head_logprobs")
"""A teacher's likeliest tokens at each position, [N, K], -1 where there is none, and their log-probabilities."""
KLAMP_KEYS = (*ANCHORS, *HEAD, "mask", "kl_mask")
"""Keys of `loss_fn_inputs` that klamp reads and the service's built-in losses refuse."""

Place: TypeAlias = list[tuple[int, float]]
"""Of one token ids with their log-probabilities: a teacher's likeliest, by rank, and last the one that is there."""
NO_TOKEN = (-1, 0.0)
"""Stands among a teacher's likeliest where there is none."""


def build_datum(
    prompt: Sequence[int],
    response: Sequence[int],
    advantages: float | Sequence[float],
    logprobs: Sequence[float],
    ref_logprobs: Sequence[float] | None = None,
    *,
    teacher_logprobs: Sequence[float] | None = None,
    teacher_head: Sequence[Place] | None = None,
    mask: Sequence[float] | None = None,
    kl_mask: Sequence[float] | None = None,
) -> Any:
    """One completion as a `tinker.Datum`, everything aligned with the tokens that it speaks of.

    The rows `advantages`, `logprobs`, `mask`, and where given those of the anchors and `kl_mask`, are float32 tensors
    of `target_tokens`'s length; the SDK converts only lists of the keys that it knows, and refuses bools.

    Args:
        prompt: token ids, at least one.
        response: token ids of the completion, the end token included, at least one.
        advantages: of the completion, or of each of its tokens.
        logprobs: of the sampler, in nats, one per token of the response.
        ref_logprobs: of the reference (`compute_reference_logprobs`); needed where there is a KL in loss or advantage.
        teacher_logprobs: of a teacher, likewise; behind a prompt of its own if it has one.
        teacher_head: of a teacher at each token of the response its likeliest, and the token's own log-probability
            (`compute_teacher_head`); for teacher_estimator="topk", in the place of teacher_logprobs.
        mask: 1 = train on the token; None: on every token of the response. Advantages are 0 where it is 0.
        kl_mask: 1 = the token carries the KL (`kl_exclude_tokens`); None: as `mask`.

    Raises:
        DataError: no prompt, no response, a token id that is no whole number, or None among the numbers.
        ShapeError: a row that has another length than the response.
        UnsupportedVersion: the SDK is missing or outside the range.
    """
    tinker = load_tinker()
    prompt, response = token_ids("prompt", prompt), token_ids("response", response)
    if len(prompt) == 0 or len(response) == 0:
        raise DataError(
            "a datum needs at least one token of prompt and one of response",
            got=f"{len(prompt)} tokens of prompt, {len(response)} of response",
            why="the first token of a sequence has no log-probability",
            fix="start the prompt with the beginning-of-sequence token; leave out completions without a token",
        )
    trained = _response_row("mask", [1.0] * len(response) if mask is None else mask, len(response)) != 0
    spread = number_row("advantages", advantages).float()
    spread = spread.expand(len(response)) if spread.ndim == 0 else spread
    rows = {
        "advantages": masked(_response_row("advantages", spread, len(response)), trained),
        "logprobs": _response_row("logprobs", logprobs, len(response)),
        "mask": trained.float(),
    }
    head, taught = None, teacher_logprobs
    if teacher_head is not None:
        head, taught = _told(teacher_head, response, teacher_logprobs)
    given = {"ref_logprobs": ref_logprobs, "teacher_logprobs": taught, "kl_mask": kl_mask}
    for name, values in given.items():
        if values is not None:
            rows[name] = _response_row(name, values, len(response))
    full = prompt + response
    inputs = {"target_tokens": torch.tensor(full[1:], dtype=torch.int64)}
    inputs |= {name: torch.cat([torch.zeros(len(prompt) - 1), row]) for name, row in rows.items()}
    for name, values, none in zip(HEAD, head or (), NO_TOKEN, strict=head is not None):
        inputs[name] = torch.cat([values.new_full((len(prompt) - 1, values.shape[1]), none), values])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={name: tinker.TensorData.from_torch(row) for name, row in inputs.items()},
    )


def _told(places: Sequence[Place], response: Sequence[int], given: object) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The ids and log-probabilities of a teacher's head, [T, K] each, and its log-probabilities of the tokens, [T]."""
    told = number_row("teacher_head", places)
    fits = told.ndim == 3 and told.shape[1] > 0 and told.shape[2] == 2 and told[:, -1, 0].tolist() == list(response)
    if not fits or given is not None:
        raise DataError(
            "teacher_head does not tell what a teacher says of this response",
            got="teacher_logprobs besides" if fits else f"{tuple(told.shape)} numbers for {len(response)} tokens",
            why="for each token it holds pairs of an id and its log-probability, as many as for every other token, and "
            "last the pair of the token itself",
            fix="pass what compute_teacher_head returned for this response, and leave teacher_logprobs out",
        )
    return (told[:, :-1, 0].long(), told[:, :-1, 1].float()), told[:, -1, 1].float()


def strip_for_builtin(datums: Sequence[Any]) -> list[Any]:
    """The datums without the keys that the service's built-in losses refuse: those of the anchors, mask, kl_mask.

    A built-in loss sees every position, so that advantages are set to 0 where the mask was 0. The arguments stay as
    they are.

    Raises:
        UnsupportedVersion: the SDK is missing or outside the range.
    """
    stripped = []
    for datum in datums:
        inputs = {name: value for name, value in datum.loss_fn_inputs.items() if name not in KLAMP_KEYS}
        if "mask" in datum.loss_fn_inputs and "advantages" in inputs:
            trained = datum.loss_fn_inputs["mask"].to_torch() != 0
            inputs["advantages"] = tensor_data(masked(inputs["advantages"].to_torch(), trained))
        stripped.append(with_inputs(datum, inputs))
    return stripped


def with_inputs(datum: Any, inputs: dict[str, Any]) -> Any:
    """A datum with other `loss_fn_inputs`; where the SDK keeps a datum's origin, that is kept."""
    spans = ("model_input_spans", "loss_fn_input_spans")
    kept = {name: getattr(datum, name) for name in spans if getattr(datum, name, None) is not None}
    return load_tinker().Datum(model_input=datum.model_input, loss_fn_inputs=inputs, **kept)


def tensor_data(row: Tensor) -> Any:
    """A row of numbers as the SDK sends it, in float32."""
    return load_tinker().TensorData.from_torch(row.detach().float())


def _response_row(name: str, values: Sequence[float] | Tensor, length: int) -> Tensor:
    row = number_row(name, values).float()
    if row.shape != (length,):
        raise ShapeError(
            f"{name} does not have one number per token of the response",
            got=f"{name} {tuple(row.shape)}, response ({length},)",
            why="each number belongs to one token",
            fix="pass the values of the response only; build_datum adds the zeros of the prompt",
        )
    return row


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The data of B datums, padded on the right to N positions; without gradient."""

    mask: Tensor
    """True = a token to train on. [B, N]"""
    advantages: Tensor
    """The advantages, one per position. [B, N]"""
    logprobs: Tensor
    """The log-probabilities under whoever sampled the tokens, in nats. [B, N]"""
    ref_logprobs: Tensor | None
    """The log-probabilities under the reference, in nats; None where a datum has none. [B, N]"""
    teacher_logprobs: Tensor | None
    """The same under the teacher. [B, N]"""
    kl_mask: Tensor | None
    """True = the token carries the KL; None: the same as `mask`. [B, N]"""
    targets: Tensor
    """The tokens. [B, N]"""
    head: Tensor
    """The teacher's likeliest tokens, -1 where there is none. [B, N, K]"""
    head_logprobs: Tensor
    """Their log-probabilities under it. [B, N, K]"""
    lengths: tuple[int, ...]
    """The number of positions of each datum."""

    @property
    def totals(self) -> Totals:
        """The numbers of sequences, trained tokens and KL tokens."""
        carried = self.mask if self.kl_mask is None else self.mask & self.kl_mask
        tokens, kl_tokens = (max(1.0, float(mask.sum())) for mask in (self.mask, carried))
        return Totals(sequences=float(len(self.lengths)), tokens=tokens, kl_tokens=kl_tokens)

    def batch(self, policy_logprobs: Tensor, **more: Any) -> Batch:
        """The datums as a batch of the core under a policy; the sampler counts as the old policy."""
        return Batch(
            policy_logprobs=policy_logprobs,
            mask=self.mask,
            advantages=self.advantages,
            old_logprobs=self.logprobs,
            sampler_logprobs=self.logprobs,
            ref_logprobs=self.ref_logprobs,
            teacher_logprobs=self.teacher_logprobs,
            kl_mask=self.kl_mask,
            **more,
        )

    def policy(self, logprobs_list: Sequence[Tensor]) -> Tensor:
        """The policy's log-probabilities padded to [B, N, K + 1], the target's last, with gradient; each checked.

        Raises:
            TensorError, ShapeError, NonFiniteError: rows that do not fit the datums; the datum is named.
        """
        if not isinstance(logprobs_list, Sequence) or len(logprobs_list) != len(self.lengths):
            found = f"{len(logprobs_list)} rows" if isinstance(logprobs_list, Sequence) else describe(logprobs_list)
            raise ShapeError(
                "logprobs_list does not hold one row of log-probabilities per datum",
                got=f"{len(self.lengths)} datums, {found}",
                why="the row at position i is that of the datum at position i",
                fix="pass both as forward_backward_custom hands them to the loss",
            )
        for i, (row, length) in enumerate(zip(logprobs_list, self.lengths, strict=True)):
            check_tensors(FLOATS, **{f"logprobs_list[{i}]": row})
            k = self.head.shape[2]
            if row.shape != ((length, k + 1) if k else (length,)):
                raise ShapeError(
                    f"datum {i}: the policy's log-probabilities do not have the length of target_tokens",
                    got=f"log-probabilities {tuple(row.shape)}, target_tokens ({length},), {k} tokens of a head",
                    why="each log-probability belongs to one token",
                    fix="use forward_backward_kl, which asks for those of the head too"
                    if k
                    else "pass target_tokens as a 1-D row of token ids",
                )
            each = row.reshape(length, -1).T
            check_logprobs(f"datum {i}: the policy's row", each, self.mask[i, :length].expand_as(each))
        return pad([row.reshape(length, -1) for row, length in zip(logprobs_list, self.lengths, strict=True)])

    def asked(self) -> list[Any]:
        """The `target_tokens` to send: the tokens, or where there is a head its tokens too, see `asked_tokens`."""
        rows = zip(self.targets, self.head, self.lengths, strict=True)
        wide = [asked_tokens(targets[:length], head[:length]) for targets, head, length in rows]
        return [load_tinker().TensorData.from_torch(row if self.head.shape[2] else row[:, 0]) for row in wide]


def read_rows(
    data: Sequence[Any], *, reference: bool = False, teacher: bool = False, exclusions: bool = False, top_k: int = 0
) -> Rows:
    """Read and check the data of datums (the SDK's, or anything with `loss_fn_inputs`).

    Keys: `target_tokens`, `advantages`, `logprobs` always; `ref_logprobs` and
    `teacher_logprobs` where a KL to them is asked for; `mask` (1 = train
    on the token), else every position counts at which log-probability, advantage or reference is not exactly 0;
    `kl_mask` (1 = the token carries the KL), else as `mask`.

    Args:
        data: datums of one call.
        reference: whether a KL to the reference is asked for, so that every datum needs `ref_logprobs`.
        teacher: whether one to a teacher is, likewise `teacher_logprobs`.
        exclusions: whether tokens are excluded from the KL, so that every datum needs `kl_mask`.
        top_k: tokens of the teacher's head, which every datum then needs.

    Raises:
        DataError: no datums, a missing key, or something that is no row of numbers.
        ShapeError: a row of another length than `target_tokens`.
        NonFiniteError: NaN or infinities, or positive log-probabilities, at a position that counts.
        EmptyMaskError: no datum has a token to train on.
    """
    _check_datums(data)
    asked = zip(ANCHORS, (reference, teacher), strict=True)
    anchors = [name for name, needed in asked if needed or all(name in each.loss_fn_inputs for each in data)]
    has_kl_mask = exclusions or any("kl_mask" in datum.loss_fn_inputs for datum in data)
    rows = [_read(i, datum.loss_fn_inputs, anchors, has_kl_mask) for i, datum in enumerate(data)]
    heads = [_read_head(i, datum.loss_fn_inputs, rows[i]["mask"], top_k) for i, datum in enumerate(data)]
    mask = pad([row["mask"] for row in rows])
    if not bool(mask.any()):
        raise EmptyMaskError(
            "no datum has a token to train on",
            got=f"{len(rows)} datums",
            why="there is nothing to average over",
            fix="check that responses are not empty and that the masks mark them",
        )
    return Rows(
        mask=mask,
        advantages=pad([row["advantages"] for row in rows]),
        logprobs=pad([row["logprobs"] for row in rows]),
        ref_logprobs=pad([row["ref_logprobs"] for row in rows]) if "ref_logprobs" in anchors else None,
        teacher_logprobs=pad([row["teacher_logprobs"] for row in rows]) if "teacher_logprobs" in anchors else None,
        kl_mask=pad([row["kl_mask"] for row in rows]) if has_kl_mask else None,
        targets=pad([row["target_tokens"] for row in rows]),
        head=pad_sequence([ids for ids, _ in heads], batch_first=True, padding_value=NO_TOKEN[0]),
        head_logprobs=pad([logprobs for _, logprobs in heads]),
        lengths=tuple(len(row["mask"]) for row in rows),
    )


def _check_datums(data: object) -> None:
    if not isinstance(data, Sequence) or len(data) == 0:
        raise DataError(
            "there are no datums",
            got=describe(data),
            why="a loss is taken over the datums of one step, a list of them",
            fix="pass a list of what klamp.tinker.build_datum makes",
        )
    for i, datum in enumerate(data):
        if not isinstance(getattr(datum, "loss_fn_inputs", None), Mapping):
            raise DataError(
                f"datum {i} has no loss_fn_inputs",
                got=describe(datum),
                why="a datum holds its rows of numbers there, by name",
                fix="build datums with klamp.tinker.build_datum",
            )


def pad(rows: Iterable[Tensor]) -> Tensor:
    """Rows of different lengths as one tensor, [B, N], with zeros on the right; gradients reach every row."""
    return pad_sequence(list(rows), batch_first=True)


def _read(i: int, inputs: Mapping[str, Any], anchors: Sequence[str], has_kl_mask: bool) -> dict[str, Tensor]:
    targets = _row(i, inputs, "target_tokens")
    names = ["advantages", "logprobs", *anchors]
    rows = {name: _row(i, inputs, name, len(targets)) for name in names}
    if "mask" in inputs:
        rows["mask"] = _row(i, inputs, "mask", len(targets)) != 0
    else:
        rows["mask"] = torch.stack([row != 0 for row in rows.values()]).any(0)
    if has_kl_mask:
        rows["kl_mask"] = _row(i, inputs, "kl_mask", len(targets)) != 0
    for name in names[1:]:
        check_logprobs(f"datum {i}: {name}", rows[name][None], rows["mask"][None])
    if not bool((rows["advantages"].isfinite() | ~rows["mask"]).all()):
        raise NonFiniteError(
            f"datum {i}: an advantage is NaN or infinite",
            got=f"{int((~rows['advantages'].isfinite()).sum())} of {len(rows['advantages'])}",
            why="it would turn the whole update into NaN",
            fix="check the rewards; group_advantages never returns NaN for finite rewards",
        )
    return rows | {"target_tokens": targets}


def _read_head(i: int, inputs: Mapping[str, Any], mask: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The first `top_k` tokens of a datum's head and their log-probabilities, [N, top_k] each."""
    if not top_k:
        return torch.zeros(len(mask), 0, dtype=torch.long), torch.zeros(len(mask), 0)
    if missing := [name for name in HEAD if name not in inputs]:
        raise _missing(i, inputs, missing[0])
    ids, logprobs = (number_row(f"datum {i}: {name}", inputs[name]) for name in HEAD)
    if ids.shape != logprobs.shape or ids.ndim != 2 or len(ids) != len(mask) or ids.shape[1] < top_k:
        raise ShapeError(
            f"datum {i}: the teacher's head does not fit",
            got=f"ids {tuple(ids.shape)}, log-probabilities {tuple(logprobs.shape)}, target_tokens ({len(mask)},), "
            f"teacher_top_k={top_k}",
            why="each position has the likeliest tokens of the teacher there, teacher_top_k of them",
            fix="compute_teacher_head(..., top_k=teacher.teacher_top_k), and build_datum(teacher_head=)",
        )
    check_logprobs(f"datum {i}: {HEAD[1]}", logprobs.T, mask.expand(logprobs.shape[1], -1))
    return ids[:, :top_k].long(), logprobs[:, :top_k]


def _row(i: int, inputs: Mapping[str, Any], name: str, length: int | None = None) -> Tensor:
    """One key of a datum as a row of numbers, detached."""
    if name not in inputs:
        raise _missing(i, inputs, name)
    row = number_row(f"datum {i}: {name}", inputs[name])
    if row.ndim != 1 or length not in (None, len(row)):
        raise ShapeError(
            f"datum {i}: {name} does not have the length of target_tokens",
            got=f"{name} {tuple(row.shape)}" + ("" if length is None else f", target_tokens ({length},)"),
            why="position t of every row speaks of token t + 1 of prompt and response; the SDK does not check it",
            fix="build datums with klamp.tinker.build_datum, which aligns them",
        )
    return row


def _missing(i: int, inputs: Mapping[str, Any], name: str) -> DataError:
    by = "compute_teacher_head" if name in HEAD else "compute_reference_logprobs" if name in ANCHORS else None
    return DataError(
        f"datum {i} has no {name!r} in loss_fn_inputs",
        got=f"keys: {', '.join(sorted(inputs))}",
        why="a KL needs its anchor; leaving it out silently would train without one" if by else "the loss reads it",
        fix="build datums with klamp.tinker.build_datum"
        + (f", with the result of {by}; or leave that KL out" if by else ""),
    )


def number_row(name: str, values: Any) -> Tensor:
    """Numbers as a detached tensor in their own precision; integers and booleans stay what they are.

    Raises:
        DataError: something among them is no number.
    """
    try:
        row: Tensor = values.to_torch() if hasattr(values, "to_torch") else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} is no row of numbers",
            got=f"{type(error).__name__}: {error}",
            why="None inside a datum would become NaN without a word",
            fix="pass one number per token",
        ) from error
    return row.detach()


def token_ids(name: str, tokens: Any) -> list[int]:
    """Token ids as a list of ints; a list, an array or a tensor of whole numbers.

    Raises:
        DataError: something among them is no whole number >= 0.
    """
    found = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    listed = list(found) if isinstance(found, Iterable) else None
    bad = [i for i, token in enumerate(listed or ()) if not _is_id(token)]
    if listed is None or bad:
        raise DataError(
            f"{name} must hold token ids",
            got=describe(tokens) if listed is None else f"{describe(listed[bad[0]])} at position {bad[0]}",
            why="a token id is a whole number >= 0; anything else would become another token without a word",
            fix=f"pass {name} as a list of ints, as tokenizer.encode gives them",
        )
    return [index(token) for token in listed]


def _is_id(token: Any) -> bool:
    try:
        return not isinstance(token, bool) and index(token) >= 0
    except TypeError:
        return False
