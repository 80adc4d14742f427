"""What every test starts from: shape checks, one thread or OMP_NUM_THREADS, fixed seeds, no network, a shared cache."""

import logging
import os
import random
import re
from pathlib import Path
from typing import Any

# Before anything that reads them is imported; `setdefault`, so that a person can still say otherwise.
ROOT = Path(__file__).resolve().parent.parent
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": str(ROOT / ".cache" / "huggingface"),
    "KLAMP_CACHE": str(ROOT / ".cache" / "klamp"),  # the base model is trained once per checkout
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}.items():
    os.environ.setdefault(name, value)

os.environ.pop("COLUMNS", None)  # workers set it, and klamp's lines and tables are as wide as the terminal

import jaxtyping  # noqa: E402
import tests.typecheck  # noqa: E402, F401

# Must come before klamp is imported: tests can check every annotation of the core at run time, those below do.
jaxtyping.install_import_hook("klamp.core", "tests.typecheck.check")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# Clients of the SDK whose stand-in has ended report each missed heartbeat to stderr, in the tests that run then.
logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.CRITICAL)

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))

# The same examples in every run: what new ones find must not stop a landing. `make fuzz` draws others.
drawn_anew = "KLAMP_FUZZ" in os.environ
hypothesis.settings.register_profile("klamp", deadline=None, print_blob=True, derandomize=not drawn_anew)
hypothesis.settings.load_profile("klamp")


WHOLE_FILE_IS_SLOW = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.M)
LEFT_OUT = {
    "not slow": lambda text: WHOLE_FILE_IS_SLOW.search(text) is not None,
    "slow": lambda text: "mark.slow" not in text,
    "slow and gate": lambda text: "mark.gate" not in text,
    "gate": lambda text: "mark.gate" not in text,
}
"""What the Makefile's targets choose with `-m` -> whether nothing in a test file is among it, by the file's text."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which nothing is chosen is not imported for nothing, in each of the workers."""
    left_out = LEFT_OUT.get(config.option.markexpr)
    if left_out is None or not collection_path.match("test_*.py"):
        return None
    return left_out(collection_path.read_text(encoding="utf-8")) or None


def pytest_configure(config: pytest.Config) -> None:
    """Teach the built-in model from another seed if KLAMP_MODEL_SEED is set, as `make numeric-other-seed` does."""
    if seed := os.environ.get("KLAMP_MODEL_SEED"):
        from klamp.lab.tasks.arithmetic import RECIPE

        RECIPE["seed"] = int(seed)


SHAPES_CHECKED = tuple(ROOT / "tests" / folder for folder in ("core", "scoring"))
"""Where annotations are checked. Elsewhere they are not, as for users: the checks take a quarter of a step's time."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a test and its fixtures: run-time checks of shapes where they belong."""
    checked = any(folder in item.path.parents for folder in SHAPES_CHECKED)
    jaxtyping.config.update("jaxtyping_disable", not checked)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def shapes_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches the run-time shape checks off, as they are for users: for tests of klamp's own refusals."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def default_base_model() -> Path:
    """The folder of the built-in base model."""
    from tests.base_model import taught

    return taught()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line with the number of tests that need code that is not here; `-ra` lists them."""
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("NOT RUN" in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(f"NOT RUN: {count} tests need a package, a wheel or a checkout that is not here")
