"""Runs of trainers that take their steps in turn, each in a process of its own.

What the machine does from one minute to the next falls on all of them alike, so steps of the same round can be
subtracted from each other: a difference that two runs one after the other could not show. While one takes its step
the others wait. The order never changes: a step that allocates much takes longer after some runs than after others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from typing import IO, Any

from benchmarks.measure import surroundings
from benchmarks.step_runs import Setting, one

READY = "ready"


class Waiting:
    """A run in a process of its own that waits before each of its steps."""

    def __init__(self, name: str, setting: Setting, stack: ExitStack) -> None:
        self.name = name
        self.messages = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        _, environment = surroundings()
        command = [sys.executable, "-m", "benchmarks.turns", json.dumps(setting.to_dict())]
        pipe = subprocess.PIPE
        self.process: subprocess.Popen[str] = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.messages, text=True, env=environment)
        )
        stack.callback(self.process.kill)

    def answer(self) -> str:
        """The next line that it writes, once it has written it.

        Raises:
            RuntimeError: it failed; with the end of its messages.
        """
        line = _pipe(self.process.stdout).readline()
        if not line:
            self.process.wait()
            self.messages.seek(0)
            raise RuntimeError(f"the run {self.name} failed:\n{self.messages.read()[-2000:]}")
        return line

    def go(self) -> str:
        """Let it take a step, or end after the last one; what it then answers."""
        pipe = _pipe(self.process.stdin)
        pipe.write("\n")
        pipe.flush()
        return self.answer()


def _pipe(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def in_turn(settings: Mapping[str, Setting]) -> dict[str, dict[str, Any]]:
    """What `step_runs.one` finds for each run, all of as many steps.

    Raises:
        RuntimeError: a run failed.
        ValueError: the runs differ in their number of steps.
    """
    (steps,) = {setting.steps for setting in settings.values()}
    with ExitStack() as stack:
        runs = [Waiting(name, setting, stack) for name, setting in settings.items()]
        for run in runs:
            run.answer()
        for _ in range(steps):
            for run in runs:
                run.go()
        threads, load = surroundings()[0], os.getloadavg()[0]
        return {run.name: json.loads(run.go()) | {"threads": threads, "load": load} for run in runs}


def _main() -> None:
    """`python -m benchmarks.turns SETTING`: the other side of `Waiting`."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers = sys.stdout

    def turn() -> None:
        print(READY, file=answers, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for this run any more")

    with redirect_stdout(sys.stderr):
        found = one(json.loads(sys.argv[1]), turn)
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    _main()
