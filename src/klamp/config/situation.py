"""What is to be trained, as far as it decides which KL to begin with."""

from __future__ import annotations

from dataclasses import dataclass

from klamp.core.advantages import GROUP_SIZES
from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, POSITIVE
from klamp.core.fields import check_fields
from klamp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is to be trained, as far as it decides the KL.

    Raises:
        ConfigError: a length, a group or a range that cannot be.
    """

    length: int = 1000
    """Mean completion length in tokens."""
    max_length: int | None = None
    """Longest completion in tokens; None: the mean."""
    group_size: int = 8
    """Completions per prompt."""
    updates: int = 1
    """Updates per rollout."""
    gamed: bool = True
    """Whether the reward can be gamed: it is a model, or a rule that can be fooled."""
    keeps: bool = True
    """Whether the model must keep what it can do besides."""
    reward_range: float = 1.0
    """The largest reward minus the smallest."""
    lags: bool = False
    """Whether an inference engine writes the completions, whose weights or numbers may differ from the trainer's."""
    ends_where_beta_says: bool = False
    """Whether the run is to end at the optimum that beta names."""
    steady_length: bool = False
    """Whether completions must not grow under the KL."""
    free_kl: float | None = None
    """The KL that is free, in nats per token; None: none is."""
    small_vocabulary: bool = False
    """Whether the vocabulary is small, or memory to spare, so that the logits of both models can be held."""
    low_precision: bool = False
    """Whether log-ratios of many nats are expected in half precision."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            {
                "length": AT_LEAST_1,
                "max_length": AT_LEAST_1,
                "group_size": GROUP_SIZES,
                "updates": AT_LEAST_1,
                "reward_range": POSITIVE.but("a reward that is always the same teaches nothing", "1.0"),
                "free_kl": AT_LEAST_0.but("a KL is never negative", "leave it out where none is free"),
            },
        )
        if self.max_length is not None and self.max_length < self.length:
            raise ConfigError(
                "the longest completion is shorter than the mean",
                got=f"max_length={self.max_length}, length={self.length}",
                why="a mean lies between the shortest and the longest",
                fix=f"max_length >= {self.length}",
            )

    @property
    def needs_kl(self) -> bool:
        """Whether a KL is worth its cost."""
        return self.gamed or self.keeps

    @property
    def in_reward(self) -> bool:
        """Whether the KL is to be taken from the reward."""
        return self.needs_kl and (self.ends_where_beta_says or self.steady_length)

    @property
    def holds_target(self) -> bool:
        """Whether beta is to follow a target, which neither a free budget nor a beta with a meaning goes with."""
        return self.keeps and not self.ends_where_beta_says and self.free_kl is None
