"""TRL's GRPO and distillation as a host: see `klamp.trl`."""
