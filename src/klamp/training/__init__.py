"""klamp's own trainer: rollouts, references, updates, checkpoints; transformers, accelerate and peft are used here."""
