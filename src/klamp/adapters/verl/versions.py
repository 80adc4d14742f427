"""The range of verl that this adapter was tested with."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

from klamp.errors import UnsupportedVersion

OLDEST, BELOW = "0.8", "0.10"


def check_version() -> str:
    """The installed version of verl.

    Raises:
        UnsupportedVersion: verl is missing, or outside the declared range.
    """
    try:
        installed = metadata.version("verl")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed == "none" or not Version(OLDEST) <= Version(installed) < Version(BELOW):
        raise out_of_range(f"verl {installed}")
    return installed


def out_of_range(got: str) -> UnsupportedVersion:
    """The error for a verl whose hooks are not where klamp looks for them."""
    return UnsupportedVersion(
        f"klamp.verl needs verl>={OLDEST},<{BELOW}",
        got=got,
        why="the KL enters where verl's own loss and reward look up the name of theirs, which changes between versions",
        fix=f'pip install "verl>={OLDEST},<{BELOW}"',
    )
