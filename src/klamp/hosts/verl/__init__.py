"""klamp's KL in verl: in its policy losses, in its `kl_penalty`, and in its controller of a KL in the reward.

names        a KL as a name in verl's configuration: klamp:kl_gradient=forward
hydra        a value in the grammar of verl's command line
refusals     what verl has no place for, and why
pricing      what a coefficient costs under a configuration of verl
columns      what the loss in verl's workers needs of a whole batch
hooks        register: the places in verl that look a name up, and the actor's loss
driver       klamp's part in verl's trainer, where the whole batch is
overrides    a KLConfig as overrides of verl's configuration
effective    what the KL of a verl configuration will really do
"""
