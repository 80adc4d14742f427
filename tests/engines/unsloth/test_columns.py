"""Where the tokens of a completion stand among Unsloth's columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.errors import UnsupportedVersion
from klamp.hosts.unsloth.columns import Columns

PAD = 0
PROMPTS = [[5], [6, 7, 8], [9, 9]]
COMPLETIONS = [[11, 12, 13, 14], [21, 22], [31, PAD, 33]]
"""The last one holds the padding token itself, which Unsloth takes for padding."""


def batch() -> dict[str, Any]:
    prompt = torch.tensor([[PAD] * (3 - len(row)) + row for row in PROMPTS])
    completion = torch.tensor([row + [PAD] * (4 - len(row)) for row in COMPLETIONS])
    return {"prompt_ids": prompt, "completion_ids": completion, "max_left_pad": torch.tensor([[2]] * 3)}


def unsloths(width: int) -> tuple[Tensor, Tensor]:
    """Ids and mask as Unsloth has them: padding at the right, the last `width` columns."""
    ids, masks = [], []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        kept = [token for token in completion if token != PAD]
        row, mask = prompt + kept, [0] * len(prompt) + [1] * len(kept)
        ids.append((row + [PAD] * 7)[:7][-width:])
        masks.append((mask + [0] * 7)[:7][-width:])
    return torch.tensor(ids), torch.tensor(masks)


@pytest.mark.parametrize("width", [6, 7])
def test_there_and_back(width: int) -> None:
    inputs, (ids, mask) = batch(), unsloths(width)
    columns = Columns.of(inputs, width, pad_id=PAD)
    columns.check(inputs, ids, mask)
    assert torch.equal(columns.take(ids), inputs["completion_ids"])
    assert columns.take(mask.bool()).tolist() == [[True] * 4, [True, True, False, False], [True, False, True, False]]
    values = torch.rand(3, 4)
    assert torch.equal(columns.put(values) * (1 - mask), torch.zeros(3, width))
    assert torch.equal(columns.take(columns.put(values)), values * columns.take(mask.bool()))


def test_gradients_flow_both_ways() -> None:
    ids, mask = unsloths(6)
    scored = torch.rand(ids.shape, requires_grad=True)
    columns = Columns.of(batch(), 6, pad_id=PAD)
    columns.put(3 * columns.take(scored)).sum().backward()
    assert torch.equal(scored.grad, 3.0 * mask)


def test_nothing_is_moved_where_unsloth_has_not_packed() -> None:
    inputs = {key: value for key, value in batch().items() if key != "max_left_pad"}
    values = torch.rand(3, 4)
    columns = Columns.of(inputs, 4, pad_id=PAD)
    assert torch.equal(columns.take(values), values) and torch.equal(columns.put(values), values)


@pytest.mark.parametrize("spoilt", ["another token", "a token that is not found", "another width"])
def test_tokens_that_do_not_match_are_refused(spoilt: str) -> None:
    inputs, (ids, mask) = batch(), unsloths(6)
    if spoilt == "another token":
        ids[0, 1] = 12 if ids[0, 1] != 12 else 13
    if spoilt == "a token that is not found":
        mask[1, 0] = 1
    if spoilt == "another width":
        ids, mask = ids.roll(1, 1), mask.roll(1, 1)
    with pytest.raises(UnsupportedVersion, match="does not find the completions among Unsloth's columns"):
        Columns.of(inputs, 6, pad_id=PAD).check(inputs, ids, mask)
