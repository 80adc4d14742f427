"""`klamp check FILE`: the verdict on a capture file, without torch; the exit code is for CI."""

from __future__ import annotations

from collections.abc import Sequence

from klamp.audit.capture import Capture
from klamp.audit.conclude import conclude
from klamp.cli.flags import read_options
from klamp.cli.options import CheckOptions
from klamp.cli.text import say


def run(argv: Sequence[str]) -> int:
    """Print the verdict; 0 sound, 1 wrong, 3 cannot tell.

    Raises:
        DataError: the file cannot be read.
    """
    options = read_options(CheckOptions, argv, command="klamp check")
    verdict = conclude(Capture.load(options.path))
    say(verdict.to_json() if options.json else verdict)
    return verdict.exit_code
