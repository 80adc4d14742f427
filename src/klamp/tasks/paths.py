"""Paths that users name, see `klamp.files`."""

from klamp.files import at_home, followed, with_end

__all__ = ["at_home", "followed", "with_end"]
