"""What to measure on a GPU in nine minutes, most valuable first; `scripts/gpu_record.sh` is the command.

Each part is a process of its own with its own time limit, and writes its own file of JSON lines: what it was taken on,
then every number as soon as it is there, then how the part ended. A part that fails or takes too long ends alone. The
table of all files, `record.md`, is written again after each part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_parts import result_of
from benchmarks.head_cases import naive_of
from benchmarks.measure import machine, middle
from benchmarks.records import Benchmark, table

SECONDS = 530
"""All parts together end within this time; what is left of nine minutes is the start of the script."""
PATIENCE = 3
"""How many times as long as on a GPU the parts may take in a trial at the smallest sizes, on a CPU that is busy."""
PAGE = "record.md"
COMMAND = "python -m benchmarks gpu"


class Part(NamedTuple):
    """A generator `module:function` of lines, and the seconds after which it is ended."""

    target: str
    limit: float


PARTS: Mapping[str, Part] = {
    "agreement": Part("benchmarks.gpu_parts:agreement", 90),
    "heads": Part("benchmarks.gpu_parts:heads_qwen2", 100),
    "heads-large": Part("benchmarks.gpu_parts:heads_large", 100),
    "step": Part("benchmarks.gpu_parts:step", 160),
    "check": Part("benchmarks.gpu_parts:cost_of_check", 40),
    "run": Part("benchmarks.gpu_parts:run", 40),
}


def record(
    folder: Path, *, small: bool, command: str = COMMAND, parts: Mapping[str, Part] = PARTS, seconds: float = SECONDS
) -> list[Path]:
    """Run every part, each into its file in `folder`; the files, the table last. Earlier files of that name go."""
    folder.mkdir(parents=True, exist_ok=True)
    patience = PATIENCE if small else 1
    deadline = time.monotonic() + seconds * patience
    files = {name: folder / f"{number}-{name}.jsonl" for number, name in enumerate(parts, start=1)}
    for file in files.values():
        file.unlink(missing_ok=True)
    taken_on = {"date": date.today().isoformat(), "command": command, "commit": _commit(), "machine": _machine()}
    for name, part in parts.items():
        limit = min(part.limit * patience, deadline - time.monotonic())
        _append(files[name], {"part": name, "limit_s": round(limit), **taken_on})
        start = time.monotonic()
        ended = _ended(part, files[name], limit, small=small) if limit > 1 else "not started: no time was left"
        _append(files[name], {"part": name, "ended": ended, "seconds_of_part": round(time.monotonic() - start, 1)})
        written = [file for file in files.values() if file.exists()]
        (folder / PAGE).write_text(page(read(written)), encoding="utf-8")
        print(f"{name}: {ended}, {files[name]}", file=sys.stderr, flush=True)
    return [*files.values(), folder / PAGE]


def _machine() -> dict[str, Any]:
    import torch

    return machine() | {"cuda": torch.version.cuda}


def _commit() -> str:
    """The commit that is measured; empty in a folder without git's data."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except OSError:
        return ""


