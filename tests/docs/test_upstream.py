"""The reproductions in docs/upstream.md show what their reports say."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from klamp.audit.verdict import Verdict, findings_table

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "upstream.md").read_text(encoding="utf-8")
BEGINNING, *REPORTS = PAGE.split("\n## ")


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
