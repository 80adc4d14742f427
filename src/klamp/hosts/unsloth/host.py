"""What klamp needs to know of Unsloth: its class, its versions, and where its own KL silently stops pulling."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from klamp.hosts.common.versions import check_installed
from klamp.hosts.unsloth.loss import Call, LossWithKL, stopped_calling

OLDEST, NEWEST = "2026.10.7", "2026.10.9"
LOSS = "UnslothEfficientGRPO"
"""The name of the function that Unsloth's loss calls."""

FARTHEST, STEP = 40.0, 1e-3
"""How far out, and how finely, Unsloth's clamps are looked for, in nats."""


class Clamps(NamedTuple):
    """The log-ratios (policy - ref, nats) beyond which Unsloth's own KL has no gradient; None: it always has one."""

    below: float | None
    above: float | None
    value: float
    """The largest value of the KL of one token, in nats."""


def check_version() -> str:
    """The installed version of Unsloth.

    Raises:
        UnsupportedVersion: Unsloth or its zoo is missing, or outside the range that was tried.
    """
    why = "the KL enters in the middle of Unsloth's own loss, which changes from week to week"
    for package in ("unsloth_zoo", "unsloth"):
        installed = check_installed(f"{package}>={OLDEST},<={NEWEST}", by="klamp.trl on Unsloth", why=why)
    return installed


def loss_function(host: type) -> tuple[dict[str, Any], Any]:
    """Unsloth's loss function, and the namespace in which its compute_loss looks that function up.

    Raises:
        UnsupportedVersion: it is not there, or takes other arguments.
    """
    names = inspect.unwrap(vars(host)["compute_loss"]).__globals__
    function = names.get(LOSS)
    taken = [] if function is None else list(inspect.signature(function.forward).parameters)[1:]
    if [name.removeprefix("_").removesuffix("_logps").removesuffix("_per_token") for name in taken] != list(
        Call._fields
    ):
        raise stopped_calling(f"{LOSS} takes {', '.join(taken) or 'nothing: it is not there'}")
    return names, function


@contextmanager
def in_place(host: type, stand_in: LossWithKL) -> Iterator[None]:
    """A context in which Unsloth's compute_loss calls `stand_in` instead of its own loss function."""
    names, function = loss_function(host)
    names[LOSS] = stand_in
    try:
        yield
    finally:
        names[LOSS] = function


def silent_clamps(original: Any) -> Clamps:
    """Measure where the gradient of Unsloth's own KL ends, and the largest value that it takes."""
    count = round(2 * FARTHEST / STEP)
    with torch.enable_grad():
        apart = torch.linspace(-FARTHEST, FARTHEST, count + 1).view(1, -1).requires_grad_()
        loss = _own_kl(original, apart)
        (slope,) = torch.autograd.grad(loss, apart)
    dead = apart.detach()[(slope == 0) & (apart.abs() > 0.1)]
    below, above = dead[dead < 0], dead[dead > 0]
    return Clamps(
        below=float(below.max()) if len(below) else None,
        above=float(above.min()) if len(above) else None,
        value=float(_own_kl(original, torch.tensor([[-FARTHEST]]))),
    )


def _own_kl(original: Any, apart: torch.Tensor) -> torch.Tensor:
    """Unsloth's own KL, summed over tokens that are so many nats from the reference."""
    call = Call(
        new=apart,
        old=None,
        ref=torch.zeros_like(apart),
        sampling=None,
        lm_head=None,
        input_ids=torch.zeros_like(apart, dtype=torch.long),
        mask=torch.ones_like(apart),
        advantages=torch.zeros(1),
        beta=1.0,
        scaler=None,
        n_chunks=1,
        extra_kwargs={"loss_type": "dr_grpo", "max_completion_length": 1},
        upstream_scale=None,
    )
    return original.apply(*call)[0]
