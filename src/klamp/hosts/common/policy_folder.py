"""The folder of the weights in a checkpoint of klamp's, for every door that takes a model by the name of its folder."""

from __future__ import annotations

from pathlib import Path

POLICY = "policy"
"""The folder inside a checkpoint of klamp's that holds its weights."""


def policy_folder(name: str) -> str:
    """The folder of the weights where a checkpoint of klamp's is named; any other name as it is.

    Args:
        name: a folder, or a hub id.
    """
    given = Path(name).expanduser()
    inside = given / POLICY
    return str(inside) if inside.is_dir() and not (given / "config.json").exists() else name
