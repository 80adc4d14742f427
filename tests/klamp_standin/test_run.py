"""Starting the stand-in with a model and a tokenizer of one's own."""

from __future__ import annotations

import tinker
from tests.standin import ready
from tests.waiting import SECONDS
from tinker import types

from klamp.tasks import arithmetic_tokenizer
from klamp_standin import serve, tiny_model


def test_it_serves_a_model_and_tokenizer_of_ones_own():
    tokenizer = arithmetic_tokenizer()
    model = tiny_model(len(tokenizer), seed=3)
    with serve(model, tokenizer, name="me/mine") as standin:
        service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        client = ready(service.create_lora_training_client("me/mine", rank=2))
        assert client.get_tokenizer().get_vocab() == tokenizer.get_vocab()
        sampler = ready(service.create_sampling_client(base_model="me/mine"))
        prompt = tokenizer("1+2=", add_special_tokens=False)["input_ids"]
        row = (
            sampler.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=30, seed=1))
            .result(timeout=SECONDS)
            .sequences[0]
        )
        assert (row.stop_reason == "stop") == (row.tokens[-1] == tokenizer.eos_token_id)
        assert standin.environment["TINKER_BASE_URL"] == standin.url


def test_the_same_draws_whatever_the_order_of_arrival():
    def draws():
        with serve(seed=5) as standin:
            service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
            client = ready(service.create_sampling_client(base_model=standin.base_model))
            params = types.SamplingParams(max_tokens=4)
            futures = [client.sample(types.ModelInput.from_ints([1, i]), 2, params) for i in range(8)]
            return [[row.tokens for row in future.result(timeout=SECONDS).sequences] for future in futures]

    first = draws()
    assert first == draws()
    assert len({str(group) for group in first}) > 1
