"""Asks a sampling client for the log-probabilities of tokens, and for its likeliest: in order, within a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, POSITIVE, check_number, describe
from klamp.errors import DataError, ModelError, NonFiniteError, ShapeError
from klamp.hosts.common.versions import load_tinker
from klamp.hosts.tinker.datums import Place, token_ids

T = TypeVar("T")


class Answer(NamedTuple):
    """What a client said of the sequence i: of its prompt's tokens, and of its response; None where that is empty."""

    i: int
    said: Any
    prompt: int
    response: list[int]


async def compute_reference_logprobs(
    ref_client: Any,
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
    *,
    concurrency: int = 64,
    timeout: float = 300.0,
) -> list[list[float]]:
    """Log-probabilities of the responses under the reference, in nats, in the order of the responses.

    One request per response. The SDK itself tries again what may pass, for hours; here a response has `timeout`
    seconds, and what the SDK gives up ends it at once. Where the SDK can score a suffix only (0.34 and later) the
    prompt is not scored.

    Args:
        ref_client: a `SamplingClient` of the base model (or of a snapshot), or the SDK's future of one, which is
            awaited first; a client that has only `compute_logprobs_async` will do.
        prompt_tokens: one list of ids per response, none of them empty.
        response_tokens: the responses; an empty one gives an empty list and costs no request.
        concurrency: requests in flight at a time.
        timeout: seconds for a response, the SDK's own attempts included.

    Raises:
        ModelError: the service refuses, or does not answer in time; the sequence is named.
        NonFiniteError: None, NaN or an infinity inside a response.
        ShapeError: an answer of another length than the tokens (n values, or n - 1 without the first token's None).
        DataError, ConfigError: arguments that cannot be used.
        UnsupportedVersion: the SDK is missing or outside the range.

    Source: the Tinker guide (docs/sources.md)
    """
    answers = await _ask_all(ref_client, prompt_tokens, response_tokens, concurrency, timeout)
    return [_logprobs(answer, answer.said, "reference") for answer in answers]


async def compute_teacher_head(
    teacher_client: Any,
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
    top_k: int,
    *,
    concurrency: int = 64,
    timeout: float = 300.0,
) -> list[list[Place]]:
    """What a teacher says of the responses: at each token its `top_k` likeliest, and the one that is there.

    One request per response, as `compute_reference_logprobs`: `sample` with `topk_prompt_logprobs` and one token that
    is thrown away. The head never depends on the token that was sampled: of an answer that holds one token more than
    was asked for, it is left out.

    Args:
        teacher_client: a `SamplingClient`, see `compute_reference_logprobs`.
        prompt_tokens: one list of ids per response; the teacher's own prompts, if it sees others than the policy.
        response_tokens, concurrency, timeout: as in `compute_reference_logprobs`.
        top_k: how many, `TeacherConfig.teacher_top_k`; 0: the tokens of the responses alone.

    Returns:
        What `build_datum(teacher_head=)` takes: one list per response, with a list of pairs for each of its tokens:
        `top_k` ids, the likeliest first, with their log-probabilities in nats, and last the token itself.

    Raises:
        ModelError, NonFiniteError, ShapeError, DataError, ConfigError: see `compute_reference_logprobs`; and fewer of
            the likeliest tokens than were asked for.
    """
    check_number("top_k", top_k, AT_LEAST_0, whole=True)
    answers = await _ask_all(teacher_client, prompt_tokens, response_tokens, concurrency, timeout, top_k)
    return [_places(answer, top_k) if answer.response else [] for answer in answers]


