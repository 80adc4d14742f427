"""One micro-batch as `klamp.check` saw it: arrays and scalars, from which a verdict follows without torch.

A capture file is a safetensors file: float32 arrays, and a header with schema, host, data type and scalars. It holds no
text and, unless `save_ids=True` asks for them, no token ids. NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from klamp.audit.verdict import SCHEMA
from klamp.errors import DataError

Array: TypeAlias = NDArray[Any]

NEEDED = ("gradient", "policy_logprobs", "mask")
SCORES = ("ref_logprobs", "old_logprobs", "sampler_logprobs", "baseline", "policy_part", "second", "third")
PER_COMPLETION = ("advantages", "rewards")
"""Names of arrays: those that a capture needs, other numbers [B, T], and those that may be [B]."""
TYPES: dict[str, Any] = {"segments": np.int32, "ids": np.int32, "mask": np.bool_}  # others: float64; in a file float32


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What a verdict is computed from."""

    arrays: dict[str, Any]  # name -> array
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # scalars: eps, dtype, beta, ..., and findings

    def save(self, path: str | Path, *, ids: bool) -> None:
        """Write the capture as a safetensors file, with or without token ids."""
        from safetensors.numpy import save_file

        arrays = {k: x for k, x in self.arrays.items() if ids or k != "ids"}
        stored = {k: np.ascontiguousarray(x, dtype=TYPES.get(k, np.float32)) for k, x in arrays.items()}
        save_file(stored, str(path), metadata={"schema": SCHEMA, "facts": json.dumps(self.facts, default=str)})

    @classmethod
    def load(cls, path: str | Path) -> Capture:
        """Read a capture file.

        Raises:
            DataError: the file is missing, or is no whole capture.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                header = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in list(file.keys())}
            facts = json.loads(header.get("facts", "null"))
            shapes = {name: x.shape for name, x in arrays.items() if name not in PER_COMPLETION}
            whole = {*NEEDED} <= {*arrays} and len({*shapes.values()}) == 1 and arrays["mask"].ndim == 2
            if header.get("schema") != SCHEMA or not isinstance(facts, dict) or not whole:
                raise ValueError(f"schema {header.get('schema')!r}, arrays {shapes}")
        except (OSError, SafetensorError, ValueError) as error:
            got, fix = f"{type(error).__name__}: {error}", "name a file that klamp.check(..., save=...) wrote"
            why = f"a safetensors file of {SCHEMA} is read, with {', '.join(NEEDED)}, all of one shape [B, T]"
            raise DataError(f"{path} is not a whole capture of klamp.check", got=got, why=why, fix=fix) from error
        return cls(arrays={k: x.astype(TYPES.get(k, np.float64)) for k, x in arrays.items()}, facts=facts)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The trained tokens of a micro-batch, completion after completion, each array [n]."""

    gradient: Array  # d loss / d log-probability
    policy: Array  # log-probabilities under the policy
    row: Array  # the completion of each token, 0 to B - 1, ascending
    ref: Array | None = None  # log-probabilities under the reference or teacher
    old: Array | None = None  # log-probabilities under the old policy
    sampler: Array | None = None  # log-probabilities as the sampler reported them
    advantage: Array | None = None  # the advantage of each token
    baseline: Array | None = None  # what the loss subtracts from the log-ratio
    policy_part: Array | None = None  # the part of the gradient that comes from the advantages, if the loss was watched
    second: Array | None = None  # the derivative of the summed gradient
    third: Array | None = None  # the derivative of the summed second derivative
    group: Array | None = None  # the prompt of each completion, [B]
    eps: float = 6e-8  # unit roundoff of the log-probabilities
    clip: tuple[float, float] | None = None  # the clip range of the trainer, as distances from 1

    @classmethod
    def of(cls, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Tokens:
        """The tokens under the mask; a completion is a row, or a segment of a packed row."""
        mask, segments = arrays["mask"], arrays.get("segments", np.zeros(1, int))
        span = int(np.ptp(segments)) + 1
        rows = np.broadcast_to(span * np.arange(len(mask))[:, None] + segments - segments.min(), mask.shape)[mask]
        order = np.argsort(rows, kind="stable")
        completions, row = np.unique(rows[order], return_inverse=True)
        advantage = arrays.get("advantages")
        if advantage is not None and advantage.ndim == 1:
            per_segment = "segments" in arrays and advantage.size == completions.size
            advantage = (advantage if per_segment else advantage[completions // span])[row]
        elif advantage is not None:
            advantage = advantage[mask][order]
        scores = {name: arrays[name] for name in ("gradient", "policy_logprobs", *SCORES) if name in arrays}
        size, clip = None if "segments" in arrays else facts.get("group_size"), facts.get("clip")
        return cls(
            row=row,
            advantage=advantage,
            group=np.unique(completions // size, return_inverse=True)[1] if size else None,
            eps=float(facts.get("eps", 6e-8)),
            clip=(float(clip[0]), float(clip[1])) if clip else None,
            **{name.removesuffix("_logprobs"): x[mask][order] for name, x in scores.items()},
        )

    @cached_property
    def d(self) -> Array:
        """The log-ratio to the reference."""
        return self.policy - self.ref if self.ref is not None else np.zeros_like(self.policy)

    @cached_property
    def d_old(self) -> Array:
        return self.d - self.log_r

    @cached_property
    def distance(self) -> float:
        """The root mean square of the log-ratio to the reference."""
        return float(np.sqrt(np.square(self.d).mean()))

    @cached_property
    def log_r(self) -> Array:
        """The log-ratio to the old policy."""
        return self.policy - self.old if self.old is not None else np.zeros_like(self.policy)

    @cached_property
    def r(self) -> Array:
        return np.exp(np.clip(self.log_r, -50, 50))

    @cached_property
    def prefix_r(self) -> Array:
        """The product of the completion's ratios up to the token itself."""
        return np.exp(np.clip(self.so_far(self.log_r), -50, 50))

    @cached_property
    def lengths(self) -> Array:
        """The number of trained tokens of each completion, [B]."""
        return np.bincount(self.row).astype(float)

    @cached_property
    def first(self) -> Array:
        """The place of each completion's first token, [B]."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(int)

    @cached_property
    def courses(self) -> dict[str, Array]:
        """The log-ratios that a loss may subtract from the advantages: name -> [n]."""
        later = {"later log-ratios": self.to_go(self.d), "later old - ref": self.to_go(self.d_old)}
        return {"log-ratio": self.d, "old - ref": self.d_old} | later

    def total(self, x: Array) -> Array:
        """The sum of x over each token's completion, [n]."""
        return np.bincount(self.row, weights=x)[self.row]

    def average(self, x: Array) -> Array:
        """The mean of x over each token's completion, [n]."""
        return self.total(x) / self.lengths[self.row]

    def so_far(self, x: Array) -> Array:
        """The sum of x over the token's completion up to the token itself, [n]."""
        sums = np.cumsum(x)
        return sums - (sums[self.first] - x[self.first])[self.row]

    def to_go(self, x: Array) -> Array:
        """The sum of x over the token itself and the later ones of its completion, [n]."""
        return self.total(x) - self.so_far(x) + x

    def weights(self, mean: str) -> Array:
        """What each token counts in a mean; sums to 1."""
        counts = np.ones_like(self.policy) if mean == "token" else 1 / self.lengths[self.row]
        return counts / counts.sum()


def roundoff(*spacings: float) -> float:
    """The unit roundoff of numbers that went through types of these spacings, and through float32 at best."""
    return max(*spacings, 1.19e-7) / 2
