"""The configuration of a training run: `TrainConfig`, made of one section per subject.

Field names are unique across the classes, so that a YAML file and the command line can be flat.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.kl import ALIASES, resolve_aliases
from klamp.core.arguments import check_fields
from klamp.errors import ConfigError, KLWarning
from klamp.tasks.config import TaskConfig
from klamp.training.refusals import check_backend, check_precision, check_texts
from klamp.training.sections import ModelConfig, OptimConfig, RolloutConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run.

    Raises:
        ConfigError: parts that do not fit together.
    """

    kl: KLConfig = field(default_factory=KLConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        build_objective(self.kl, self.loss, max_length=self.rollout.max_completion_length)
        if self.run.resume and self.run.output_dir is None:
            raise ConfigError(
                "resume needs output_dir",
                got="output_dir=None",
                why="a run is continued from the checkpoints in its folder",
                fix="pass the folder of the run: --output_dir runs/NAME --resume",
            )
        check_backend(self.kl, self.loss, self.model, self.rollout, self.optim, self.run)
        check_precision(self.model)
        check_texts(self.flat())
        if self.kl.kl_early_stop is not None and self.optim.num_iterations == 1:
            warnings.warn(
                f"kl_early_stop={self.kl.kl_early_stop!r} has no effect: it needs num_iterations of 2 or more, since "
                "at a rollout's first update the policy is the one that sampled it.",
                KLWarning,
                stacklevel=3,
            )

    def flat(self) -> dict[str, Any]:
        """All fields in one mapping: name -> plain value."""
        sections = (dataclasses.asdict(getattr(self, section.name)) for section in dataclasses.fields(self))
        return {name: value for section in sections for name, value in section.items()}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> TrainConfig:
        """A configuration from flat values; aliases are resolved, missing fields keep their default.

        Raises:
            UnknownNameError: a key that is no field; names the nearest.
            ConfigError: values that do not fit.
        """
        owners = field_owners()
        sections: dict[str, dict[str, Any]] = {section.name: {} for section in dataclasses.fields(cls)}
        for name, value in resolve_aliases(values, set(owners)).items():
            sections[owners[name]][name] = tuple(value) if isinstance(value, list) else value
        classes = section_classes()
        return cls(**{name: classes[name](**given) for name, given in sections.items()})


def section_classes() -> dict[str, type]:
    """Name of each section -> its configuration class."""
    return {
        "kl": KLConfig,
        "loss": LossConfig,
        "task": TaskConfig,
        "model": ModelConfig,
        "rollout": RolloutConfig,
        "optim": OptimConfig,
        "run": RunConfig,
    }


def field_owners() -> dict[str, str]:
    """Name of each field -> the section that holds it; no name stands in two sections."""
    return {f.name: name for name, cls in section_classes().items() for f in dataclasses.fields(cls)}


__all__ = [
    "ALIASES",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainConfig",
    "field_owners",
    "section_classes",
]
