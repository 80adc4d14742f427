"""What `klamp train` takes besides the configuration itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Where the configuration comes from, and what is done with it."""

    config: str | None = None
    """YAML file: the flags' names as keys, flat or under their section (kl, loss, task, ...)."""
    preset: str | None = None
    """KL and loss fields as a published recipe has them; may also stand in the file."""
    dry_run: bool = False
    """Print what would run, and start nothing."""
    debug: bool = False
    """Show the traceback of an error (also: KLAMP_DEBUG=1)."""
