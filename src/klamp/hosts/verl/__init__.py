"""klamp's KL in verl: in its loss, in its `kl_penalty`, and in its controller of a KL in the reward.

fields_in_verl       a KL as a name in verl's configuration, and values as its command line has them
overrides            a whole KL, and one to a teacher, as arguments of that command line; what has no place, and why
teacher              the KL to a teacher among verl's losses of distillation
hooks                register: the places in verl that look a name up, and the actor's loss
driver               klamp's part in verl's trainer, where the whole batch is; what the loss in the workers needs of it
effective_in_verl    what the KL of a verl configuration will really do, and what it costs
"""
