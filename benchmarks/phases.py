"""Where a step's time goes: the main thread's stack is looked at every few milliseconds and the CPU time booked.

The phase of a sample is that of the first rule that names a function on the stack, so both trainers are measured alike
and neither is changed. A sampled step is slower than a free one: shares mean something, totals are taken elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType

Rule = tuple[str, str, str]
"""End of a file's name, start of a function's name, phase."""

RULES: dict[str, Sequence[Rule]] = {
    "klamp": (
        ("training/evaluation.py", "evaluate", "outside"),
        ("training/setup.py", "", "outside"),
        ("training/checkpoint.py", "save", "outside"),
        ("training/sampling.py", "generate", "generation"),
        ("training/rollouts.py", "rewards_of", "reward"),
        ("scoring/scorer.py", "_exact", "exact KL"),
        ("training/rollouts.py", "_with_reference", "reference"),
        ("training/rollouts.py", "_with_policy_pass", "policy, before the loss"),
        ("torch/_tensor.py", "backward", "backward"),
        ("training/updates.py", "_step", "optimizer"),
        ("training/updates.py", "update", "forward"),
        ("training/run.py", "_measure", "metrics"),
    ),
    "trl": (
        ("trl/trainer/grpo_trainer.py", "__init__", "outside"),
        ("trl/trainer/grpo_trainer.py", "_generate_single_turn", "generation"),
        ("trl/trainer/grpo_trainer.py", "_calculate_rewards", "reward"),
        ("trl/trainer/grpo_trainer.py", "_compute_loss", "forward"),
        ("torch/_tensor.py", "backward", "backward"),
        ("torch/optim/", "", "optimizer"),
        ("transformers/trainer.py", "_clip_grad_norm", "optimizer"),
        ("trl/trainer/grpo_trainer.py", "_get_per_token_logps", "reference"),
    ),
}
"""Trainer -> rules; the first rule that names any frame of a stack decides, so what holds the others comes last."""


def phase(names: Sequence[tuple[str, str]], rules: Sequence[Rule]) -> str:
    """The phase of a stack of (file, function) in any order."""
    for end, function, found in rules:
        if any(
            (end in file if end.endswith("/") else file.endswith(end)) and name.startswith(function)
            for file, name in names
        ):
            return found
    return "other"


def _stack(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


class Sampler:
    """Samples the thread that made it, from `start` to `stop`."""

    def __init__(self, rules: Sequence[Rule], *, interval: float = 0.004) -> None:
        self.rules, self.interval = rules, interval
        self.phases: Counter[str] = Counter()
        self.places: Counter[tuple[str, str, str]] = Counter()
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; the counters hold CPU seconds."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.process_time()
        while not self._done.wait(self.interval):
            now = time.process_time()
            self.note(list(_stack(sys._current_frames().get(self._main))), now - before)
            before = now

    def note(self, names: Sequence[tuple[str, str]], spent: float) -> None:
        """Book CPU seconds on a stack, innermost frame first."""
        found = phase(names, self.rules)
        self.phases[found] += spent
        for file, name in _own(names):
            self.places[found, file, name] += spent


def _own(names: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The innermost frame, and the innermost of each package of interest, with short file names."""
    seen = set()
    for file, name in names:
        short = file.rpartition("site-packages/")[2].rpartition("src/")[2]
        package = short.partition("/")[0]
        if package not in seen and package in ("klamp", "trl", "transformers", "torch", "accelerate"):
            seen.add(package)
            yield short, name
