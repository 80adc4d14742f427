"""Asks a sampling client for the log-probabilities of tokens, and for its likeliest: in order, within a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, POSITIVE, check_number, describe
from klamp.core.types import FORBIDDEN
from klamp.errors import DataError, ModelError, NonFiniteError, ShapeError
from klamp.hosts.common.versions import load_tinker
from klamp.hosts.tinker.datums import Place, token_ids

T = TypeVar("T")


async def compute_reference_logprobs(
    ref_client: Any,
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
    *,
    concurrency: int = 64,
    timeout: float = 300.0,
) -> list[list[float]]:
    """Log-probabilities of the responses under the reference, in nats, in the order of the responses.

    One request per response; the prompt is not scored if the SDK can score a suffix only (0.34 and later).

    Args:
        ref_client: a `SamplingClient` of the base model (or of a snapshot), or the SDK's future of one, which is
            awaited first; a client that has only `compute_logprobs_async` will do.
        prompt_tokens: one list of ids per response, none of them empty.
        response_tokens: the responses; an empty one gives an empty list and costs no request.
        concurrency: requests in flight at a time.
        timeout: seconds for a response, the SDK's own attempts included.

    Raises:
        ModelError: the service refuses, or does not answer in time; the sequence is named.
        NonFiniteError: None, NaN, an infinity or -9999 (a vLLM server's -inf) inside a response.
        ShapeError: an answer of another length than the tokens (n values, or n - 1 without the first token's None).
        DataError, ConfigError: arguments that cannot be used.
        UnsupportedVersion: the SDK is missing or outside the range.

    Source: the Tinker guide (docs/sources.md)
    """
    return await _score_all(ref_client, prompt_tokens, response_tokens, concurrency, timeout)


async def compute_teacher_head(
    teacher_client: Any,
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
    top_k: int,
    *,
    concurrency: int = 64,
    timeout: float = 300.0,
) -> list[list[Place]]:
    """A teacher's numbers for the responses: at each token its `top_k` likeliest tokens and the sampled one.

    One request per response: `sample` with `topk_prompt_logprobs` and one token that is thrown away. The head never
    depends on the token that was sampled.

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
    return await _score_all(teacher_client, prompt_tokens, response_tokens, concurrency, timeout, top_k)


async def _score_all(
    client: Any, prompt_tokens: object, response_tokens: object, concurrency: int, timeout: float, top_k: int = -1
) -> list[list[Any]]:
    load_tinker()
    check_number("concurrency", concurrency, AT_LEAST_1, whole=True)
    check_number("timeout", timeout, POSITIVE)
    pairs = _sequences(prompt_tokens, response_tokens)
    asker, free = Asker(await resolve(client), pairs, timeout, top_k), asyncio.Semaphore(concurrency)

    async def one(i: int) -> list[Any]:
        async with free:
            return await asker.score(i)

    tasks = [asyncio.ensure_future(one(i)) for i in range(len(pairs))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sequences(prompts: Any, responses: Any) -> list[tuple[list[int], list[int]]]:
    if not (isinstance(prompts, Collection) and isinstance(responses, Collection) and len(prompts) == len(responses)):
        raise DataError(
            "prompt_tokens and response_tokens must hold one list of token ids per response each",
            got=f"{describe(prompts)} and {describe(responses)}",
            why="each response is scored behind its own prompt",
            fix="pass lists of lists of ints; repeat each prompt for every response of its group",
        )
    pairs = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        pairs.append((token_ids(f"prompt_tokens[{i}]", prompt), token_ids(f"response_tokens[{i}]", response)))
        if not pairs[i][0]:
            raise DataError(
                f"sequence {i}: the prompt is empty",
                why="the first token of a sequence has no log-probability",
                fix="start the prompt with the beginning-of-sequence token",
            )
    return pairs


class Asker:
    """Asks a client to score responses behind their prompts: a teacher, or with top_k -1 a reference."""

    def __init__(self, client: Any, pairs: Sequence[tuple[list[int], list[int]]], timeout: float, top_k: int) -> None:
        self.who, name = ("reference", "compute_logprobs") if top_k < 0 else ("teacher", "sample")
        self.method, self.timeout = getattr(client, name if hasattr(client, name) else f"{name}_async"), timeout
        self.has_suffix = "prompt_logprobs_last_n" in inspect.signature(self.method).parameters
        self.pairs, self.top_k, self.options = pairs, top_k, dict[str, Any]()
        if top_k >= 0:
            once = {"num_samples": 1, "sampling_params": load_tinker().SamplingParams(max_tokens=1)}
            self.options = {**once, "include_prompt_logprobs": True, "topk_prompt_logprobs": top_k}

    async def score(self, i: int) -> list[Any]:
        """The log-probabilities of response i; of a teacher with its likeliest tokens at each place."""
        response = self.pairs[i][1]
        if not response:
            return []
        answer = await self._answer(i)
        if self.top_k < 0:
            return self._logprobs(i, answer)
        likeliest = self._of_response(i, answer.topk_prompt_logprobs) if self.top_k else [()] * len(response)
        scored = zip(response, self._logprobs(i, answer.prompt_logprobs), likeliest, strict=True)
        return [[*self._head(i, token, pairs or ()), (token, logprob)] for token, logprob, pairs in scored]

    def _logprobs(self, i: int, answer: Sequence[float | None]) -> list[float]:
        values = self._of_response(i, answer)
        bad = [j for j, value in enumerate(values) if value is None or not FORBIDDEN < value < math.inf]
        if bad:
            raise NonFiniteError(
                f"sequence {i}: the {self.who} has no log-probability for a token of the response",
                got=f"{values[bad[0]]} at token {bad[0]} of the response, {len(bad)} of {len(values)} tokens",
                why="a KL without it would be NaN, or silently leave the token out",
                fix=f"check that the {self.who}'s vocabulary has the token",
            )
        return [float(value) for value in values if value is not None]

    def _of_response(self, i: int, answer: Sequence[T] | None) -> list[T]:
        """The values of the response's tokens; some servers leave out the first token's None."""
        prompt, response = map(len, self.pairs[i])
        if answer is None or len(answer) not in (prompt + response, prompt + response - 1):
            raise ShapeError(
                f"sequence {i}: the {self.who} answered with another number of log-probabilities than there are tokens",
                got=f"{answer if answer is None else len(answer)} values for {prompt} + {response} tokens",
                why="each value belongs to one token",
                fix="check that the client scores these tokens and does not cut the sequence at its context length",
            )
        return list(answer[len(answer) - response :])

    def _head(self, i: int, token: int, pairs: Collection[tuple[int, float]]) -> Place:
        best = sorted(pairs, key=lambda pair: -pair[1])
        head = [pair for pair in best if len(best) <= self.top_k or pair[0] != token][: self.top_k]
        if len(head) < self.top_k:
            raise ModelError(
                f"sequence {i}: the teacher gave fewer of its likeliest tokens than were asked for",
                got=f"{len(head)} of {self.top_k}",
                why="which tokens it leaves out may depend on the one that was sampled, and the KL would be off",
                fix="set teacher_top_k to what the service gives",
            )
        return head

    async def _answer(self, i: int) -> Any:
        prompt, response = self.pairs[i]
        tokens = load_tinker().ModelInput.from_ints(prompt + response)
        suffix = {"prompt_logprobs_last_n": len(response)} if self.has_suffix else {}
        try:
            async with asyncio.timeout(self.timeout):
                return await resolve(self.method(tokens, **suffix, **self.options))
        except Exception as error:
            late = isinstance(error, TimeoutError)
            raise ModelError(
                f"sequence {i}: the {self.who} {'did not answer in time' if late else 'refuses to score the sequence'}",
                got=f"nothing within {self.timeout:g} s" if late else f"{type(error).__name__}: {error}",
                why="training without this KL would be another loss",
                fix="check the service, the base model's name and the key; then continue from the last checkpoint",
            ) from error


async def resolve(answer: Any) -> Any:
    """The value out of what the SDK (or a test's fake) returns: an awaitable, a future, or the value itself."""
    if hasattr(answer, "__await__"):  # first: newer SDKs hand back futures that are both, and warn of the older use
        return await answer
    return await asyncio.wrap_future(answer) if isinstance(answer, concurrent.futures.Future) else answer
