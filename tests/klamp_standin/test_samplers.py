"""The routes of sampling: which weights a sampler has, what it draws and scores, what it refuses."""

from __future__ import annotations

import inspect

import pytest
from tests.klamp_standin.routes import in_process, new_run, result
from tests.waiting import SECONDS
from tinker import types
from tinker.proto.response_conv import deserialize_proto_response

from klamp_standin import samplers
from klamp_standin.protocol import Refused
from klamp_standin.training import save_weights_for_sampler

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def here():
    with in_process() as made:
        yield made


@pytest.fixture(scope="module")
def base(here):
    body = {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "base"}
    return samplers.create_sampling_session(here, body)["sampling_session_id"]


def asked(sampler, number=1, **changes):
    body = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 4},
    }
    return body | changes


def answered(here, body):
    return deserialize_proto_response(result(here, samplers.asample(here, body, ())), types.SampleResponse)


def test_every_session_has_a_name_of_its_own(here):
    assert len({samplers.create_session(here, {})["session_id"] for _ in range(5)}) == 5


def test_a_sampler_says_which_weights_it_has(here, base):
    assert samplers.get_sampler(here, base) == {"sampler_id": base, "base_model": "base", "model_path": None}
    model_id = new_run(here, 7)
    path = result(here, save_weights_for_sampler(here, {"model_id": model_id, "seq_id": 1, "path": "a"}, ()))["path"]
    body = {"session_id": "s", "sampling_session_seq_id": 9, "model_path": path}
    named = samplers.create_sampling_session(here, body)["sampling_session_id"]
    assert samplers.get_sampler(here, named)["model_path"] == path
    with pytest.raises(Refused, match="no sampler 'x'"):
        samplers.get_sampler(here, "x")


def test_draws_depend_on_the_sampler_and_the_number_of_the_request(here, base):
    rows = [[row.tokens for row in answered(here, asked(base, number, num_samples=4)).sequences] for number in (2, 3)]
    assert rows[0] != rows[1]
    with in_process() as other:
        samplers.create_sampling_session(other, {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "base"})
        again = [row.tokens for row in answered(other, asked(base, 2, num_samples=4)).sequences]
    assert again == rows[0], "the same in another server with the same seed"


def test_only_drawn_tokens_count_as_sampled(here, base):
    before = here.tokens.copy()
    found = answered(here, asked(base, 4))
    drawn = sum(len(row.tokens) for row in found.sequences)
    answered(here, asked(base, 5, prompt_logprobs=True))
    assert here.tokens["sampled"] - before["sampled"] == drawn
    assert here.tokens["prompt"] - before["prompt"] == 2 * len(PROMPT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"topk_prompt_logprobs": 2}, "does not have topk_prompt_logprobs"),
        ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "1 to 2"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"sampling_session_id": None}, "no sampler ''"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_it_is_promised(here, base, changes, words):
    with pytest.raises(Refused, match=words):
        samplers.asample(here, asked(base, 99) | changes, ())


def test_stop_strings_need_a_tokenizer(here):
    with pytest.raises(Refused, match="needs a tokenizer"):
        here.decode([1, 2])


def test_last_n_scores_a_suffix(reference):
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    whole = reference.compute_logprobs(prompt).result(timeout=SECONDS)
    if "prompt_logprobs_last_n" not in inspect.signature(reference.compute_logprobs).parameters:
        pytest.skip("this SDK scores whole prompts only")
    assert reference.compute_logprobs(prompt, 2).result(timeout=SECONDS) == [None, None, *whole[2:]]
