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


POLICY, RENAMED = made(), (made(more=("<|a|>",)), made(more=("<|b|>",)))
END, STOP = (POLICY.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))


def ids(text: str, tokenizer: Any = POLICY) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def prompt(tokenizer: Any = POLICY, messages: Any = TALK) -> list[int]:
    return ids(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True), tokenizer)


ANSWER = [*ids("it is 2"), END]


def finding(verdict: Any, code: str) -> Any:
    return next(each for each in verdict.findings if each.code == code)


def test_thread_1_the_teacher_receives_the_role_colon_form_of_the_policy() -> None:
    plain = made(template=ROLE_COLON)
    sent = [*prompt(plain), *ANSWER]
    for policy in (plain, made()):  # rendered by a template, or by hand
        verdict = klamp.check_pair(policy, made(), TALK, policy_ids=sent, teacher_ids=sent)
        assert verdict.codes("wrong") == ("teacher-template",) and "<|im_start|>user" in str(verdict)
        assert "render the prompt with the teacher's chat template" in str(verdict)
        assert f"prompt length, {len(prompt())}" in str(verdict)
    by_hand: dict[str, Any] = {"policy_ids": [*ids("1+1?"), *ANSWER]}
    assert klamp.check_pair(plain, made(), TALK, teacher_ids=sent, **by_hand).codes("wrong") == ("teacher-template",)
    mended = [*prompt(made()), *ANSWER]
    assert klamp.check_pair(plain, made(), TALK, policy_ids=sent, teacher_ids=mended).ok


def test_thread_2_the_teacher_s_own_prompt_is_cut_at_the_policy_s_length() -> None:
    plain, teacher = made(template=ROLE_COLON), made()
    ours, theirs = len(prompt(plain)), len(prompt(teacher))
    sent: dict[str, Any] = {"policy_ids": [*prompt(plain), *ANSWER], "teacher_ids": [*prompt(teacher), *ANSWER]}
    for given in (sent, {}):
        verdict = klamp.check_pair(plain, teacher, TALK, prompt_lengths=(ours, ours), **given)
        assert verdict.codes("wrong") == ("positions",) and f"own prompt length, {theirs}" in str(verdict)
        assert finding(verdict, "positions").evidence == {"shift": ours - theirs}
        assert klamp.check_pair(plain, teacher, TALK, prompt_lengths=(ours, theirs), **given).ok
    verdict = klamp.check_pair(plain, teacher, TALK, **sent)
    assert verdict.codes("note") == ("prompt-lengths",) and f"{theirs} tokens and the policy's {ours}" in str(verdict)


def test_two_templates_are_a_warning_until_it_is_known_what_was_sent() -> None:
    verdict = klamp.check_pair(made(template=ROLE_COLON), made(), TALK)
    assert verdict.ok and verdict.codes() == ("templates-differ", "prompt-lengths")
    assert "'User: what" in str(verdict) and "'<|im_start|>user" in str(verdict)
    assert not klamp.check_pair(made(template=ROLE_COLON), made(), TALK, teacher_example=HINT).codes("warning")


@pytest.mark.parametrize("stops", [None, (STOP, [STOP, END]), ([STOP], END)])
def test_thread_3_the_policy_ends_with_a_token_that_the_teacher_does_not_end_with(stops: Any) -> None:
    base, teacher = made(end="<|endoftext|>"), made()
    verdict = klamp.check_pair(base, teacher, TALK, end_ids=stops)
    fault = finding(verdict, "end-id")
    assert verdict.codes("wrong") == ("end-id",) and fault.evidence == {"policy": [STOP], "teacher": [END]}
    assert "'<|im_end|>' and the policy with '<|endoftext|>'" in fault.what and "train the policy" in fault.fix
    ended = [*prompt(), *ids("it is 2"), STOP]
    either: dict[str, Any] = {"end_ids": ([STOP, END], END)}
    assert "end-id" in klamp.check_pair(base, teacher, TALK, policy_ids=ended, **either).codes("wrong")
    assert klamp.check_pair(base, teacher, TALK, **either).codes("note") == ("end-id",), "it may end with either"


