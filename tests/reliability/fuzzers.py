"""The tests that draw their inputs, and how many each of them draws in `make test`; nothing is drawn here."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Any

MODULES = {
    "tests.reliability.test_fuzz_core": "functions of the core: log-ratios to 1e5, every data type, infinities, masks, "
    "strides, empty axes",
    "tests.reliability.test_fuzz_command_line": "command lines, configuration files, plans",
    "tests.reliability.test_fuzz_data": "files of prompts and answers",
    "tests.reliability.test_fuzz_records": "records that doctor, report and a resume read, checkpoints, outcomes",
    "tests.training.test_vllm_reference": "what a vLLM server answers, over HTTP",
    "tests.reliability.test_metamorphic": "the whole objective, whose value may not change: padding, order, "
    "micro-batches, masked tokens; and scales in beta",
}
"""Where they are -> what is drawn there."""


def drawn(module: str) -> dict[str, int]:
    """The tests of a module that draw inputs -> how many, over all of their cases."""
    found = {name: test for name, test in vars(import_module(module)).items() if name.startswith("test_")}
    counts = {name: _each(test) * _cases(test) for name, test in found.items()}
    return {name: count for name, count in counts.items() if count}


def _each(test: Callable[..., Any]) -> int:
    """How many inputs a test draws in one case, by its settings, or by those of the test inside it."""
    if hasattr(test, "hypothesis"):
        return getattr(test, "_hypothesis_internal_use_settings").max_examples  # noqa: B009 - it has no other name
    calls = (
        node for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(test)))) if isinstance(node, ast.Call)
    )
    return sum(ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "examples")


def _cases(test: Callable[..., Any]) -> int:
    marks = (mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize")
    return math.prod(len(list(mark.args[1])) for mark in marks)


def text() -> str:
    """What the page says of them."""
    counts = {module: drawn(module) for module in MODULES}
    total, tests = sum(sum(each.values()) for each in counts.values()), sum(map(len, counts.values()))
    rows = [
        f"| {MODULES[module]} | `{module.replace('.', '/')}.py` | {len(each)} | {sum(each.values()):,} |"
        for module, each in counts.items()
    ]
    return "\n".join(
        (
            f"**{total:,}** inputs in {tests} tests, at each `make test`; `KLAMP_FUZZ=20 make fuzz` draws twenty times "
            "as many, and others, where the file is one of `tests/reliability`.",
            "",
            "| what is drawn | where | tests | inputs |",
            "| --- | --- | --- | --- |",
            *rows,
        )
    )
