"""What a tokenizer makes of one conversation: its prompt in text and ids, its answer, and how the answer ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from klamp.errors import DataError

Example: TypeAlias = Sequence[Mapping[str, Any]] | tuple[str, str]
"""Messages that end with the assistant's answer, or the texts of prompt and answer."""
Ids: TypeAlias = list[int] | None

PROBE = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
"""A conversation that shows how a chat template writes a prompt and ends an answer."""
TAIL = 2
"""Tokens that a chat template may write after the end token."""


@dataclass(frozen=True)
class Side:
    """What one tokenizer makes of the example, and what its model receives; None: not known."""

    name: str
    tokenizer: Any
    vocabulary: Mapping[str, int]
    text: str | None  # the prompt as this tokenizer's own template writes it
    own: Ids  # the ids of that prompt
    answer: Ids
    sent: Ids
    length: int | None
    ends: set[int]

    @classmethod
    def of(cls, name: str, tokenizer: Any, given: Sequence[Any], example: Any, options: Mapping[str, Any]) -> Side:
        """`given`: the ids that were sent, the length that is cut off, the end ids."""
        sent, length, ends = given
        ends = getattr(tokenizer, "eos_token_id", None) if ends is None else ends
        ends = {int(i) for i in (ends if isinstance(ends, Iterable) else [ends]) if i is not None}
        sent = None if sent is None else [int(i) for i in sent]
        text, answer = (None, None) if example is None else _rendered(tokenizer, example, options)
        ids = encoded(tokenizer, text), encoded(tokenizer, answer)
        return cls(name, tokenizer, tokenizer.get_vocab(), text, *ids, sent, length, ends)

    def prompt(self, answer: Ids) -> Ids:
        """The ids before an answer in what was sent; if nothing was sent, its own prompt."""
        if self.sent is None or not answer:
            return self.own if self.sent is None else None
        first = (i for i, token in enumerate(self.sent) if token == answer[0])
        fits = [i for i in first if self.sent[i : i + len(answer)] == answer]
        return self.sent[: fits[-1]] if fits else None

    def split(self) -> tuple[Ids, int | None]:
        """The answer without its end, and the end id."""
        if self.sent is None:
            return self.answer, None
        own = self.own if self.own and self.sent[: len(self.own)] == self.own else self.prompt(self.answer)
        start = self.length if self.length is not None else None if own is None else len(own)
        if start is None:
            return None, None
        answer = self.sent[start:]
        last = max((i for i, token in enumerate(answer) if token in self.ends), default=-1)
        return (answer[:last], answer[last]) if last >= max(0, len(answer) - 1 - TAIL) else (answer, None)

    def words(self, ids: Iterable[int]) -> str:
        """The tokens with these ids, for a message."""
        names = {i: token for token, i in self.vocabulary.items()}
        return " or ".join(repr(names[i]) if i in names else f"no token (id {i})" for i in sorted(ids))


def turn_end(tokenizer: Any) -> Sequence[int]:
    """The ids that the chat template writes after an assistant's answer; none where it refuses to write one."""
    try:
        text = str(tokenizer.apply_chat_template(PROBE, tokenize=False))
    except Exception:  # templates raise errors of their own
        return ()
    _, written, after = text.rpartition("ANSWER")
    return encoded(tokenizer, after.strip()) or () if written else ()


def _rendered(tokenizer: Any, example: Any, options: Mapping[str, Any]) -> tuple[str | None, str]:
    """The prompt as the chat template writes it (None: there is no such template), and the answer."""
    *prompt, last = example or [None]
    if isinstance(last, str) and len(prompt) == 1:
        return prompt[0], last
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        why, fix = "the answer's ids are compared", "pass messages that end with the assistant's, or (prompt, answer)"
        raise DataError("the example does not end with an answer in text", got=repr(last), why=why, fix=fix)
    try:
        asked = {"tokenize": False, "add_generation_prompt": True, **options}
        return str(tokenizer.apply_chat_template(prompt, **asked)), last["content"]
    except Exception:  # no template, or one that raises errors of its own
        return None, last["content"]


def encoded(tokenizer: Any, text: str | None) -> Ids:
    """The ids of a text without special tokens; None: there is no text, or the tokenizer refuses it."""
    try:
        found = None if text is None else tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # a tokenizer may refuse a character in any way
        return None
    return None if found is None else [int(i) for i in getattr(found, "ids", found)]


def apart(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Where two sequences begin to differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
