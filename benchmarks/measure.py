"""How everything here is measured: each run in a process of its own, memory by the operating system's accounting."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from klamp._version import __version__

PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "accelerate")


class Peak:
    """Peak memory above what was held at the start: that of the process, or the accelerator's own count."""

    def start(self) -> None:
        """What is held from here on counts; the process's peak starts anew where Linux lets it."""
        if _cuda():
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated() / 2**20
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.held = _resident_mib()

    def extra_mib(self) -> float:
        """The peak since the start in MiB."""
        if _cuda():
            import torch

            return torch.cuda.max_memory_allocated() / 2**20 - self.held
        return max(0.0, peak_mib() - self.held)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def peak_mib() -> float:
    """The most memory that this process has held.

    Linux's VmHWM, and not ru_maxrss, which is never less than what the process that started this one held then.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))


def _resident_mib() -> float:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def wait_for_gpu() -> None:
    """Return once the GPU, if there is one, has done what it was given."""
    if _cuda():
        import torch

        torch.cuda.synchronize()


def timed(run: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Seconds of each repeat, elapsed and of the CPU (all threads), and extra peak memory in MiB."""
    peak = Peak()
    peak.start()
    seconds, cpu = [], []
    for _ in range(repeats):
        start, busy = time.perf_counter(), time.process_time()
        run()
        wait_for_gpu()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    return {"seconds": seconds, "cpu_seconds": cpu, "extra_mib": peak.extra_mib()}


def isolated(
    target: str, arguments: Mapping[str, Any], *, threads: int = 2, python: str = sys.executable
) -> dict[str, Any]:
    """`module:function(**arguments)` in a fresh process of an interpreter; its result, with threads and load average.

    Raises:
        RuntimeError: the process failed; with the end of its messages.
    """
    command = [python, "-m", "benchmarks.measure", target, json.dumps(dict(arguments))]
    threads, environment = surroundings(threads)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{target} failed with {arguments}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"threads": threads, "load": os.getloadavg()[0]}


def surroundings(threads: int = 2) -> tuple[int, dict[str, str]]:
    """How many threads a measured process has, `OMP_NUM_THREADS` or what is given, and its environment."""
    threads = int(os.environ.get("OMP_NUM_THREADS", threads))
    return threads, os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def rounds(runs: Mapping[str, Callable[[], dict[str, Any]]], count: int) -> dict[str, list[dict[str, Any]]]:
    """Every run `count` times in turn, so that a slow minute of the machine falls on all of them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            found[name].append(run())
    return found


def pooled(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The runs of one case as one: all seconds, the highest memory, the highest load; a floor has no memory."""
    found = dict(results[0])
    for name in {"seconds", "cpu_seconds", "sampling_seconds"} & found.keys():
        found[name] = [value for result in results for value in result[name]]
    for name in {"extra_mib", "load"} & found.keys():
        found[name] = max(result[name] for result in results)
    if "phases" in found:
        found["phases"] = {name: [v for result in results for v in result["phases"][name]] for name in found["phases"]}
    return found


def middle(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range as text."""
    return f"{middle(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine() -> dict[str, Any]:
    """What the numbers were taken on, and with which versions."""
    versions = {"klamp": __version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    """The processor's name as Linux gives it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _main() -> None:
    """`python -m benchmarks.measure module:function JSON`: the other side of `isolated`."""
    import importlib

    import torch

    target, arguments = sys.argv[1:]
    module, _, function = target.partition(":")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    print(json.dumps(result))


if __name__ == "__main__":
    _main()
