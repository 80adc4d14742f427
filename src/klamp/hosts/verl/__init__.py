"""klamp's KL in verl: in its actor's loss, among its losses of distillation, and in its trainer."""
