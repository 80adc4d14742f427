"""`klamp` under DeepSpeed on CPU processes, as it would be on GPUs: STAGE WORD ...; `bf16` is ZeRO-2 in bfloat16."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from tests.engines.deepspeed.training import settings
from transformers import training_args

from klamp.cli import main

if __name__ == "__main__":
    _, stage, *words = sys.argv  # noqa: TID251  (a program of its own)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if stage == "bf16":  # as `accelerate launch --zero_stage 2 --mixed_precision bf16` tells its processes
        os.environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
        training_args.is_torch_bf16_gpu_available = lambda: True
    else:
        file = Path(tempfile.mkdtemp()) / "deepspeed.json"
        file.write_text(json.dumps(settings(int(stage))["deepspeed"]))
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
    # accelerate uses DeepSpeed on accelerators only; transformers would leave the processes' group and join anew.
    torch.accelerator.is_available = lambda: True
    PartialState(backend="gloo")
    reset = AcceleratorState._reset_state
    AcceleratorState._reset_state = staticmethod(lambda reset_partial_state=False: reset())
    sys.exit(main(words))
