"""A run of klamp by TRL's GRPO: `klamp train --backend trl`."""
