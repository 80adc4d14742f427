"""Finds out whether TRL's classes are its own, or the rewritten ones that Unsloth puts in their place."""

from __future__ import annotations

from klamp.errors import ConfigError

UNSLOTH = "_UnslothGRPOTrainer"
"""The class that Unsloth derives from nothing of TRL's."""


def host_class(cls: type) -> type | None:
    """The GRPO trainer of Unsloth among a class and its bases; None where there is none."""
    return next((c for c in cls.__mro__ if c.__name__ == UNSLOTH), None)


def refuse_classes() -> None:
    """Refuse klamp's own config and trainer classes while TRL's are Unsloth's.

    Raises:
        ConfigError: Unsloth has put its own classes in the place of TRL's.
    """
    import trl

    if host_class(trl.GRPOTrainer) is not None:
        raise ConfigError(
            "klamp.trl.GRPOConfig and klamp.trl.GRPOTrainer cannot be used once Unsloth has patched TRL",
            got=f"trl.GRPOTrainer is {trl.GRPOTrainer.__name__}",
            why="Unsloth's trainer never calls the TRL method that a subclass of TRL's overrides, so the KL would be "
            "missing; and a subclass of its config would bring back TRL's defaults in place of Unsloth's",
            fix="build trl.GRPOConfig and trl.GRPOTrainer as Unsloth patched them, and then "
            "klamp.trl.attach(trainer, KLConfig(...))",
        )
