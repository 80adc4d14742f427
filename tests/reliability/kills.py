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
    """A SIGKILL at one of `POINTS` or `AT_RANDOM`: at this share of the run's time, or of its times at the point."""

    point: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A run of one of `CASES` that is killed; a second blow is for the resumed run."""

    case: str
    blows: tuple[Blow, ...]

    def __str__(self) -> str:
        return f"{self.case}, " + ", then ".join(f"{blow.point} ({blow.share:.2f})" for blow in self.blows)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How many blows met the run alive, and what is not as in the undisturbed run."""

    hits: int
    differs: list[str]


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
            others = [other for other in (*FIRST, *OF_A_RESUME) if case in ONLY.get(other, CASES)]
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
        if case not in self.whole:
            folder = self.folder / "whole" / case.replace(" ", "-")
            code, report = self._run(case, folder, dict.fromkeys(POINTS, 0))
            assert code == 0, f"{case}: the undisturbed run ended with {code}"
            self.whole[case] = Whole(holds=contents(folder), **report)
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
        """Start or resume a run, killed at its nth time at a point or after some seconds; exit code, own report."""
        report = self.folder / "told.json"
        report.unlink(missing_ok=True)
        settings = {"model": self.model, "output_dir": str(folder), "resume": folder.exists()}
        values = {**COMMON, **CASES[case], **settings}
        _wait_for_another_second(folder)
        child = children.start(train, values, dict(aims or {}), str(report))
        if after is not None:
            children.wait_for(report)
            time.sleep(after)
            with suppress(ProcessLookupError):  # it was faster than the undisturbed one
                os.killpg(child.pid, signal.SIGKILL)
        (code,) = children.end([child])
        return code, json.loads(report.read_text() or "{}")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An undisturbed run: its time, how often it came by each point, what its folder holds."""

    seconds: float
    passed: dict[str, int]
    holds: dict[str, Any]


def _wait_for_another_second(folder: Path) -> None:
    """TensorBoard orders the files of a run by the second in their names, which no real resume shares with its run."""
    stamps = [int(path.name.split(".")[3]) for path in (folder / "tracking").glob("events.out.tfevents.*")]
    while stamps and int(time.time()) <= max(stamps):
        time.sleep(0.05)


def train(values: dict[str, Any], aims: dict[str, int], report: str) -> None:
    """The process of a run: makes the report when it begins, and fills it with its time and points at its end."""
    os.setpgrp()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", KLWarning)
    counts = {name: Aim(at) for name, at in aims.items()}
    for name, aim in counts.items():
        POINTS[name](aim)
    started = time.perf_counter()
    Path(report).touch()
    train_run(TrainConfig.from_flat(values))
    seconds = time.perf_counter() - started
    passed = {name: aim.passed for name, aim in counts.items()}
    Path(report).write_text(json.dumps({"seconds": seconds, "passed": passed}))