def _append(file: Path, line: Mapping[str, Any]) -> None:
    """Add a line and have it on the disk before going on; the line starts anew where another was cut off."""
    with file.open("a+b") as stream:
        end = stream.seek(0, os.SEEK_END)
        if end:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(json.dumps(line).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def _ended(part: Part, file: Path, limit: float, *, small: bool) -> str:
    """Run a part, with all processes that it starts, for as long as it may; how it ended."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--part",
        part.target,
        str(file),
        *(["--small"] if small else []),
    ]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
        process = subprocess.Popen(command, stdout=messages, stderr=messages, start_new_session=True)
        try:
            code = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"stopped at its limit of {limit:.0f} s"
            raise
        messages.seek(0)
        return "done" if code == 0 else f"failed (exit code {code}): {messages.read()[-1500:].strip()}"


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of all files, each with the name of its part; half a line, of a part that was ended, is left out."""
    lines = []
    for file in files:
        part = file.stem.partition("-")[2]
        for text_line in file.read_text(encoding="utf-8").splitlines():
            try:
                lines.append({"part": part, **json.loads(text_line)})
            except ValueError:
                continue
    return lines


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """The record as one page: what it was taken on, and one table."""
    head = next(line for line in lines if "machine" in line)
    found = head["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    device = found["device"] if found["device"] != "cpu" else f"CPU: {found['processor']}"
    about = (
        f"Command: `{head['command']}`, commit {head['commit'] or 'unknown'}, on {device}; Python {found['python']}, "
        f"CUDA {found['cuda']}, {versions}."
    )
    return f"# klamp on {device}, {head['date']}\n\n{about}\n\n{results_table(lines)}\n"


def results_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row for each number, and one for the end of each part."""
    rows = []
    for line in lines:
        if "ended" in line:
            rows.append((line["part"], "(the part)", "", f"{_cell(line['ended'])}, {line['seconds_of_part']} s"))
        elif "case" in line:
            rows.append((line["part"], _name(line), line["dtype"], _cell(result_of(line) + _over_naive(line, lines))))
    return table(("part", "case", "type", "result"), rows)


def _name(line: Mapping[str, Any]) -> str:
    size = line.get("size")
    return f"{line['case']}, N {size[0]:,}, H {size[1]:,}, V {size[2]:,}" if size else str(line["case"])


def _cell(text_of_line: str) -> str:
    """A text as it may stand in a table."""
    return " ".join(text_of_line.split()).replace("|", "\\|")


def _over_naive(line: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """A head's seconds over those of whole logits at the same size and type."""
    if "size" not in line or "seconds" not in line or line["case"].startswith("naive") or "frozen" in line["case"]:
        return ""
    kind, same = naive_of(line["case"]), ("part", "size", "dtype")
    for other in lines:
        if other.get("case") == kind and "seconds" in other and all(other[x] == line[x] for x in same):
            return f"; {middle(line['seconds']) / middle(other['seconds']):.2f} of naive"
    return ""


def run(quick: bool) -> dict[str, Any]:
    """All parts, as `scripts/gpu_record.sh` runs them.

    Raises:
        SystemExit: there is no GPU, and it is no dry run.
    """
    import torch

    if not (quick or torch.cuda.is_available()):
        raise SystemExit(
            "python -m benchmarks gpu needs a GPU, and torch sees none here.\n"
            "`python -m benchmarks gpu --quick` runs the same program on the CPU at the smallest sizes, as a trial."
        )
    with tempfile.TemporaryDirectory() as folder:
        *files, _ = record(Path(folder), small=quick)
        return {"lines": read(files)}


def text(results: Mapping[str, Any]) -> str:
    """The table."""
    return results_table(results["lines"])


BENCHMARK = Benchmark(
    name="gpu",
    title="klamp on a GPU",
    about="Loss and gradient of `grpo_loss` and the heads against float64 on the CPU; seconds and peak memory of the "
    "heads; a step of `klamp.trl` and one of TRL; the cost of a check; a short run here and on the CPU. Each part has "
    "a time limit. `scripts/gpu_record.sh` writes every number at once, as JSON lines.",
    run=run,
    text=text,
)


def _run_part(target: str, file: Path, *, small: bool) -> None:
    module, _, function = target.partition(":")
    for line in getattr(importlib.import_module(module), function)(small=small):
        _append(file, line)


def main() -> None:
    """`python -m benchmarks.gpu FOLDER [--small]`; with `--part`, the process of one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("path", type=Path, help="folder of the record")
    parser.add_argument("--small", action="store_true", help="the smallest sizes")
    parser.add_argument("--part", metavar="MODULE:FUNCTION", help="write the lines of this part to the file PATH")
    parser.add_argument("--command", default=COMMAND, help="what the record names as its command")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part's processes end, too
    if asked.part:
        _run_part(asked.part, asked.path, small=asked.small)
    else:
        record(asked.path, small=asked.small, command=asked.command)


if __name__ == "__main__":
    main()
