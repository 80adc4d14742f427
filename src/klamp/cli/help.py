"""The help of every command, from the fields of its options and the texts under them.

A command has one screen of what one sets first, and the rest by section.
"""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING

from klamp.cli.fields import Field, fields_of
from klamp.cli.flags import field_name
from klamp.cli.pages import PAGES, Page
from klamp.errors import unknown_name

WIDTH, COLUMN = 100, 30
"""Most columns of a line, and those before a flag's text."""


def show_help(command: str, argv: Sequence[str] = ()) -> None:
    """Print the help of a command.

    Args:
        command: its name.
        argv: its arguments; the word after `--help`, if there is one, is the part that is asked for.

    Raises:
        UnknownNameError: the help has no such part; names the nearest.
    """
    after = [*itertools.dropwhile(lambda word: word not in ("-h", "--help"), argv)][1:2]
    print(help_text(command, *after))


def help_text(command: str, topic: str = "") -> str:
    """The help of a command as text.

    Args:
        command: its name.
        topic: a section of the configuration, a flag, or `all`, where the command takes the configuration; "": the
            first page.

    Raises:
        UnknownNameError: no such topic; names the nearest.
    """
    page, own = PAGES[command], fields_of(PAGES[command].options)
    head = [f"usage: klamp {command} {page.usage}", "", *_wrap(page.about)]
    head += ["", "examples:", *(f"  {line}" for line in page.examples)]
    if page.first:
        parts = _parts_of_a_run(command, own, page.hidden)
        return "\n".join(_choose(command, topic, parts) if topic else [*head, *_first_page(command, page, parts)])
    words = {name: field for name, field in own.items() if field.word}
    flags = {name: field for name, field in own.items() if not field.word}
    taken = _part("of the evaluation", _taken(page.takes)) if page.takes else []
    lists = [line for title, rows in page.lists.items() for line in ("", f"{title}:", *_rows(rows()))]
    return "\n".join([*head, *_part("arguments", words), *_part("flags", flags), *taken, *lists])


def _taken(names: Sequence[str]) -> dict[str, Field]:
    """Fields of the configuration, by name."""
    from klamp.cli.train_fields import fields

    return {name: fields()[name] for name in names}


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def _wrap(text: str, width: int | None = None) -> list[str]:
    return textwrap.wrap(text, width or _width(), break_on_hyphens=False)


def _parts_of_a_run(command: str, own: Mapping[str, Field], hidden: Collection[str]) -> dict[str, dict[str, Field]]:
    """Heading -> fields: the command's own, then those of the configuration that it takes, by section."""
    from klamp.cli.train_fields import fields

    parts: dict[str, dict[str, Field]] = {command: {**own, "preset": fields()["preset"]}}
    for name, field in fields().items():
        if field.section and name not in hidden:
            parts.setdefault(field.section, {})[name] = field
    return parts


def _first_page(command: str, page: Page, parts: Mapping[str, Mapping[str, Field]]) -> list[str]:
    """The first page of help: the fields that one sets first, a line each, and how to see the others."""
    known = {name: field for part in parts.values() for name, field in part.items()}
    lines = [
        line
        for title, names in page.first.items()
        for line in ("", f"{title}:", *(_short(known[name]) for name in names))
    ]
    counts = ", ".join(f"{title} ({len(part)})" for title, part in parts.items())
    more = f"every flag: klamp {command} --help SECTION, FLAG or all; sections: {counts}"
    return [*lines, "", *_wrap(more)]


def _choose(command: str, topic: str, parts: Mapping[str, Mapping[str, Field]]) -> list[str]:
    """The sections of the help that a reader asked for."""
    from klamp.cli.train_fields import fields_by_any_name
    from klamp.training.config import section_classes

    about = {title: (inspect.getdoc(cls) or "").splitlines()[0] for title, cls in section_classes().items()}
    chosen = parts if topic == "all" else {topic: parts[topic]} if topic in parts else {}
    if chosen:
        return [line for title, part in chosen.items() for line in _part(title, part, about.get(title, ""))][1:]
    known = {name: field for part in parts.values() for name, field in part.items()}
    asked = field_name(topic)
    name = fields_by_any_name()[asked].name if asked in fields_by_any_name() else asked
    if name in known:
        return _part(known[name].section or command, {name: known[name]})[1:]
    why = f"it has {', '.join(parts)}, all, and every flag by its name"
    raise unknown_name(f"part of `klamp {command} --help`", topic, {*parts, *known, "all"}, why=why)


def _part(title: str, fields: Mapping[str, Field], about: str = "") -> list[str]:
    """A section of the help: its heading, and each field in full."""
    entries = [line for field in fields.values() for line in _entry(field)]
    return ["", *_wrap(f"{title}: {about}"), *entries] if entries else []


def _entry(field: Field) -> list[str]:
    """The help of a field in full: names, values, text, default."""
    left = f"{_names(field)} {_values(field)}".rstrip()
    return _rows([(left, " ".join(part for part in (field.text, _default(field)) if part))])


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns, names and texts; the text stands below a name that is too long for its column."""
    lines: list[str] = []
    for left, text in rows:
        beside = textwrap.wrap(text, _width() - COLUMN, break_on_hyphens=False)
        if len(left) + 4 > COLUMN:
            apart = re.sub(r",(?=\S)", ", ", left)  # choices are one long word else, and would be cut anywhere
            lines += textwrap.wrap(
                apart, _width(), initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
            )
        else:
            lines.append(f"  {left}".ljust(COLUMN) + beside.pop(0))
        lines += [" " * COLUMN + line for line in beside]
    return lines


def _short(field: Field) -> str:
    """The help of a field in one line: name, as much of the text as fits, default."""
    left = field.word or f"--{field.name} {'' if field.is_switch else field.kind}"
    default = "" if field.default in (None, "", False, MISSING) else f" ({_written(field.default)})"
    room, text = _width() - COLUMN - len(default), field.text.removesuffix(".")
    clause, names = re.split(r"[.;:](?:\s|$)", text)[0], field.choices or field.suggested
    by_name = f"{clause}: {', '.join(names)}" if names else clause
    texts = [text, re.split(r"[.;](?:\s|$)", text)[0], by_name] if all(name in text for name in names) else [by_name]
    fitting = next((each for each in texts if len(each) <= room), texts[-1])
    return f"  {left}".ljust(COLUMN) + textwrap.shorten(fitting, room, placeholder=" ...") + default


def _names(field: Field) -> str:
    """All flags of a field, its own name first."""
    if field.word:
        return field.word + (" ..." if field.count is None else "")
    off = (f"no_{field.name}",) if field.is_switch else ()
    return ", ".join(f"--{name}" for name in (field.name, *field.aliases, *off))


def _values(field: Field) -> str:
    """The values that follow a field's flag, as the help shows them."""
    if field.is_switch or field.word:
        return ""
    names = field.choices or field.suggested
    if names:
        return f"{{{','.join(names)}}}"
    return f"{field.kind} ..." if field.count is None else " ".join([field.kind] * field.count)


def _default(field: Field) -> str:
    if field.default in (MISSING, None, "", ()) or field.default is False:
        return ""
    return f"(default: {_written(field.default)})"


def _written(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:,}" if isinstance(default, int) and not isinstance(default, bool) else str(default)