async def _ask_all(
    client: Any, prompt_tokens: object, response_tokens: object, concurrency: int, timeout: float, top_k: int = -1
) -> list[Answer]:
    load_tinker()
    check_number("concurrency", concurrency, AT_LEAST_1, whole=True)
    check_number("timeout", timeout, POSITIVE)
    prompts, responses = _sequences(prompt_tokens, response_tokens)
    asker, free = Asker(await resolve(client), timeout, top_k), asyncio.Semaphore(concurrency)

    async def one(i: int, prompt: list[int], response: list[int]) -> Answer:
        if not response:
            return Answer(i, None, len(prompt), response)
        async with free:
            return Answer(i, await asker.ask(i, prompt + response, len(response)), len(prompt), response)

    pairs = zip(prompts, responses, strict=True)
    tasks = [asyncio.ensure_future(one(i, *pair)) for i, pair in enumerate(pairs)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _logprobs(answer: Answer, said: Sequence[float | None] | None, who: str) -> list[float]:
    """The response's log-probabilities out of one value per token; some servers leave out the first token's None."""
    values = _suffix(answer, said, who)
    bad = [j for j, value in enumerate(values) if value is None or not math.isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"sequence {answer.i}: the {who} has no log-probability for a token of the response",
            got=f"{values[bad[0]]} at token {bad[0]} of the response, {len(bad)} of {len(values)} tokens",
            why="a KL without it would be NaN, or leave the token out without a word",
            fix=f"check that the {who}'s vocabulary has the token",
        )
    return [float(value) for value in values if value is not None]


def _suffix(answer: Answer, said: Sequence[T] | None, who: str) -> list[T]:
    prompt, response = answer.prompt, len(answer.response)
    if not response:
        return []
    if said is None or len(said) not in (prompt + response, prompt + response - 1):
        raise ShapeError(
            f"sequence {answer.i}: the {who} answered with another number of log-probabilities than there are tokens",
            got=f"{said if said is None else len(said)} values for {prompt} + {response} tokens",
            why="each value belongs to one token",
            fix="check that the client scores these tokens and does not cut the sequence at its context length",
        )
    return list(said[len(said) - response :])


def _places(answer: Answer, top_k: int) -> list[Place]:
    """Of each token of the response the teacher's likeliest, and the token itself."""
    sampled = _logprobs(answer, answer.said.prompt_logprobs, "teacher")
    likeliest = _suffix(answer, answer.said.topk_prompt_logprobs, "teacher") if top_k else [[] for _ in sampled]
    found = []
    for token, logprob, pairs in zip(answer.response, sampled, likeliest, strict=True):
        best = sorted(pairs or (), key=lambda pair: -pair[1])
        head = [pair for pair in best if len(best) <= top_k or pair[0] != token][:top_k]
        if len(head) < top_k:
            raise ModelError(
                f"sequence {answer.i}: the teacher gave fewer of its likeliest tokens than were asked for",
                got=f"{len(head)} of {top_k}",
                why="which tokens it leaves out may depend on the one that was sampled, and the KL would be off",
                fix="set teacher_top_k to what the service gives",
            )
        found.append([*head, (token, logprob)])
    return found


def _sequences(prompts: Any, responses: Any) -> tuple[list[list[int]], list[list[int]]]:
    if not (isinstance(prompts, Collection) and isinstance(responses, Collection) and len(prompts) == len(responses)):
        raise DataError(
            "prompt_tokens and response_tokens must hold one list of token ids per response each",
            got=f"{describe(prompts)} and {describe(responses)}",
            why="each response is scored behind its own prompt",
            fix="pass lists of lists of ints; repeat each prompt for every response of its group",
        )
    found = [token_ids(f"prompt_tokens[{i}]", tokens) for i, tokens in enumerate(prompts)]
    if [] in found:
        raise DataError(
            f"sequence {found.index([])}: the prompt is empty",
            why="the first token of a sequence has no log-probability",
            fix="start the prompt with the beginning-of-sequence token",
        )
    return found, [token_ids(f"response_tokens[{i}]", tokens) for i, tokens in enumerate(responses)]


class Asker:
    """Asks a client for log-probabilities, of a suffix only where client and server can; with top_k -1 a reference."""

    def __init__(self, client: Any, timeout: float, top_k: int) -> None:
        self.who, name = ("reference", "compute_logprobs") if top_k < 0 else ("teacher", "sample")
        self.method, self.timeout = getattr(client, name if hasattr(client, name) else f"{name}_async"), timeout
        self.suffix = "prompt_logprobs_last_n" in inspect.signature(self.method).parameters
        self.options: dict[str, Any] = {}
        if top_k >= 0:
            once = {"num_samples": 1, "sampling_params": load_tinker().SamplingParams(max_tokens=1)}
            self.options = {**once, "include_prompt_logprobs": True, "topk_prompt_logprobs": top_k}

    async def ask(self, i: int, tokens: list[int], response: int) -> Any:
        """The client's answer for one sequence."""
        prompt = load_tinker().ModelInput.from_ints(tokens)
        try:
            async with asyncio.timeout(self.timeout):
                return await self._once(prompt, response)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            raise ModelError(
                f"sequence {i}: the {self.who} {'did not answer in time' if late else 'refuses to score the sequence'}",
                got=f"nothing within {self.timeout:g} s" if late else f"{type(error).__name__}: {error}",
                why="training without this KL would be another loss",
                fix="check the service, the base model's name and the key; then continue from the last checkpoint",
            ) from error

    async def _once(self, prompt: Any, response: int) -> Any:
        if self.suffix:
            try:
                return await resolve(self.method(prompt, prompt_logprobs_last_n=response, **self.options))
            except RuntimeError as error:
                # The SDK's own finding that the server scored the whole prompt all the same.
                if "prompt_logprobs_last_n" not in str(error):
                    raise
                self.suffix = False
        return await resolve(self.method(prompt, **self.options))


async def resolve(answer: Any) -> Any:
    """The value out of what the SDK (or a test's fake) returns: an awaitable, a future, or the value itself."""
    if hasattr(answer, "__await__"):  # first: newer SDKs hand back futures that are both, and warn of the older use
        return await answer
    return await asyncio.wrap_future(answer) if isinstance(answer, concurrent.futures.Future) else answer
