"""What every host of a KL term needs and no host's library: its fields, its penalty, its controls, its metrics.

versions           which versions of each host were tried
kl_fields          the options, for a host's own dataclass of arguments; which of them no host can honour, and why
control            beta from step to step, and what a checkpoint must hold of it
rollout            once per generation batch: whose KL counts, gate, reference length, KL in the reward or the advantage
coefficient        once per micro-batch: the penalty, and the coefficient that puts it into the host's own loss
window             what was measured, summed over micro-batches and processes
step_zero          the KL before the first update, which should be 0
effective          what the KL of a run will really do, in words
sampler_weights    whether a sampler has the weights that the model has
"""
