"""What the documentation shows of the records: `python -m benchmarks page` writes records/benchmarks.md and the README.

Nothing is measured; the newest records under results/ are read. A test holds the page against what this writes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import overhead, step
from benchmarks.measure import middle
from benchmarks.records import RESULTS, Benchmark, newest, stem, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "records" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks: written by `python -m benchmarks page` -->", "<!-- end of benchmarks -->"
PICTURES = ("step", "scale", "controllers")
"""Records whose picture the documentation shows."""

NOTICE = (
    "<!-- Written by `python -m benchmarks page` from benchmarks/results; change what it is made from, not this. -->"
)
INTRODUCTION = """
`python -m benchmarks NAME` measures on your machine what a user would otherwise run, side by side: naive torch, TRL's
GRPOTrainer and its chunked head, Liger's, the matrix products without which there is no gradient, and klamp.

| NAME | what it measures |
|---|---|
| `heads` | output heads, forward and backward: the products alone, naive, row chunks, TRL, Liger, `linear_logprobs` |
| `exact` | the exact KL: all logits against `linear_kl`, over N and V |
| `teachers` | the KL to a teacher: the products alone, Liger, TRL, `linear_kl` exact and over a head of 64 |
| `step` | a whole GRPO step with KL: TRL, `klamp.trl` with `fast_scoring`, `klamp train`, the products alone |
| `floor` | the same against the products alone, over group size, prompt, completion, model and adapter |
| `elsewhere` | the same step with an adapter, in 16 bits, with long completions, with a vocabulary of 151,936 |
| `overhead` | the same step with KL and at beta 0 |
| `batches` | the same step in `klamp.trl` with `fast_scoring`, in micro-batches as klamp cuts it and as TRL does |
| `scale` | heads against N and V, a step against the group size and the prompt's length |
| `references` | what each kind of reference costs in memory |
| `unsloth` | the same step by Unsloth's trainer, in its own environment (`scripts/environment.sh unsloth`) |
| `waits` | where a person waits: the first step, `klamp report`, `klamp doctor`, `klamp ablate` |
| `alarms` | how often the doctor's alarms rise by chance, in drawn runs that are sound, and in twins that are not |
| `controllers` | what each rule of beta did with a `target_kl` (`--seeds N`, `--targets KL ...`) |
| `gpu` | on a GPU: the numbers against the CPU's, `heads`, `step`, `overhead`; `--quick` is a trial on any machine |
| `all` | all of them but `unsloth` and `gpu`; over two hours on two cores |

`--quick` takes small sizes and ends within a minute or so each. `--json` prints the record instead of the table.
`--record` writes JSON, Markdown and a picture to `benchmarks/results/`, named `theme_hardware_yyyymm`, and this page
anew; `--render FILE` writes Markdown and picture of a record again, `python -m benchmarks page` this page alone.
`OMP_NUM_THREADS` is the number of threads, 2 unless set. On a machine with a GPU the same commands run there.

Every run has a process of its own. Peak memory is the operating system's (the highest resident size above what was held
before the first run), on a GPU torch's. Times are medians with their range; the cases take turns, so that a slow
minute of the machine falls on all of them. The load average is noted in each record: take the elapsed times of a busy
machine for nothing. Tests hold the compared heads to the same gradients, and both trainers to the same number of
tokens; no test asserts a time.
""".strip()


def docs_page(benchmarks: Sequence[Benchmark], folder: Path = RESULTS) -> str:
    """docs/records/benchmarks.md."""
    parts = ["# Benchmarks", NOTICE, INTRODUCTION]
    for benchmark in benchmarks:
        record = newest(benchmark.name, folder)
        if record is None:
            continue
        versions = ", ".join(f"{name} {number}" for name, number in record["machine"]["versions"].items())
        found = re.sub(r"^## ", "### ", benchmark.text(record["results"]), flags=re.MULTILINE)
        parts += [f"## {benchmark.title}", benchmark.about, found]
        if benchmark.name in PICTURES:
            parts.append(f"![{benchmark.title}](../benchmarks-{benchmark.name}.png)")
        parts.append(
            f"`{record['command']}`, {record['threads']} threads, {record['date']}; {versions}. "
            f"The record is `benchmarks/results/{stem(record)}.json`."
        )
    return "\n\n".join(parts) + "\n"


def readme_part(folder: Path = RESULTS) -> str:
    """The README's table of whole steps; empty where there is no record of them."""
    whole, cost = newest("floor", folder), newest("overhead", folder)
    if whole is None:
        return ""
    points = [point for point in whole["results"]["points"] if point["over"] in {"prompt", "model"}]
    return _steps(points, cost["results"] if cost else None)


def _steps(points: Sequence[Mapping[str, Any]], cost: Mapping[str, Any] | None) -> str:
    """One line per model and length of prompts; of `points`, those of one size are one."""
    kl: dict[tuple[Any, ...], str] = {}
    for row in overhead.costs(cost) if cost else []:
        seen = row["seen"]
        kl[seen["model"], seen["prompt"], seen["trainer"]] = f"{middle(row['seconds']):.2f} s"
    rows = []
    for pair in step.pairs(points):
        where = (pair["klamp"]["model"], pair["klamp"]["prompt"])
        rows.append(
            (
                f"{where[0]} parameters, prompts of {where[1]}",
                *(_rate(pair, name) for name in step.NAMES),
                *(kl.get((*where, trainer), "") for trainer in ("trl", "klamp")),
            )
        )
    headings = ("GRPO step with KL, tokens/s", *step.NAMES.values(), "of it the KL: TRL", "klamp train")
    return table(headings, rows)


def _rate(pair: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Tokens per second, and how often TRL's that is."""
    rate, stock = step.throughput(pair[name]), step.throughput(pair["trl"])
    return f"{rate:,.0f}" if name == "trl" else f"{rate:,.0f} ({rate / stock:.1f}×)"


def write(benchmarks: Sequence[Benchmark]) -> list[Path]:
    """Write the page, its pictures, and the README's part where the README has a place for it."""
    PAGE.write_text(docs_page(benchmarks), encoding="utf-8")
    files = [PAGE]
    for name in PICTURES:
        record = newest(name)
        if record is not None:
            files.append(PAGE.parents[1] / f"benchmarks-{name}.png")
            shutil.copy(RESULTS / f"{stem(record)}.png", files[-1])
    readme = README.read_text(encoding="utf-8")
    if BEGIN in readme:
        README.write_text(with_part(readme, readme_part()), encoding="utf-8")
        files.append(README)
    return files


def with_part(readme: str, part: str) -> str:
    """The README with what stands between the two marks replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"
