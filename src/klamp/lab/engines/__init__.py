"""TRL and verl as engines of `klamp train`: their arguments, TRL's program, verl's data files and reward."""
