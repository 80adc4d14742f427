"""The command line: the only part of klamp that reads argv or prints."""

from klamp.cli.app import main

__all__ = ["main"]
