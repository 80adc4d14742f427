"""Cautions about a chat model's format that no prompt shows: a template that is missing, an end that is not the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from klamp.tasks.config import TaskConfig
from klamp.tasks.prompts import uses_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_MARKS = ("im_start", "start_header_id", "start_of_turn", "start_of_role", "[INST]", "|user|", "|User|")
"""Parts of tokens that open a turn in the chat formats in use."""

_ANSWER = "ANSWER"


def chat_cautions(config: TaskConfig, tokenizer: PreTrainedTokenizerBase, stop: Iterable[int]) -> tuple[str, ...]:
    """What does not fit between a chat model's tokenizer, its template and the tokens that end a completion, in words.

    Args:
        config: of the task; its `chat_template` says whether a template is meant to be used.
        tokenizer: the tokenizer of the model that is trained.
        stop: ids that end a completion.
    """
    if uses_chat_template(config, tokenizer):
        end = turn_end(tokenizer)
        return () if not end or end[0] in set(stop) else (_never_ends(tokenizer, end[0], stop),)
    if config.chat_template is not None or getattr(tokenizer, "chat_template", None):
        return ()
    marks = [token for token in _added(tokenizer) if any(mark in token for mark in TURN_MARKS)]
    if not marks:
        return ()
    return (
        f"the tokenizer knows the marks of a chat ({marks[0]}) and has no chat template: prompts go in as they are, "
        "and the model reads a text to go on with, not a question. Use the chat model's tokenizer with its template "
        "(chat_template.jinja, or tokenizer_config.json); chat_template=False says that this is meant.",
    )


def turn_end(tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """The ids that the chat template writes after an assistant's answer; none where it refuses to write one."""
    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # templates raise errors of their own
        return ()
    _, written, after = text.rpartition(_ANSWER)
    end = after.strip() if written else ""
    return tokenizer(end, add_special_tokens=False)["input_ids"] if end else ()  # pyright: ignore


def _never_ends(tokenizer: PreTrainedTokenizerBase, end: int, stop: Iterable[int]) -> str:
    mark, others = (str(tokenizer.convert_ids_to_tokens(ids)) for ids in (end, sorted(stop)))
    return (
        f"the chat template ends an answer with {mark}, and completions end with {others}: answers go on past their "
        f"end until they are cut. Make {mark} the tokenizer's end token, or add it to eos_token_id in the model's "
        "generation_config.json."
    )


def _added(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return sorted(str(token) for token in tokenizer.get_added_vocab())  # pyright: ignore
