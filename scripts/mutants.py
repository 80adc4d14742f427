#!/usr/bin/env python3
"""Mutants of core, config and hosts/common: small mistakes put into the code, each of which a test should notice.

    scripts/mutants.py [--seed 0] [--number 150] [--minutes 45] [--only core/heads/tiles.py] [--record]

Cosmic Ray makes the mistakes: another operator, comparison, number or boolean, a loop that does not run, an exception
that is not caught, a decorator that is gone. A seed draws the places, and at each place one mistake, in a copy of the
package; the checkout is left alone. The test files of the module's name run first, then the others of its folder that
import it. A mistake that nobody could notice is listed, with the reason, in mutants-equivalent.toml. The counts and
what survived, with its diff, are written to build/mutants.md; --record keeps the counts in mutants-record.json and
shows them in docs/records/index.md. Exit status 1: less than 95 % of the others were caught.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import difflib
import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "klamp"
TESTS = ROOT / "tests"
PACKAGES = ("core", "core/heads", "config", "hosts/common")
EQUIVALENT = Path(__file__).with_name("mutants-equivalent.toml")
REPORT = ROOT / "build" / "mutants.md"
RECORD = Path(__file__).with_name("mutants-record.json")
PAGE = ROOT / "docs" / "records" / "index.md"
COMMAND = "make mutants MUTANTS_ARGS=--record"
BEGIN, END = f"<!-- mutants: written by `{COMMAND}` -->", "<!-- end of mutants -->"
OUTCOMES = ("caught", "alive", "equivalent")
CONTRACT = TESTS / "contracts" / "test_public_names.py"
REFUSALS = TESTS / "contracts" / "test_bad_input.py"
SLOW = ("test_logprobs.py",)  # a minute: for the module of exactly its name
TO_CATCH = 0.95

# An operator is replaced by one of its family: across them Python itself refuses most, or compares names by alphabet,
# which would prove no test. `is` for `==` is for the linter to find.
FAMILIES = (
    "Add Sub Mul Div FloorDiv Mod Pow",
    "BitAnd BitOr BitXor",
    "Lt LtE Gt GtE",
    "Eq NotEq",
    "Is IsNot",
    "In NotIn",  # codespell:ignore
)
FAMILY = {name: family for family in FAMILIES for name in family.split()}

Place = tuple[int, int]  # line from 1, column from 0
Key = tuple[str, str, str, str]  # module, operator, line, what it becomes: known by it wherever the line moves to


# --- which mutants there are ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A module with one mistake in it."""

    module: str
    operator: str
    number: int
    """Of the line, from 1."""
    code: str

    @property
    def key(self) -> Key:
        before, after = (code.splitlines()[self.number - 1].strip() for code in (source(self.module), self.code))
        return self.module, self.operator, before, after

    @property
    def diff(self) -> str:
        codes = (code.splitlines(keepends=True) for code in (source(self.module), self.code))
        return "".join(difflib.unified_diff(*codes, *(f"{side}/src/klamp/{self.module}" for side in "ab"), n=1))

    def __str__(self) -> str:
        module, operator, before, after = self.key
        return f"{module}:{self.number} {operator}: {before}  ->  {after}"


@functools.cache
def source(module: str) -> str:
    """The code of a module without a mistake."""
    return (SOURCE / module).read_text(encoding="utf-8")


def modules() -> list[str]:
    """Every module that is looked at, as its path below src/klamp."""
    files = (file for package in PACKAGES for file in (SOURCE / package).glob("*.py") if file.name != "__init__.py")
    return sorted(str(file.relative_to(SOURCE)) for file in files)


