"""The record of a GPU: on a CPU at the smallest sizes; a part that fails or hangs loses no other part's numbers."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import head_cases
from benchmarks.gpu import PAGE, PARTS, Part, read, record

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


def sound(*, small: bool) -> Iterator[dict[str, Any]]:
    yield {"case": "one", "dtype": "float32", "here": 1.0, "cpu": float(small)}


def broken(*, small: bool) -> Iterator[dict[str, Any]]:
    yield from sound(small=small)
    raise RuntimeError("the device | is gone")


def hanging(*, small: bool) -> Iterator[dict[str, Any]]:
    yield from sound(small=small)
    time.sleep(SECONDS)


def test_the_script_writes_every_part_on_a_cpu(tmp_path: Path) -> None:
    command = ["scripts/gpu_record.sh", "--cpu", str(tmp_path)]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "WHEELS": str(tmp_path / "none")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=SECONDS)
    files = [tmp_path / f"{number}-{name}.jsonl" for number, name in enumerate(PARTS, start=1)]
    for file in files:
        head, *lines, last = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert head["command"] == " ".join(command) and head["machine"]["device"] == "cpu"
        assert {"klamp", "torch", "trl"} <= head["machine"]["versions"].keys()
        assert last["ended"] == "done"
        assert lines and not [line for line in lines if "error" in line]
    lines = [line for line in read(files) if "errors" in line]
    assert len(lines) == 16 and all(max(line["errors"].values()) <= line["bound"] for line in lines)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "| agreement | grpo_loss, k3 | float32 | difference to float64:" in page
    assert "| heads | cut-cross-entropy, N 32, H 32, V 1,000 | float32 | skipped:" in page
    assert len([line for line in page.splitlines() if line.startswith("| ---")]) == 1


def test_a_part_that_fails_or_hangs_loses_no_other_numbers(tmp_path: Path) -> None:
    functions = (("broken", 200), ("hanging", 40), ("sound", 200))
    parts = {name: Part(f"tests.benchmarks.test_gpu:{name}", limit) for name, limit in functions}
    (tmp_path / "3-sound.jsonl").write_text("of an earlier run\n", encoding="utf-8")
    *files, page = record(tmp_path, small=False, parts=parts)
    ended = [line["ended"] for line in read(files) if "ended" in line]
    assert ended[0].startswith("failed (exit code 1): Traceback") and ended[0].endswith("the device | is gone")
    assert ended[1:] == ["stopped at its limit of 40 s", "done"]
    assert [line["case"] for line in read(files) if "case" in line] == ["one"] * 3
    assert "the device \\| is gone" in page.read_text(encoding="utf-8")


def test_no_part_starts_without_time_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    *files, _ = record(tmp_path, small=True, parts={"sound": PARTS["run"]}, seconds=0)
    with files[0].open("a", encoding="utf-8") as stream:
        stream.write('{"case": "cut o')
    lines = read(files)
    assert [line.get("ended") for line in lines] == [None, "not started: no time was left"]


def test_a_comparison_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head_cases.MODULES, "TRL kl", "no_such_package")
    assert "no_such_package cannot be imported (ModuleNotFoundError" in head_cases.unavailable("TRL kl")
    assert head_cases.unavailable("linear_kl") == ""
