"""Asks a sampling client one question, in whichever form the client has, again where that may help."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from klamp.errors import ModelError
from klamp.hosts.tinker.versions import load_tinker

LONGEST_WAIT = 30.0
"""The longest wait between two attempts, in seconds."""


@dataclass
class Asker:
    """Asks a client for log-probabilities, and tries again after errors that may pass."""

    client: Any
    retries: int
    backoff: float
    timeout: float
    suffix: bool = field(init=False)
    """Whether the client scores a suffix only; taken back where the server turns out not to."""
    # A generator of its own: the waits must not move anybody's seeds.
    jitter: random.Random = field(default_factory=random.Random, init=False)

    def __post_init__(self) -> None:
        name = "compute_logprobs" if hasattr(self.client, "compute_logprobs") else "compute_logprobs_async"
        self.method = getattr(self.client, name)
        self.suffix = "prompt_logprobs_last_n" in inspect.signature(self.method).parameters

    async def ask(self, i: int, tokens: list[int], response: int) -> Sequence[float | None] | None:
        """The client's answer for one sequence, after as many attempts as are needed."""
        prompt = load_tinker().ModelInput.from_ints(tokens)
        for attempt in range(self.retries + 1):
            try:
                async with asyncio.timeout(self.timeout):
                    return await self._once(prompt, response)
            except Exception as error:
                if not is_transient(error):
                    raise _failed(i, "refuses to score the sequence", error) from error
                if attempt == self.retries:
                    raise _failed(i, f"did not answer in {attempt + 1} attempts", error) from error
                wait = min(self.backoff * 2**attempt, LONGEST_WAIT)
                await asyncio.sleep(wait * self.jitter.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    async def _once(self, prompt: Any, response: int) -> Sequence[float | None] | None:
        if not self.suffix:
            return await resolve(self.method(prompt))
        try:
            return await resolve(self.method(prompt, prompt_logprobs_last_n=response))
        except RuntimeError as error:
            # The SDK's own finding that the server scored the whole prompt all the same.
            if "prompt_logprobs_last_n" not in str(error):
                raise
            self.suffix = False
            return await resolve(self.method(prompt))


async def resolve(answer: Any) -> Any:
    """The value out of what the SDK (or a test's fake) returns: an awaitable, a future, or the value itself."""
    if hasattr(answer, "__await__"):  # first: newer SDKs hand back futures that are both, and warn of the older use
        return await answer
    return await asyncio.wrap_future(answer) if isinstance(answer, concurrent.futures.Future) else answer


def is_transient(error: Any) -> bool:
    """Whether an error may pass: lost connections, timeouts, HTTP 408, 409, 429, 5xx, faults of the service."""
    tinker: Any = load_tinker()
    if isinstance(error, TimeoutError | ConnectionError | tinker.APIConnectionError):
        return True
    if isinstance(error, tinker.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, tinker.RequestFailedError) and str(error.category).lower() != "user"


def _failed(i: int, what: str, error: Exception) -> ModelError:
    return ModelError(
        f"sequence {i}: the reference {what}",
        got=f"{type(error).__name__}: {error}",
        why="training without this KL would be another loss",
        fix="check the service, the base model's name and the key; then continue from the last checkpoint",
    )
