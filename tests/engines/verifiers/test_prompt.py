"""verifiers 0.1.3 scores completions without their prompts, and klamp says so; document 004 has its trainer."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai.types.chat import ChatCompletion
from tests.hosts.trl.hosts import PROMPTS, model, tokenizer
from verifiers import SingleTurnEnv
from verifiers.trainers.grpo_trainer import GRPOTrainer

from klamp import check_sync
from klamp.hosts.common.sampler_weights import HIDDEN, WEIGHTS, SyncReport

TEMPERATURE = 0.9
LENGTH = 8


@pytest.fixture(scope="module")
def policy() -> Any:
    return model().eval()


def sampled(policy: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens drawn one by one, and the log-probability of each."""
    ids, logprobs = list(prompt), []
    for _ in range(LENGTH):
        with torch.no_grad():
            scores = (policy(torch.tensor([ids])).logits[0, -1] / TEMPERATURE).log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1))
        ids.append(token)
        logprobs.append(float(scores[token]))
    return ids[len(prompt) :], logprobs


def answered(tokens: list[int], logprobs: list[float]) -> ChatCompletion:
    """A completion as vLLM's server answers with it."""
    content = [
        {"token": f"token_id:{token}", "logprob": value, "top_logprobs": [], "bytes": None}
        for token, value in zip(tokens, logprobs, strict=True)
    ]
    message = {"role": "assistant", "content": tokenizer().decode(tokens)}
    choice = {"index": 0, "finish_reason": "length", "message": message, "logprobs": {"content": content}}
    return ChatCompletion.model_validate(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    )


@pytest.fixture(scope="module")
def processed(policy: Any) -> list[tuple[list[int], list[int], list[int], list[int], list[float]]]:
    """What verifiers makes of each completion: prompt, its mask, completion, its mask, log-probabilities."""
    torch.manual_seed(0)
    chat = copy.deepcopy(tokenizer())
    chat.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    template = chat.apply_chat_template
    chat.apply_chat_template = lambda **given: template(**given, return_dict=False)  # its default until transformers 5
    environment, found = object.__new__(SingleTurnEnv), []
    for text in PROMPTS:
        prompt = [{"role": "user", "content": text}]
        ids = chat.apply_chat_template(conversation=prompt, add_generation_prompt=True)
        response = answered(*sampled(policy, ids))
        completion = [{"role": "assistant", "content": response.choices[0].message.content}]
        found.append(environment.process_chat_format_vllm(prompt, completion, {"responses": [response]}, chat))
    return found


def scored(policy: Any, prompt: list[int], mask: list[int], completion: list[int]) -> list[float]:
    """The log-probabilities that verifiers' trainer computes."""
    ids, attention = torch.tensor([[*prompt, *completion]]), torch.tensor([[*mask, *[1] * len(completion)]])
    trainer: Any = SimpleNamespace(temperature=TEMPERATURE)
    with torch.no_grad():
        every = GRPOTrainer._get_per_token_logps(trainer, policy, ids, attention, ids.shape[1] - 1)
    return every[0, len(prompt) - 1 :].tolist()


def report(policy: Any, processed: Any, *, visible: bool) -> SyncReport:
    trained = [
        scored(policy, prompt, [1] * len(mask) if visible else mask, tokens) for prompt, mask, tokens, *_ in processed
    ]
    return check_sync(
        policy,
        [prompt for prompt, *_ in processed],
        [tokens for _, _, tokens, *_ in processed],
        [logprobs for *_, logprobs in processed],
        trainer_logprobs=trained,
        temperature=TEMPERATURE,
    )


def test_another_prompt_changes_nothing_but_the_first_token(policy: Any, processed: Any) -> None:
    prompt, mask, tokens, *_ = processed[0]
    assert set(mask) == {0}
    other = [token + 1 for token in prompt]
    here, there = (scored(policy, each, mask, tokens) for each in (prompt, other))
    assert here[1:] == pytest.approx(there[1:], abs=1e-6)
    seen = [scored(policy, each, [1] * len(mask), tokens) for each in (prompt, other)]
    assert max(abs(a - b) for a, b in zip(*seen, strict=True)) > 0.5


def test_the_check_says_that_the_trainer_does_not_see_the_prompt(policy: Any, processed: Any) -> None:
    found = report(policy, processed, visible=False)
    sampler, trainer = found.sides
    assert not found.in_sync and sampler.is_right and trainer.nearest == HIDDEN
    assert trainer.gaps[HIDDEN] < 1e-5 < trainer.gaps[WEIGHTS]
    assert "does not see the prompt" in str(found)


def test_with_a_mask_that_shows_the_prompt_all_is_in_order(policy: Any, processed: Any) -> None:
    assert report(policy, processed, visible=True).in_sync
