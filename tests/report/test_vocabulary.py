"""Tokens as text."""

from __future__ import annotations

import pytest

from klamp.report.vocabulary import decoded, reader, shown

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


@pytest.mark.parametrize(("token", "text"), TABLE.items())
def test_byte_level_tokens_are_decoded(token: str, text: str) -> None:
    assert decoded(token) == text
    assert reader(["a", "Ġb"])(token) == text


def test_what_is_no_byte_stays() -> None:
    assert decoded("東") == "東"


def test_other_vocabularies_are_left_alone() -> None:
    read = reader(["4", "▁the", "Ã¼"])
    assert (read("Ã¼"), read("▁the"), read("aĠ")) == ("Ã¼", " the", "aĠ")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a", "a"),
        (" the", " the"),
        ("", "∅"),
        ("   ", "␣␣␣"),
        ("\n", "↵\n"),
        ("\t\r", "⇥␍"),
        ("\u202e", "⟨U+202E⟩"),
        ("x" * 100, "x" * 80 + "…(+20)"),
    ],
)
def test_shown(text: str, seen: str) -> None:
    assert shown(text) == seen


def test_the_table_is_that_of_transformers() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    for byte in range(128):
        assert decoded(letters[byte]) == chr(byte)
    for text in ("naïve 東京 😀", "\x7f\xa0\xad"):
        assert decoded("".join(letters[byte] for byte in text.encode())) == text
