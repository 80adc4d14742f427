"""verl's buffer of completions, asked more often; verl loads it by its path. For tests only."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Impatient(ReplayBuffer):
    """Every twentieth of a second, where verl waits two seconds: tiny models answer sooner."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=0.05)
