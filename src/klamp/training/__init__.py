"""The door to klamp's own loop: `klamp.training.loop`, five functions, and `klamp.training.config`, their options."""
