"""GRPO from scratch in five functions, as a guide describes them (docs/sources.md)."""

from __future__ import annotations

from klamp.training.microbatch import compute_kl_divergence, compute_loss, grpo_microbatch_step
from klamp.training.trainer import log_train, train

__all__ = ["compute_kl_divergence", "compute_loss", "grpo_microbatch_step", "log_train", "train"]
