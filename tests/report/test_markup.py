"""Whatever text holds, it stays text."""

from __future__ import annotations

import html
import json
import re

import pytest
from tests.report.pages import parse

from klamp.report.markup import Html, element, escape, join, json_block, shorten, visible

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"


def test_children_and_attributes_are_escaped() -> None:
    page = element("p", HOSTILE, element("b", "x < y"), title=HOSTILE)
    assert "<img" not in page and "<!--" not in page
    node = parse(page).one("p")
    assert node.attributes == {"title": HOSTILE}
    assert node.text == HOSTILE + "x < y" and [child.name for child in node.walk()] == ["b"]


def test_attributes() -> None:
    made = element("input", class_="a", data_step=3, hidden=True, disabled=False, title=None, aria_label="")
    assert made == '<input class="a" data-step="3" hidden aria-label="">'
    assert element("br") == "<br>"
    assert element("i") == "<i></i>"


def test_markup_passes_and_text_does_not() -> None:
    assert escape(Html("<b>")) == "<b>"
    assert escape("<b>") == "&lt;b&gt;"
    assert join(["<", Html("<br>")], " & ") == "&lt; &amp; <br>"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain ASCII, 2 + 2", "plain ASCII, 2 + 2"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("Zürich, 東京, עברית, 😀", "Zürich, 東京, עברית, 😀"),
        ("user\u202egnp.exe", "user⟨U+202E⟩gnp.exe"),
        ("\u2066a\u2069", "⟨U+2066⟩a⟨U+2069⟩"),
        ("\x00\x07\x1b[31m\x7f\r", "⟨U+0000⟩⟨U+0007⟩⟨U+001B⟩[31m⟨U+007F⟩⟨U+000D⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("a\u200bb\u2060\ufeff\u00ad", "a⟨U+200B⟩b⟨U+2060⟩⟨U+FEFF⟩⟨U+00AD⟩"),
        ("\u2028\u2029", "⟨U+2028⟩⟨U+2029⟩"),
        ("\u3164\u115f", "⟨U+3164⟩⟨U+115F⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("\ue000\uffff", "⟨U+E000⟩⟨U+FFFF⟩"),
        ("a" + "\u0301" * 50 + "b", "a" + "\u0301" * 4 + "b"),
    ],
)
def test_what_cannot_be_seen_is_written_out(text: str, seen: str) -> None:
    assert visible(text) == seen
    assert parse(element("p", text)).text == seen
    element("p", text, title=text).encode("utf-8")


def test_data_cannot_end_its_element() -> None:
    value = {"text": HOSTILE + "\u2028\ud800", "numbers": [1.5, None]}
    block = json_block(value, name="data")
    assert re.findall("<[^>]*>", block) == ['<script type="application/json" id="data">', "</script>"]
    inner = block.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert json.loads(inner) == value and inner == html.unescape(inner)
    block.encode("ascii")


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError):
        json_block([float("nan")], name="data")


def test_long_text_is_cut_and_says_so() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcde", 3) == "abc… (2 more characters)"
