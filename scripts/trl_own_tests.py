#!/usr/bin/env python3
"""TRL's own tests of GRPO, once with TRL's classes and once with klamp's in their place, compared test by test.

    scripts/trl_own_tests.py CHECKOUT [--python .venv-oldest/bin/python] [-k EXPR] [--fast_scoring] [--first_step]

CHECKOUT is TRL's repository: a folder with tests/ in it, or a git directory (a revision of it by --revision). It should
be of the version that the environment holds; TRL's releases come without tests, so there is nothing to fetch them from.
Nothing is downloaded: the models and the dataset that the tests name are made here, and what cannot be made fails the
same way in both runs. Exit status 1: a test passes with TRL's class and not with klamp's.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ROOT / "scripts" / "trl_own"
SUITE = "tests/test_grpo_trainer.py"
PASSES = {"passed", "xfailed"}  # what pytest counts as no failure, a test that ran to its end
MISSING = "not run"


@dataclass(frozen=True)
class Result:
    """What became of a test: pytest's outcome, the last line of why, and the losses its trainings reported."""

    outcome: str
    why: str = ""
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same tests.

    Attributes:
        counts: outcome -> (how many in the stock run, how many in the other).
        differences: one line per test whose outcomes differ.
        lost: the tests among them that pass in the stock run only.
        trained: how many tests that pass in both reported losses.
        other_losses: those among them whose losses are not the same to the last bit.
        far_losses: those among them with a loss that is further away than 1e-5 of it.
    """

    counts: dict[str, tuple[int, int]]
    differences: list[str]
    lost: list[str]
    trained: int
    other_losses: list[str]
    far_losses: list[str]


def compare(stock: dict[str, Result], other: dict[str, Result]) -> Comparison:
    """Test by test, by name; a test that only one run knows did not run in the other."""
    absent = Result(MISSING)
    names = list(dict.fromkeys([*stock, *other]))
    pairs = {name: (stock.get(name, absent), other.get(name, absent)) for name in names}
    differ = {name: pair for name, pair in pairs.items() if pair[0].outcome != pair[1].outcome}
    both = {name: pair for name, pair in pairs.items() if all(result.outcome == "passed" for result in pair)}
    trained = {name: pair for name, pair in both.items() if any(result.losses for result in pair)}
    first, second = (Counter(pair[side].outcome for pair in pairs.values()) for side in (0, 1))
    return Comparison(
        counts={outcome: (first[outcome], second[outcome]) for outcome in sorted(first | second)},
        differences=[
            f"{name}: {a.outcome} -> {b.outcome} {b.why or a.why}".rstrip() for name, (a, b) in differ.items()
        ],
        lost=[name for name, (a, b) in differ.items() if a.outcome in PASSES and b.outcome not in PASSES],
        trained=len(trained),
        other_losses=[name for name, (a, b) in trained.items() if a.losses != b.losses],
        far_losses=[name for name, (a, b) in trained.items() if not _near(a.losses, b.losses)],
    )


def _near(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Whether losses, written bit for bit, differ by 1e-5 of them at most."""
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(ours, theirs, strict=False)]
    return len(ours) == len(theirs) and all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in pairs)


def read_record(path: Path) -> dict[str, Result]:
    """The plugin's lines: the last word on a test counts, but a failure (of its teardown) is not talked away."""
    results: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        said = json.loads(line)
        result = Result(said["outcome"], said["why"], tuple(said["losses"]))
        if said["test"] not in results or results[said["test"]].outcome != "failed":
            results[said["test"]] = result
    return results


def report(comparison: Comparison) -> str:
    """What a person wants to read of it."""
    lines = [f"{'':12}{'stock':>8}{'drop-in':>10}"]
    lines += [f"{outcome:12}{a:>8}{b:>10}" for outcome, (a, b) in comparison.counts.items()]
    lines += ["", f"different outcomes: {len(comparison.differences)}", *comparison.differences]
    same = comparison.trained - len(comparison.other_losses)
    lines += [f"tests that train and pass in both: {comparison.trained}; the same losses to the last bit: {same}"]
    lines += [f"to 1e-5: {comparison.trained - len(comparison.far_losses)}"]
    lines += [f"other losses: {name}" for name in comparison.far_losses or comparison.other_losses]
    lines += [f"passes with TRL's class and not with klamp's: {len(comparison.lost)}", *comparison.lost]
    return "\n".join(lines)


def place_tests(checkout: Path, revision: str, folder: Path) -> None:
    """Put the tests/ of a checkout, or of a revision of a git directory, into a folder."""
    if (checkout / "tests").is_dir():
        shutil.copytree(checkout / "tests", folder / "tests")
        return
    archive = subprocess.run(
        ["git", "--git-dir", str(checkout), "archive", revision, "tests"], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The variables of a run: one thread, no network, the plugin at hand."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, **own, "HF_HOME": str(folder), **more}


def run_tests(folder: Path, classes: str, options: argparse.Namespace) -> dict[str, Result]:
    """One pytest process over TRL's file, with one pair of classes."""
    home, record = folder / f"home-{classes}", folder / f"{classes}.jsonl"
    home.mkdir()
    variables = environment(
        home, KLAMP_OWN_CLASSES=classes, KLAMP_OWN_RECORD=str(record), KLAMP_OWN_HUBS=str(folder / "hubs")
    )
    variables |= {"KLAMP_OWN_FIRST_STEP": "1"} if options.first_step else {}
    command = [options.python, "-m", "pytest", "-p", "own_plugin", "-p", "no:cacheprovider", "-q", "--tb=short", SUITE]
    command += ["--basetemp", str(folder / f"files-{classes}"), "--timeout", str(options.timeout), "-k", options.k]
    with (folder / f"{classes}.log").open("w") as log:
        subprocess.run(command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
    shutil.rmtree(folder / f"files-{classes}", ignore_errors=True)
    return read_record(record)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--revision", default="HEAD", help="of a git directory without a work tree")
    parser.add_argument("--python", default=str(ROOT / ".venv-oldest" / "bin" / "python"))
    parser.add_argument("-k", default="", metavar="EXPR", help="pytest's own -k")
    parser.add_argument("--fast_scoring", action="store_true", help="klamp's class with fast_scoring on")
    parser.add_argument("--first_step", action="store_true", help="both train for one step in float32")
    parser.add_argument("--timeout", type=int, default=300, help="seconds per test")
    parser.add_argument("--keep", type=Path, help="a new folder for the logs and records; without it they are removed")
    options = parser.parse_args()
    options.python = str(Path(options.python).absolute())
    return options


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="trl-own-") as temporary:
        folder = Path(temporary)
        place_tests(options.checkout, options.revision, folder)
        variables = environment(folder, KLAMP_OWN_HUBS=str(folder / "hubs"))
        subprocess.run([options.python, PLUGIN / "own_hub.py"], env=variables, stderr=subprocess.DEVNULL, check=True)
        stock, other = (
            run_tests(folder, classes, options) for classes in ("stock", "fast" if options.fast_scoring else "klamp")
        )
        if options.keep:
            options.keep.mkdir(parents=True)
            for path in [*folder.glob("*.log"), *folder.glob("*.jsonl")]:
                shutil.copy(path, options.keep)
        if not stock:
            print((folder / "stock.log").read_text()[-4000:], file=sys.stderr)
            return 2
    comparison = compare(stock, other)
    print(report(comparison))
    return 1 if comparison.lost else 0


if __name__ == "__main__":
    sys.exit(main())
