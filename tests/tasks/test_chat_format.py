"""Cautions about a chat model's format: each fault is named, and what is sound, or meant, is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from klamp.tasks import arithmetic_tokenizer
from klamp.tasks.chat_format import chat_cautions, turn_end
from klamp.tasks.config import TaskConfig

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def tokenizer(*, template: str | None = TEMPLATE, marks: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Any:
    """A tokenizer of a chat model."""
    made = arithmetic_tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(marks)})
    made.chat_template = template
    return made


def said(made: Any, *, stop: tuple[str, ...] = ("<|im_end|>",), **config: Any) -> tuple[str, ...]:
    return chat_cautions(TaskConfig(**config), made, made.convert_tokens_to_ids(list(stop)))


def test_a_chat_model_with_its_template_and_its_end_is_left_alone() -> None:
    assert said(tokenizer()) == ()


def test_a_model_that_is_no_chat_model_is_left_alone() -> None:
    made = arithmetic_tokenizer()
    assert chat_cautions(TaskConfig(), made, [made.eos_token_id]) == ()


def test_a_template_that_is_missing_is_named_by_the_marks_that_are_there() -> None:
    (caution,) = said(tokenizer(template=None))
    assert "(<|im_start|>)" in caution and "no chat template" in caution


def test_a_template_that_is_left_out_on_purpose_is_left_alone() -> None:
    assert said(tokenizer(template=None), chat_template=False) == ()
    assert said(tokenizer(), chat_template=False) == ()


def test_an_end_of_the_turn_that_ends_nothing_is_named_with_what_does() -> None:
    made = tokenizer()
    (caution,) = said(made, stop=(made.eos_token,))
    assert f"ends an answer with <|im_end|>, and completions end with ['{made.eos_token}']" in caution


def test_one_of_several_end_tokens_is_enough() -> None:
    made = tokenizer()
    assert said(made, stop=(made.eos_token, "<|im_end|>")) == ()


@pytest.mark.parametrize(
    "template", ["{{ messages[0]['content'] }}", "{{ raise_exception('no') }}", "{{ messages[-1]['content'] }}"]
)
def test_a_template_that_writes_no_end_says_nothing(template: str) -> None:
    made = tokenizer(template=template)
    assert turn_end(made) == () and said(made, stop=(made.eos_token,)) == ()
