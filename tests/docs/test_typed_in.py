"""Pages typed in line by line: the tutorial prints what it shows, and docs/upstream.md shows what its reports say."""

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.docs.pages import DOCS

from klamp.audit.verdict import Verdict, findings_table
from klamp.doctor.examine import examine
from klamp.doctor.readers import read_record

PAGE = (DOCS / "from-scratch.md").read_text(encoding="utf-8")
STEPS = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE, re.S)
EXACT = 3
"""The first blocks ask no model: what they print is the same on every machine."""


class Session(NamedTuple):
    """What somebody has who followed the page to its end."""

    printed: list[str]
    names: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def session(default_base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("from-scratch")
    names: dict[str, Any] = {}
    printed = []
    with contextlib.chdir(folder):
        for code, _ in STEPS:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, names)
            printed.append(output.getvalue())
    return Session(printed, names, folder)


def form(text: str) -> list[str]:
    """The text without its numbers and the width of its gaps."""
    return re.sub(r"[+-]?\d+(?:\.\d+)?", "#", text).split()


def test_every_block_of_code_shows_what_it_prints() -> None:
    assert len(STEPS) == PAGE.count("```python\n") == PAGE.count("```text\n") == 6


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_a_block_prints_what_the_page_shows(session: Session, number: int) -> None:
    shown = STEPS[number][1]
    if number < EXACT:
        assert session.printed[number] == shown
    assert form(session.printed[number]) == form(shown)


def test_what_the_page_says_of_the_numbers_holds(session: Session) -> None:
    steps, history = session.printed[4].splitlines(), session.names["history"]
    assert steps[0].endswith("KL penalty: 0.0000"), "policy and reference are one model"
    assert "-0.0000" not in "".join(session.printed)
    assert all(each["kl_penalty"] == pytest.approx(0.01 * each["kl/k1"], rel=1e-4, abs=1e-9) for each in history)


@pytest.mark.slow
def test_the_run_of_the_page_learns(session: Session) -> None:
    history = session.names["history"]
    first, last = history[:5], history[-5:]
    assert sum(each["reward"] for each in last) > sum(each["reward"] for each in first)
    assert sum(each["kl/k3"] for each in last) > 0.1


def test_its_record_can_be_examined(session: Session) -> None:
    unchecked = examine(read_record(session.folder / "runs" / "from-scratch")).unchecked
    assert {"kl-spike", "huge-values", "kl-high"}.isdisjoint(unchecked)


BEGINNING, *REPORTS = (DOCS / "upstream.md").read_text(encoding="utf-8").split("\n## ")


def snippet(text: str) -> str:
    return "".join(re.findall(r"```python\n(.*?)```", text, re.S))


@pytest.mark.parametrize("report", REPORTS, ids=[x.partition("\n")[0] for x in REPORTS])
def test_a_reproduction_shows_the_fault(report: str) -> None:
    code, verdicts = snippet(report), list[Verdict]()
    for name in re.findall(r"^from (\w+)", code, re.M):
        pytest.importorskip(name)
    names: dict[str, Any] = {"print": verdicts.append}
    with warnings.catch_warnings(action="ignore"):
        exec(compile(snippet(BEGINNING) + code, "upstream.md", "exec"), names)
    told = re.search(r"`klamp.check` reports (.*?)[.,\n]", report)
    assert told and len(verdicts) == 1
    codes = [x for x in re.findall(r"`([a-z-]+)`", told[1]) if x in findings_table()]
    assert codes and {*codes} & {*verdicts[0].codes()}, str(verdicts[0])
    assert "Fix: " in report and re.search(r"^- Places?: `", report, re.M)
