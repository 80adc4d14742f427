"""The mathematics: pure functions on tensors. Knows torch and nothing else."""
