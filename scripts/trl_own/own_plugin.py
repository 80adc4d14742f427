"""pytest plugin for TRL's own tests: their dataset, the classes under test, and a record of what became of each test.

KLAMP_OWN_CLASSES=klamp puts klamp's GRPOConfig and GRPOTrainer in the place of TRL's before a test module is imported;
KLAMP_OWN_CLASSES=fast does so with `fast_scoring` on wherever a test does not speak of it. KLAMP_OWN_FIRST_STEP=1 has
either class train for one step in float32, likewise, whose gradient norm counts as a loss: the tests' learning rate of
0.1 makes of a difference in the last bit one in the second digit.
KLAMP_OWN_RECORD names the file that gets one line of JSON per test, as each ends: a crash loses the running test only.
KLAMP_OWN_HUBS is the folder that own_hub.py filled; HF_HOME is a folder of the run's own.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset, DatasetDict, IterableDatasetDict
from transformers import Trainer

# How many words of each line of the Zen of Python make a prompt, as one of the tests expects to see them.
WORDS = [4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 2, 1]
TRAINED_ON = 12  # of 14 rows; the dataset that the tests name has 17 of 19
ZEN = "trl-internal-testing/zen"
# Ids of Qwen's written out; and a test that needs an end of turn never to be sampled.
NEEDS_FULL = re.compile(r"\b1516[45]\d\b|_all_masked")

FIRST_STEP = (
    {"bf16": False, "max_steps": 1, "logging_steps": 1} if os.environ.get("KLAMP_OWN_FIRST_STEP") else {}
)  # what a test gets where it does not speak of it

losses: list[str] = []  # of the training runs of the running test


def prompts() -> list[str]:
    """The beginnings of the lines of `import this`, which prints them: hence the silence."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    return [" ".join(line.split()[:count]) for line, count in zip(lines, WORDS, strict=False)]


def zen(config: str) -> DatasetDict:
    """The prompt-only configurations of the dataset that the tests load: plain texts, or one turn of a conversation."""
    if config not in {"standard_prompt_only", "conversational_prompt_only"}:
        raise ValueError(f"{ZEN} is served with prompts only, not {config!r}")
    chat = config == "conversational_prompt_only"
    rows = [[{"role": "user", "content": text}] if chat else text for text in prompts()]
    parts = {"train": rows[:TRAINED_ON], "test": rows[TRAINED_ON:]}
    return DatasetDict({name: Dataset.from_dict({"prompt": part}) for name, part in parts.items()})


def serve_dataset(load: Any) -> Any:
    """datasets.load_dataset, with one name answered from here."""

    def load_dataset(path: str, *names: Any, split: str | None = None, streaming: bool = False, **options: Any) -> Any:
        if path != ZEN:
            return load(path, *names, split=split, streaming=streaming, **options)
        made: Any = zen(*names)
        if streaming:
            made = IterableDatasetDict({name: part.to_iterable_dataset() for name, part in made.items()})
        return made if split is None else made[split]

    return load_dataset


def record_losses(train: Any) -> Any:
    """Trainer.train, with the loss it reports kept to the last bit."""

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        result = train(self, *args, **options)
        losses.append(float(result.training_loss).hex())
        if FIRST_STEP:
            losses.extend(float(row["grad_norm"]).hex() for row in self.state.log_history if "grad_norm" in row)
        return result

    return recorded


def pytest_configure(config: pytest.Config) -> None:
    datasets.load_dataset = serve_dataset(datasets.load_dataset)
    Trainer.train = record_losses(Trainer.train)
    classes = os.environ.get("KLAMP_OWN_CLASSES")
    defaults = dict(FIRST_STEP)
    if classes in ("klamp", "fast"):
        import klamp.trl

        trl.GRPOConfig, trl.GRPOTrainer = klamp.trl.GRPOConfig, klamp.trl.GRPOTrainer
        defaults |= {"fast_scoring": True} if classes == "fast" else {}
    trl.GRPOConfig = with_defaults(trl.GRPOConfig, defaults) if defaults else trl.GRPOConfig


def with_defaults(config: Any, defaults: dict[str, Any]) -> Any:
    """A configuration class with other defaults."""
    fields = [(name, Any, dataclasses.field(default=value)) for name, value in defaults.items()]
    made: Any = dataclasses.make_dataclass("GRPOConfig", fields, bases=(config,))
    made.__module__ = "trl"  # where it is put: pickle looks for it there
    return made


def hub_for(test: Any) -> str:
    """Which of the two caches a test function needs."""
    return "full" if NEEDS_FULL.search(inspect.getsource(inspect.unwrap(test))) else "small"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Function) -> Any:
    """Each test starts with no losses, and finds its models where huggingface_hub looks for them."""
    losses.clear()
    if FIRST_STEP:  # a test without arguments would leave the others in mixed precision
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        AcceleratorState._reset_state(reset_partial_state=True)
    hub = Path(os.environ["HF_HOME"]) / "hub"
    hub.unlink(missing_ok=True)
    hub.symlink_to(Path(os.environ["KLAMP_OWN_HUBS"]) / hub_for(item.function))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The call's report, or whatever ended the test without one."""
    if report.when != "call" and report.passed:
        return
    expected = hasattr(report, "wasxfail")
    outcome = ("xpassed" if report.passed else "xfailed") if expected else report.outcome
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    why = told.strip().splitlines()[-1:]
    line = {"test": report.nodeid, "outcome": outcome, "why": "".join(why)[:300], "losses": list(losses)}
    with Path(os.environ["KLAMP_OWN_RECORD"]).open("a") as record:
        record.write(json.dumps(line) + "\n")
