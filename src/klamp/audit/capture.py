"""One micro-batch as `klamp.check` saw it: arrays and scalars, from which a verdict follows without torch.

A capture file is a safetensors file: float32 arrays, and a header with schema, host, data type and scalars. It holds no
text and, unless `save_ids=True` asks for them, no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from klamp.audit.forms import Array, Tokens
from klamp.errors import DataError

SCHEMA = "klamp.check/1"
NEEDED = ("gradient", "policy_logprobs", "mask")
SCORES = ("ref_logprobs", "old_logprobs", "sampler_logprobs", "baseline", "policy_part", "second", "third")
WHOLE = ("segments", "ids")
"""Names of the arrays [B, T]: those that a capture needs, more numbers, whole numbers. Beside them: advantages ([B] or
[B, T]) and rewards [B]."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What a verdict is computed from."""

    arrays: dict[str, Any]  # name -> array
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # scalars: eps, dtype, beta, ..., and findings

    def save(self, path: str | Path) -> None:
        """Write the capture as a safetensors file."""
        from safetensors.numpy import save_file

        types = dict.fromkeys(WHOLE, np.int32) | {"mask": np.uint8}
        stored = {k: np.ascontiguousarray(x, dtype=types.get(k, np.float32)) for k, x in self.arrays.items()}
        save_file(stored, str(path), metadata={"schema": SCHEMA, "facts": json.dumps(self.facts, default=str)})

    @classmethod
    def load(cls, path: str | Path) -> Capture:
        """Read a capture file.

        Raises:
            DataError: the file is missing, or is no whole capture.
        """
        from safetensors import SafetensorError, safe_open

        fix = "name a file that klamp.check(..., save=...) wrote"
        try:
            with safe_open(str(path), framework="np") as file:
                header = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in list(file.keys())}
            facts = json.loads(header.get("facts", "null"))
        except (OSError, SafetensorError, ValueError) as error:
            got = f"{type(error).__name__}: {error}"
            raise DataError(f"{path} cannot be read as a capture", got=got, fix=fix) from error
        if header.get("schema") != SCHEMA or not isinstance(facts, dict):
            got = f"schema {header.get('schema')!r}"
            raise DataError(f"{path} is no capture of klamp.check", got=got, why=f"klamp reads {SCHEMA}", fix=fix)
        shapes = {name: arrays[name].shape for name in (*NEEDED, *SCORES, *WHOLE) if name in arrays}
        if any(name not in arrays for name in NEEDED) or len(set(shapes.values())) != 1 or arrays["mask"].ndim != 2:
            why = f"it needs {', '.join(NEEDED)}, and all of one shape [B, T]"
            raise DataError(f"{path} is not a whole capture", got=str(shapes), why=why, fix=fix)
        whole = {k: x if k in WHOLE else x > 0 if k == "mask" else x.astype(np.float64) for k, x in arrays.items()}
        return cls(arrays=whole, facts=facts)


def _places(arrays: Mapping[str, Any]) -> Any:
    """The completion of each trained token, as they stand: its row, or its segment of a packed row."""
    mask = arrays["mask"]
    rows = np.broadcast_to(np.arange(mask.shape[0])[:, None], mask.shape)
    if (segments := arrays.get("segments")) is not None:
        rows = rows * int(np.ptp(segments) + 1) + segments - segments.min()
    return rows[mask]


def in_order(arrays: Mapping[str, Any], x: Any) -> Array:
    """The values of [B, T] under the mask, ordered by completion."""
    return x[arrays["mask"]][np.argsort(_places(arrays), kind="stable")].astype(np.float64)


def trained_tokens(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Tokens:
    """The tokens under the mask, ordered by completion."""
    places = np.sort(_places(arrays), kind="stable")
    rows, row = np.unique(places, return_inverse=True)
    scores = (name for name in SCORES if name in arrays and name not in ("second", "third"))
    picked = {name.removesuffix("_logprobs"): in_order(arrays, arrays[name]) for name in scores}
    advantage = arrays.get("advantages")
    if advantage is not None:
        of_segment = advantage.ndim == 1 and "segments" in arrays and advantage.size == rows.size
        wide = (
            advantage
            if advantage.ndim == 2
            else np.broadcast_to(advantage[: len(arrays["mask"]), None], arrays["mask"].shape)
        )
        advantage = advantage[row].astype(np.float64) if of_segment else in_order(arrays, wide)
    size, clip = facts.get("group_size"), facts.get("clip")
    group = np.unique(rows // size, return_inverse=True)[1] if size and "segments" not in arrays else None
    return Tokens(
        gradient=in_order(arrays, arrays["gradient"]),
        policy=in_order(arrays, arrays["policy_logprobs"]),
        row=row,
        advantage=advantage,
        group=group,
        eps=float(facts.get("eps", 6e-8)),
        clip=(float(clip[0]), float(clip[1])) if clip else None,
        **picked,
    )
