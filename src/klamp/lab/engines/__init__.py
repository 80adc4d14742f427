"""Starts the program of another trainer, TRL's or verl's, for a run of `klamp train`."""
