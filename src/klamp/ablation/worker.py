"""The process that does one run of an ablation: `python -m klamp.ablation.worker RUN_FOLDER [FD]`.

It reads its run in the ablation's plan and, from the environment, what is in no file; it writes its updates, a JSON
object a line, to the file descriptor. Once nobody reads there any more, the run is saved after its step and left: no
run outlives the command that started it by long.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from filelock import lock_descriptor

from klamp.ablation.executor import LOG, Tell, Update
from klamp.ablation.plan import read_plan, runs

DONE, FAILED, INTERRUPTED = 0, 1, 130
"""Exit codes; FAILED has an outcome that says why."""


def main(arguments: Sequence[str]) -> int:
    """Do the run of a folder; returns the exit code.

    Args:
        arguments: the run's folder, and the file descriptor for updates where somebody reads them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # while models are loaded, too, and where a shell ignored one
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    folder, ablation = Path(arguments[0]), Path(arguments[0]).parent.parent
    report = teller(int(arguments[1])) if len(arguments) > 1 else lambda update: None
    try:
        report(Update(run=folder.name, state="running"))
        from transformers.utils.logging import disable_progress_bar

        from klamp.ablation.one_run import perform
        from klamp.errors import TrainingStopped

        disable_progress_bar()
        (run,) = (each for each in runs(read_plan(ablation)) if each.name == folder.name)
        with alone(folder):
            try:
                outcome = perform(run, ablation, report)
            except TrainingStopped as stopped:
                logging.getLogger(__name__).warning("%s", stopped)
                return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE if outcome.state == "done" else FAILED


def teller(descriptor: int) -> Tell:
    """A function that writes reports to a file descriptor; it interrupts the run once nobody reads them."""
    os.set_inheritable(descriptor, False)  # what a reward function starts must not hold the pipe open

    def tell(update: Update) -> None:
        try:
            os.write(descriptor, (json.dumps(asdict(update)) + "\n").encode())
        except OSError as error:
            raise KeyboardInterrupt("nobody reads the updates any more") from error

    return tell


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process works on the run: a worker without its parent still saves its last step.

    Where files cannot be locked, nothing is waited for.
    """
    with (folder / LOG).open("ab") as file:
        with suppress(OSError):
            lock_descriptor(file.fileno())
        yield


def leave(code: int) -> NoReturn:
    """End the process at once, without waiting for torch to clean up; everything is written by then."""
    atexit._run_exitfuncs()  # those of reward functions and trackers
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # noqa: TID251  (a program of its own, called by klamp.ablation.local)
