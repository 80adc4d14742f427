"""Runs of many kinds, each alone or with others, to ask of every sentence of a report whether it is printed of them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.report.pages import Node, completion, parse, run_of

from klamp.cli.report import read_runs
from klamp.diagnostics.history import Answer, RunSettings
from klamp.diagnostics.metrics import METRICS
from klamp.report.page import LIMIT, render
from klamp.report.run import ReportRun

RECORDED = Path(__file__).parents[1] / "recorded"
NAN = math.nan
READ = ("title", "aria-label")
"""Attributes whose text is read out or shown."""


@dataclass(frozen=True)
class World:
    """Runs, and what their page says."""

    runs: Sequence[ReportRun]
    page: Node
    """Their page."""
    said: Sequence[str]
    """The text of each element of the page, and of the attributes that are read."""

    @property
    def one(self) -> bool:
        """Whether the page is about a single run."""
        return len(self.runs) == 1

    def values(self, *names: str) -> list[dict[int, float]]:
        """The values of these metrics in each run, by step, as its rows have them."""
        return [
            {row.step: row.metrics[name] for row in run.history.rows if name in row.metrics}
            for run in self.runs
            for name in names
        ]

    def logs(self, *names: str) -> bool:
        """Whether some run has logged one of these metrics."""
        return any(map(bool, self.values(*names)))

    def completions(self) -> list[Any]:
        """All that were written, in any run."""
        return [each for run in self.runs for step in run.history.completions.values() for each in step]

    def skills(self) -> list[tuple[int, str, list[tuple[int, float]]]]:
        """(run, skill, (step, score) of each evaluation)."""
        names = [
            (i, s) for i, run in enumerate(self.runs) for s in {s for e in run.history.evaluations for s in e.metrics}
        ]
        rows = [[(e.step, e.metrics[s]) for e in self.runs[i].history.evaluations if s in e.metrics] for i, s in names]
        return [(i, s, found) for (i, s), found in zip(names, rows, strict=True)]


def texts(page: Node) -> Iterator[str]:
    """What a reader of the page sees or hears."""
    for node in page.walk():
        if node.name in ("script", "style"):
            continue
        yield from (node.attributes[name] or "" for name in READ if name in node.attributes)
        if any(isinstance(child, str) for child in node.children):
            yield node.text


def taught(name: str = "a", **changes: Any) -> ReportRun:
    """A run with a teacher, a reference, answers, and another last beta in its configuration than at the start."""
    rows = [completion(step=s, ref=(-1.0, -2.0 - s / 7, -0.5), teacher=(-1.0, -2.5, -0.5)) for s in range(1, 8)]
    each: dict[str, Any] = {"teacher__kl.math": [0.5], "teacher__kl.code": [0.3]}
    run = run_of(
        name=name,
        completions=[*rows, rows[0]],
        k1=[0.0, -0.1, 0.2, 0.1],
        k3=[0.0, 0.1, 0.3, 0.2],
        exact=[0.0, 0.1, 0.2, 0.1],
        teacher__kl=[0.4, 0.3, 0.2, 0.1],
        **each,
    )
    step = {"skill": "addition", "question": "1+1=", "score": 1.0}
    run.history.answers += [Answer(step=s, completion="2", **step) for s in (0, 4)]
    run.history.answers.append(Answer(step=4, completion="two", who="teacher", **step))
    run.history.changes = {2: "beta 0.04 -> 0.01"}
    return replace(run, **changes)


def spiked(name: str = "a", **details: Any) -> ReportRun:
    """A run whose KL jumps after many steps at one place, with what it cost by token."""
    rows = [completion(step=s, ref=(-1.0, -2.0 - s / 7, -0.5), ended=s > 3, prompt="p" * 3000) for s in range(1, 8)]
    values: dict[str, Any] = {"config": {"beta": 0.04}, "versions": {"torch": "2"}}
    return run_of(
        name=name,
        completions=rows,
        scores=[(0, {"addition": 0.5, "reversal": 1.0}), (7, {"addition": 0.9, "reversal": 1.0})],
        settings=RunSettings(rl_skill="addition"),
        details=values | details,
        k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7],
        reward=[0.5] * 7,
        kl__log_ratio_max=[0.1] * 7,
        kl__log_ratio_p99=[0.1] * 7,
    )


def everything() -> ReportRun:
    """A run that logs all that any alarm needs."""
    known = RunSettings(loss_type="grpo", verifier="rules", scale_rewards="std", beta=0.1, prompts=8, eval_size=64)
    rows = [completion(step=s, sampled=[True] * 3, sampler=(-1.0, -2.0, -0.5)) for s in (1, 2)]
    curves: dict[str, Any] = {name.replace("/", "__"): [0.1, 0.1] for name in METRICS}
    return run_of(completions=rows, scores=[(0, {"a": 0.5}), (2, {"a": 0.5})], settings=known, **curves)


def near(name: str = "near") -> ReportRun:
    """A run that is held near its sampler, under a controller with a band."""
    config = {"reference": "sampler", "target_kl": 0.1, "kl_controller": "step", "beta": 0.1}
    config |= {"kl_clip_method": "hard", "kl_clip_threshold": 0.5, "kl_reference_length": 8}
    curves: dict[str, Any] = {"policy__kl_old": [0.1, 0.1], "sampler__k3": [0.0, 0.0], "kl__k3_sequence": [0.1, 0.2]}
    return run_of(name=name, k3=[0.0, 0.1], details={"config": config}, **curves)


def flat(tokens: int, **changes: Any) -> ReportRun:
    """One completion, the policy where its reference is."""
    values = {"tokens": ["a"] * tokens, "policy": [-1.0] * tokens, "ref": [-1.0] * tokens}
    return run_of(completions=[completion(**values | changes)])


def written(folder: Path, name: str, *lines: object) -> Path:
    """A record of another trainer."""
    file = folder / name
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def others(folder: Path) -> dict[str, list[ReportRun]]:
    """What TRL and verl write, as the reader has it; klamp's own recorded runs."""
    (folder / "trl").mkdir()
    log = [
        {"step": 10 * i, "kl": 0.01 * i, "reward": 0.5, "grad_norm": 1.0, "entropy": 0.2, "loss": 0.1}
        for i in range(1, 4)
    ]
    log += [
        {"step": 30, "eval_reward": 0.4, "sampling/sampling_logp_difference/mean": 0.05, "completions/mean_length": 9.0}
    ]
    jump = [{"step": i, "kl": kl} for i, kl in enumerate([0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7], start=1)]
    names = ("actor/kl_loss", "actor/entropy", "response_length/mean", "critic/score/mean", "rollout_corr/kl")
    verl = [{"step": s, "data": dict.fromkeys(names, 0.1) | {"val-core/math/acc/mean@1": 0.3}} for s in range(3)]
    records = {
        "TRL": [written(folder / "trl", "trainer_state.json", {"log_history": log, "global_step": 30})],
        "TRL, spiked": [written(folder, "spiked.json", {"log_history": jump})],
        "verl": [written(folder, "verl.jsonl", *verl)],
        "klamp": [RECORDED / "drift"],
    }
    records["klamp and TRL"] = records["klamp"] + records["TRL"]
    return {name: read_runs(paths) for name, paths in records.items()}


