"""A long run with long completions: the page stays small and quick to use."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect
from tests.browser.conftest import Open
from tests.report.pages import completion, run_of

from klamp.report.page import LIMIT, render


def test_a_large_record_fits(tmp_path: Path, open_page: Open) -> None:
    n = 900
    rows = [
        completion(
            step=step,
            tokens=[f"Ġword{i % 97}" for i in range(n)],
            policy=[-1.0 - (i * 7919 % 100) / 50 for i in range(n)],
            ref=[-1.0 - (i * 104729 % 100) / 50 - step / 500 for i in range(n)],
            sampler=[-1.0 - (i * 7919 % 100) / 50 for i in range(n)],
            prompt=f"Question {step}",
        )
        for step in range(1, 121)
    ]
    run = run_of(completions=rows, k3=[0.1 + step % 7 for step in range(5000)], reward=[0.5] * 5000)
    file = tmp_path / "report.html"
    file.write_text(render([run]), encoding="utf-8")
    assert 0.9 * LIMIT < file.stat().st_size <= LIMIT
    page = open_page(file)
    cards = page.locator(".completion").count()
    assert 10 < cards < 120
    assert f"{120 - cards} are left out: the page stays below 2 MB" in page.locator("#left-out").inner_text()
    page.get_by_label("Text").fill("Question 120\nword0 word1")
    page.get_by_label("Text").fill("question 120")
    expect(page.get_by_role("status")).to_contain_text("1 of 1 shown")
