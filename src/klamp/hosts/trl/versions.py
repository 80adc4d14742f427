"""The range of TRL that this adapter was tested with."""

from __future__ import annotations

from klamp.hosts.common.versions import check_installed


def check_version() -> str:
    """The installed version of TRL.

    Raises:
        UnsupportedVersion: TRL is missing, or outside the declared range.
    """
    why = "the KL enters in the middle of TRL's own loss, which changes from version to version"
    return check_installed("trl>=1.10,<2", by="klamp.trl", why=why)
