"""Where a person waits: for the first step, for the report and the doctor of a long run, for each run of an ablation.

Each command is a process of its own, as a person starts it; its peak memory is what the operating system counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import klamp
from benchmarks.measure import middle, spread, surroundings
from benchmarks.records import Benchmark, table
from benchmarks.step_model import TOKENIZER, make_model, write_prompts

STEPS, WRITTEN, LOG_BYTES = 5000, 10, 10**9
"""Steps of the long run, completions that each step writes, and the size of the long log."""
QUICK_STEPS, QUICK_LOG_BYTES = 50, 10**6
RUNS, QUICK_RUNS = 4, 2
"""Runs of the ablation, each of one step."""
COMMANDS = (
    "libraries alone",
    "klamp --help",
    "klamp train --dry-run",
    "klamp train, to the end of step 1",
    "klamp report",
    "klamp doctor",
    "JSON of the log alone",
    "klamp doctor, a log of completions",
    "klamp ablate",
)
SHORT, REPEATS = 4, 3
"""So many of the first ones are run so often; those on long records once."""
CPU = ("--cpu", "--report_to", "none")
LIBRARIES = "import torch, accelerate; from transformers import AutoTokenizer, Qwen2ForCausalLM"
JSON_ALONE = "import json, sys\nfor line in open(sys.argv[1], 'rb'): json.loads(line)"


def run(quick: bool) -> dict[str, Any]:
    """Every command, the short ones several times."""
    repeats = 1 if quick else REPEATS
    with tempfile.TemporaryDirectory() as folder, _compiled(Path(folder) / "compiled"):
        here = Path(folder)
        arguments = _setting(here)
        long = _long_run(here, arguments, QUICK_STEPS if quick else STEPS)
        log = _long_log(here, long, QUICK_LOG_BYTES if quick else LOG_BYTES)
        calls: tuple[Callable[[int], dict[str, Any]], ...] = (
            lambda i: _python("-c", LIBRARIES),
            lambda i: _klamp("--help"),
            lambda i: _klamp("train", *arguments, "--dry-run"),
            lambda i: _first_step(here / f"first-{i}", arguments),
            lambda i: _klamp("report", str(long)) | {"output_bytes": _bytes_of(long / "report.html")},
            lambda i: _klamp("doctor", str(long), failing=True),
            lambda i: _python("-c", JSON_ALONE, str(log)),
            lambda i: _klamp("doctor", str(log), failing=True),
            lambda i: _ablation(here, arguments, QUICK_RUNS if quick else RUNS),
        )
        measured = {
            name: _often(repeats if number < SHORT else 1, call)
            for number, (name, call) in enumerate(zip(COMMANDS, calls, strict=True))
        }
        sizes = {"run": _bytes_of(long / "completions.jsonl"), "log": _bytes_of(log), "steps": _lines_of(long)}
    return {"sizes": sizes, "commands": measured}


@contextmanager
def _compiled(folder: Path) -> Iterator[None]:
    """A context that keeps compiled modules, as those of an installed klamp are; klamp's own are there at once."""
    before = dict(os.environ)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    try:
        _python("-m", "compileall", "-q", str(Path(klamp.__file__).parent))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _setting(folder: Path) -> list[str]:
    """The flags of a run on a model that is small enough to cost nothing."""
    make_model(folder / "model", "tiny", max_length=256)
    write_prompts(folder / "prompts.jsonl", count=8, length=8, vocab_size=512)
    given = {
        "model": folder / "model",
        "tokenizer": folder / "model" / TOKENIZER,
        "task": folder / "prompts.jsonl",
        "reward": "benchmarks.step_model:mean_word",
        "prompts_per_step": 2,
        "num_generations": 8,
        "max_completion_length": 64,
        "beta": 0.04,
        "eval_size": 1,
        "save_every": 0,
    }
    return [*CPU, *(str(word) for name, value in given.items() for word in (f"--{name}", value))]


ALONE = """import resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)"""
"""Runs a command from a small process: Linux counts what its parent held when it began as the command's own peak."""


