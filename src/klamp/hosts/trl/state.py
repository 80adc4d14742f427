"""klamp's part of a TRL checkpoint: the controller of beta and the frozen reference length."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from klamp.errors import KLWarning
from klamp.hosts.common.control import read_state

FILE = "klamp_state.json"


def save(trainer: Any, trial: Any) -> None:
    """Write klamp's state beside the trainer's own, on the process that saves."""
    control = trainer._klamp.control
    if control is not None and trainer.args.should_save:
        folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
        (folder / FILE).write_text(json.dumps(control.state_dict(), indent=2) + "\n", encoding="utf-8")


def load(trainer: Any, folder: str | None) -> None:
    """Continue from a checkpoint; where it has no state of klamp's, the controller starts anew, with a warning.

    Raises:
        RunFolderError, ConfigError: the state does not fit the configuration.
    """
    session = trainer._klamp
    if folder is None:
        return
    session.resumed = True
    if session.control is None:
        return
    path = Path(folder) / FILE
    if path.exists():
        session.control.load_state_dict(read_state(path))
        return
    warnings.warn(
        f"The checkpoint {folder} holds no {FILE}: beta starts again from its configured value, and a reference length "
        "that has to be measured cannot be.",
        KLWarning,
        stacklevel=2,
    )
