"""The mathematics of the KL and of GRPO: pure functions on tensors, which need torch and nothing else."""
