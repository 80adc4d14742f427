"""Weights that TRL divides among processes by FSDP2: whether it does so here, and all of them for an evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from klamp.errors import ConfigError
from klamp.training.processes import FSDP, asked_for


def check_fsdp_version() -> None:
    """Refuse FSDP1, before accelerate sets it up.

    Raises:
        ConfigError: it was asked for.
    """
    version = os.environ.get("FSDP_VERSION", "1")
    if asked_for(FSDP) and version != "2":
        raise ConfigError(
            "klamp train does not run under FSDP1",
            got=f"fsdp_version {version}, which is 1 where none is given",
            why="it flattens the weights, which an evaluation gathers by name",
            fix="launch with --fsdp_version 2; or train with TRL and klamp.trl",
        )


def is_used(accelerator: Accelerator) -> bool:
    """Whether accelerate shards by FSDP here, as was asked for.

    Raises:
        ConfigError: it was asked for, and accelerate does not.
    """
    if not asked_for(FSDP):
        return False
    if accelerator.distributed_type is DistributedType.FSDP:
        return True
    if accelerator.num_processes == 1:  # whose weights are whole either way
        return False
    raise ConfigError(
        "FSDP was asked for, and accelerate does not use it here",
        got=f"{accelerator.num_processes} processes on {accelerator.device.type}",
        why="accelerate shards on GPUs and their like only; on CPUs every process would hold all weights",
        fix="launch without FSDP: torchrun, or accelerate launch --multi_gpu (which also joins CPU processes)",
    )


@contextmanager
def gathered(module: nn.Module, *, split_after_passes: bool) -> Iterator[None]:
    """A context in which every process holds all weights, to read only; all processes must enter it.

    Args:
        module: sharded as one unit or layer by layer, or not at all.
        split_after_passes: whether a unit gives up the weights of others after each pass while it trains.
    """
    # The outermost is first: it prepares all.
    units = [each for each in module.modules() if isinstance(each, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(split_after_passes, recurse=False)
            unit.reshard()
