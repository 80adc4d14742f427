"""Chat messages, chat templates, the check that prompts fit, cautions about a chat model's format."""

from typing import Any

import pytest

from klamp.errors import ConfigError, DataError
from klamp.lab.tasks import Example, TaskConfig, arithmetic_tokenizer
from klamp.lab.tasks.files import chat_cautions, check_prompts, prompt_text, uses_chat_template

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('odd role') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def plain() -> Any:
    return arithmetic_tokenizer()


@pytest.fixture
def chat() -> Any:
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_template_is_used_where_there_is_one_unless_told_otherwise(plain: Any, chat: Any) -> None:
    assert uses_chat_template(TaskConfig(), chat)
    assert not uses_chat_template(TaskConfig(), plain)
    assert not uses_chat_template(TaskConfig(chat_template=False), chat)
    with pytest.raises(DataError, match="chat_template is not set"):
        prompt_text("hi", TaskConfig(chat_template=True), plain, where="row 1")
    with pytest.raises(ConfigError, match="row 4 holds chat messages"):
        prompt_text([{"role": "user", "content": "a"}], TaskConfig(), plain, where="row 4")


@pytest.mark.parametrize(
    ("value", "system", "expected"),
    [
        ("hi", "", "<user>hi;<assistant>"),
        ("hi", "be kind", "<system>be kind;<user>hi;<assistant>"),
        ([{"role": "user", "content": "a"}], "", "<user>a;<assistant>"),
        # the row's own system message wins over the configured one
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "x", "<system>s;<user>a;<assistant>"),
        # a last message by the assistant is continued
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}], "", "<user>a;<assistant>so"),
    ],
)
def test_templates_render_texts_and_messages(chat: Any, value: Any, system: str, expected: str) -> None:
    assert prompt_text(value, TaskConfig(system_prompt=system), chat, where="row 1") == expected


def test_without_a_template_text_stays_as_it_is(plain: Any, chat: Any) -> None:
    assert prompt_text(" 1+1=", TaskConfig(), plain, where="row 1") == " 1+1="
    assert prompt_text("1+1=", TaskConfig(chat_template=False), chat, where="row 1") == "1+1="
    assert prompt_text("1+1=", TaskConfig(system_prompt="add"), plain, where="row 1") == "add\n\n1+1="


@pytest.mark.parametrize("value", [None, "  \n", [], 5, {"role": "user"}, ["hi"], [{"role": "user", "content": None}]])
def test_a_prompt_that_is_none_names_its_row(chat: Any, value: Any) -> None:
    with pytest.raises(DataError, match="row 7 has no prompt"):
        prompt_text(value, TaskConfig(), chat, where="row 7")


def test_what_the_template_refuses_is_a_data_error(chat: Any) -> None:
    with pytest.raises(DataError, match="(?s)template refuses row 2.*odd role"):
        prompt_text([{"role": "robot", "content": "a"}], TaskConfig(), chat, where="row 2")


def check(prompts: list[str], limit: int | None, tokenizer: Any) -> None:
    check_prompts([Example(prompt=p) for p in prompts], tokenizer, limit, 4)


def test_a_prompt_may_fill_the_room_to_the_last_token(plain: Any) -> None:
    check(["1+1=", "123456"], 10, plain)
    check([], 10, plain)
    check(["1" * 500], None, plain)


@pytest.mark.parametrize(
    ("prompts", "what"),
    [
        (["1+1=", "1234567"], "prompt 2 is too long: 7 tokens, and the limit is 6"),
        (["1", "2", ""], "prompt 3 has no tokens"),
        (["1+1=", "HELLO"], "prompt 2 cannot be tokenized"),
    ],
)
def test_a_prompt_that_cannot_be_used_names_its_row(plain: Any, prompts: list[str], what: str) -> None:
    with pytest.raises(DataError, match=what):
        check(prompts, 10, plain)


WITH_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def tokenizer(*, template: str | None = WITH_TURNS, marks: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Any:
    made = arithmetic_tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(marks)})
    made.chat_template = template
    return made


def said(made: Any, *, stop: tuple[str, ...] = ("<|im_end|>",), **config: Any) -> tuple[str, ...]:
    return chat_cautions(TaskConfig(**config), made, made.convert_tokens_to_ids(list(stop)))


def test_what_fits_is_left_alone() -> None:
    assert said(tokenizer()) == (), "a chat model with its template and its end"
    made = arithmetic_tokenizer()
    assert chat_cautions(TaskConfig(), made, [made.eos_token_id]) == (), "no chat model"
    assert said(tokenizer(template=None), chat_template=False) == () == said(tokenizer(), chat_template=False)
    assert said(tokenizer(), stop=(made.eos_token, "<|im_end|>")) == (), "one of several end tokens is enough"


def test_an_end_of_the_turn_that_ends_nothing_is_named_with_what_does() -> None:
    made = tokenizer()
    (caution,) = said(made, stop=(made.eos_token,))
    assert f"ends an answer with <|im_end|>, and completions end with ['{made.eos_token}']" in caution