def annotations(code: str) -> list[tuple[Place, Place]]:
    """Where annotations stand: they are not run, and pyright reads them."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
    return [((a.lineno, a.col_offset), (a.end_lineno or 0, a.end_col_offset or 0)) for a in found if a is not None]


def is_a_marker(code: str, place: Place) -> bool:
    """Whether the sign there is the bare `*` of a list of parameters, which multiplies nothing."""
    line, column = place
    return code.splitlines()[line - 1][column : column + 2] in ("*,", "*")


def makes_sense(operator: str) -> bool:
    """Whether an operator of Cosmic Ray makes mistakes that a person could make."""
    name, *replaced = operator.rpartition("/")[2].split("_")
    if name in ("ReplaceBinaryOperator", "ReplaceComparisonOperator"):
        return FAMILY.get(replaced[0]) == FAMILY.get(replaced[1], "none")
    return name != "NoOp"


def mistakes(module: str) -> Iterator[tuple[Place, str, int]]:
    """Where in a module which operator can make a mistake, but in annotations: its place, name and how many before."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    types, nodes = annotations(source(module)), list(ast_nodes(get_ast(source(module))))
    for name in filter(makes_sense, plugins.operator_names()):
        operator = plugins.get_operator(name)
        if operator.arguments():
            continue
        positions = (place for node in nodes for place in operator().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not is_a_marker(source(module), start) and not any(first <= start < last for first, last in types):
                yield start, name, occurrence


def draw(names: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """A sample of the mutants of these modules, at most one of each place: many in one place crowd out no other."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    places: dict[tuple[str, Place], list[tuple[str, int]]] = {}
    for module in names:
        for place, operator, occurrence in mistakes(module):
            places.setdefault((module, place), []).append((operator, occurrence))
    generator, found = random.Random(seed), list[Mutant]()
    for module, place in generator.sample(sorted(places), len(places)):
        operator, occurrence = generator.choice(places[module, place])
        code = mutate_code(source(module), plugins.get_operator(operator)(), occurrence)
        if is_python(code):
            found.append(Mutant(module, operator, place[0], code))
        if len(found) == number:
            break
    return found


def is_python(code: str) -> bool:
    """Whether the code can be read at all."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def equivalent() -> dict[Key, str]:
    """The mistakes that nobody could notice, and why."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]
    return {(e["module"], e["operator"], e["line"], e["becomes"]): e["why"] for e in entries}


# --- running the tests ----------------------------------------------------------------------------------------


def stages(module: str) -> list[tuple[str, ...]]:
    """The test files of a module's name, then those of its folder that import it, then those of what imports it.

    Before them the contract of all dataclasses, which are declared in any module; last, for the core, the contract of
    what is handed to its public functions.
    """
    folder, name = Path(module).parent, Path(module).stem
    files = sorted((TESTS / folder).glob("test_*.py"))
    exactly = [file for file in files if file.stem == f"test_{name.lstrip('_')}"]
    quick = [file for file in files if file.name not in SLOW]
    own = [file for file in quick if file.stem.startswith(f"test_{name.lstrip('_')}_")]
    users = [file.stem for file in (SOURCE / folder).glob("*.py") if _imports(file, folder, name)]
    importing = [file for file in quick if _imports(file, folder, name)]
    of_users = [file for file in quick if any(_imports(file, folder, user) for user in users)]
    found, known = list[tuple[str, ...]](), set[Path]()
    before, last = [CONTRACT] if "@dataclass" in source(module) else [], [REFUSALS] if folder == Path("core") else []
    for wanted in (before, exactly + own, importing, of_users, last):
        found.append(tuple(str(file) for file in wanted if file not in known))
        known.update(wanted)
    return [some for some in found if some]


@functools.cache
def _imports(file: Path, folder: Path, name: str) -> bool:
    """Whether a file names a module of a folder of klamp's in one of its imports."""
    package = ".".join(("klamp", *folder.parts))
    lines = re.compile(rf"^from {package}(\.{name} import| import .*\b{name}\b)", re.MULTILINE)
    return lines.search(file.read_text(encoding="utf-8")) is not None


def _in_a_process(files: tuple[str, ...], copy: str) -> None:
    """Runs pytest on the copy of the package, in a session of its own: what it starts can be ended with it."""
    os.setsid()
    os.chdir(ROOT)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    sys.dont_write_bytecode = True  # of two mutants in one second, the second could be taken for the first
    sys.path[:0] = [copy, str(ROOT)]
    # CI: Hypothesis draws the same examples each time and keeps none.
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path[:2]), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    import pytest

    os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files])))


class Workplace:
    """A copy of the package in which one mutant after the other lives, and a process that has loaded torch already."""

    def __init__(self, folder: Path) -> None:
        self.copy = folder
        shutil.copytree(SOURCE, folder / "klamp", ignore=shutil.ignore_patterns("__pycache__"))
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["torch", "pytest", "hypothesis", "beartype", "jaxtyping"])
        self.limit: Callable[[tuple[str, ...]], float] = functools.cache(self._limit)

    def passes(self, files: tuple[str, ...], limit: float | None = None) -> bool:
        """Whether all tests pass; a limit in seconds that is reached is a failure."""
        process = self.processes.Process(target=_in_a_process, args=(files, str(self.copy)))
        process.start()
        process.join(limit)
        if process.is_alive() and process.pid:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return process.exitcode == 0

    def _limit(self, files: tuple[str, ...]) -> float:
        """Three times as long as the tests take without a mistake, and some: the machine may be busy."""
        begin = time.monotonic()
        if not self.passes(files):
            sys.exit(f"these tests fail without a mutant: {' '.join(files)}")
        return 3 * (time.monotonic() - begin) + 20

    def catches(self, mutant: Mutant) -> bool:
        """Whether a test fails on the mutant, or does not end."""
        for files in stages(mutant.module):
            limit, place = self.limit(files), self.copy / "klamp" / mutant.module
            place.write_text(mutant.code, encoding="utf-8")
            noticed = not self.passes(files, limit)
            place.write_text(source(mutant.module), encoding="utf-8")
            if noticed:
                return True
        return False