def test_threads_15_and_26_the_teacher_has_another_tokenizer() -> None:
    teacher = made(LETTERS[::-1])
    verdict = klamp.check_pair(POLICY, teacher, TALK)
    fault = finding(verdict, "other-tokenizer")
    assert "same model family" in fault.fix and "GOLD" in fault.fix and "answer-ids" in verdict.codes("wrong")
    token, other = (each.convert_ids_to_tokens(fault.evidence["id"]) for each in (POLICY, teacher))
    assert fault.evidence["id"] in ANSWER, "the first id that the example uses"
    assert f"{token!r} for the policy and {other!r} for the teacher" in fault.what
    assert klamp.check_pair(POLICY, teacher).codes("wrong") == ("other-tokenizer",), "without an example"
    assert "end-id" not in klamp.check_pair(POLICY, made(LETTERS[1:])).codes(), "one end token under two ids"
    verdict = klamp.check_pair(*RENAMED, TALK, policy_ids=[*prompt(), END + 1, *ANSWER])
    assert verdict.codes("wrong") == ("other-tokenizer",), "an id that is used"


def test_thread_40_ids_are_clamped_into_the_teacher_s_vocabulary() -> None:
    policy = made(more=("<think>", "</think>"))
    think = policy.convert_tokens_to_ids("<think>")
    sent = [*prompt(), think, *ANSWER]
    clamped = [min(i, think - 1) for i in sent]
    given: dict[str, Any] = {"policy_ids": sent, "teacher_ids": clamped, "prompt_lengths": (len(prompt()),) * 2}
    verdict = klamp.check_pair(policy, POLICY, TALK, **given)
    assert {*verdict.codes("wrong")} == {"ids-outside", "answer-ids"} and "never clamp" in str(verdict)
    assert finding(verdict, "ids-outside").evidence["ids"] == [think]
    assert finding(verdict, "answer-ids").evidence["at"] == 0
    rows = klamp.check_pair(policy, POLICY, TALK, policy_ids=sent, vocabulary_sizes=(96, 96))
    assert rows.codes("wrong") == ("ids-outside",), "a row of the head without a token"
    assert klamp.check_pair(POLICY, POLICY, TALK, vocabulary_sizes=(100, END)).codes("wrong") == ("ids-outside",)
    assert klamp.check_pair(POLICY, POLICY, TALK, vocabulary_sizes=(100, END + 1)).ok


def test_the_answer_s_ids_are_compared_behind_each_one_s_prompt() -> None:
    sent, other = [*prompt(), *ANSWER], [*prompt(), *ids("it is 3"), END]
    verdict = klamp.check_pair(POLICY, made(), TALK, policy_ids=sent, teacher_ids=other)
    fault = finding(verdict, "answer-ids")
    assert verdict.codes("wrong") == ("answer-ids",) and fault.evidence["at"] == len(ids("it is "))
    assert "answer ids behind the teacher's prompt" in fault.fix
    turns = ([*prompt(), *ids("it"), END, *ids(f" is {last}, ok?")] for last in (2, 3))
    given = dict(zip(("policy_ids", "teacher_ids"), turns, strict=True))
    assert "answer-ids" in klamp.check_pair(POLICY, POLICY, TALK, **given).codes("wrong"), "behind an inner end token"
    split = made()
    split.backend_tokenizer.model = models.BPE(vocab=POLICY.get_vocab(), merges=[])
    assert klamp.check_pair(POLICY, split, TALK).codes("wrong") == ("answer-ids",), "the same ids, other merges"


def test_an_answer_that_is_encoded_again_becomes_other_ids() -> None:
    sampled = [i for token in "it is 2" for i in ids(token)]  # `i`, `s`: encoding its text writes `is`
    sent = [*prompt(), *sampled, END]
    verdict = klamp.check_pair(POLICY, POLICY, TALK, policy_ids=sent)
    assert verdict.ok and verdict.codes("warning") == ("retokenised",)
    assert "pass on the sampled ids" in str(verdict) and finding(verdict, "retokenised").evidence["at"] == 3
    verdict = klamp.check_pair(POLICY, POLICY, TALK, policy_ids=sent, teacher_ids=sent)
    assert verdict.codes("note") == ("retokenised",) and not verdict.codes("warning"), "the teacher has the same ids"
    again = [*prompt(), *ANSWER]
    verdict = klamp.check_pair(POLICY, POLICY, TALK, policy_ids=sent, teacher_ids=again)
    assert verdict.codes() == ("answer-ids", "retokenised")


def test_a_model_has_positions_for_the_whole_sequence() -> None:
    length = len(prompt()) + len(ids("it is 2"))
    assert klamp.check_pair(POLICY, POLICY, TALK, context_lengths=(length, length)).ok
    assert "the teacher receives" in str(klamp.check_pair(POLICY, POLICY, TALK, context_lengths=(length, length - 1)))


