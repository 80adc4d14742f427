"""Preflight of a policy and its teacher: do both read one conversation as the same tokens, ends and positions?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from klamp.audit.verdict import Finding, Verdict, cannot_tell, note, warning, wrong
from klamp.errors import DataError

Example: TypeAlias = Sequence[Mapping[str, Any]] | tuple[str, str]
"""Messages that end with the assistant's answer, or the texts of prompt and answer."""
Ids: TypeAlias = list[int] | None

SHOWN = 40
"""Characters, or ids, that a finding shows."""
PROBE = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
"""A conversation that shows how a chat template writes a prompt and ends an answer."""
TAIL = 2
"""Tokens that a chat template may write after the end token."""
OPEN = {
    "example": "chat templates, ids of the answer, round trip",
    "policy_ids": "what the policy is trained on",
    "teacher_ids": "what the teacher receives",
    "prompt_lengths": "where the prompts are cut off",
    "end_ids": "where generation stops",
    "vocabulary_sizes": "the numbers of logits",
    "context_lengths": "the numbers of positions",
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
    vocabulary_sizes: tuple[int, int] | None = None,
    context_lengths: tuple[int, int] | None = None,
    template_options: Mapping[str, Any] | None = None,
    who: Literal["teacher", "reference"] = "teacher",
) -> Verdict:
    """Checks that a policy and its teacher read one conversation in the same way; loads no model.

    Every pair of values is (policy, teacher). Ids are those of the example, prompt and answer, without padding.

    Args:
        policy_tokenizer: the policy's: any object with `get_vocab`, `encode` and `decode`.
        teacher_tokenizer: the one of the teacher or the reference.
        example: messages that end with the assistant's answer, or two texts (prompt, answer).
        teacher_example: the example as the teacher sees it, if its prompt is another one.
        policy_ids: the ids that the policy is trained on.
        teacher_ids: the ids that the teacher receives.
        prompt_lengths: how many ids the trainer cuts off as the prompt.
        end_ids: the id or ids at which generation stops; None: each tokenizer's end token.
        vocabulary_sizes: the number of logits of each model.
        context_lengths: the number of positions of each model.
        template_options: arguments of both chat templates, such as `{"enable_thinking": False}`.
        who: a reference receives the policy's prompt, so its own chat template is not checked.

    Raises:
        DataError: the example does not end with an answer in text.
    """
    passed = {name for name, value in locals().items() if value is not None}
    options, lengths, ends = template_options or {}, prompt_lengths or (None, None), end_ids or (None, None)
    policy = Side.of("policy", policy_tokenizer, (policy_ids, lengths[0], ends[0]), example, options)
    teacher = Side.of(who, teacher_tokenizer, (teacher_ids, lengths[1], ends[1]), teacher_example or example, options)
    answer, end = policy.split()
    prompts = policy.prompt(answer), teacher.prompt(answer)
    used = {*(policy.sent or ()), *(answer or ()), *policy.ends}
    findings = [*_vocabularies(policy, teacher, used, vocabulary_sizes), *_ends(policy, teacher, end)]
    if answer:
        findings += [*_answers(policy, teacher, answer), *_cuts(policy, teacher, prompts)]
    elif answer is None and passed & {"example", "policy_ids"}:
        fix = "pass policy_ids and prompt_lengths"
        findings.append(cannot_tell("not-encoded", "the ids of the policy's answer are not known", fix=fix))
    for side, prompt, limit in zip((policy, teacher), prompts, context_lengths or (), strict=False):
        if (length := len(side.sent or [*(prompt or ()), *(answer or ())])) > limit:
            what = f"the {side.name} receives {length} tokens and has {limit} positions"
            findings.append(wrong("too-long", what, fix="shorten the prompt or the answer", length=length, limit=limit))
    if who == "teacher" and example and not isinstance(example[-1], str):
        findings += _templates(policy, teacher, prompts, hinted=teacher_example is not None)
    missing = {what: f"pass {name}" for name, what in OPEN.items() if name not in passed}
    if who == "teacher" and example and (teacher.text is None or isinstance(example[-1], str)):
        missing["the teacher's chat template"] = "pass messages, and a tokenizer with a chat template"
    summary = f"policy with {len(policy.vocabulary)} tokens, {who} with {len(teacher.vocabulary)}"
    return Verdict.of(findings, summary=summary, not_checked=missing)


def _vocabularies(policy: Side, teacher: Side, used: set[int], sizes: Any) -> Iterator[Finding]:
    own, other, who = policy.vocabulary, teacher.vocabulary, teacher.name
    names = {i: token for token, i in other.items()}
    differ = sorted(token for token, i in own.items() if other.get(token) != i)
    clash = {own[token] for token in differ if token in other or own[token] in names}
    counts = {"tokens": len(differ), "of": len(own), "first": differ[0] if differ else None, "sizes": sizes}
    fix = f"use a {who} of the same model family; a KL per token cannot align two tokenizers (GOLD and ULD do)"
    if clash:
        i = min(clash, key=lambda i: (i not in used, i))
        what = f"the {who} has another tokenizer than the policy: id {i} is {policy.words([i])} for the policy"
        added = {*getattr(policy.tokenizer, "get_added_vocab", dict)().values()}
        say = warning if clash <= added and i not in used else wrong
        yield say("other-tokenizer", f"{what} and {teacher.words([i])} for the {who}", fix=fix, id=i, **counts)
    elif len(own) != len(other) or len({*(sizes or ())}) > 1:
        what = f"policy and {who} have {len(own)} and {len(other)} tokens; an id that both have is the same token"
        yield note("extra-tokens", what, **counts)
    size = max(names, default=-1) + 1 if sizes is None else sizes[1]
    if outside := sorted(i for i in used if i not in names or i >= size):
        what = f"{len(outside)} ids of the example are not in the {who}'s vocabulary, the first is {outside[0]}"
        yield wrong("ids-outside", what, fix=f"{fix}; never clamp ids", ids=outside[:SHOWN], size=size)


