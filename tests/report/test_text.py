"""Texts of the page: escaped, numbers as people write them, tokens as text."""

import math

import pytest
from tests.report.pages import parse

from klamp.report.text import (
    Html,
    count,
    decoded,
    element,
    escape,
    join,
    plain_table,
    probability,
    reader,
    rounded,
    setting,
    short,
    shorten,
    shown,
    signed,
    visible,
)

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"


def test_children_and_attributes_are_escaped() -> None:
    page = element("p", HOSTILE, element("b", "x < y"), title=HOSTILE)
    assert "<img" not in page and "<!--" not in page
    node = parse(page).one("p")
    assert node.attributes == {"title": HOSTILE}
    assert node.text == HOSTILE + "x < y" and [child.name for child in node.walk()] == ["b"]


def test_attributes_are_written_by_their_kind_and_markup_passes_where_text_does_not() -> None:
    made = element("input", class_="a", data_step=3, hidden=True, disabled=False, title=None, aria_label="")
    assert made == '<input class="a" data-step="3" hidden aria-label="">'
    assert element("br") == "<br>"
    assert element("i") == "<i></i>"
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


def test_short() -> None:
    plain = (0, 1, 1.0, 0.12, 0.1234, 0.9996, -0.5, 123.456, 123456.0)
    assert [short(value) for value in plain] == ["0", "1", "1", "0.12", "0.123", "1", "−0.5", "123", "123456"]
    powers = (0.0001234, 0.00001234, 1e6, 163500000.0, -3e-13)
    assert [short(value) for value in powers] == ["0.000123", "1.23e−5", "1e6", "1.64e8", "−3e−13"]
    assert [short(value) for value in (math.nan, math.inf, -math.inf, None)] == ["NaN", "∞", "−∞", "–"]


def test_digits_signs_counts_and_decimals() -> None:
    assert short(math.pi, digits=5) == "3.1416"
    assert (short(123456789, digits=9), short(2500, digits=9)) == ("1.23456789e8", "2500")
    assert (signed(0.25), signed(-0.25), signed(0)) == ("+0.25", "−0.25", "0")
    assert (count(1, "alarm"), count(0, "alarm"), count(12, "run")) == ("1 alarm", "0 alarms", "12 runs")
    assert [rounded(value, decimals=1) for value in (99.609, 100.0, -2.25, 0.0)] == ["99.6", "100.0", "−2.2", "0.0"]
    assert [rounded(value, decimals=1) for value in (None, math.nan, math.inf)] == ["–", "NaN", "∞"]
    assert rounded(99.609, decimals=None) == "99.61" and rounded(99.609, decimals=None, digits=3) == "99.6"
    assert (shorten("abc", 3), shorten("abcde", 3)) == ("abc", "abc… (2 more characters)")


def test_probability_and_setting() -> None:
    logprobs = [math.log(share) for share in (1.0, 0.5, 0.0123, 0.00012, 1e-9, 0.99991)]
    shares = ["100 %", "50.0 %", "1.2 %", "0.012 %", "1e−7 %", "99.991 %"]
    assert [probability(each) for each in logprobs] == shares
    assert [probability(each) for each in (-2000.0, 0.1, math.nan, None)] == ["0 %", "100 %", "–", "–"]
    values = (None, True, 1e-4, (0.1, 2), [], "", 3)
    assert [setting(value) for value in values] == ["none", "true", "0.0001", "0.1, 2", "(empty)", "(empty)", "3"]


TABLE = {  # made with transformers' own bytes_to_unicode, of GPT-2
    "Hello": "Hello",
    "Ġworld": " world",
    "ĊĊ": "\n\n",
    "Ã¼": "ü",
    "æĿ±": "東",
    "Ã": "\\xc3",
    "<|im_end|>": "<|im_end|>",
    "ĉ": "\t",
}


def test_byte_level_tokens_are_decoded_and_other_vocabularies_are_left_alone() -> None:
    for token, text in TABLE.items():
        assert decoded(token) == reader(["a", "Ġb"])(token) == text
    assert decoded("東") == "東"
    read = reader(["4", "▁the", "Ã¼"])
    assert (read("Ã¼"), read("▁the"), read("aĠ")) == ("Ã¼", " the", "aĠ")


def test_shown() -> None:
    assert [shown(text) for text in ("a", " the", "", "   ")] == ["a", " the", "∅", "␣␣␣"]
    assert [shown(text) for text in ("\n", "\t\r", "\u202e")] == ["↵\n", "⇥␍", "⟨U+202E⟩"]
    assert shown("x" * 100) == "x" * 80 + "…(+20)"


def test_a_table_escapes_its_texts() -> None:
    table = parse(plain_table(["step", "k3"], [["7", "0.12"], ["8", "<b>"]], caption="KL", classes="wide"))
    assert table.one("table").rows() == [["step", "k3"], ["7", "0.12"], ["8", "<b>"]]
    assert [cell.attributes["scope"] for cell in table.one("tbody").all("th")] == ["row", "row"]
    assert table.one("div").attributes["aria-label"] == "Table: KL" and table.one("table").classes == ["wide"]
    assert table.one("caption").classes == ["unseen"]
