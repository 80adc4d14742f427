"""Runs a script with FSDP2 on CPU processes, to try a sharded run where there is no GPU.

    OMP_NUM_THREADS=1 accelerate launch --config_file examples/accelerate/fsdp2_cpu.yaml \\
        examples/accelerate/fsdp2_on_cpu.py examples/trl_train.py train --kl-beta 0.04

accelerate (1.15) shards for accelerators only: on CPU processes it takes the same configuration for plain data
parallelism, without a word. Here it is told that the gloo processes are such. With GPUs this file is not needed.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def main() -> None:
    """Join the processes, then run the script that is named first, with the rest as its arguments."""
    torch.distributed.init_process_group("gloo")
    choose = PartialState._prepare_backend

    def as_accelerators(*given: object, **named: object) -> tuple[str, DistributedType]:
        backend, kind = choose(*given, **named)
        return backend, DistributedType.MULTI_GPU if kind is DistributedType.MULTI_CPU else kind

    PartialState._prepare_backend = as_accelerators
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
