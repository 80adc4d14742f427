"""The output head of a model: log-probabilities and the exact KL without the matrix of logits."""
