"""The range of TRL that this adapter was tested with."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

from klamp.errors import UnsupportedVersion

OLDEST, BELOW = "1.10", "2"


def check_version() -> str:
    """The installed version of TRL.

    Raises:
        UnsupportedVersion: TRL is missing, or outside the declared range.
    """
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed == "none" or not Version(OLDEST) <= Version(installed) < Version(BELOW):
        raise UnsupportedVersion(
            f"klamp.trl needs trl>={OLDEST},<{BELOW}",
            got=f"trl {installed}",
            why="the KL enters in the middle of TRL's own loss, which changes from version to version",
            fix=f'pip install "trl>={OLDEST},<{BELOW}"',
        )
    return installed
