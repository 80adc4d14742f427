"""Turns the prompt column of a data row into text: chat messages, chat templates, checks of length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from klamp.audit.pair import turn_end
from klamp.errors import ConfigError, DataError, brief
from klamp.lab.tasks.base import Example, TaskConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def uses_chat_template(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts are written with the tokenizer's chat template; by default if the tokenizer has one."""
    return bool(tokenizer.chat_template) if config.chat_template is None else config.chat_template


def prompt_text(value: Any, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, where: str) -> str:
    """The text to tokenize, from one value of a prompt column; `where` is how errors name its row.

    A text becomes one user message where a chat template is used, and stays as it is otherwise. A list of messages
    (with `role` and `content`) needs a template; a last message by the assistant is continued rather than answered.

    Raises:
        DataError: the prompt is empty, or neither a text nor messages.
        ConfigError: messages, and no chat template to render them with.
    """
    messages = _messages(value, where)
    if not uses_chat_template(config, tokenizer):
        if not isinstance(value, str):
            what = f"{where} holds chat messages, and no chat template is used"
            why = "only a template says how a model expects messages to be written"
            fix = "use a tokenizer with a chat template, or a column of plain text"
            raise ConfigError(what, got=f"chat_template={config.chat_template}", why=why, fix=fix)
        return f"{config.system_prompt}\n\n{value}" if config.system_prompt else value
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    continued = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
        )
    except Exception as error:  # no template, or a jinja error of its own, e.g. for a role
        roles = [message["role"] for message in messages]
        fix = "write the messages in the roles and the order that the template expects, or set chat_template=false"
        raise DataError(f"the chat template refuses {where}", got=roles, why=str(error), fix=fix) from error
    return str(text)


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    """The value of a prompt column as a list of messages; refuses one with nothing in it."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if isinstance(messages, Sequence) and messages and all(map(_is_message, messages)):
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    why = "a prompt is a text with something in it, or a list of messages with a role and a content"
    raise DataError(f"{where} has no prompt", got=brief(repr(value)), why=why, fix="remove or repair this row")


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    role, content = value.get("role"), value.get("content")
    return isinstance(role, str) and isinstance(content, str) and bool(content.strip() or role == "system")


def check_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_model_length: int | None, max_new_tokens: int
) -> int:
    """Refuse prompts that are empty, cannot be tokenized, or leave no room for a completion of `max_new_tokens`.

    `max_model_length` is for both together; None: no limit. Returns the tokens of the longest prompt.

    Raises:
        DataError: the first prompt that does not work, by its row.
    """
    longest, room = 0, None if max_model_length is None else max_model_length - max_new_tokens
    for row, example in enumerate(examples, start=1):
        try:
            length = len(tokenizer(example.prompt, add_special_tokens=False)["input_ids"])  # pyright: ignore
            what, why = f"prompt {row} has no tokens", "a model cannot continue an empty prompt"
        except Exception as error:  # of whatever kind the tokenizer raises
            length, what, why = 0, f"prompt {row} cannot be tokenized", f"{type(error).__name__}: {error}"
        if room is not None and length > max(0, room):
            what = f"prompt {row} is too long: {length} tokens, and the limit is {max(0, room)}"
            why = f"there is room for {max_model_length} tokens, and a completion may take {max_new_tokens} of them"
        elif length > 0:
            longest = max(longest, length)
            continue
        fix = "remove or repair this row, or change max_completion_length (of verl also max_prompt_length)"
        raise DataError(what, got=brief(repr(example.prompt)), why=why, fix=fix)
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
