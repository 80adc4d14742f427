"""Scores completions with the parts of a causal language model: each distinct prompt once, logits never held."""
