"""Hydra reads back what was written in its grammar."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from klamp.hosts.verl.fields_in_verl import written


def read(text: str) -> Any:
    return OverridesParser.create().parse_override(f"key={text}").value()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1e-6,
        float("inf"),
        "klamp:kl_gradient=forward,kl_max_weight=2.5",
        "it's",
        "a\\'b",
        "end\\",
        "",
        "null",
        "True",
        "1.5",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "/a folder/with, {marks}",
        "two\nlines",
        ["a", "b=c", 1],
        {"param_dtype": "fp32", "reduce_dtype": "fp32"},
    ],
    ids=repr,
)
def test_what_was_written_is_read_back(value: Any) -> None:
    assert read(written(value)) == value


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab'\\\"=,[]{}()$%: /.-1\t"))
def test_any_text_is_read_back(text: str) -> None:
    assert read(written(text)) == text


def test_plain_texts_stay_readable() -> None:
    assert written("low_var_kl") == "low_var_kl" and written("/data/train.parquet") == "/data/train.parquet"
    assert written(("a", 0.5)) == "[a,0.5]"
