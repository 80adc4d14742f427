"""`klamp.check_pair`: the faults of public threads, rebuilt with small tokenizers, and sound pairs."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import klamp
from klamp.errors import DataError
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?+=\n"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{{ think }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLE_COLON = (
    "{% for m in messages %}{{ 'User' if m.role == 'user' else 'Assistant' }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
TALK = [{"role": "user", "content": "what is 1+1?"}, {"role": "assistant", "content": "it is 2"}]
HINT = [{"role": "system", "content": "say: it is 2"}, *TALK]


def made(letters: str = LETTERS, *, end: str = "<|im_end|>", template: str = CHATML, more: tuple[str, ...] = ()) -> Any:
    """A tokenizer of one token per character, and one for `is`; its special tokens come last."""
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*letters, "is"])}, merges=[("i", "s")]))
    backend.decoder = decoders.Fuse()  # pyright: ignore
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (*SPECIAL, *more)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


POLICY, TEACHER, PLAIN, BASE = made(), made(), made(template=ROLE_COLON), made(end="<|endoftext|>")
RENAMED = (made(more=("<|a|>",)), made(more=("<|b|>",)))
END, STOP = (POLICY.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))


def ids(text: str) -> list[int]:
    return POLICY.encode(text, add_special_tokens=False)


def prompt(tokenizer: Any = POLICY, messages: Any = TALK) -> list[int]:
    return ids(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))


ANSWER = [*ids("it is 2"), END]
SENT, PLAIN_SENT = [*prompt(), *ANSWER], [*prompt(PLAIN), *ANSWER]


def both(policy: list[int], teacher: list[int]) -> dict[str, Any]:
    return {"policy_ids": policy, "teacher_ids": teacher}


FLIPPED, SPLIT = made(LETTERS[::-1]), made()
MORE, THINKER = made(more=("<|extra|>",)), made(more=("<think>", "</think>"))
SPLIT.backend_tokenizer.model = models.BPE(vocab=POLICY.get_vocab(), merges=[])
THINK, SPELT = THINKER.convert_tokens_to_ids("<think>"), [*prompt(), *(i for x in "it is 2" for i in ids(x)), END]
OURS, THEIRS, EITHER = len(prompt(PLAIN)), len(prompt()), ([STOP, END], END)
WITH_THINK = [*prompt(), THINK, *ANSWER]
BY_HAND, THINKING, GOES_ON = [*ids("User: 1+1?"), *ANSWER], [*ids("so, "), *SENT], [*prompt(), *ids("so, "), *ANSWER]
CHARACTERS, TEXTS, HINTED = arithmetic_tokenizer(), ("1+1=", "it is 2"), both(SENT, [*prompt(messages=HINT), *ANSWER])

FAULTS: list[tuple[str, Any, Any, dict[str, Any], str]] = [
    ("thread 1, rendered by a template", PLAIN, TEACHER, both(PLAIN_SENT, PLAIN_SENT), "teacher-template"),
    ("thread 1, rendered by hand", POLICY, TEACHER, both(PLAIN_SENT, PLAIN_SENT), "teacher-template"),
    ("thread 1, fixed", PLAIN, TEACHER, both(PLAIN_SENT, SENT), ""),
    ("thread 2", PLAIN, TEACHER, both(PLAIN_SENT, SENT) | {"prompt_lengths": (OURS, OURS)}, "positions"),
    ("thread 2, fixed", PLAIN, TEACHER, both(PLAIN_SENT, SENT) | {"prompt_lengths": (OURS, THEIRS)}, ""),
    ("thread 3", BASE, TEACHER, {}, "end-id"),
    ("thread 3, as sent", BASE, TEACHER, {"policy_ids": [*SENT[:-1], STOP], "end_ids": EITHER}, "end-id"),
    ("thread 3, it may end with either", BASE, TEACHER, {"end_ids": EITHER}, ""),
    ("threads 15 and 26", POLICY, FLIPPED, {}, "other-tokenizer answer-ids"),
    ("thread 26, an id that is used", *RENAMED, {"policy_ids": [*prompt(), END + 1, *ANSWER]}, "other-tokenizer"),
    ("thread 40", THINKER, POLICY, both(WITH_THINK, [min(i, THINK - 1) for i in WITH_THINK]), "ids-outside answer-ids"),
    ("the same ids, other merges", POLICY, SPLIT, {}, "answer-ids"),
]
FIXES = {
    "teacher-template": "render the prompt with the teacher's chat template",
    "positions": f"own prompt length, {THEIRS}",
    "end-id": "train the policy",
    "other-tokenizer": "same model family",
    "ids-outside": "never clamp",
}
"""Part of the fix that ended the thread."""


@pytest.mark.parametrize(("name", "policy", "teacher", "given", "codes"), FAULTS)
def test_a_fault_is_named_with_its_fix(name: str, policy: Any, teacher: Any, given: Any, codes: str) -> None:
    verdict = klamp.check_pair(policy, teacher, TALK, **given)
    found = [x for x in verdict.findings if x.level == "wrong"]
    assert {x.code for x in found} == set(codes.split()) and verdict.ok is not bool(codes), str(verdict)
    assert all(FIXES.get(x.code, "") in x.fix for x in found), str(verdict)


def test_without_an_example_the_vocabularies_are_compared() -> None:
    assert klamp.check_pair(POLICY, FLIPPED).codes("wrong") == ("other-tokenizer",)
    assert "end-id" not in klamp.check_pair(POLICY, made(LETTERS[1:])).codes(), "one end token under two ids"


SOUND: dict[str, tuple[Any, Any, Any, dict[str, Any], str, str]] = {
    "all that is sent": (POLICY, POLICY, TALK, both(SENT, SENT), "", ""),
    "padded tokens of the teacher": (POLICY, MORE, TALK, {}, "", "extra-tokens"),
    "a special token with another name": (*RENAMED, TALK, {}, "other-tokenizer", ""),
    "a hint": (POLICY, TEACHER, TALK, HINTED | {"teacher_example": HINT}, "", ""),
    "a hint without its example": (POLICY, TEACHER, TALK, HINTED, "", "teacher-template"),
    "one model, a plain prompt": (POLICY, POLICY, TALK, both(BY_HAND, BY_HAND), "teacher-template", ""),
    "a reference": (POLICY, TEACHER, TALK, both(BY_HAND, BY_HAND) | {"who": "reference"}, "", ""),
    "a template that goes on": (POLICY, TEACHER, TALK, both(SENT, GOES_ON), "", ""),
    "options": (POLICY, TEACHER, TALK, both(THINKING, THINKING) | {"template_options": {"think": "so, "}}, "", ""),
    "texts": (POLICY, TEACHER, TEXTS, {"prompt_lengths": (4, 4)}, "", ""),
    "tokenizers' own class": (POLICY.backend_tokenizer, TEACHER.backend_tokenizer, TEXTS, {}, "", ""),
    "two templates": (PLAIN, TEACHER, TALK, {}, "templates-differ", "prompt-lengths"),
    "another tokenization": (POLICY, POLICY, TALK, {"policy_ids": SPELT}, "retokenised", ""),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_pairs_are_not_accused(name: str) -> None:
    policy, teacher, example, given, warned, noted = SOUND[name]
    verdict = klamp.check_pair(policy, teacher, example, **given)
    assert verdict.ok is True, str(verdict)
    assert verdict.codes("warning") == tuple(warned.split()), str(verdict)
    assert set(noted.split()) <= set(verdict.codes("note"))


def test_what_was_not_passed_is_listed_with_the_argument_that_allows_it() -> None:
    assert len(klamp.check_pair(POLICY, POLICY).not_checked) == 5
    given = both(SENT, SENT) | {"prompt_lengths": (len(prompt()),) * 2, "end_ids": (END, END)}
    assert not klamp.check_pair(POLICY, POLICY, TALK, **given).not_checked
    assert [*klamp.check_pair(POLICY, POLICY, ("1", "2"), **given).not_checked] == ["the teacher's chat template"]


def test_an_answer_that_cannot_be_read_leaves_the_question_open() -> None:
    assert klamp.check_pair(CHARACTERS, CHARACTERS, ("1+1=", "TWO")).codes("cannot tell") == ("not-encoded",)
    for example in ([], TALK[:1], [{"role": "assistant", "content": ["2"]}]):
        with pytest.raises(DataError, match="does not end with an answer"):
            klamp.check_pair(POLICY, POLICY, example)
