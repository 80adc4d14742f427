"""Translates between the columns of Unsloth's tensors and the positions of completion tokens.

Unsloth scores a text batch with the padding moved to the right of each row and keeps the last columns of that, so many
that every completion fits: more than the longest completion has, with prompt tokens in front and another shift in every
row. Only the mask says what is what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.errors import UnsupportedVersion


@dataclass(frozen=True)
class Columns:
    """The column of Unsloth's tensors in which each completion token stands.

    Attributes:
        index: its column; 0 where it has none. [B, T]
        present: whether it has one. [B, T] bool
        width: number of Unsloth's columns, W.
    """

    index: Tensor
    present: Tensor
    width: int

    @classmethod
    def of(cls, inputs: Mapping[str, Any], width: int, *, pad_id: int) -> Columns:
        """Find the columns for a batch of Unsloth's.

        Args:
            inputs: the host's tensors.
            width: number of Unsloth's columns.
            pad_id: the padding token, by which Unsloth tells what to move.
        """
        completion = inputs["completion_ids"]
        length = completion.shape[1]
        if "max_left_pad" not in inputs:  # nothing was moved: images keep their places
            index = torch.arange(length, device=completion.device).expand_as(completion)
            return cls(index, torch.ones_like(completion, dtype=torch.bool), width)
        prompt = inputs["prompt_ids"]
        kept = torch.cat([prompt, completion], dim=1) != pad_id
        packed = kept.cumsum(-1) - 1 - (kept.shape[1] - width)
        index, present = packed[:, -length:], kept[:, -length:]
        return cls(torch.where(present, index, 0).clamp(min=0), present & (index >= 0), width)

    def take(self, values: Tensor) -> Tensor:
        """Values in Unsloth's columns [B, W] -> by position in the completion [B, T]; 0 (False) where there is none."""
        return values.gather(1, self.index).masked_fill(~self.present, 0)

    def put(self, values: Tensor) -> Tensor:
        """Values by position [B, T] -> in Unsloth's columns [B, W]; 0 where no completion token stands."""
        kept = values.masked_fill(~self.present, 0)
        return values.new_zeros(len(values), self.width).scatter_add(1, self.index, kept)

    def check(self, inputs: Mapping[str, Any], host_ids: Tensor, host_mask: Tensor) -> None:
        """Raise an error if Unsloth trains on other tokens than the ones found here.

        Raises:
            UnsupportedVersion: another token stands in a column, or Unsloth trains on one that is not found.
        """
        trained = self.take(host_mask.bool())
        same = (self.take(host_ids) == inputs["completion_ids"]) | ~trained
        if not bool(same.all()) or int(trained.sum()) != int(host_mask.sum()):
            raise UnsupportedVersion(
                "klamp does not find the completions among Unsloth's columns",
                got=f"{int((~same).sum())} other tokens, {int(trained.sum())} of {int(host_mask.sum())} trained tokens",
                why="the KL would be put on other tokens than those it was measured on",
                fix="use a version of Unsloth in klamp's declared range",
            )
