"""`klamp.check_pair`: the faults of public threads, rebuilt with small tokenizers, and sound pairs."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import klamp
from klamp.errors import DataError
from klamp.tasks.arithmetic import arithmetic_tokenizer

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


def finding(verdict: Any, code: str) -> Any:
    return next(each for each in verdict.findings if each.code == code)


def test_thread_1_the_teacher_receives_the_role_colon_form_of_the_policy() -> None:
    for policy in (PLAIN, POLICY):  # rendered by a template, or by hand
        verdict = klamp.check_pair(policy, TEACHER, TALK, **both(PLAIN_SENT, PLAIN_SENT))
        assert verdict.codes("wrong") == ("teacher-template",), str(verdict)
        assert "render the prompt with the teacher's chat template" in finding(verdict, "teacher-template").fix
    by_hand = both([*ids("1+1?"), *ANSWER], PLAIN_SENT)
    assert klamp.check_pair(PLAIN, TEACHER, TALK, **by_hand).codes("wrong") == ("teacher-template",)
    assert klamp.check_pair(PLAIN, TEACHER, TALK, **both(PLAIN_SENT, SENT)).ok


def test_thread_2_the_teacher_s_own_prompt_is_cut_at_the_policy_s_length() -> None:
    ours, theirs = len(prompt(PLAIN)), len(prompt())
    for given in (both(PLAIN_SENT, SENT), {}):
        verdict = klamp.check_pair(PLAIN, TEACHER, TALK, prompt_lengths=(ours, ours), **given)
        assert verdict.codes("wrong") == ("positions",) and f"own prompt length, {theirs}" in str(verdict)
        assert finding(verdict, "positions").evidence == {"shift": ours - theirs}
        assert klamp.check_pair(PLAIN, TEACHER, TALK, prompt_lengths=(ours, theirs), **given).ok
    assert klamp.check_pair(PLAIN, TEACHER, TALK, **both(PLAIN_SENT, SENT)).codes("note") == ("prompt-lengths",)


def test_two_templates_are_a_warning_until_it_is_known_what_was_sent() -> None:
    verdict = klamp.check_pair(PLAIN, TEACHER, TALK)
    assert verdict.ok and verdict.codes() == ("templates-differ", "prompt-lengths")
    assert not klamp.check_pair(PLAIN, TEACHER, TALK, teacher_example=HINT).codes("warning")


@pytest.mark.parametrize("stops", [None, (STOP, [STOP, END]), ([STOP], END)])
def test_thread_3_the_policy_ends_with_a_token_that_the_teacher_does_not_end_with(stops: Any) -> None:
    verdict = klamp.check_pair(BASE, TEACHER, TALK, end_ids=stops)
    fault = finding(verdict, "end-id")
    assert verdict.codes("wrong") == ("end-id",) and fault.evidence == {"policy": [STOP], "teacher": [END]}
    assert "train the policy" in fault.fix
    ended, either = [*prompt(), *ids("it is 2"), STOP], ([STOP, END], END)
    assert "end-id" in klamp.check_pair(BASE, TEACHER, TALK, policy_ids=ended, end_ids=either).codes("wrong")
    assert klamp.check_pair(BASE, TEACHER, TALK, end_ids=either).codes("note") == ("end-id",), "it may end with either"


def test_threads_15_and_26_the_teacher_has_another_tokenizer() -> None:
    verdict = klamp.check_pair(POLICY, made(LETTERS[::-1]), TALK)
    fault = finding(verdict, "other-tokenizer")
    assert "same model family" in fault.fix and "GOLD" in fault.fix and "answer-ids" in verdict.codes("wrong")
    assert fault.evidence["id"] in ANSWER, "the first id that the example uses"
    assert klamp.check_pair(POLICY, made(LETTERS[::-1])).codes("wrong") == ("other-tokenizer",), "without an example"
    assert "end-id" not in klamp.check_pair(POLICY, made(LETTERS[1:])).codes(), "one end token under two ids"
    verdict = klamp.check_pair(*RENAMED, TALK, policy_ids=[*prompt(), END + 1, *ANSWER])
    assert verdict.codes("wrong") == ("other-tokenizer",), "an id that is used"


def test_thread_40_ids_are_clamped_into_the_teacher_s_vocabulary() -> None:
    policy = made(more=("<think>", "</think>"))
    think = policy.convert_tokens_to_ids("<think>")
    sent = [*prompt(), think, *ANSWER]
    given = both(sent, [min(i, think - 1) for i in sent])
    verdict = klamp.check_pair(policy, POLICY, TALK, prompt_lengths=(len(prompt()),) * 2, **given)
    assert {*verdict.codes("wrong")} == {"ids-outside", "answer-ids"} and "never clamp" in str(verdict)
    assert finding(verdict, "ids-outside").evidence["ids"] == [think]
    rows = klamp.check_pair(policy, POLICY, TALK, policy_ids=sent, vocabulary_sizes=(96, 96))
    assert rows.codes("wrong") == ("ids-outside",), "a row of the head without a token"
    assert klamp.check_pair(POLICY, POLICY, TALK, vocabulary_sizes=(100, END)).codes("wrong") == ("ids-outside",)
    assert klamp.check_pair(POLICY, POLICY, TALK, vocabulary_sizes=(100, END + 1)).ok


def test_the_answer_s_ids_are_compared_behind_each_one_s_prompt() -> None:
    verdict = klamp.check_pair(POLICY, TEACHER, TALK, **both(SENT, [*prompt(), *ids("it is 3"), END]))
    assert verdict.codes("wrong") == ("answer-ids",)
    assert finding(verdict, "answer-ids").evidence["at"] == len(ids("it is "))
    turns = both(*([*prompt(), *ids("it"), END, *ids(f" is {last}, ok?")] for last in (2, 3)))
    assert "answer-ids" in klamp.check_pair(POLICY, POLICY, TALK, **turns).codes("wrong"), "behind an inner end token"
    split = made()
    split.backend_tokenizer.model = models.BPE(vocab=POLICY.get_vocab(), merges=[])
    assert klamp.check_pair(POLICY, split, TALK).codes("wrong") == ("answer-ids",), "the same ids, other merges"


def test_an_answer_that_is_encoded_again_becomes_other_ids() -> None:
    sent = [*prompt(), *(i for token in "it is 2" for i in ids(token)), END]  # `i`, `s`: encoding it writes `is`
    verdict = klamp.check_pair(POLICY, POLICY, TALK, policy_ids=sent)
    assert verdict.ok and verdict.codes("warning") == ("retokenised",)
    assert finding(verdict, "retokenised").evidence["at"] == 3
    verdict = klamp.check_pair(POLICY, POLICY, TALK, **both(sent, sent))
    assert verdict.codes("note") == ("retokenised",) and not verdict.codes("warning"), "the teacher has the same ids"
    assert klamp.check_pair(POLICY, POLICY, TALK, **both(sent, SENT)).codes() == ("answer-ids", "retokenised")


def test_a_model_has_positions_for_the_whole_sequence() -> None:
    length = len(SENT) - 1
    assert klamp.check_pair(POLICY, POLICY, TALK, context_lengths=(length, length)).ok
    assert klamp.check_pair(POLICY, POLICY, TALK, context_lengths=(length, length - 1)).codes("wrong") == ("too-long",)


CHARACTERS, MORE, PAIR = arithmetic_tokenizer(), made(more=("<|extra|>",)), ("1+1=", "it is 2")
BY_HAND, THINKING = [*ids("User: 1+1?"), *ANSWER], [*ids("so, "), *SENT]
HINTED = both(SENT, [*prompt(messages=HINT), *ANSWER])
PAIRS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "one tokenizer": (POLICY, POLICY, TALK, {}),
    "one tokenizer, all that is sent": (POLICY, POLICY, TALK, both(SENT, SENT)),
    "one base model": (BASE, BASE, TALK, {}),
    "two copies": (POLICY, TEACHER, TALK, both(SENT, SENT)),
    "padded tokens of the teacher": (POLICY, MORE, TALK, {"vocabulary_sizes": (80, 96)}),
    "padded tokens of the policy": (MORE, POLICY, TALK, {"vocabulary_sizes": (96, 80)}),
    "a special token with another name": (*RENAMED, TALK, {}),
    "a hint": (POLICY, TEACHER, TALK, HINTED | {"teacher_example": HINT}),
    "a hint without its example": (POLICY, TEACHER, TALK, HINTED),
    "one model, a plain prompt": (POLICY, POLICY, TALK, both(BY_HAND, BY_HAND)),
    "a reference, a plain prompt": (POLICY, TEACHER, TALK, both(BY_HAND, BY_HAND) | {"who": "reference"}),
    "a template that goes on": (POLICY, TEACHER, TALK, both(SENT, [*prompt(), *ids("so, "), *ANSWER])),
    "options of the templates": (
        POLICY,
        TEACHER,
        TALK,
        both(THINKING, THINKING) | {"template_options": {"think": "so, "}},
    ),
    "texts": (POLICY, TEACHER, PAIR, {"prompt_lengths": (4, 4)}),
    "a token in front of both prompts": (POLICY, TEACHER, PAIR, {"prompt_lengths": (5, 5)}),
    "tokenizers' own class": (POLICY.backend_tokenizer, TEACHER.backend_tokenizer, PAIR, {}),
    "klamp's characters": (CHARACTERS, CHARACTERS, ("1+1=", "2"), {}),
}
WARNED = {"a special token with another name": "other-tokenizer", "one model, a plain prompt": "teacher-template"}


@pytest.mark.parametrize("case", PAIRS)
def test_sound_pairs_are_not_accused(case: str) -> None:
    policy, teacher, example, given = PAIRS[case]
    verdict = klamp.check_pair(policy, teacher, example, **given)
    assert verdict.ok is True, str(verdict)
    assert verdict.codes("warning") == ((WARNED[case],) if case in WARNED else ()), str(verdict)
    assert ("extra-tokens" in verdict.codes("note")) == case.startswith("padded")
    noted = ("a hint without its example", "one model, a plain prompt")
    assert ("teacher-template" in verdict.codes()) == (case in noted)


def test_what_was_not_passed_is_listed_with_the_argument_that_allows_it() -> None:
    assert len(klamp.check_pair(POLICY, POLICY).not_checked) == 7
    given = both(SENT, SENT) | {
        "prompt_lengths": (len(prompt()),) * 2,
        "end_ids": (END, END),
        "vocabulary_sizes": (80, 80),
        "context_lengths": (99, 99),
    }
    assert not klamp.check_pair(POLICY, POLICY, TALK, **given).not_checked
    assert [*klamp.check_pair(POLICY, POLICY, ("1", "2"), **given).not_checked] == ["the teacher's chat template"]


def test_an_answer_that_cannot_be_read_leaves_the_question_open() -> None:
    assert klamp.check_pair(CHARACTERS, CHARACTERS, ("1+1=", "TWO")).codes("cannot tell") == ("not-encoded",)
    for example in ([], TALK[:1], [{"role": "assistant", "content": ["2"]}]):
        with pytest.raises(DataError, match="does not end with an answer"):
            klamp.check_pair(POLICY, POLICY, example)
