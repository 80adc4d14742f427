"""Unsloth without a GPU: it patches TRL for the whole process, and a plain model takes the place of one of its own."""

from __future__ import annotations

import os
import tempfile
from typing import Any


def patch(*, gpu: bool) -> None:
    """Let Unsloth write TRL's trainer anew; before anything of TRL and transformers is imported.

    Args:
        gpu: whether there is one, so that nothing has to be switched off.
    """
    os.environ.update(
        UNSLOTH_DISABLE_STATISTICS="1",
        UNSLOTH_COMPILE_LOCATION=tempfile.mkdtemp(prefix="klamp-unsloth-"),
        TRITON_INTERPRET="0" if gpu else "1",
    )
    if not gpu:
        os.environ.update(
            UNSLOTH_ALLOW_CPU="1",
            UNSLOTH_COMPILE_DISABLE="1",
            TORCHDYNAMO_DISABLE="1",  # the first step would compile for a minute
            UNSLOTH_GRPO_PREFIX_GROUPER="0",  # it needs attention that a plain model does not have: rows would leak
        )
    import unsloth
    import unsloth.models.rl

    if not gpu:
        os.environ["UNSLOTH_ALLOW_CPU"] = "0"
        unsloth.models.rl._patch_trl_rl_trainers_impl("grpo_trainer")


def with_switches(model: Any) -> Any:
    """A plain model with stand-ins for Unsloth's switches between training and inference."""
    model._unsloth_user_float32 = True  # else Unsloth makes it half precision
    model.for_training = lambda *_, **__: model.train()
    model.for_inference = lambda *_, **__: model.eval()
    return model
