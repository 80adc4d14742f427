"""Turns the prompt column of a data row into text: chat messages, chat templates, checks of length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from klamp.audit.pair import turn_end
from klamp.errors import ConfigError, DataError, brief
from klamp.tasks.base import Example, TaskConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]


def uses_chat_template(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts are written with the tokenizer's chat template; by default if the tokenizer has one.

    Raises:
        ConfigError: a template is asked for, and the tokenizer has none.
    """
    has_one = bool(getattr(tokenizer, "chat_template", None))
    if config.chat_template and not has_one:
        raise ConfigError(
            "the tokenizer has no chat template",
            got="chat_template=True",
            why="there is nothing to turn messages into text with",
            fix="use a chat model's tokenizer, or leave chat_template unset",
        )
    return has_one if config.chat_template is None else config.chat_template


def prompt_text(value: Any, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, where: str) -> str:
    """The text to tokenize, from one value of a prompt column.

    A text becomes one user message where a chat template is used, and stays as it is otherwise. A list of messages
    needs a template; a last message by the assistant is continued rather than answered.

    Args:
        value: a text, or a list of messages with `role` and `content`.
        config: its `chat_template` and `system_prompt` are used.
        tokenizer: of the model that is trained.
        where: how errors name the row.

    Raises:
        DataError: the prompt is empty, or neither a text nor messages.
        ConfigError: messages, and no chat template to render them with.
    """
    messages = _messages(value, where)
    if not uses_chat_template(config, tokenizer):
        if not isinstance(value, str):
            raise ConfigError(
                f"{where} holds chat messages, and no chat template is used",
                got=f"chat_template={config.chat_template}",
                why="only a template says how a model expects messages to be written",
                fix="use a tokenizer with a chat template, or a column of plain text",
            )
        return f"{config.system_prompt}\n\n{value}" if config.system_prompt else value
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    continued = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
        )
    except Exception as error:  # templates raise jinja errors of their own, e.g. for a role they do not know
        raise DataError(
            f"the chat template refuses {where}",
            got=[message["role"] for message in messages],
            why=str(error),
            fix="write the messages in the roles and the order that this tokenizer's template expects",
        ) from error
    return str(text)


def _messages(value: Any, where: str) -> Messages:
    """The value of a prompt column as a list of messages; refuses one with nothing in it."""
    if isinstance(value, str) and value.strip():
        return [{"role": "user", "content": value}]
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(map(_is_message, value)):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    empty = value is None or value == [] or (isinstance(value, str) and not value.strip())
    raise DataError(
        f"{where} has {'an empty prompt' if empty else 'a prompt of the wrong type'}",
        got=brief(repr(value)),
        why="a prompt is a text with something in it, or a list of messages with a role and a content",
        fix="remove or repair this row",
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
        and bool(value["content"].strip() or value["role"] == "system")
    )


def check_prompts(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_model_length: int | None,
    max_new_tokens: int,
) -> int:
    """Refuse prompts that are empty, cannot be tokenized, or leave no room for a completion.

    Args:
        examples: all prompts of a run, in the order of the data.
        tokenizer: of the model that is trained; special tokens are not added.
        max_model_length: how many tokens the model can hold, prompt and completion together; None: no limit.
        max_new_tokens: how many tokens a completion may have.

    Returns:
        The tokens of the longest prompt.

    Raises:
        DataError: the first prompt that does not work, by its row.
    """
    longest = 0
    room = None if max_model_length is None else max_model_length - max_new_tokens
    for row, example in enumerate(examples, start=1):
        got = brief(repr(example.prompt))
        try:
            length = len(tokenizer(example.prompt, add_special_tokens=False)["input_ids"])  # pyright: ignore
        except Exception as error:  # of whatever kind the tokenizer raises
            raise DataError(
                f"prompt {row} cannot be tokenized",
                got=got,
                why=f"{type(error).__name__}: {error}",
                fix="use a tokenizer that knows every character of it, or remove this row",
            ) from error
        if length == 0:
            why, fix = "a model cannot continue an empty prompt", "remove or repair this row"
            raise DataError(f"prompt {row} has no tokens", got=got, why=why, fix=fix)
        if room is not None and length > room:
            limit = f"the limit is {room}" if room > 0 else "a completion leaves room for none"
            raise DataError(
                f"prompt {row} is too long: {length} tokens, and {limit}",
                got=got,
                why=f"the model holds {max_model_length} tokens, and a completion may take {max_new_tokens} of them",
                fix="remove or shorten this prompt, or allow fewer tokens per completion",
            )
        longest = max(longest, length)
    return longest


def chat_cautions(config: TaskConfig, tokenizer: PreTrainedTokenizerBase, stop: Iterable[int]) -> tuple[str, ...]:
    """A caution if the token that ends an answer in the chat template is not among those that end a completion."""
    end = turn_end(tokenizer) if uses_chat_template(config, tokenizer) else ()
    if not end or end[0] in set(stop):
        return ()
    mark, others = (str(tokenizer.convert_ids_to_tokens(ids)) for ids in (end[0], sorted(stop)))
    return (
        f"the chat template ends an answer with {mark}, and completions end with {others}: answers go on past their "
        f"end until they are cut. Make {mark} the tokenizer's end token, or add it to eos_token_id in the model's "
        "generation_config.json.",
    )
