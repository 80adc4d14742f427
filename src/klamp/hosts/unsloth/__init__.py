"""TRL's GRPO trainer as Unsloth rewrites it, with klamp's KL in Unsloth's own loss and averages.

columns          Unsloth's columns of a batch against the completion's own
loss_function    what stands in Unsloth's loss function while a loss is computed, and its silent clamps
hooks            what is refused, the class that `attach` gives to a trainer that is already built, what is in force
"""
