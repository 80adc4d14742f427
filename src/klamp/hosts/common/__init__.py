"""What every host of a KL term needs and no host's library: its fields, its penalty, its controls, its metrics."""
