"""`python -m tests.recorded [NAME ...] [--seeds N] [--threads N]`: trains the planted runs and writes their records.

With --seeds it writes nothing: it trains each run with so many seeds, says what was found in each, and exits with 1 if
any of them does not show what it must.
"""

from __future__ import annotations

import argparse  # noqa: TID251  (a program of its own)
import tempfile
import time
import warnings
from pathlib import Path

import tests.conftest  # noqa: F401  (the surroundings of the tests: one model cache, no network)
import torch
from tests.base_model import taught
from tests.recorded.plants import RECORDED, RUNS, train
from tests.recorded.record import FOLDER, write

from klamp.errors import KLWarning


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description="Train the planted runs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which runs; none: all that are recorded")
    parser.add_argument("--seeds", type=int, default=0, help="write nothing, and try so many seeds of each")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in RUNS]
    if unknown:
        parser.error(f"no run is called {', '.join(unknown)}; there are {', '.join(RUNS)}")
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", KLWarning)
    taught()
    names = given.names or RECORDED
    if given.seeds:
        missed = [_tried(name, seed) for name in names for seed in range(given.seeds)]
        return int(any(missed))
    for name in names:
        _recorded(name)
    return 0


def _recorded(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "run", FOLDER / name, train(RUNS[name], Path(folder)))
    size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
    print(f"{name}: {size / 1000:.0f} kB", flush=True)


def _tried(name: str, seed: int) -> bool:
    """Whether a seed of a run does not show what it must."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        diagnosis = train(RUNS[name], Path(folder), seed=seed)
    misses = RUNS[name].misses(diagnosis)
    found = ", ".join(f"{each.alarm.name} {each.first_step}" for each in diagnosis.findings)
    told = "; ".join(misses) or "as it must be"
    gain = RUNS[name].gain(diagnosis)
    print(f"{name} seed {seed}: {told} [{found}] gain {gain:.3f} {time.monotonic() - started:.1f} s", flush=True)
    return bool(misses)


if __name__ == "__main__":
    raise SystemExit(main())
