"""Output heads, forward and backward with both gradients: the matrix products alone, naive logits, klamp's heads.

Every case runs three times in a process of its own. The extra peak memory is what the operating system's peak
(ru_maxrss) is above the memory held before the first run: inputs are not counted, gradients are. CPU seconds (of all
threads) still mean something where other work is running; elapsed seconds do not.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = ("products", "naive", "linear_logprobs", "linear_logprobs, frozen head", "naive kl", "linear_kl")
DTYPES = ("float32", "bfloat16")
SIZES = {True: (256, 256, 32_000), False: (1024, 896, 151_936)}
REPEATS = 3
# Naive KL holds about ten matrices of logits; it is measured on fewer rows.
ROWS_OF_NAIVE_KL = 4


def _naive(hidden: Any, weight: Any, targets: Any) -> Any:
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def make_run(case: str, dtype: str, size: tuple[int, int, int]) -> Callable[[], None]:
    """A function that does one forward and backward pass."""
    import torch

    from klamp import exact_kl, linear_kl, linear_logprobs

    n, h, v = size
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden, weight = torch.randn(n, h).to(kind), torch.randn(v, h, dtype=kind).mul_(h**-0.5)
    targets, factor = torch.randint(v, (n,)), torch.randn(n)
    other = hidden + 0.1 * torch.randn(n, h).to(kind)
    ref_hidden, ref_weight = (other, weight.clone()) if "kl" in case else (hidden, weight)
    tile = torch.randn(n, 4096).to(kind)  # the products alone are formed slice by slice, like any that fit in memory

    def products() -> None:
        d_hidden, d_weight = torch.zeros_like(hidden), torch.empty_like(weight)
        for start in range(0, v, tile.shape[1]):
            some = weight[start : start + tile.shape[1]]
            d = tile[:, : some.shape[0]]
            hidden @ some.t()
            d_hidden += d @ some
            torch.mm(d.t(), hidden, out=d_weight[start : start + tile.shape[1]])

    scorers: dict[str, Callable[[], Any]] = {
        "naive": lambda: _naive(hidden, weight, targets),
        "linear_logprobs": lambda: linear_logprobs(hidden, weight, targets),
        "linear_logprobs, frozen head": lambda: linear_logprobs(hidden, weight, targets),
        "naive kl": lambda: exact_kl(hidden @ weight.t(), ref_hidden @ ref_weight.t()),
        "linear_kl": lambda: linear_kl(hidden, weight, ref_hidden, ref_weight),
    }
    if case == "products":
        return products
    hidden.requires_grad_(True)
    weight.requires_grad_("frozen" not in case)

    def run() -> None:
        hidden.grad = weight.grad = None
        scorers[case]().backward(factor)

    return run


def one(case: str, dtype: str, n: int, h: int, v: int, repeats: int = REPEATS) -> dict[str, Any]:
    """One case in this process: seconds of each repeat, elapsed and of the CPU, and the extra peak memory in MiB."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    run = make_run(case, dtype, (n, h, v))
    before, seconds, cpu = _resident_mib(), [], []
    for _ in range(repeats):
        start, busy = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    threads = torch.get_num_threads()
    return {
        "rows": n,
        "threads": threads,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "extra_mib": peak() - before,
        "load": os.getloadavg()[0],
    }


def _resident_mib() -> float:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measure(case: str, dtype: str, size: tuple[int, int, int]) -> dict[str, Any]:
    """The case in a fresh process."""
    rows = size[0] // ROWS_OF_NAIVE_KL if case == "naive kl" else size[0]
    arguments = [sys.executable, "-m", "benchmarks.heads", case, dtype, str(rows), *map(str, size[1:])]
    environment = {"OMP_NUM_THREADS": "2"} | os.environ
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main(*, as_json: bool, quick: bool) -> None:
    """Measure every case in both types and print the record."""
    import torch

    size = SIZES[quick]
    found = {dtype: {case: measure(case, dtype, size) for case in CASES} for dtype in DTYPES}
    record = {
        "command": "python -m benchmarks heads" + (" --quick" if quick else ""),
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()},
        "size": dict(zip(("rows", "width", "vocab"), size, strict=True)),
        "heads": found,
    }
    print(json.dumps(record, indent=2) if as_json else table(record))


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    lines = [
        "| type | head | rows | seconds, median (range) | CPU seconds | CPU, over products | extra peak MiB | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype, cases in record["heads"].items():
        floor = statistics.median(cases["products"]["cpu_seconds"]) / cases["products"]["rows"]
        for case, seen in cases.items():
            middle, low, high = (f(seen["seconds"]) for f in (statistics.median, min, max))
            cpu = statistics.median(seen["cpu_seconds"])
            ratio = cpu / seen["rows"] / floor
            lines.append(
                f"| {dtype} | {case} | {seen['rows']} | {middle:.2f} ({low:.2f} to {high:.2f}) "
                f"| {cpu:.2f} | {ratio:.2f}× | {seen['extra_mib']:.0f} | {seen['load']:.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    case, dtype, *numbers = sys.argv[1:]
    print(json.dumps(one(case, dtype, *map(int, numbers))))
