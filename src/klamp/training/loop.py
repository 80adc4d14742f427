"""GRPO from scratch in five functions; see `klamp.lab.loop`."""

from klamp.lab.loop import compute_kl_divergence, compute_loss, grpo_microbatch_step, log_train, train

__all__ = ["compute_kl_divergence", "compute_loss", "grpo_microbatch_step", "log_train", "train"]
