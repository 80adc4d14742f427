"""Sentences of the doctor: those in a module's source, and whether a record is told one and another is not."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from tests.diagnostics.histories import completion, history_of, look

from klamp.diagnostics.doctor import examine
from klamp.diagnostics.history import History, Row, RunSettings

Pair = tuple[str, str, History, History]
"""An alarm, what it says, a record of which that is true, and one near to it of which it would be false."""
NO_SENTENCES = ("Limit", "DataError")


def templates(module: ModuleType) -> Iterator[str]:
    """Each text of a module with a space in it, as a pattern with a gap for every value; no docstring, no error."""
    tree = ast.parse(inspect.getsource(module))
    passed: set[int] = set()
    for node in ast.walk(tree):
        named = isinstance(node, ast.Call) and getattr(node.func, "id", "") in NO_SENTENCES
        if (
            named
            or isinstance(node, ast.Raise)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ):
            passed |= {id(part) for part in ast.walk(node)}
        if isinstance(node, ast.JoinedStr):
            passed |= {id(part) for part in node.values if isinstance(part, ast.Constant)}
            passed |= {id(part.format_spec) for part in node.values if isinstance(part, ast.FormattedValue)}
    for node in (node for node in ast.walk(tree) if id(node) not in passed):
        parts: list[str] = []
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = [re.sub(r"\{[^}]*\}|\\\d", "\0", node.value)]
        text = "".join(parts)
        if " " in text.replace("\0", "").strip():
            yield ".*?".join(map(re.escape, " ".join(text.split()).split("\0")))


def said(history: History, name: str) -> str:
    """What an alarm says of a record: what was seen when it rose, in hindsight and at the end; the likely causes."""
    found = [each for each in examine(history).findings if each.alarm.name == name]
    seen = [each for finding in found for each in (finding.evidence, finding.later, look(name, history)) if each]
    return "\n".join(text for each in seen for text in (each.text, *each.causes))


def holds(pair: Pair) -> None:
    name, text, true, false = pair
    assert text in said(true, name), said(true, name)
    assert text not in said(false, name)


def uncovered(module: ModuleType, pairs: Sequence[Pair], more: Iterable[tuple[str, str]] = ()) -> list[str]:
    """The sentences of a module that no pair of records tells apart; `more` are texts that were printed, and not."""
    told = [*((said(true, name), said(false, name)) for name, _, true, false in pairs), *more]
    return [
        each for each in templates(module) if not any(re.search(each, a) and not re.search(each, b) for a, b in told)
    ]


def written(rows: Sequence[dict[str, Any]], step: int = 1, told: RunSettings | None = None, **curves: Any) -> History:
    """A run with completions in one step."""
    history = history_of(settings=told, **curves)
    history.add_completions(completion(step, **row) for row in rows)
    return history


def valued(*scores: dict[str, float], **more: Any) -> History:
    """A run that was evaluated every ten steps."""
    history = History(settings=RunSettings(**more))
    history.evaluations = [Row(step=10 * i, metrics=row) for i, row in enumerate(scores)]
    return history
