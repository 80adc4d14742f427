"""One process of a group that trains under FSDP2 on CPUs, as it would on GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def one_of_several(rank: int, count: int, ports: list[int], jobs: list[dict[str, Any]], told: str) -> None:
    """Like the one in `children`, sharded; besides, notes the share of the weights that this process held in each job.

    accelerate shards on accelerators only: here it is told that the gloo processes are such.
    """
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_TORCH_DEVICE": "cpu"}
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from tests.training import children
    from torch import nn

    from klamp.training import sharding

    choose, shard, shares = PartialState._prepare_backend, sharding.fully_shard, []

    def as_accelerators(*given: Any, **named: Any) -> tuple[str, DistributedType]:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        backend, kind = choose(*given, **named)
        return backend, DistributedType.MULTI_GPU if kind is DistributedType.MULTI_CPU else kind

    def noted(module: nn.Module, **options: Any) -> Any:
        sharded = shard(module, **options)
        weights: list[Any] = list(module.parameters())
        shares.append(sum(w.to_local().numel() for w in weights) / sum(w.numel() for w in weights))
        return sharded

    PartialState._prepare_backend = as_accelerators
    sharding.fully_shard = noted  # pyright: ignore[reportAttributeAccessIssue]
    children.one_of_several(rank, count, ports, jobs, told)
    Path(f"{told}-shares").write_text(json.dumps(shares), encoding="utf-8")
