"""What is said where names that were given for a record do not fit it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path

from klamp.errors import ConfigError, DataError

SHOWN = 12
"""Names of a record that a message lists."""


def check_logged(names: Mapping[str, str] | None, logged: Collection[str], path: Path) -> None:
    """Refuse names that stand in no row of a record.

    Args:
        names: klamp's name of a metric -> that in the record; None: none were given.
        logged: all names in the record that hold numbers.
        path: where the record is.

    Raises:
        DataError: lists names that are there.
    """
    for ours, theirs in (names or {}).items():
        if theirs not in logged:
            nearest = get_close_matches(theirs, logged, n=1, cutoff=0.6)
            there = sorted(logged)
            raise DataError(
                f"no row of the record has a number called {theirs!r}",
                got=f"{ours}={theirs} for {path}",
                why=f"it has {', '.join(there[:SHOWN])}{', ...' if len(there) > SHOWN else ''}"
                if there
                else "it has none",
                fix=f"did you mean {nearest[0]!r}?" if nearest else "write the name as the record has it",
            )


def refuse_names(names: Mapping[str, str] | None, path: Path, *, why: str) -> None:
    """Refuse names for a record whose metrics have klamp's names already.

    Args:
        names: klamp's name of a metric -> that in the record; None or empty: none were given.
        path: where the record is.
        why: what kind of record it is.

    Raises:
        ConfigError: names were given.
    """
    if names:
        given = ", ".join(f"{ours}={theirs}" for ours, theirs in names.items())
        raise ConfigError("the record has no names to map", got=f"{given} for {path}", why=why, fix="leave --map out")
