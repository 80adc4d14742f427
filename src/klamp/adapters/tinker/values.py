"""What callers pass, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.errors import DataError, ShapeError


def number_row(name: str, values: Any) -> Tensor:
    """Numbers as a detached tensor of their own precision; integers and bools as they are.

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


def as_length(length: float | Sequence[float] | None, count: int) -> Tensor | float | None:
    """A reference length as the core takes it: one number, or one per datum.

    Raises:
        ShapeError: another number of lengths than datums.
    """
    if length is None or isinstance(length, int | float):
        return None if length is None else float(length)
    if len(length) != count:
        raise ShapeError("reference_length holds one number, or one per datum", got=f"{len(length)} for {count}")
    return torch.tensor(list(length), dtype=torch.float32)