def sound() -> dict[str, tuple[Any, Any, Any, dict[str, Any]]]:
    sent, hinted, plain = [*prompt(), *ANSWER], [*prompt(messages=HINT), *ANSWER], [*ids("User: 1+1?"), *ANSWER]
    base, think = made(end="<|endoftext|>"), [*prompt(), *ids("so, "), *ANSWER]
    front, pair = [*ids("so, "), *sent], ("1+1=", "it is 2")
    both, thinking = ({"policy_ids": each, "teacher_ids": each} for each in (plain, front))
    return {
        "one tokenizer": (POLICY, POLICY, TALK, {}),
        "one tokenizer, all that is sent": (POLICY, POLICY, TALK, {"policy_ids": sent, "teacher_ids": sent}),
        "one base model": (base, base, TALK, {}),
        "two copies": (made(), made(), TALK, {"policy_ids": sent, "teacher_ids": sent}),
        "padded tokens of the teacher": (POLICY, made(more=("<|extra|>",)), TALK, {"vocabulary_sizes": (80, 96)}),
        "padded tokens of the policy": (made(more=("<|extra|>",)), POLICY, TALK, {"vocabulary_sizes": (96, 80)}),
        "a special token with another name": (*RENAMED, TALK, {}),
        "a hint": (POLICY, made(), TALK, {"policy_ids": sent, "teacher_ids": hinted, "teacher_example": HINT}),
        "a hint without its example": (POLICY, made(), TALK, {"policy_ids": sent, "teacher_ids": hinted}),
        "one model, a plain prompt": (POLICY, POLICY, TALK, both),
        "a reference, a plain prompt": (made(), made(), TALK, both | {"who": "reference"}),
        "a template that goes on": (POLICY, made(), TALK, {"policy_ids": sent, "teacher_ids": think}),
        "options of the templates": (POLICY, made(), TALK, thinking | {"template_options": {"think": "so, "}}),
        "texts": (POLICY, made(), pair, {"prompt_lengths": (4, 4)}),
        "a token in front of both prompts": (POLICY, made(), pair, {"prompt_lengths": (5, 5)}),
        "tokenizers' own class": (POLICY.backend_tokenizer, made().backend_tokenizer, pair, {}),
        "klamp's characters": (arithmetic_tokenizer(), arithmetic_tokenizer(), ("1+1=", "2"), {}),
    }


@pytest.mark.parametrize("case", sound())
def test_sound_pairs_are_not_accused(case: str) -> None:
    policy, teacher, example, given = sound()[case]
    verdict = klamp.check_pair(policy, teacher, example, **given)
    assert verdict.ok is True, str(verdict)
    warned = {"a special token with another name": "other-tokenizer", "one model, a plain prompt": "teacher-template"}
    assert verdict.codes("warning") == ((warned[case],) if case in warned else ()), str(verdict)
    assert ("extra-tokens" in verdict.codes("note")) == case.startswith("padded")
    noted = ("a hint without its example", "one model, a plain prompt")
    assert ("teacher-template" in verdict.codes()) == (case in noted)


def test_what_was_not_passed_is_listed_with_the_argument_that_allows_it() -> None:
    assert len(klamp.check_pair(POLICY, POLICY).not_checked) == 7
    sent = [*prompt(), *ANSWER]
    given: dict[str, Any] = {"policy_ids": sent, "teacher_ids": sent, "prompt_lengths": (len(prompt()),) * 2}
    given |= {"end_ids": (END, END), "vocabulary_sizes": (80, 80), "context_lengths": (99, 99)}
    assert not klamp.check_pair(POLICY, POLICY, TALK, **given).not_checked
    assert [*klamp.check_pair(POLICY, POLICY, ("1", "2"), **given).not_checked] == ["the teacher's chat template"]


def test_an_answer_that_cannot_be_read_leaves_the_question_open() -> None:
    characters = arithmetic_tokenizer()
    assert klamp.check_pair(characters, characters, ("1+1=", "TWO")).codes("cannot tell") == ("not-encoded",)
    for example in ([], TALK[:1], [{"role": "assistant", "content": ["2"]}]):
        with pytest.raises(DataError, match="does not end with an answer"):
            klamp.check_pair(POLICY, POLICY, example)