# --- the whole ------------------------------------------------------------------------------------------------


def share(counts: Mapping[str, int]) -> float:
    """How many of those that a test could notice were caught."""
    return counts["caught"] / max(1, counts["caught"] + counts["alive"])


def record_of(found: list[tuple[Mutant, str]], run: str) -> dict[str, Any]:
    """What a run gave: the counts of each module, and what survived."""
    counts: dict[str, Counter[str]] = {}
    for mutant, outcome in found:
        counts.setdefault(mutant.module, Counter())[outcome] += 1
    modules = {name: {outcome: counts[name][outcome] for outcome in OUTCOMES} for name in sorted(counts)}
    return {"run": run, "modules": modules, "alive": [list(m.key) for m, outcome in found if outcome == "alive"]}


def summary(record: Mapping[str, Any]) -> str:
    """A record as Markdown: the counts, and one row for each module."""
    rows: dict[str, dict[str, int]] = record["modules"]
    total = sum(map(Counter, rows.values()), Counter[str]())
    lines = [f"Run: {record['run']}.", ""]
    lines += [f"Of {total.total()} mutants: " + ", ".join(f"{total[name]} {name}" for name in OUTCOMES) + "."]
    lines += [f"Caught of those that are not equivalent: **{100 * share(total):.1f} %**.", ""]
    lines += [f"| module | {' | '.join(OUTCOMES)} |", "| --- |" + " --- |" * len(OUTCOMES)]
    lines += [f"| {name} | {' | '.join(str(row[outcome]) for outcome in OUTCOMES)} |" for name, row in rows.items()]
    return "\n".join(lines)


def report(found: list[tuple[Mutant, str]], run: str) -> str:
    """What a run gave, as Markdown: its summary, and each survivor's diff."""
    alive = [f"```diff\n{mutant.diff}```" for mutant, outcome in found if outcome == "alive"]
    return "\n".join([summary(record_of(found, run)), *(["", "Alive:", "", *alive] if alive else []), ""])


def text(record: Mapping[str, Any] | None) -> str:
    """What the page says of a record."""
    if record is None:
        return f"No run is recorded yet: `{COMMAND}` writes one."
    alive = [f"- {module}: `{before}` → `{after}`" for module, _, before, after in record["alive"]]
    return "\n".join([summary(record), *(["", "Not noticed:", "", *alive] if alive else [])])


def recorded() -> dict[str, Any] | None:
    """The record that is kept; None: there is none yet."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else None


def page_of(page: str, record: Mapping[str, Any] | None) -> str:
    """The page with its part on the mutants written anew."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{text(record)}\n\n{END}{rest.partition(END)[2]}"


def keep(record: Mapping[str, Any]) -> None:
    """Keep a record, and show it on the page."""
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


def tried(sample: list[Mutant], minutes: float) -> Iterator[tuple[Mutant, str]]:
    """Each mutant and what became of it; after so many minutes no other is begun."""
    begin, known = time.monotonic(), equivalent()
    with tempfile.TemporaryDirectory() as folder:
        workplace = Workplace(Path(folder))
        for n, mutant in enumerate(sample, 1):
            if time.monotonic() - begin > 60 * minutes:
                return
            outcome = "equivalent" if mutant.key in known else "caught" if workplace.catches(mutant) else "alive"
            print(f"{(time.monotonic() - begin) / 60:5.1f} min {n:4}/{len(sample)} {outcome:10} {mutant}", flush=True)
            yield mutant, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument("--number", type=int, default=150, help="how many mutants")
    parser.add_argument("--minutes", type=float, default=45.0, help="after these, no other mutant is begun")
    parser.add_argument("--only", choices=modules(), metavar="MODULE", help="of one, such as core/heads/tiles.py")
    parser.add_argument("--record", action="store_true", help="keep the counts, and show them in docs/records")
    args = parser.parse_args()
    begin, sample = time.monotonic(), draw([args.only] if args.only else modules(), args.number, args.seed)
    found = list(tried(sample, args.minutes))
    minutes = (time.monotonic() - begin) / 60
    words = f"make mutants MUTANTS_ARGS='{' '.join(sys.argv[1:])}'"
    run = (
        f"`{words}`, {datetime.date.today()}, {minutes:.0f} minutes, {len(found)} of the {len(sample)} that were drawn"
    )
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(report(found, run), encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))
    if args.record:
        keep(record_of(found, run))
    sys.exit(share(Counter(outcome for _, outcome in found)) < TO_CATCH)


if __name__ == "__main__":
    main()