def _ends(policy: Side, teacher: Side, end: int | None) -> Iterator[Finding]:
    ours, who = policy.ends if end is None else {end}, teacher.name
    theirs = teacher.ends & {*turn_end(teacher.tokenizer)[:1]} or teacher.ends
    token, other = policy.words(ours), teacher.words(theirs)
    if ours and theirs and not ours <= theirs and token != other:  # one token with two ids is another tokenizer
        both = {"teacher": sorted(theirs), "policy": sorted(ours)}
        what = f"the {who} ends an answer with {other} and the policy with {token} (ids "
        what += f"{both['teacher']} and {both['policy']}): the {who} may pull the policy's end away, and answers then "
        fix = f"give both the same end token, or first train the policy on answers that end as the {who}'s do"
        yield (note if ours & theirs else wrong)("end-id", f"{what}grow until they are cut", fix=fix, **both)


def _answers(policy: Side, teacher: Side, answer: list[int]) -> Iterator[Finding]:
    sent, who = teacher.sent is not None, teacher.name
    ours, theirs = (answer, teacher.split()[0]) if sent else (policy.answer or answer, teacher.answer)
    same = teacher.prompt(answer) is not None if sent else ours == theirs
    if not same and (sent or theirs is not None):
        at, theirs = apart(ours, theirs or []), theirs or []
        what = f"from its token {at} on, the {who} reads the answer as {theirs[at : at + 3]} instead of "
        fix = f"send the policy's answer ids behind the {who}'s prompt, not the text of the answer"
        evidence = {"at": at, "policy": ours[:SHOWN], "teacher": theirs[:SHOWN]}
        nowhere = f"the policy's answer is not among the ids that the {who} receives"
        yield wrong("answer-ids", f"{what}{ours[at : at + 3]}" if theirs else nowhere, fix=fix, **evidence)
    try:
        again = encoded(policy.tokenizer, policy.tokenizer.decode(answer, skip_special_tokens=False)) or answer
    except Exception:  # ids without a token are named by `_vocabularies`
        again = answer
    if again != answer:
        at = apart(answer, again)
        what = f"decoding and encoding the answer changes its ids from token {at} on: {answer[at : at + 3]} become "
        say, fix = note if sent and same else warning, "pass on the sampled ids, never their text"
        yield say("retokenised", f"{what}{again[at : at + 3]}", fix=fix, at=at, ids=again[:SHOWN])


def _cuts(policy: Side, teacher: Side, prompts: tuple[Ids, Ids]) -> Iterator[Finding]:
    if prompts[0] is None or prompts[1] is None:
        return
    ours, theirs, who, cut = len(prompts[0]), len(prompts[1]), teacher.name, teacher.length
    fix = f"cut the {who}'s log-probabilities by the {who}'s own prompt length, {theirs}"
    if cut is None and ours != theirs:
        what = f"the {who}'s prompt has {theirs} tokens and the policy's {ours}"
        yield note("prompt-lengths", what, fix=fix, policy=ours, teacher=theirs)
    elif cut is not None and (teacher.sent is not None or cut == policy.length):
        added = 0 if teacher.sent is not None else (policy.length or 0) - ours  # what both prompts have in front
        if shift := cut - added - theirs:
            what = (
                f"the {who}'s answer begins at token {theirs + added} and is cut at {cut}: a shift of {shift:+d} tokens"
            )
            yield wrong("positions", what, fix=fix, shift=shift)


def _templates(policy: Side, teacher: Side, prompts: tuple[Ids, Ids], *, hinted: bool) -> Iterator[Finding]:
    """Does the teacher receive the prompt as its own chat template writes it?"""
    ours, own, given = policy.text, teacher.text or "", prompts[1]
    fix = "render the prompt with the teacher's chat template, append the policy's answer ids, and cut the teacher's "
    fix += f"log-probabilities by the teacher's own prompt length, {len(teacher.own or ())}"
    if teacher.sent is None and ours is not None and own not in ("", ours) and not hinted:
        at = apart(ours, own)
        what = f"the chat templates write the prompt differently: {ours[at : at + SHOWN]!r} for the policy and "
        yield warning("templates-differ", f"{what}{own[at : at + SHOWN]!r} for the teacher", fix=fix, at=at)
    elif teacher.sent is not None and given and teacher.own and given[: len(teacher.own)] != teacher.own:
        copied = given in (prompts[0], policy.own)
        accused = copied and policy.tokenizer is not teacher.tokenizer
        what = "the teacher receives " + ("the policy's form of the prompt" if copied else "another prompt")
        say = wrong if accused else warning if copied or hinted else note
        fix = fix if copied or hinted else f"pass teacher_example if that is meant; if not, {fix}"
        yield say("teacher-template", f"{what}; its own chat template writes {own[:SHOWN]!r}", fix=fix)


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
