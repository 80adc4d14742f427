"""TRL's GRPO trainer as Unsloth rewrites it, with klamp's KL in Unsloth's own loss and averages."""
