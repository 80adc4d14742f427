#!/usr/bin/env python3
"""The golden numbers: freeze them again (`write`), or compare sampled runs of two commits (`compare OLD [NEW]`).

    PYTHONPATH=src:. .venv/bin/python scripts/golden.py write [KIND ...]      tests/golden/*.json
    PYTHONPATH=src:. .venv/bin/python scripts/golden.py compare OLD [NEW]     exit status 1 on a difference

`write` keeps the cases of a file and computes their numbers again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def rounded(x: Any) -> Any:
    """Numbers with 12 significant digits, wherever they stand."""
    if isinstance(x, dict):
        return {name: rounded(each) for name, each in x.items()}
    if isinstance(x, list):
        return [rounded(each) for each in x]
    return float(f"{x:.12g}") if isinstance(x, float) else x


def write_lines(file: Path, opened: str, lines: list[str], closed: str) -> None:
    file.write_text(opened + "\n" + ",\n".join(lines) + "\n" + closed + "\n", encoding="utf-8")
    print(f"{file.relative_to(ROOT)}: {len(lines)} entries, {file.stat().st_size / 1000:.0f} kB")


def write(kinds: list[str]) -> None:
    """Freeze the numbers of these kinds; without one, of all."""
    from tests.golden import adapter
    from tests.golden.worlds import FOLDER

    def text(x: Any) -> str:
        return json.dumps(rounded(x), separators=(",", ":"))

    for kind in kinds or ["grpo_loss", "tinker", "verl", "unsloth", "trl", "ends", "verify", "alarms"]:
        file = FOLDER / f"{kind}.json"
        if kind == "verify":
            rows = [f'"{name}":{text(each)}' for name, each in adapter.proofs().items()]
            write_lines(file, "{", rows, "}")
        elif kind == "alarms":
            runs = {record: adapter.alarms(record) for record in adapter.recorded_runs()}
            stay = json.loads(file.read_text("utf-8"))["stay"]
            known = {"stay": stay, "known": sorted(adapter.known_alarms()), "runs": runs}
            write_lines(file, "{", [f'"{name}":{text(each)}' for name, each in known.items()], "}")
        else:
            run = adapter.end if kind == "ends" else getattr(adapter, kind)
            cases = [case | {"is": run(case)} for case in json.loads(file.read_text("utf-8"))]
            write_lines(file, "[", [text(case) for case in cases], "]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("kinds", nargs="*")
    options = parser.parse_args()
    write(options.kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
