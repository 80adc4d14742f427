"""Asks a sampling client for the log-probabilities of tokens, and for its likeliest: in order, within a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, POSITIVE, check_number, describe
from klamp.errors import DataError, ModelError, NonFiniteError, ShapeError
from klamp.hosts.common.versions import load_tinker
from klamp.hosts.tinker.datums import NO_TOKEN, Place, token_ids

T = TypeVar("T")
Reader: TypeAlias = Callable[[int, Any, int, list[int]], list[T]]
"""What is read of the answer for a sequence: its number, the answer, the tokens of its prompt, its response."""


async def compute_reference_logprobs(
    ref_client: Any,
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
    *,
    concurrency: int = 64,
    timeout: float = 300.0,
) -> list[list[float]]:
    """Log-probabilities of the responses under the reference, in nats, in the order of the responses.

    One request per response, `concurrency` at a time. The SDK itself tries lost connections, timeouts and the statuses
    408, 409, 429 and 5xx again, for hours; here a response has `timeout` seconds, and what the SDK gives up ends it at
    once. Where the SDK can score a suffix only (0.34 and later) the prompt is not scored.

    Args:
        ref_client: a `SamplingClient` of the base model (or of a snapshot), or the SDK's future of one, which is
            awaited first; a client that has only `compute_logprobs_async` will do.
        prompt_tokens: one list of ids per response, none of them empty.
        response_tokens: the responses; an empty one gives an empty list and costs no request.
        concurrency: requests in flight at a time.
        timeout: seconds for a response, the SDK's own attempts included.

    Returns:
        One list per response, as long as the response.

    Raises:
        ModelError: the service refuses, or does not answer in time; the sequence is named.
        NonFiniteError: None, NaN or an infinity inside a response.
        ShapeError: an answer of another length than the tokens (n values, or n - 1 without the first token's None).
        DataError, ConfigError: arguments that cannot be used.
        UnsupportedVersion: the SDK is missing or outside the range.

    Source: the Tinker guide (docs/sources.md)
    """

    def read(i: int, answer: Any, prompt: int, response: list[int]) -> list[float]:
        return response_part(i, answer, prompt, len(response))

    return await _each(ref_client, (prompt_tokens, response_tokens), read, limits=(concurrency, timeout))


async def compute_teacher_head(
    teacher_client: Any,
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
    top_k: int,
    *,
    vocabulary: int | None = None,
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
        response_tokens: the responses.
        top_k: how many, `TeacherConfig.teacher_top_k`; 0: the tokens of the responses alone.
        vocabulary: entries of the policy, where a teacher may have more: ids from there on are left out of the head.
        concurrency: requests in flight at a time.
        timeout: seconds for a response, the SDK's own attempts included.

    Returns:
        One list per response, with a list of pairs for each of its tokens: `top_k` ids, the likeliest first, with their
        log-probabilities in nats ((-1, 0.0) in the place of one that was left out), and last the token itself. It is
        what `build_datum(teacher_head=)` takes.

    Raises:
        ModelError, NonFiniteError, ShapeError, DataError, ConfigError: see `compute_reference_logprobs`; and fewer of
            the likeliest tokens than were asked for.

    Source: the Tinker guide (docs/sources.md)
    """

    def read(i: int, answer: Any, prompt: int, response: list[int]) -> list[Place]:
        count = prompt + len(response)
        sampled = response_part(i, answer.prompt_logprobs, prompt, len(response), who="teacher")
        told = answer.topk_prompt_logprobs if top_k else [None] * count
        told = _suffix(i, told, prompt, len(response), who="teacher")
        places = zip(told, response, sampled, strict=True)
        return [_place(i, *place, top_k, math.inf if vocabulary is None else vocabulary) for place in places]

    check_number("top_k", top_k, AT_LEAST_0, whole=True)
    limits = (concurrency, timeout)
    return await _each(teacher_client, (prompt_tokens, response_tokens), read, limits=limits, top_k=top_k)


async def _each(
    client: Any, given: tuple[object, object], read: Reader[T], *, limits: tuple[int, float], top_k: int | None = None
) -> list[list[T]]:
    """What is read of the answer for each response, in their order; `limits` are requests at a time and seconds."""
    load_tinker()
    (concurrency, timeout), (prompt_tokens, response_tokens) = limits, given
    check_number("concurrency", concurrency, AT_LEAST_1, whole=True)
    check_number("timeout", timeout, POSITIVE)
    prompts = _sequences("prompt_tokens", prompt_tokens)
    responses = _sequences("response_tokens", response_tokens)
    _check_sequences(prompts, responses)
    asker = Asker(await resolve(client), timeout, top_k)
    free = asyncio.Semaphore(concurrency)

    async def one(i: int, prompt: list[int], response: list[int]) -> list[T]:
        if len(response) == 0:
            return []
        async with free:
            answer = await asker.ask(i, prompt + response, len(response))
        return read(i, answer, len(prompt), response)

    pairs = zip(prompts, responses, strict=True)
    tasks = [asyncio.ensure_future(one(i, *pair)) for i, pair in enumerate(pairs)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def response_part(
    i: int, answer: Sequence[float | None] | None, prompt: int, response: int, who: str = "reference"
) -> list[float]:
    """The response's log-probabilities out of what `compute_logprobs` answered for prompt + response.

    Args:
        i: which sequence, for the errors.
        answer: one value per token, the first None; or, from some servers, without that first one.
        prompt: tokens of the prompt.
        response: tokens of the response.
        who: who answered.

    Raises:
        ShapeError, NonFiniteError: see `compute_reference_logprobs`.
    """
    values = _suffix(i, answer, prompt, response, who)
    bad = [j for j, value in enumerate(values) if value is None or not math.isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"sequence {i}: the {who} has no log-probability for a token of the response",
            got=f"{values[bad[0]]} at token {bad[0]} of the response, {len(bad)} of {response} tokens",
            why="a KL without it would be NaN, or leave the token out without a word",
            fix=f"check that the {who}'s vocabulary has the token",
        )
    return [float(value) for value in values if value is not None]


def _suffix(i: int, answer: Sequence[T] | None, prompt: int, response: int, who: str) -> list[T]:
    length = None if answer is None else len(answer)
    if answer is None or length not in (prompt + response, prompt + response - 1):
        raise ShapeError(
            f"sequence {i}: the {who} answered with another number of log-probabilities than there are tokens",
            got=f"{length} values for {prompt} + {response} tokens",
            why="each value belongs to one token",
            fix="check that the client scores these tokens and does not cut the sequence at its context length",
        )
    return list(answer[length - response :])


def _place(
    i: int, told: Sequence[tuple[int, float]] | None, token: int, logprob: float, top_k: int, vocabulary: float
) -> Place:
    best = sorted(told or (), key=lambda pair: -pair[1])
    head = [pair for pair in best if len(best) <= top_k or pair[0] != token][:top_k]
    if len(head) < min(top_k, vocabulary):
        raise ModelError(
            f"sequence {i}: the teacher gave fewer of its likeliest tokens than were asked for",
            got=f"{len(head)} of {top_k}",
            why="which tokens it leaves out may depend on the one that was sampled, and the KL would be off",
            fix="set teacher_top_k to what the service gives",
        )
    known = [(id_, number) if id_ < vocabulary else NO_TOKEN for id_, number in head]
    return [*known, *[NO_TOKEN] * (top_k - len(known)), (token, logprob)]


def _sequences(name: str, sequences: object) -> list[list[int]]:
    """Lists of token ids, one per sequence."""
    if not isinstance(sequences, Iterable):
        raise DataError(
            f"{name} must hold one list of token ids per response",
            got=describe(sequences),
            why="each response is scored behind its own prompt",
            fix=f"pass {name} as a list of lists of ints",
        )
    return [token_ids(f"{name}[{i}]", tokens) for i, tokens in enumerate(sequences)]


def _check_sequences(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> None:
    if len(prompts) != len(responses):
        raise DataError(
            "prompts and responses differ in number",
            got=f"{len(prompts)} prompts, {len(responses)} responses",
            why="each response is scored behind its own prompt",
            fix="repeat each prompt for every response of its group",
        )
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(
                f"sequence {i}: the prompt is empty",
                got="no tokens",
                why="the first token of a sequence has no log-probability",
                fix="start the prompt with the beginning-of-sequence token",
            )


class Asker:
    """Asks a client for log-probabilities; for those of a suffix only, where client and server can.

    Args:
        client: a sampling client.
        timeout: seconds for an answer, the SDK's own attempts included.
        top_k: how many likeliest tokens a teacher is asked for as well; None: a reference, asked for none.
    """

    def __init__(self, client: Any, timeout: float, top_k: int | None = None) -> None:
        self.who, name = ("reference", "compute_logprobs") if top_k is None else ("teacher", "sample")
        self.method, self.timeout = getattr(client, name if hasattr(client, name) else f"{name}_async"), timeout
        self.suffix = "prompt_logprobs_last_n" in inspect.signature(self.method).parameters
        self.options: dict[str, Any] = {}
        if top_k is not None:
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
        if not self.suffix:
            return await resolve(self.method(prompt, **self.options))
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
