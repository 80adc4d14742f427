"""The SDK's datums: built with every number at the position of its token, and read as padded tensors.

full = prompt + response; the model reads full[:-1] and is asked about full[1:]. Every row has N = len(full) - 1
entries: the first len(prompt) - 1 belong to the prompt and are 0; position t belongs to token t + 1. Reading checks
what the SDK does not (lengths, NaN, missing keys), and names the wrong datum before anything is sent.
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
from klamp.core.masking import Totals, masked
from klamp.core.topk import asked_tokens
from klamp.core.types import Batch, Scored, check_logprobs, held_anchors
from klamp.errors import DataError, EmptyMaskError, NonFiniteError, ShapeError
from klamp.hosts.common.versions import load_tinker

ANCHORS = ("ref_logprobs", "teacher_logprobs")
HEAD = ("teacher_head_tokens", "teacher_head_logprobs")
"""A teacher's likeliest tokens at each position, [N, K], filled up with -1, and their log-probabilities."""
KLAMP_KEYS = (*ANCHORS, *HEAD, "mask", "kl_mask")
"""Keys of `loss_fn_inputs` that klamp reads and the service's built-in losses refuse."""

Place: TypeAlias = list[tuple[int, float]]
"""Of one token ids with their log-probabilities: a teacher's likeliest, by rank, and last the one that is there."""
NO_TOKEN = -1
"""Fills up the list of a teacher's likeliest tokens."""


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
    """One completion as a `tinker.Datum`, every value aligned with its token.

    Args:
        prompt: token ids, at least one.
        response: token ids of the completion, the end token included, at least one.
        advantages: of the completion, or of each of its tokens.
        logprobs: of the sampler, in nats, one per token of the response.
        ref_logprobs: of the reference (`compute_reference_logprobs`); needed where there is a KL in loss or advantage.
        teacher_logprobs: of a teacher, likewise; behind a prompt of its own if it has one.
        teacher_head: at each token of the response the teacher's likeliest tokens and the token's own log-probability
            (`compute_teacher_head`); for teacher_estimator="topk", instead of teacher_logprobs.
        mask: 1 = train on the token; None: on every token of the response. Advantages are 0 where it is 0.
        kl_mask: 1 = the token carries the KL (`kl_exclude_tokens`); None: as `mask`.

    Raises:
        DataError, ShapeError: no prompt, no response, no token ids, no numbers, or fewer or more numbers than tokens.
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
    spread = number_row("advantages", advantages)
    columns: dict[str, Any] = {
        "advantages": spread if spread.ndim else spread.expand(len(response)),
        "logprobs": logprobs,
        "mask": [1.0] * len(response) if mask is None else mask,
        "ref_logprobs": ref_logprobs,
        "teacher_logprobs": teacher_logprobs,
        "kl_mask": kl_mask,
    }
    head: dict[str, Tensor] = {}
    if teacher_head is not None:
        places = _check_head(teacher_head, response, teacher_logprobs)
        columns["teacher_logprobs"] = places[:, -1, 1]
        head = {HEAD[0]: places[:, :-1, 0].long(), HEAD[1]: places[:, :-1, 1].float()}
    rows = {name: number_row(name, x, len(response)).float() for name, x in columns.items() if x is not None} | head
    trained = rows["mask"] != 0
    rows |= {"advantages": masked(rows["advantages"], trained), "mask": trained.float()}
    full = prompt + response
    inputs = {"target_tokens": torch.tensor(full[1:], dtype=torch.int64)}
    for name, row in rows.items():
        of_prompt = row.new_full((len(prompt) - 1, *row.shape[1:]), NO_TOKEN if name == HEAD[0] else 0)
        inputs[name] = torch.cat([of_prompt, row])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={name: tinker.TensorData.from_torch(row) for name, row in inputs.items()},
    )


def _check_head(head: Sequence[Place], response: Sequence[int], teacher_logprobs: object) -> Tensor:
    """What `compute_teacher_head` returned for a response, as numbers: [T, K + 1, 2]"""
    places = number_row("teacher_head", head)
    fits = places.ndim == 3 and places.shape[1] > 0 and places.shape[2] == 2
    fits = fits and places[:, -1, 0].tolist() == list(response)
    if not fits or teacher_logprobs is not None:
        raise DataError(
            "teacher_head does not fit this response",
            got="teacher_logprobs besides" if fits else f"{tuple(places.shape)} numbers for {len(response)} tokens",
            why="for each token it holds as many pairs of an id and its log-probability, and last the token's own",
            fix="pass what compute_teacher_head returned for this response, and leave teacher_logprobs out",
        )
    return places


def strip_for_builtin(datums: Sequence[Any]) -> list[Any]:
    """The datums without the keys that the service's built-in losses refuse: the anchors' keys, mask, kl_mask.

    A built-in loss sees every position, so that advantages are set to 0 where the mask was 0.
    """
    stripped = []
    for datum in datums:
        inputs = {name: value for name, value in datum.loss_fn_inputs.items() if name not in KLAMP_KEYS}
        if "mask" in datum.loss_fn_inputs and "advantages" in inputs:
            advantages = masked(inputs["advantages"].to_torch(), datum.loss_fn_inputs["mask"].to_torch() != 0)
            inputs["advantages"] = load_tinker().TensorData.from_torch(advantages.float())
        stripped.append(with_inputs(datum, inputs))
    return stripped


def with_inputs(datum: Any, inputs: dict[str, Any]) -> Any:
    """A datum with other `loss_fn_inputs`; where the SDK keeps a datum's origin, that is kept."""
    spans = ("model_input_spans", "loss_fn_input_spans")
    origin = {name: getattr(datum, name) for name in spans if getattr(datum, name, None) is not None}
    return load_tinker().Datum(model_input=datum.model_input, loss_fn_inputs=inputs, **origin)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The data of B datums, padded on the right to N positions, [B, N] each; without gradient."""

    mask: Tensor
    advantages: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None = None  # None: a datum has none
    teacher_logprobs: Tensor | None = None  # likewise
    kl_mask: Tensor | None = None  # None: `mask`
    target_tokens: Tensor
    head: Tensor  # [B, N, K], -1 where the teacher gave no token
    head_logprobs: Tensor
    lengths: tuple[int, ...]  # positions of each datum

    @property
    def totals(self) -> Totals:
        """The numbers of sequences, trained tokens and KL tokens."""
        carried = self.mask if self.kl_mask is None else self.mask & self.kl_mask
        tokens, kl_tokens = (max(1.0, float(mask.sum())) for mask in (self.mask, carried))
        return Totals(sequences=float(len(self.lengths)), tokens=tokens, kl_tokens=kl_tokens)

    def batch(self, policy_logprobs: Tensor, *, teacher_kl: Tensor | None, **options: Any) -> Batch:
        """The datums as a batch of the core under a policy; the sampler counts as the old policy."""
        anchors = held_anchors(self.ref_logprobs, self.logprobs, mask=self.kl_mask)
        if self.teacher_logprobs is not None:
            anchors["teacher"] = Scored(self.teacher_logprobs, kl=teacher_kl)
        return Batch(
            policy_logprobs=policy_logprobs,
            mask=self.mask,
            advantages=self.advantages,
            old_logprobs=self.logprobs,
            anchors=anchors,
            **options,
        )

    def policy(self, logprobs_list: Sequence[Tensor]) -> Tensor:
        """The policy's log-probabilities padded to [B, N, K + 1], the target's last, with gradient; each checked."""
        if not isinstance(logprobs_list, Sequence) or len(logprobs_list) != len(self.lengths):
            raise ShapeError(
                "logprobs_list does not hold one row of log-probabilities per datum",
                got=f"{len(self.lengths)} datums, {describe(logprobs_list)}",
                why="row i belongs to datum i",
                fix="pass both as forward_backward_custom hands them to the loss",
            )
        k = self.head.shape[2]
        for i, (row, length) in enumerate(zip(logprobs_list, self.lengths, strict=True)):
            check_tensors(FLOATS, **{f"logprobs_list[{i}]": row})
            check_shape(f"datum {i}: the policy's row", row, (length, k + 1) if k else (length,))
            columns = row.reshape(length, -1).T
            check_logprobs(f"datum {i}: the policy's row", columns, self.mask[i, :length].expand_as(columns))
        rows = [row.reshape(length, -1) for row, length in zip(logprobs_list, self.lengths, strict=True)]
        return pad_sequence(rows, batch_first=True)

    def asked(self) -> list[Any]:
        """The `target_tokens` to send: the tokens, or where there is a head its tokens too, see `asked_tokens`."""
        rows = zip(self.target_tokens, self.head, self.lengths, strict=True)
        wide = [asked_tokens(targets[:length], head[:length]) for targets, head, length in rows]
        return [load_tinker().TensorData.from_torch(row if self.head.shape[2] else row[:, 0]) for row in wide]


def read_rows(
    data: Sequence[Any], *, reference: bool = False, teacher: bool = False, exclusions: bool = False, top_k: int = 0
) -> Rows:
    """Read and check the data of datums (the SDK's, or anything with `loss_fn_inputs`).

    Anchors are read if asked for, or if all datums have them; `kl_mask` if asked for, or if one has it. Without `mask`
    every position counts at which log-probability, advantage or reference is not exactly 0.
    """
    _check_datums(data)
    needed = {"ref_logprobs": reference, "teacher_logprobs": teacher}
    anchors = [name for name in ANCHORS if needed[name] or all(name in datum.loss_fn_inputs for datum in data)]
    has_kl_mask = exclusions or any("kl_mask" in datum.loss_fn_inputs for datum in data)
    rows = [_read(i, datum.loss_fn_inputs, anchors, has_kl_mask) for i, datum in enumerate(data)]
    for i, (row, datum) in enumerate(zip(rows, data, strict=True)):
        row["head"], row["head_logprobs"] = _read_head(i, datum.loss_fn_inputs, row["mask"], top_k)
    if not any(bool(row["mask"].any()) for row in rows):
        raise EmptyMaskError(
            "no datum has a token to train on",
            got=f"{len(rows)} datums",
            why="there is nothing to average over",
            fix="check that responses are not empty and that the masks mark them",
        )
    columns = {
        name: pad_sequence([row[name] for row in rows], True, NO_TOKEN if name == "head" else 0) for name in rows[0]
    }
    return Rows(**columns, lengths=tuple(len(row["mask"]) for row in rows))


def _check_datums(data: object) -> None:
    listed = data if isinstance(data, Sequence) else ()
    bad = [i for i, datum in enumerate(listed) if not isinstance(getattr(datum, "loss_fn_inputs", None), Mapping)]
    if not listed or bad:
        raise DataError(
            f"datum {bad[0]} has no loss_fn_inputs" if bad else "there are no datums",
            got=describe(listed[bad[0]] if bad else data),
            why="a loss is taken over a list of datums, which hold their rows of numbers there, by name",
            fix="pass a list of what klamp.tinker.build_datum makes",
        )


def _read(i: int, inputs: Mapping[str, Any], anchors: Sequence[str], has_kl_mask: bool) -> dict[str, Tensor]:
    length, logprobs = _key(i, inputs, "target_tokens").numel(), ("logprobs", *anchors)
    rows = {name: _key(i, inputs, name, length) for name in ("target_tokens", "advantages", *logprobs)}
    if "mask" in inputs:
        rows["mask"] = _key(i, inputs, "mask", length) != 0
    else:
        rows["mask"] = torch.stack([rows[name] != 0 for name in ("advantages", *logprobs)]).any(0)
    if has_kl_mask:
        rows["kl_mask"] = _key(i, inputs, "kl_mask", length) != 0
    for name in logprobs:
        check_logprobs(f"datum {i}: {name}", rows[name][None], rows["mask"][None])
    if not bool((rows["advantages"].isfinite() | ~rows["mask"]).all()):
        raise NonFiniteError(
            f"datum {i}: an advantage is NaN or infinite",
            got=f"{int((~rows['advantages'].isfinite()).sum())} of {len(rows['advantages'])}",
            why="it would turn the whole update into NaN",
            fix="check the rewards; group_advantages never returns NaN for finite rewards",
        )
    return rows


def _read_head(i: int, inputs: Mapping[str, Any], mask: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    if not top_k:
        return torch.zeros(len(mask), 0, dtype=torch.long), torch.zeros(len(mask), 0)
    ids, logprobs = (_key(i, inputs, name) for name in HEAD)
    if ids.shape != logprobs.shape or ids.ndim != 2 or len(ids) != len(mask) or ids.shape[1] < top_k:
        raise ShapeError(
            f"datum {i}: the teacher's head does not fit",
            got=f"ids {tuple(ids.shape)}, log-probabilities {tuple(logprobs.shape)}, target_tokens ({len(mask)},), "
            f"teacher_top_k={top_k}",
            why="each position needs the teacher's teacher_top_k likeliest tokens",
            fix="compute_teacher_head(..., top_k=teacher.teacher_top_k), and build_datum(teacher_head=)",
        )
    check_logprobs(f"datum {i}: {HEAD[1]}", logprobs.T, mask.expand(logprobs.shape[1], -1))
    return ids[:, :top_k].long(), logprobs[:, :top_k]


def _key(i: int, inputs: Mapping[str, Any], name: str, length: int | None = None) -> Tensor:
    if name not in inputs:
        raise DataError(
            f"datum {i} has no {name!r} in loss_fn_inputs",
            got=f"keys: {', '.join(sorted(inputs))}",
            why="the loss reads it; a KL whose anchor is left out silently would be trained without",
            fix="pass the result of compute_reference_logprobs or compute_teacher_head to klamp.tinker.build_datum",
        )
    return number_row(f"datum {i}: {name}", inputs[name], length)


def number_row(name: str, values: Any, length: int | None = None) -> Tensor:
    """Numbers as a detached tensor in their own precision; integers and booleans stay what they are. [length]"""
    try:
        row: Tensor = values.to_torch() if hasattr(values, "to_torch") else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} is not a row of numbers",
            got=f"{type(error).__name__}: {error}",
            why="None inside a datum would silently become NaN",
            fix="pass one number per token",
        ) from error
    if length is not None:
        check_shape(name, row, (length,))
    return row.detach()


def check_shape(name: str, row: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a row without one number per token, or with a head without one per token of the head."""
    if row.shape != shape:
        raise ShapeError(
            f"{name} does not have one number per token",
            got=f"{name} {tuple(row.shape)}, tokens {shape}",
            why="each number belongs to one token; the SDK does not check it",
            fix="pass build_datum the response's values only; forward_backward_kl asks for the head's values too",
        )


def token_ids(name: str, tokens: Any) -> list[int]:
    """Token ids as a list of ints; a list, an array or a tensor of whole numbers >= 0."""
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    listed = list(values) if isinstance(values, Iterable) else None
    bad = [i for i, token in enumerate(listed or ()) if not _is_id(token)]
    if listed is None or bad:
        raise DataError(
            f"{name} must hold token ids",
            got=describe(tokens) if listed is None else f"{describe(listed[bad[0]])} at position {bad[0]}",
            why="a token id is a whole number >= 0; anything else would silently become another token",
            fix=f"pass {name} as a list of ints, as tokenizer.encode returns it",
        )
    return [index(token) for token in listed]


def _is_id(token: Any) -> bool:
    try:
        return not isinstance(token, bool) and index(token) >= 0
    except TypeError:
        return False
