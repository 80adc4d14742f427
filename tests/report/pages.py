"""Runs to report, and pages as trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from tests.diagnostics.histories import completion, history_of

from klamp.doctor.examine import examine
from klamp.doctor.history import Completion, Details, Row, RunSettings
from klamp.report.run import ReportRun

VOID = ("meta", "input", "link", "br")


@dataclass
class Node:
    name: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def all(self, name: str = "", *, of: str = "", **attributes: str) -> list[Node]:
        """The elements in it with this name, this class and these attributes."""
        wanted = {key.replace("_", "-"): value for key, value in attributes.items()}
        return [
            node
            for node in self.walk()
            if (not name or node.name == name)
            and (not of or of in node.classes)
            and all(node.attributes.get(key) == value for key, value in wanted.items())
        ]

    def one(self, name: str = "", *, of: str = "", **attributes: str) -> Node:
        (found,) = self.all(name, of=of, **attributes)
        return found

    def walk(self) -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.walk()

    def rows(self) -> list[list[str]]:
        return [[cell.text for cell in row.walk() if cell.name in ("th", "td")] for row in self.all("tr")]


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"{tag} closes {self.open[-1].name}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(page: str) -> Node:
    """A page as a tree; every element in it must be closed in order."""
    builder = _Builder()
    builder.feed(page)
    builder.close()
    assert len(builder.open) == 1, f"{builder.open[-1].name} stays open"
    return builder.open[0]


def run_of(
    *,
    name: str = "run",
    completions: Sequence[Completion] = (),
    scores: Sequence[tuple[int, dict[str, float]]] = (),
    settings: RunSettings | None = None,
    details: dict[str, Any] | None = None,
    source: str = "klamp run",
    **curves: Sequence[float],
) -> ReportRun:
    history = history_of(settings=settings, **curves)
    history.source = source
    history.add_completions(completions)
    history.evaluations = [Row(step=step, metrics=metrics) for step, metrics in scores]
    details = details or {}
    history.config = details.pop("config", {})
    history.details = Details(versions=details.pop("versions", {}))
    return ReportRun(name=name, path=f"runs/{name}", diagnosis=examine(history), **details)


__all__ = ["Node", "completion", "parse", "run_of"]
