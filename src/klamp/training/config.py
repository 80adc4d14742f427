"""The configuration of a run in sections; see `klamp.lab.config`."""

from klamp.lab.config import ModelConfig, OptimConfig, RolloutConfig, RunConfig, TrainConfig

__all__ = ["ModelConfig", "OptimConfig", "RolloutConfig", "RunConfig", "TrainConfig"]
