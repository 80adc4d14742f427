"""klamp's own trainer: rollouts, references, updates, checkpoints; transformers and peft are used here."""
