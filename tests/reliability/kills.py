"""Kills runs and takes them up again: what is left of one that was killed is that of one that never was.

Every run is a process of its own, a fork of a server that has loaded the libraries. It leads a process group, and the
whole group gets SIGKILL: from outside at a random time, or from the run itself at one of `points.POINTS`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard
from tests.reliability.points import POINTS, Aim
from tests.reliability.runs import ALARMED, CASES, COMMON, MOVING, contents, differing
from tests.training import children
from tests.training.conftest import stored, tiny_llama

from klamp.config import KLWarning
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig

AT_RANDOM = "at a random time"
"""The point that is none: the process is killed from outside."""
OF_A_RESUME = ("while a resume cuts the metrics", "before a resume has cut the metrics")
"""Points that a run comes by only when it goes on."""
ONLY = {
    "after the reference moved": MOVING,
    "while the reference is saved": MOVING,
    "while an alarm is written": ALARMED,
}
"""Points that some cases alone come by."""
FIRST = tuple(point for point in POINTS if point not in OF_A_RESUME)
"""Points at which a run can be killed for the first time."""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One SIGKILL."""

    point: str
    """One of `POINTS`, or `AT_RANDOM`."""
    share: float
    """When: the share of the undisturbed run's time, or of the times that it comes by the point. In [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A run that is killed."""

    case: str
    """One of `CASES`."""
    blows: tuple[Blow, ...]
    """One, or a second one for the run that was taken up."""

    def __str__(self) -> str:
        return f"{self.case}, " + ", then ".join(f"{blow.point} ({blow.share:.2f})" for blow in self.blows)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run that was killed."""

    hits: int
    """How many of the blows met it alive."""
    differs: list[str]
    """What is not as in the undisturbed run; empty if all is well."""


def plan(count: int, seed: int) -> list[Kill]:
    """Kills in which every point has its turn, with any case that comes by it.

    Every fourth one is at a random time, and every third run is killed a second time after it was taken up.
    """
    drawn = random.Random(seed)
    points = iter(FIRST[i % len(FIRST)] for i in range(count))
    kills = []
    for number in range(count):
        point = AT_RANDOM if number % 4 == 0 else next(points)
        cases = ONLY.get(point, tuple(CASES))
        case = drawn.choice(cases)
        blows = [Blow(point=point, share=drawn.random())]
        if number % 3 == 2:
            others = [each for each in (*FIRST, *OF_A_RESUME) if case in ONLY.get(each, CASES)]
            blows.append(Blow(point=drawn.choice((AT_RANDOM, *others)), share=0.4 * drawn.random()))
        kills.append(Kill(case=case, blows=tuple(blows)))
    return kills


@dataclass
class Ground:
    """Where runs are killed: a folder, the model that they start from, and the undisturbed runs, each made once."""

    folder: Path
    whole: dict[str, Whole] = field(default_factory=dict)

    @cached_property
    def model(self) -> str:
        """The folder of the model."""
        return stored(tiny_llama(), self.folder / "model")

    def strike(self, kill: Kill) -> Outcome:
        """Kill a run, take it up again to its end, and compare it."""
        whole = self.undisturbed(kill.case)
        folder = self.folder / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        hits = sum(self._hit(kill.case, blow, folder, whole) for blow in kill.blows)
        code, _ = self._run(kill.case, folder)
        return Outcome(hits=hits, differs=[f"the run ended with {code}"] if code else differing(whole.holds, folder))

    def undisturbed(self, case: str) -> Whole:
        """The run that the killed ones are held against."""
        if case not in self.whole:
            folder = self.folder / "whole" / case.replace(" ", "-")
            code, told = self._run(case, folder, dict.fromkeys(POINTS, 0))
            assert code == 0, f"{case}: the undisturbed run ended with {code}"
            self.whole[case] = Whole(holds=contents(folder), **told)
        return self.whole[case]

    def _hit(self, case: str, blow: Blow, folder: Path, whole: Whole) -> bool:
        """Start the run or take it up, and strike; whether it was alive still."""
        if blow.point == AT_RANDOM:
            code, _ = self._run(case, folder, after=blow.share * whole.seconds)
        else:
            code, _ = self._run(case, folder, {blow.point: 1 + int(blow.share * whole.passed[blow.point])})
        assert code in (0, -signal.SIGKILL), f"{case}, {blow}: the run ended with {code}"
        return code != 0

    def _run(
        self, case: str, folder: Path, aims: Mapping[str, int] | None = None, *, after: float | None = None
    ) -> tuple[int | None, dict[str, Any]]:
        """Start a run or take it up; its exit code, and what it tells of itself at its end.

        Args:
            case: of the run.
            folder: its folder.
            aims: where it kills itself: point -> at which of its times there.
            after: kill it so many seconds after its begin.
        """
        told = self.folder / "told.json"
        told.unlink(missing_ok=True)
        settings = {"model": self.model, "output_dir": str(folder), "resume": folder.exists()}
        values = {**COMMON, **CASES[case], **settings}
        _wait_for_another_second(folder)
        child = children.start(train, values, dict(aims or {}), str(told))
        if after is not None:
            children.wait_for(told)
            time.sleep(after)
            with suppress(ProcessLookupError):  # it was faster than the undisturbed one
                os.killpg(child.pid, signal.SIGKILL)
        (code,) = children.end([child])
        return code, json.loads(told.read_text() or "{}")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An undisturbed run."""

    seconds: float
    """How long it took."""
    passed: dict[str, int]
    """How often it came by each point."""
    holds: dict[str, Any]
    """What its folder holds."""


def _wait_for_another_second(folder: Path) -> None:
    """TensorBoard orders the files of a run by the second in their names, which no real resume shares with its run."""
    stamps = [int(path.name.split(".")[3]) for path in (folder / "tracking").glob("events.out.tfevents.*")]
    while stamps and int(time.time()) <= max(stamps):
        time.sleep(0.05)


def train(values: dict[str, Any], aims: dict[str, int], told: str) -> None:
    """The process of a run.

    Args:
        values: the configuration.
        aims: point -> at which of its times there it kills itself; 0: it counts them.
        told: a file that it makes when it begins; at its end it says there how long it took, and what it came by.
    """
    os.setpgrp()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", KLWarning)
    counts = {name: Aim(at) for name, at in aims.items()}
    for name, aim in counts.items():
        POINTS[name](aim)
    started = time.perf_counter()
    Path(told).touch()
    train_run(TrainConfig.from_flat(values))
    seconds = time.perf_counter() - started
    Path(told).write_text(
        json.dumps({"seconds": seconds, "passed": {name: aim.passed for name, aim in counts.items()}})
    )