def built() -> dict[str, list[ReportRun]]:
    """The others, from curves."""
    seeds = [run_of(name=f"s{i}", k3=[0.1 * i, 0.2], reward=[0.5, 0.5], details={"group": "s"}) for i in (1, 2)]
    of_klamp = {"config": {"beta": 0.01}}
    blind = run_of(
        name="blind", source="log", settings=RunSettings(beta=None), reward=[0.5, 0.6] * 4, gradient=[0.2] * 8
    )
    held_out = {"kl_after": 0.5, "kl_after_sequence": 2.0}
    position = (-2.0, -2.0, -0.5)
    return {
        "one step": [run_of(reward=[0.5], length=[4.0], length__truncated=[0.0], train__grad_norm=[1.0])],
        "not finite": [run_of(k3=[NAN, NAN, 0.1, 0.2, math.inf] * 2, reward=[NAN, NAN], k1=[0.1, NAN, 0.3])],
        "one not finite": [run_of(k3=[0.1, NAN, 0.3])],
        "no KL": [run_of(settings=RunSettings(beta=0.0), reward=[0.5, 0.6] * 4, beta=[0.0] * 8)],
        "blind": [blind],
        "blind and seen": [blind, run_of(name="seen", k3=[0.0, 0.02, 0.03, 0.03], details=of_klamp)],
        "empty": [run_of(name="empty")],
        "taught": [taught()],
        "taught, at a URL": [taught(config={"teacher_url": "http://host:8000"})],
        "two taught": [taught("a", config={"beta": 0.04}, **held_out), taught("b", config={"beta": 0.1})],
        "spiked": [spiked()],
        "everything": [everything()],
        "spiked twice": [spiked("a", **held_out), run_of(name="b", k3=[0.0] + [0.25] * 9), spiked("c")],
        "taught and not": [taught("a"), run_of(name="b", k3=[0.0, 0.02, 0.03, 0.03])],
        "measured after": [run_of(k3=[0.1] * 12, details={**held_out, **of_klamp})],
        "near": [near()],
        "resumed": [taught(config={"target_kl": 0.1})],
        "seeds": [*seeds, run_of(name="alone", k3=[0.1, 0.2], details={"config": {"beta": 0.1}})],
        "same": [run_of(name=name, k3=[0.1], details={"config": {"beta": 0.1, "output_dir": name}}) for name in "ab"],
        "long": [run_of(k3=[math.sin(i) ** 2 for i in range(1000)], scores=[(20, {"a": 0.5})])],
        "skills kept": [run_of(reward=[0.5] * 37, scores=[(20, {"a": 0.5}), (40, {"a": 0.5})])],
        "one completion": [run_of(completions=[completion(ref=position)])],
        "all at the reference": [flat(5)],
        "very long": [flat(4000)],
        "masked": [flat(3, ref=[-2.0] * 3, trained=[False] * 3)],
        "of the sampler": [flat(3, ref=None, sampler=[-1.5] * 3)],
        "of nobody": [flat(3, ref=None)],
        "many": [run_of(completions=[completion(step=s, ref=(-1.0 - s / 9, -2.0, -0.5)) for s in range(1, 120)])],
    }


SMALL = {"many": 150_000}
"""Worlds whose page has little room: bytes."""


@functools.cache
def worlds() -> dict[str, World]:
    """All of them, by name."""
    with TemporaryDirectory() as folder:
        runs = {**others(Path(folder)), **built()}
    pages = {name: render(each, limit=SMALL.get(name, LIMIT)) for name, each in runs.items()}
    made = {name: parse(page.removeprefix("<!doctype html>")) for name, page in pages.items()}
    return {name: World(runs[name], page, [*texts(page)]) for name, page in made.items()}