def _often(repeats: int, command: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    found = [command(i) for i in range(repeats)]
    return found[0] | {
        "seconds": [value for each in found for value in each["seconds"]],
        "peak_mib": max(each["peak_mib"] for each in found),
    }


def _klamp(*arguments: str, failing: bool = False) -> dict[str, Any]:
    return _python("-m", "klamp.cli", *arguments, failing=failing)


def _python(*arguments: str, failing: bool = False, until: Callable[[], bool] | None = None) -> dict[str, Any]:
    """Seconds of a command of Python's (until something holds, where that is asked), and its peak memory.

    Raises:
        RuntimeError: it failed, where that is no finding of its own; with the end of its messages.
    """
    with tempfile.TemporaryFile() as said, tempfile.NamedTemporaryFile("r") as peak:
        begin = time.perf_counter()
        words = [sys.executable, "-S", "-c", ALONE, peak.name, sys.executable, *arguments]
        process = subprocess.Popen(words, stdout=said, stderr=said, env=surroundings()[1])
        held: float | None = None
        while until is not None and held is None and process.poll() is None:
            held = time.perf_counter() - begin if until() else None
            time.sleep(0.005)
        code = process.wait()
        seconds = time.perf_counter() - begin if held is None else held
        if code > int(failing) or code < 0:
            said.seek(0)
            raise RuntimeError(f"{' '.join(arguments[:3])} failed:\n{said.read().decode()[-2000:]}")
        return {"seconds": [seconds], "peak_mib": int(peak.read()) / 1024}


def _first_step(folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """From the command to the line of its first step."""

    def written() -> bool:
        with suppress(OSError):
            return b'"reward"' in (folder / "metrics.jsonl").read_bytes()
        return False

    command = ("-m", "klamp.cli", "train", *arguments, "--max_steps", "1", "--output_dir", str(folder))
    return _python(*command, until=written)


def _long_run(folder: Path, arguments: Sequence[str], steps: int) -> Path:
    """The folder of a short run whose lines are written again, under later numbers, as often as there are steps."""
    run = folder / "long"
    _klamp(
        "train", *arguments, "--max_steps", "1", "--log_completions", str(WRITTEN), "--log_completions_every", "1",
        "--output_dir", str(run),
    )  # fmt: skip
    for name in ("metrics.jsonl", "completions.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if not any(key.startswith("eval/") for key in row)]
        with (run / name).open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row | {'step': step})}\n" for step in range(1, steps + 1) for row in rows)
    return run


def _long_log(folder: Path, run: Path, size: int) -> Path:
    """A file of at least `size` bytes with the completions of the long run, its steps counted on."""
    log = folder / "log.jsonl"
    rows = [json.loads(line) for line in _first_lines(run / "completions.jsonl", WRITTEN)]
    written, step = 0, 0
    with log.open("w", encoding="utf-8") as file:
        while written < size:
            step += 1
            written += sum(file.write(f"{json.dumps(row | {'step': step})}\n") for row in rows)
    return log


def _first_lines(file: Path, count: int) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        yield from (line for _, line in zip(range(count), lines, strict=False))


def _ablation(folder: Path, arguments: Sequence[str], runs: int) -> dict[str, Any]:
    """Seconds of an ablation of runs of one step, one after the other."""
    plan = ("--kl_max_log_ratio", "5", "10", "--seeds", str(runs // 2), "--workers", "1", "--max_steps", "1")
    return _klamp("ablate", *arguments, *plan, "--output_dir", str(folder / "ablation")) | {"runs": runs}


def _bytes_of(file: Path) -> int:
    return file.stat().st_size


def _lines_of(run: Path) -> int:
    return sum(1 for _ in (run / "metrics.jsonl").open("rb"))


def text(results: Mapping[str, Any]) -> str:
    """A row per command, and what it comes to."""
    commands, sizes = results["commands"], results["sizes"]
    rows = [(f"`{name}`" if name.startswith("klamp") else name, spread(seen["seconds"]), f"{seen['peak_mib']:,.0f}")
            for name, seen in commands.items()]  # fmt: skip
    log, alone = commands["klamp doctor, a log of completions"], commands["JSON of the log alone"]
    ablation = commands["klamp ablate"]
    lines = [
        f"- The long run has {sizes['steps']:,} steps and {sizes['steps'] * WRITTEN:,} completions "
        f"({sizes['run'] / 1e6:,.0f} MB); its report has {commands['klamp report']['output_bytes'] / 1e6:.2f} MB.",
        f"- The log of completions has {sizes['log'] / 1e6:,.0f} MB. The doctor takes "
        f"{middle(log['seconds']) / middle(alone['seconds']):.1f} times as long as reading its JSON alone, and holds "
        f"{log['peak_mib']:.0f} MiB at most, libraries included; with the long run, a record "
        f"{sizes['log'] / sizes['run']:.1f} times as small, {commands['klamp doctor']['peak_mib']:.0f} MiB.",
        f"- The ablation has {ablation['runs']} runs of one step, one after the other: "
        f"{middle(ablation['seconds']) / ablation['runs']:.1f} s each.",
    ]
    return table(("command", "seconds, median (range)", "peak MiB"), rows) + "\n\n" + "\n".join(lines)


BENCHMARK = Benchmark(
    name="waits",
    title="Where a person waits",
    about="Each command in a process of its own, from its start to its end (or to the line of the first step in "
    "metrics.jsonl), on a random model with two layers whose own work is next to nothing; modules are compiled before, "
    f"as those of an installed klamp are; libraries alone, as any program with a model needs them: `{LIBRARIES}`. "
    "The long run is a short one whose lines were written again under later numbers.",
    run=run,
    text=text,
)
