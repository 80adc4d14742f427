"""`klamp` under DeepSpeed on CPU processes, as it would be on GPUs: STAGE WORD ..."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from tests.engines.deepspeed.training import settings

from klamp.cli import main

if __name__ == "__main__":
    _, stage, *words = sys.argv  # noqa: TID251  (a program of its own)
    file = Path(tempfile.mkdtemp()) / "deepspeed.json"
    file.write_text(json.dumps(settings(int(stage))["deepspeed"]))
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    # accelerate uses DeepSpeed on accelerators only; transformers would leave the processes' group and join anew.
    torch.accelerator.is_available = lambda: True
    PartialState(backend="gloo")
    reset = AcceleratorState._reset_state
    AcceleratorState._reset_state = staticmethod(lambda reset_partial_state=False: reset())
    sys.exit(main(words))
