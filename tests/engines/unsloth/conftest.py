"""Unsloth patches TRL and transformers for the whole process, so it comes before anything of them is imported.

Without a GPU it is talked into patching TRL all the same, and a plain tiny model takes the place of one of its own.
With one, only test_gpu.py runs, on Unsloth as it is.
"""

import os
import tempfile

import torch

GPU = torch.cuda.is_available()

os.environ.update(
    UNSLOTH_DISABLE_STATISTICS="1",
    UNSLOTH_COMPILE_LOCATION=tempfile.mkdtemp(prefix="klamp-unsloth-"),
    TRITON_INTERPRET="0" if GPU else "1",
)
if not GPU:
    os.environ.update(
        UNSLOTH_ALLOW_CPU="1",
        UNSLOTH_COMPILE_DISABLE="1",
        TORCHDYNAMO_DISABLE="1",  # the first step would compile for a minute
        UNSLOTH_GRPO_PREFIX_GROUPER="0",  # it needs attention that a plain model does not have: rows would leak
    )

import unsloth  # noqa: E402  (before trl and transformers)
import unsloth.models.rl  # noqa: E402

if not GPU:
    os.environ["UNSLOTH_ALLOW_CPU"] = "0"
    unsloth.models.rl._patch_trl_rl_trainers_impl("grpo_trainer")

collect_ignore_glob = ["test_[!g]*.py"] if GPU else []
