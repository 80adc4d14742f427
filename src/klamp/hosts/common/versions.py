"""The range of a host's versions that an adapter was tested with."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from klamp.errors import UnsupportedVersion, missing_library


def check_installed(needed: str, *, by: str, why: str) -> str:
    """The installed version of a host.

    Args:
        needed: the range, as pip takes it: "trl>=1.10,<2".
        by: what of klamp's needs it.
        why: why no other version will do.

    Raises:
        MissingLibrary: the host is not installed.
        UnsupportedVersion: it is outside the range.
    """
    requirement = Requirement(needed)
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        raise missing_library(requirement.name, by=by) from None
    if not requirement.specifier.contains(installed, prereleases=True):
        raise out_of_range(needed, by=by, got=f"{requirement.name} {installed}", why=why)
    return installed


def out_of_range(needed: str, *, by: str, got: str, why: str) -> UnsupportedVersion:
    """The error for a host that is not the one that an adapter was tested with."""
    return UnsupportedVersion(f"{by} needs {needed}", got=got, why=why, fix=f'pip install "{needed}"')
