"""TRL's GRPO trainer as Unsloth rewrites it, with klamp's KL in Unsloth's own loss and averages.

host       which class is Unsloth's, which versions were tried, what it does in silence
columns    Unsloth's columns of a batch against the completion's own
loss       what stands in Unsloth's loss function while a loss is computed
trainer    the class that `attach` gives to a trainer that is already built
"""
