"""klamp's own trainer, its tasks and ablations, and the engines that it starts; transformers and peft are used here."""
