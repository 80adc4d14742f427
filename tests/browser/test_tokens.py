"""The per-token view: hover and focus, filters, order, links."""

import math
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from tests.browser.conftest import Open, write
from tests.report.pages import completion, run_of

from klamp.report.text import shown


def tip(page: Page) -> dict[str, str]:
    rows = page.locator("#tip dl > div").all()
    cells = [row.locator("dt, dd").all_inner_texts() for row in rows]
    return {name: f"{value} {more}".strip() for name, value, more in cells}


def number(text: str) -> float:
    return float(text.split(maxsplit=1)[0].replace("−", "-"))


def written_as(card: Locator, written: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of completions.jsonl that a card was made of."""
    step = int(card.get_attribute("data-step") or 0)
    index = int((card.locator("h4").inner_text()).split("completion ")[1].split()[0]) - 1
    return [row for row in written if row["step"] == step][index]


def checked(page: Page, card: Locator, place: int, row: dict[str, Any]) -> None:
    policy, ref, sampler = (row[f"{name}_logprobs"][place] for name in ("policy", "ref", "sampler"))
    said = tip(page)
    assert number(said["log-ratio"]) == pytest.approx(policy - ref, abs=6e-4)
    assert number(said["policy"]) == pytest.approx(100 * math.exp(policy), abs=0.06)
    assert number(said["reference"]) == pytest.approx(100 * math.exp(ref), abs=0.06)
    assert float(said["sampler"].split("log ")[1].replace("−", "-")) == pytest.approx(sampler, abs=6e-4)
    assert said["position"] == str(place + 1)
    assert page.locator("#tip .token").inner_text().strip() == shown(row["tokens"][place]).strip()


def test_hovering_shows_both_probabilities(report: Path, open_page: Open, written: list[dict[str, Any]]) -> None:
    page = open_page(report)
    for i in (0, 3):
        card = page.locator(".completion").nth(i)
        card.scroll_into_view_if_needed()
        row = written_as(card, written)
        texts = [text.strip() for text in card.locator(".tokens span").all_inner_texts()]
        assert texts == [shown(token).strip() for token in row["tokens"]]
        for place in range(len(row["tokens"])):
            card.locator(".tokens span").nth(place).hover()
            checked(page, card, place, row)
    page.mouse.move(0, 0)
    expect(page.locator("#tip")).to_be_hidden()


def test_keys_walk_through_the_tokens(report: Path, open_page: Open, written: list[dict[str, Any]]) -> None:
    page = open_page(report)
    card = page.locator(".completion").nth(1)
    row = written_as(card, written)
    card.locator(".tokens span").first.focus()
    checked(page, card, 0, row)
    page.keyboard.press("ArrowRight")
    checked(page, card, 1, row)
    page.keyboard.press("End")
    checked(page, card, len(row["tokens"]) - 1, row)
    focused = page.locator(":focus")
    assert focused.get_attribute("role") == "button"
    label = focused.get_attribute("aria-label") or ""
    assert label.startswith(f"token {shown(row['tokens'][-1])}, log-ratio ")
    assert "policy" in label and "position" in label
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(page.locator("#tip")).to_be_visible()
    page.keyboard.press("Tab")
    after, focused = page.locator(".completion").nth(2), page.locator(":focus")
    assert after.get_attribute("id") == focused.evaluate("node => node.closest('.completion').id"), "one stop for each"


def test_the_worst_token_is_one_click_away(report: Path, open_page: Open, written: list[dict[str, Any]]) -> None:
    page = open_page(report)
    sizes = [abs(p - r) for row in written for p, r in zip(row["policy_logprobs"], row["ref_logprobs"], strict=True)]
    first = page.locator("table.worst tbody tr").first
    assert abs(number(first.locator("td").first.inner_text())) == pytest.approx(max(sizes), rel=5e-3)
    for i in (0, 5):
        link = page.locator("table.worst a").nth(i)
        link.click()
        focused = page.locator(":focus")
        card = focused.evaluate("node => node.closest('article').id")
        assert f"#{card}" == link.get_attribute("href")
        assert tip(page)["position"] == str(int(link.get_attribute("data-position") or 0) + 1)
        expect(focused).to_be_in_viewport()
        expect(page.locator("#tip")).to_be_visible()


def test_a_link_to_what_a_filter_hides_clears_the_filter(report: Path, open_page: Open) -> None:
    page = open_page(report)
    page.get_by_label("Text").fill("no completion says this")
    expect(page.get_by_role("status")).to_have_text("No completion is like that.")
    page.locator("table.worst a").first.click()
    expect(page.locator(":focus")).to_be_in_viewport()
    assert page.get_by_label("Text").input_value() == ""


def test_the_shades_follow_the_anchor_that_is_chosen(open_page: Open, tmp_path: Path) -> None:
    policy, ref, teacher = (-1.0, -2.0, -0.5), (-1.0, -2.4, -0.5), (-5.0, -1.8, math.nan)
    rows = [
        completion(policy=policy, ref=ref, teacher=teacher),
        completion(step=2, policy=policy, ref=(-1.0, -2.0, -0.7), teacher=policy, trained=(False, True, True)),
        completion(step=3, policy=policy, ref=(-1.0, -2.1, -0.5)),
    ]
    page = open_page(write(tmp_path / "r.html", run_of(completions=rows)))

    def shades() -> list[list[str]]:
        return page.locator(".tokens").evaluate_all("all => all.map((s) => Array.from(s.children, (t) => t.className))")

    assert (first := shades()) == [["z", "p2", "z"], ["u m", "z", "p1"], ["z", "p1", "z"]]
    chooser = page.get_by_label("Shades compare")
    chooser.select_option("teacher")
    assert shades() == [["p4", "n1", "u"], ["z", "p1", "z"], ["u m", "z", "z"]], "the one without keeps its reference"
    expect(page.locator(".facts").first).to_contain_text("KL to the teacher")
    expect(page.locator(".shades .what")).to_have_text("log policy − log reference or teacher, in nats")
    page.locator(".tokens span").first.hover()
    assert tip(page)["log-ratio to the teacher"] == "+4.000 nats"
    chooser.select_option("reference")
    assert shades() == first


def visible(page: Page) -> list[dict[str, str]]:
    while page.locator("#more").is_visible():
        page.locator("#more").click()
    return page.locator(".completion:visible").evaluate_all("all => all.map((card) => ({ ...card.dataset }))")


def test_filters(report: Path, open_page: Open) -> None:
    page = open_page(report)
    every = visible(page)
    assert len(every) > 25 and {card["step"] for card in every} == {str(step) for step in range(1, 11)}

    def only(keep, **fields: str) -> None:
        page.get_by_role("button", name="Clear").click()
        for label, value in fields.items():
            page.get_by_label(label, exact=True).first.fill(value)
        wanted = [card for card in every if keep(card)]
        expect(page.get_by_role("status")).to_contain_text(f"of {len(wanted)} shown")
        assert 0 < len(wanted) < len(every)
        assert {card["number"] for card in visible(page)} == {card["number"] for card in wanted}

    only(lambda card: int(card["step"]) >= 8, **{"Step from": "8"})
    only(lambda card: 2 <= int(card["step"]) <= 4, **{"Step from": "2", "to": "4"})
    page.get_by_role("button", name="Clear").click()
    assert len(visible(page)) == len(every)


def test_text_is_found_in_prompts_and_completions(report: Path, open_page: Open, written: list[dict[str, Any]]) -> None:
    page = open_page(report)
    prompt = written[0]["prompt"]
    page.get_by_label("Text").fill(prompt)
    texts = page.locator(".completion:visible .words").all_inner_texts()
    assert texts and all(prompt in text for text in texts)
    page.get_by_label("Text").fill("<EOS>")
    for card in page.locator(".completion:visible").all():
        assert "<eos>" in card.locator(".tokens").inner_text()


def test_what_alarms_blame(report: Path, open_page: Open) -> None:
    page = open_page(report)
    page.get_by_label("blamed by an alarm").check()
    cards = page.locator(".completion:visible")
    assert 0 < cards.count() < 25
    assert all(card.locator(".tokens .a").count() for card in cards.all())
    link = page.locator(".finding a.jump").first
    link.click()
    assert "a" in (page.locator(":focus").get_attribute("class") or "").split()


def test_order(report: Path, open_page: Open) -> None:
    page = open_page(report)
    assert [int(card["number"]) for card in visible(page)] == sorted(int(card["number"]) for card in visible(page))
    keys = {"kl": "kl", "step": "step", "last": "step", "reward": "reward", "low": "reward"}
    for order, key in keys.items():
        page.get_by_label("Order").select_option(order)
        values = [float(card[key]) for card in visible(page)]
        assert values == sorted(values, reverse=order not in ("step", "low")) and len(set(values)) > 1


def test_runs_can_be_told_apart(comparison: Path, open_page: Open) -> None:
    page = open_page(comparison)
    page.get_by_label("Run", exact=True).select_option(label="held")
    assert {card["run"] for card in visible(page)} == {"1"}
    assert set(page.locator(".completion:visible .run").all_inner_texts()) == {"held"}
