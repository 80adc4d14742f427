"""The trainer: rollouts, references, updates, run folders. transformers, accelerate and peft live here."""
