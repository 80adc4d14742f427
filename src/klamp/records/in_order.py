"""Completions of a record a step at a time, for whoever looks at each step once: none of the others is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from klamp.diagnostics.history import Completion, Written
from klamp.diagnostics.token_metrics import row_of


class StepsOutOfOrder(Exception):
    """A record goes back to an earlier step, so that it has to be read as a whole."""


def by_step(completions: Iterable[Completion], *, with_rows: bool = False) -> Iterator[Written]:
    """The completions of one step after another, as a record has them.

    Args:
        completions: those of the record.
        with_rows: whether to compute the metrics of each step from them.

    Raises:
        StepsOutOfOrder: when it comes to a step that is earlier than the one before.
    """
    last: int | None = None
    for step, found in groupby(completions, key=lambda each: each.step):
        if last is not None and step < last:
            raise StepsOutOfOrder
        last, written = step, list(found)
        yield Written(step=step, completions=written, row=row_of(step, written) if with_rows else None)
