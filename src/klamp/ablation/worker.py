"""The process that does one run of an ablation: `python -m klamp.ablation.worker RUN_FOLDER FD`.

It reads run.json in the folder and, from the environment, what is in no file; it sends its updates to the file
descriptor, as a `multiprocessing` connection does. Once nobody reads there any more, the run is saved after its step
and left: no run outlives the command that started it by long.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from klamp.ablation.executor import Tell, Update, read_run

DONE, FAILED, INTERRUPTED = 0, 1, 130
"""Exit codes; FAILED has an outcome that says why."""


def main(run_folder: str, descriptor: str) -> int:
    """Do the run of a folder; returns the exit code.

    Args:
        run_folder: the run's folder.
        descriptor: the file descriptor for updates.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # while models are loaded, too, and where a shell ignored one
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    folder, report = Path(run_folder), teller(int(descriptor))
    try:
        report(Update(run=folder.name, state="running"))
        from transformers.utils.logging import disable_progress_bar

        from klamp.ablation.one_run import perform
        from klamp.errors import TrainingStopped

        disable_progress_bar()
        try:
            outcome = perform(read_run(folder), folder.parent.parent, report)
        except TrainingStopped as stopped:
            logging.getLogger(__name__).warning("%s", stopped)
            return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE if outcome.state == "done" else FAILED


def teller(descriptor: int) -> Tell:
    """A function that writes updates to a file descriptor; it interrupts the run once nobody reads them."""
    os.set_inheritable(descriptor, False)  # what a reward function starts must not hold the pipe open
    writes = Connection(descriptor, readable=False)

    def tell(update: Update) -> None:
        try:
            writes.send(asdict(update))
        except OSError as error:
            raise KeyboardInterrupt("nobody reads the updates any more") from error

    return tell


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # noqa: TID251  (a program of its own, called by klamp.ablation.local)
