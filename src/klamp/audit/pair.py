"""Preflight of a policy and its teacher: do both read one conversation as the same tokens, ends and positions?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from klamp.audit.verdict import CheckFinding, Level, Verdict, finding
from klamp.errors import DataError

Example: TypeAlias = Sequence[Mapping[str, Any]] | tuple[str, str]
"""Messages that end with the assistant's answer, or the texts of prompt and answer."""
Ids: TypeAlias = list[int] | None

SHOWN = 40  # characters, or ids, that a finding shows
TAIL = 2  # tokens that a chat template may write after the end token
PROBE = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
"""A conversation that shows how a chat template writes a prompt and ends an answer."""
OPEN = {
    "example": "chat templates, ids of the answer, round trip",
    "policy_ids": "what the policy is trained on",
    "teacher_ids": "what the teacher receives",
    "prompt_lengths": "where the prompts are cut off",
    "end_ids": "where generation stops",
}
"""An argument of `check_pair` -> what cannot be checked without it."""


def check_pair(
    policy_tokenizer: Any,
    teacher_tokenizer: Any,
    example: Example | None = None,
    *,
    teacher_example: Example | None = None,
    policy_ids: Iterable[int] | None = None,
    teacher_ids: Iterable[int] | None = None,
    prompt_lengths: tuple[int, int] | None = None,
    end_ids: tuple[Any, Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
    who: Literal["teacher", "reference"] = "teacher",
) -> Verdict:
    """Checks that a policy and its teacher read one conversation in the same way; loads no model.

    Every pair of values is (policy, teacher). Ids are the example's, prompt and answer, without padding.

    Args:
        policy_tokenizer, teacher_tokenizer: any objects with `get_vocab`, `encode` and `decode`.
        example: messages that end with the assistant's answer, or two texts (prompt, answer).
        teacher_example: the example as the teacher sees it, if its prompt is another one.
        policy_ids, teacher_ids: the ids that the policy is trained on, and those that the teacher receives.
        prompt_lengths: how many ids the trainer cuts off as the prompt.
        end_ids: the id or ids at which generation stops; None: each tokenizer's end token.
        template_options: arguments of both chat templates, such as `{"enable_thinking": False}`.
        who: a reference receives the policy's prompt, so its own chat template is not checked.

    Raises:
        DataError: the example does not end with an answer in text.
    """
    passed = {name for name, value in locals().items() if value is not None}
    options, lengths, ends = template_options or {}, prompt_lengths or (None, None), end_ids or (None, None)
    policy = Side("policy", policy_tokenizer, example, options, policy_ids, lengths[0], ends[0])
    anchor = Side(who, teacher_tokenizer, teacher_example or example, options, teacher_ids, lengths[1], ends[1])
    answer, end = policy.split()
    prompts = policy.prompt(answer), anchor.prompt(answer)
    used = {*(policy.sent or ()), *(answer or ()), *policy.ends}
    findings = [*_vocabularies(policy, anchor, used), *_ends(policy, anchor, end)]
    if answer:
        findings += [*_answers(policy, anchor, answer), *_cuts(policy, anchor, prompts)]
    elif answer is None and passed & {"example", "policy_ids"}:
        findings.append(finding("not-encoded"))
    if who == "teacher" and example and not isinstance(example[-1], str):
        findings += _templates(policy, anchor, prompts, hinted=teacher_example is not None)
    missing = {what: f"pass {name}" for name, what in OPEN.items() if name not in passed}
    if who == "teacher" and example and (anchor.text is None or isinstance(example[-1], str)):
        missing["the teacher's chat template"] = "pass messages, and a tokenizer with a chat template"
    summary = f"policy with {len(policy.vocabulary)} tokens, {who} with {len(anchor.vocabulary)}"
    return Verdict.of(findings, summary=summary, not_checked=missing)


def _vocabularies(policy: Side, anchor: Side, used: set[int]) -> Iterator[CheckFinding]:
    own, other, who, names = policy.vocabulary, anchor.vocabulary, anchor.name, anchor.names
    differ = sorted(token for token, i in own.items() if other.get(token) != i)
    clash = {own[token] for token in differ if token in other or own[token] in names}
    counts = {"tokens": len(differ), "of": len(own), "others": len(other), "first": differ[0] if differ else None}
    if clash:
        i = min(clash, key=lambda i: (i not in used, i))
        added = {*getattr(policy.tokenizer, "get_added_vocab", dict)().values()}
        level: Level = "warning" if clash <= added and i not in used else "wrong"
        words = {"ours": policy.words([i]), "theirs": anchor.words([i])}
        yield finding("other-tokenizer", level, who=who, id=i, **words, **counts)
    elif len(own) != len(other):
        yield finding("extra-tokens", who=who, **counts)
    if outside := sorted(used - {*names}):
        yield finding("ids-outside", who=who, count=len(outside), ids=outside[:SHOWN])


def _ends(policy: Side, anchor: Side, end: int | None) -> Iterator[CheckFinding]:
    ours = policy.ends if end is None else {end}
    theirs = anchor.ends & {*turn_end(anchor.tokenizer)[:1]} or anchor.ends
    words = {"ours": policy.words(ours), "theirs": anchor.words(theirs)}
    if ours and theirs and not ours <= theirs and words["ours"] != words["theirs"]:  # else a token with two ids
        level: Level = "note" if ours & theirs else "wrong"
        yield finding("end-id", level, who=anchor.name, teacher=sorted(theirs), policy=sorted(ours), **words)


def _answers(policy: Side, anchor: Side, answer: list[int]) -> Iterator[CheckFinding]:
    sent = anchor.sent is not None
    ours, theirs = (answer, anchor.split()[0]) if sent else (policy.answer or answer, anchor.answer)
    same = anchor.prompt(answer) is not None if sent else ours == theirs
    if not same and (sent or theirs is not None):
        yield finding("answer-ids", who=anchor.name, **_apart(ours, theirs or [], 3))
    try:
        again = encoded(policy.tokenizer, policy.tokenizer.decode(answer, skip_special_tokens=False)) or answer
    except Exception:  # ids without a token are named by `_vocabularies`
        again = answer
    if again != answer:
        yield finding("retokenised", "note" if sent and same else None, **_apart(answer, again, 3))


def _cuts(policy: Side, anchor: Side, prompts: tuple[Ids, Ids]) -> Iterator[CheckFinding]:
    if prompts[0] is None or prompts[1] is None:
        return
    ours, theirs, cut = len(prompts[0]), len(prompts[1]), anchor.length
    added = 0 if anchor.sent is not None else (policy.length or 0) - ours  # what both prompts have in front
    if cut is None and ours != theirs:
        yield finding("prompt-lengths", who=anchor.name, policy=ours, teacher=theirs)
    elif cut is not None and (anchor.sent is not None or cut == policy.length) and cut != theirs + added:
        shift = cut - theirs - added
        yield finding("positions", who=anchor.name, start=theirs + added, cut=cut, shift=shift, teacher=theirs)


def _templates(policy: Side, teacher: Side, prompts: tuple[Ids, Ids], *, hinted: bool) -> Iterator[CheckFinding]:
    """Does the teacher receive the prompt as its own chat template writes it?"""
    ours, own, received, length = policy.text, teacher.text or "", prompts[1], len(teacher.own or ())
    if teacher.sent is None and ours is not None and own not in ("", ours) and not hinted:
        yield finding("templates-differ", length=length, **_apart(ours, own, SHOWN))
    elif teacher.sent is not None and received and teacher.own and received[:length] != teacher.own:
        copied = received in (prompts[0], policy.own)
        other = copied and policy.tokenizer is not teacher.tokenizer
        level: Level = "wrong" if other else "warning" if copied or hinted else "note"
        prompt = "the policy's form of the prompt" if copied else "another prompt"
        yield finding("teacher-template", level, prompt=prompt, theirs=own[:SHOWN], length=length)


class Side:
    """What one tokenizer makes of the example, and what its model receives; None: not known."""

    def __init__(
        self, name: str, tokenizer: Any, example: Any, options: Mapping[str, Any], sent: Any, length: Any, ends: Any
    ) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.vocabulary: Mapping[str, int] = tokenizer.get_vocab()
        self.names = {i: token for token, i in self.vocabulary.items()}
        self.text, answer = (None, None) if example is None else _rendered(tokenizer, example, options)
        self.own, self.answer = encoded(tokenizer, self.text), encoded(tokenizer, answer)
        self.sent: Ids = None if sent is None else [int(i) for i in sent]  # what reaches the model
        self.length: int | None = length  # of the prompt that is cut off
        ends = getattr(tokenizer, "eos_token_id", None) if ends is None else ends
        self.ends = {int(i) for i in (ends if isinstance(ends, Iterable) else [ends]) if i is not None}

    def prompt(self, answer: Ids) -> Ids:
        """The ids before an answer in what was sent; if nothing was sent, its own prompt."""
        if self.sent is None or not answer:
            return self.own if self.sent is None else None
        starts = [i for i in range(len(self.sent)) if self.sent[i : i + len(answer)] == answer]
        return self.sent[: starts[-1]] if starts else None

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
        return " or ".join(repr(self.names[i]) if i in self.names else f"no token (id {i})" for i in sorted(ids))


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
        options = {"tokenize": False, "add_generation_prompt": True, **options}
        return str(tokenizer.apply_chat_template(prompt, **options)), last["content"]
    except Exception:  # no template, or one that raises errors of its own
        return None, last["content"]


def encoded(tokenizer: Any, text: str | None) -> Ids:
    """The ids of a text without special tokens; None: there is no text, or the tokenizer refuses it."""
    try:
        ids = None if text is None else tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # a tokenizer may refuse a character in any way
        return None
    return None if ids is None else [int(i) for i in getattr(ids, "ids", ids)]


def _apart(ours: Sequence[Any], theirs: Sequence[Any], count: int) -> dict[str, Any]:
    """Where two sequences begin to differ, and what each has from there on."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return {"at": at, "ours": ours[at : at + count], "theirs": theirs[at : at + count]}
