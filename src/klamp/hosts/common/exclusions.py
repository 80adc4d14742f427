"""Which tokens of a completion carry no KL: named tokens, a prefix, what stands between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.errors import ConfigError

SPECIAL = "special"


def excluded_ids(names: Sequence[int | str], tokenizer: Any) -> list[int]:
    """Ids of the tokens named: an id, a token string, or `special` for all special tokens.

    Raises:
        ConfigError: a name that is no token of the tokenizer.
    """
    found: set[int] = set()
    for name in names:
        if name == SPECIAL:
            found.update(int(i) for i in tokenizer.all_special_ids)
            continue
        known = tokenizer.convert_tokens_to_ids(name) if isinstance(name, str) else name
        index = int(name) if isinstance(name, str) and name.isdigit() and _absent(known, tokenizer) else known
        if not isinstance(index, int) or not 0 <= index < len(tokenizer) or _absent(index, tokenizer, name):
            raise ConfigError(
                "kl_exclude_tokens names a token that the tokenizer does not have",
                got=repr(name),
                why="excluding nothing silently would leave its KL in the loss",
                fix=f"use an id below {len(tokenizer)}, a token as the tokenizer writes it, or 'special'",
            )
        found.add(index)
    return sorted(found)


def _absent(index: object, tokenizer: Any, name: object = None) -> bool:
    """Whether an unknown string was turned into the unknown token."""
    unknown = index is None or index == tokenizer.unk_token_id
    return unknown and not isinstance(name, int) and name != tokenizer.unk_token


def kl_tokens(ids: Tensor, mask: Tensor, kl: KLConfig, excluded: Sequence[int], tokenizer: Any) -> Tensor:
    """True on the tokens that carry the KL.

    Args:
        ids: completions, [B, T].
        mask: tokens that are trained on, [B, T].
        kl: its exclusions.
        excluded: ids of `kl.kl_exclude_tokens`.
        tokenizer: turns tokens into text for the markers.
    """
    carried = mask & ~torch.isin(ids, torch.tensor(list(excluded), dtype=torch.long, device=ids.device))
    if kl.kl_exclude_prefix:
        carried = carried & (mask.long().cumsum(-1) > kl.kl_exclude_prefix)
    if kl.kl_exclude_between:
        opening, closing = kl.kl_exclude_between
        rows = [_outside(row.tolist(), opening, closing, tokenizer) for row in ids]
        carried = carried & torch.tensor(rows, device=ids.device)
    return carried


def _outside(ids: list[int], opening: str, closing: str, tokenizer: Any) -> list[bool]:
    """Per token, whether no character of it stands from an opening marker to its closing one."""
    pieces = tokenizer.batch_decode([[i] for i in ids], skip_special_tokens=False)
    text = "".join(pieces)
    inside = [False] * len(text)
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start + len(opening))
        stop = len(text) if end < 0 else end + len(closing)
        inside[start:stop] = [True] * (stop - start)
        start = text.find(opening, stop)
    outside, position = [], 0
    for piece in pieces:
        outside.append(not any(inside[position : position + len(piece)]))
        position += len(piece)
    return outside
