"""klamp's KL in verl: in its policy losses, in its `kl_penalty`, and in its controller of a KL in the reward.

names        a KL as a name in verl's configuration: klamp:kl_gradient=forward
hydra        a value in the grammar of verl's command line
refusals     what verl has no place for, and why
hooks        register: the three places in verl that look a name up
overrides    a KLConfig as overrides of verl's configuration
effective    what the KL of a verl configuration will really do
"""
