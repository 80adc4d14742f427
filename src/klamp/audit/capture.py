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

from klamp.audit.forms import Tokens
from klamp.errors import DataError

SCHEMA = "klamp.check/1"
PER_PLACE = (
    "gradient",
    "policy_logprobs",
    "ref_logprobs",
    "old_logprobs",
    "sampler_logprobs",
    "baseline",
    "policy_part",
    "second",
    "third",
)
"""Names of the arrays [B, T]; beside them: mask, advantages ([B] or [B, T]), rewards [B], segments and ids [B, T]."""
KNOWN = (*PER_PLACE, "mask", "advantages", "rewards", "segments", "ids")
NEEDED = ("gradient", "policy_logprobs", "mask")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What a verdict is computed from."""

    arrays: dict[str, Any]
    """Name -> array; see `PER_PLACE`."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Scalars: eps, dtype, loss, beta, means, clip, group_size, pad, eos, host, around, findings, ..."""

    def save(self, path: str | Path) -> None:
        """Write the capture as a safetensors file."""
        from safetensors.numpy import save_file

        stored = {name: np.ascontiguousarray(_compact(name, x)) for name, x in self.arrays.items()}
        save_file(stored, str(path), metadata={"schema": SCHEMA, "facts": json.dumps(self.facts, default=str)})

    @classmethod
    def load(cls, path: str | Path) -> Capture:
        """Read a capture file.

        Raises:
            DataError: the file is missing or is no capture of klamp's.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                header = file.metadata() or {}
                arrays = {name: _whole(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} cannot be read as a capture",
                got=f"{type(error).__name__}: {error}",
                fix="name a file that klamp.check(..., save=...) wrote",
            ) from error
        try:
            facts = json.loads(header.get("facts", ""))
        except ValueError:
            facts = None
        if header.get("schema") != SCHEMA or not isinstance(facts, dict):
            raise DataError(
                f"{path} is no capture of klamp.check",
                got=f"schema {header.get('schema')!r}",
                why=f"this version reads {SCHEMA}",
                fix="name a file that klamp.check(..., save=...) wrote, or write it anew",
            )
        _check(arrays, path)
        return cls(arrays=arrays, facts=facts)

    @property
    def tokens(self) -> Tokens:
        """The trained tokens, completion after completion."""
        return trained_tokens(self.arrays, self.facts)


def _compact(name: str, x: Any) -> Any:
    if name in ("mask",):
        return np.asarray(x, dtype=np.uint8)
    return np.asarray(x, dtype=np.int32 if name in ("segments", "ids") else np.float32)


def _whole(name: str, x: Any) -> Any:
    if name == "mask":
        return x.astype(bool)
    return x if name in ("segments", "ids") else x.astype(np.float64)


def _check(arrays: Mapping[str, Any], path: str | Path) -> None:
    lost = [name for name in NEEDED if name not in arrays]
    shape = arrays[NEEDED[0]].shape if not lost else ()
    crooked = [
        name for name in (*PER_PLACE, "mask", "segments", "ids") if name in arrays and arrays[name].shape != shape
    ]
    if lost or crooked or len(shape) != 2:
        raise DataError(
            f"{path} is not a whole capture",
            got=f"missing: {lost}, other shapes: {crooked}" if lost or crooked else f"shape {shape}",
            why=f"it needs {', '.join(NEEDED)}, all [B, T]",
            fix="write it anew with klamp.check(..., save=...)",
        )


def rows_of(arrays: Mapping[str, Any]) -> Any:
    """The completion of each place, [B, T]: its row, or its segment of a packed row."""
    mask = arrays["mask"]
    rows = np.broadcast_to(np.arange(mask.shape[0])[:, None], mask.shape)
    if "segments" in arrays:
        segments = arrays["segments"]
        rows = rows * (int(segments.max()) + 1 - int(segments.min())) + segments - int(segments.min())
    return rows


def trained_tokens(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Tokens:
    """The tokens under the mask, ordered by completion."""
    mask = arrays["mask"]
    places = rows_of(arrays)[mask]
    order = np.argsort(places, kind="stable")
    rows, row = np.unique(places[order], return_inverse=True)

    def pick(name: str) -> Any:
        return arrays[name][mask][order].astype(np.float64) if name in arrays else None

    advantage = arrays.get("advantages")
    if advantage is not None:
        if advantage.ndim == 1 and "segments" in arrays and advantage.size == rows.size:
            advantage = advantage[row]
        else:
            wide = advantage if advantage.ndim == 2 else np.broadcast_to(advantage[:, None], mask.shape)
            advantage = wide[mask][order]
        advantage = advantage.astype(np.float64)
    size = facts.get("group_size")
    group = rows // size if size and "segments" not in arrays else None
    if group is not None:
        group = np.unique(group, return_inverse=True)[1]
    clip = facts.get("clip")
    return Tokens(
        gradient=pick("gradient"),
        policy=pick("policy_logprobs"),
        row=row,
        ref=pick("ref_logprobs"),
        old=pick("old_logprobs"),
        sampler=pick("sampler_logprobs"),
        advantage=advantage,
        baseline=pick("baseline"),
        policy_part=pick("policy_part"),
        group=group,
        eps=float(facts.get("eps", 6e-8)),
        clip=tuple(clip) if clip else None,  # type: ignore[arg-type]
    )
