"""TRL's GRPO as a host: see `klamp.trl`."""
