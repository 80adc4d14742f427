"""Usable by keyboard and by screen reader, readable in both themes."""

from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.browser.conftest import Open

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")

NAMELESS = """() => Array.from(document.querySelectorAll(
    "a, button, input, select, [tabindex], [role=img], [role=group]"))
  .filter((node) => {
    const labelled = (node.getAttribute("aria-labelledby") ?? "").split(" ").some((id) => document.getElementById(id));
    return !(node.getAttribute("aria-label") || labelled || node.labels?.length || node.textContent.trim());
  })
  .map((node) => node.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["report", "comparison"])
def test_contrast(which: str, scheme: str, request: pytest.FixtureRequest, open_page: Open) -> None:
    page = open_page(request.getfixturevalue(which), color_scheme=scheme)
    page.evaluate("() => { for (const each of document.querySelectorAll('details')) each.open = true; }")
    page.locator(".tokens span").first.focus()
    seen, findings = page.evaluate(CONTRAST)
    assert seen > 500 and findings == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_every_shade(scheme: str, report: Path, open_page: Open) -> None:
    page = open_page(report, color_scheme=scheme)
    page.evaluate("""() => {
      const strip = document.querySelector("#completions .tokens");
      const made = ["p1", "p2", "p3", "p4", "n1", "n2", "n3", "n4", "z", "u", "m", "q"].map((name) => {
        const span = document.createElement("span");
        span.className = name;
        span.textContent = name;
        return span;
      });
      strip.append(...made);
    }""")
    assert page.evaluate(CONTRAST)[1] == []


@pytest.mark.parametrize("which", ["report", "comparison", "hostile"])
def test_everything_has_a_name(which: str, request: pytest.FixtureRequest, open_page: Open) -> None:
    page = open_page(request.getfixturevalue(which))
    assert page.evaluate(NAMELESS) == []


def test_the_keyboard_reaches_everything_in_order(report: Path, open_page: Open) -> None:
    page = open_page(report)
    stops: list[str] = []
    for _ in range(400):
        page.keyboard.press("Tab")
        stop = page.evaluate("""() => {
          const node = document.activeElement;
          if (node === document.body) return "";
          const place = node.closest("section")?.id ?? (node.closest("main") ? "title" : "bar");
          return `${place}|${node.id || node.className || node.tagName}`;
        }""")
        if not stop:
            break
        stops.append(stop)
    assert stops[0].endswith("|skip")
    sections = list(dict.fromkeys(stop.split("|")[0] for stop in stops[1:]))
    assert sections == ["bar", "title", "alarms", "curves", "answers", "tokens", "configuration"]
    names = [stop.split("|")[1] for stop in stops]
    assert "theme" in names and "f-text" in names and "more" in names and names.count("scrub") >= 12
    tokens = page.locator(".completion:visible").count()
    assert tokens == 25 and len(stops) < 300, "tokens and rows of tables are no stops"


def test_focus_is_always_seen(report: Path, open_page: Open) -> None:
    page = open_page(report)
    for _ in range(60):
        page.keyboard.press("Tab")
        outline = page.evaluate("""() => {
          const active = document.activeElement;
          const node = active.matches(".scrub") ? active.parentElement : active;
          const style = getComputedStyle(node);
          return [style.outlineStyle, parseFloat(style.outlineWidth), node.className];
        }""")
        assert outline[0] != "none" and outline[1] >= 1, outline


def test_the_first_stop_leads_to_the_content(report: Path, open_page: Open) -> None:
    page = open_page(report)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")
