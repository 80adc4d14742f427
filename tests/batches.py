"""Batches and objectives of tests, with all their fields side by side instead of one record per anchor."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from klamp import Batch, KLTerm, Objective, Weighted
from klamp.core.types import HELD, Scored

FIELDS: dict[str, tuple[tuple[str, ...], str]] = {
    "ref_logprobs": (("reference",), "logprobs"),
    "sampler_logprobs": (("sampler",), "logprobs"),
    "teacher_logprobs": (("teacher",), "logprobs"),
    "exact_kl": (("reference",), "kl"),
    "exact_kl_forward": (("reference",), "forward_kl"),
    "teacher_kl": (("teacher",), "kl"),
    "kl_mask": (HELD, "mask"),
    "teacher_mask": (("teacher",), "mask"),
    "gate_kl": (HELD, "gate"),
    "kl_weight": (("reference",), "weight"),
}
"""Name here -> the anchors it is of, and the field of `Scored`."""


def flat_batch(**values: Any) -> Batch:
    """A batch of values named as in `FIELDS`; the others are fields of `Batch`."""
    own = {name: x for name, x in values.items() if name not in FIELDS}
    return changed(Batch(**own), **{name: x for name, x in values.items() if name in FIELDS and x is not None})


def changed(batch: Batch, **values: Any) -> Batch:
    """A batch with other values, named as in `flat_batch`; log-probabilities None take an anchor out."""
    anchors = dict(batch.anchors)
    for name in sorted(values.keys() & FIELDS.keys(), key=list(FIELDS).index):
        names, field = FIELDS[name]
        for anchor in names:
            if field == "logprobs" and values[name] is None:
                anchors.pop(anchor, None)
            elif field == "logprobs":
                anchors[anchor] = anchors.get(anchor, Scored(values[name]))._replace(logprobs=values[name])
            elif anchor in anchors:
                anchors[anchor] = anchors[anchor]._replace(**{field: values[name]})
    own = {name: x for name, x in values.items() if name not in FIELDS}
    return replace(batch, anchors=anchors, **own)


def read(batch: Batch, name: str) -> Tensor:
    names, field = FIELDS[name]
    return getattr(batch.anchors[names[0]], field)


def objective_of(
    *, beta: float = 0.0, kl: KLTerm | None = None, others: tuple[Weighted, ...] = (), **choices: Any
) -> Objective:
    return Objective(terms=(Weighted(beta, kl or KLTerm()), *others), **choices)


def mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    tensors = {name: change(x) for name, x in vars(batch).items() if isinstance(x, Tensor)}
    anchors = {
        name: Scored(*(None if x is None else change(x) for x in scored)) for name, scored in batch.anchors.items()
    }
    return replace(batch, anchors=anchors, **tensors)


def rows_of(batch: Batch, rows: slice | list[int]) -> Batch:
    return mapped(batch, lambda x: x[rows])
