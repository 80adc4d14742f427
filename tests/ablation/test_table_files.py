"""The table as CSV and LaTeX: every number whole in the one, letters that LaTeX takes in the other."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.ablation.outcomes import failed, outcome, sweep

from klamp.ablation.table import summarise
from klamp.ablation.table_files import csv_text, latex_text

BETAS = [{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.1}]


def test_csv_has_every_number_of_every_seed() -> None:
    runs = [*sweep(BETAS), failed('a, "b"')]
    rows = list(csv.DictReader(io.StringIO(csv_text(summarise(runs)))))
    found = {(row["arm"], row["name"] if "name" in row else row["number"], int(row["seed"])): row for row in rows}
    for run in runs:
        for name, value in run.numbers.items():
            assert float(found[run.arm, name, run.seed]["value"]) == value, "not rounded"
    assert found["beta=0.01", "kl/reverse", 2]["unit"] == "nats/token"
    assert not [key for key in found if key[0].startswith("a, ")], "a failed run has no numbers"
    assert csv_text(summarise([])).count("\n") == 1


def test_latex_has_a_tabular_per_group_and_the_comparisons() -> None:
    text = latex_text(summarise([*sweep(BETAS), outcome("100% of a_b", 0), outcome("100% of a_b", 1)]))
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 4
    assert r"100\% of a\_b" in text and r"KL(policy$\|$start)" in text
    assert "% Against beta=0.0, seed by seed\n" in text and "t-test with Holm's correction" in text
    for block in re.findall(r"\\begin\{tabular\}\{(l r*|lr*)\}(.*?)\\end", text, re.S):
        rows = [line for line in block[1].splitlines() if line.endswith(r"\\")]
        assert {line.count(" & ") + 1 for line in rows} == {len(block[0])}
    assert "\\" not in latex_text(summarise([])).replace("\n", "")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_latex_takes_it(tmp_path: Path) -> None:
    body = latex_text(summarise(sweep(BETAS)))
    page = r"\documentclass{article}\usepackage{booktabs}\begin{document}" + "\n" + body + r"\end{document}"
    (tmp_path / "page.tex").write_text(page, encoding="utf-8")
    done = subprocess.run(["pdflatex", "-halt-on-error", "page.tex"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
