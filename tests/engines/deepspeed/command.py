"""`klamp` under DeepSpeed on CPU processes, as it would be on GPUs: STAGE WORD ..."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState

from klamp.cli import main

if __name__ == "__main__":
    _, stage, *words = sys.argv  # noqa: TID251  (a program of its own)
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    # accelerate uses DeepSpeed on accelerators only; transformers would leave the processes' group and join anew.
    torch.accelerator.is_available = lambda: True
    PartialState(backend="gloo")
    reset = AcceleratorState._reset_state
    AcceleratorState._reset_state = staticmethod(lambda reset_partial_state=False: reset())
    sys.exit(main(words))
