"""Datums and clients that look like the SDK's and are not: plain tensors in float64, answers made up."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

T = TypeVar("T")


@dataclass
class FakeDatum:
    loss_fn_inputs: dict


def fake_datum(prompt, response, generator):
    """A datum of `prompt` and `response` tokens whose response rows are random and whose prompt rows are 0."""

    def row(values):
        return torch.cat([torch.zeros(prompt - 1, dtype=torch.float64), values])

    def noise():
        return torch.rand(response, generator=generator, dtype=torch.float64)

    sampler = -0.1 - 2 * noise()
    inputs = {
        "target_tokens": torch.arange(prompt + response - 1),
        "advantages": row(torch.randn(response, generator=generator, dtype=torch.float64)),
        "logprobs": row(sampler),
        "ref_logprobs": row(-0.1 - 2 * noise()),
        "mask": row(torch.ones(response, dtype=torch.float64)),
    }
    policy = row((sampler + 0.4 * (noise() - 0.5)).clamp(max=-0.01))
    policy[: prompt - 1] = -3.0  # what a model says about the prompt
    return FakeDatum(inputs), policy.requires_grad_(True)


def fake_batch(sizes=((3, 4), (3, 2), (2, 5), (2, 1)), *, seed=0):
    """Datums and the policy's log-probabilities, one (prompt, response) length each."""
    generator = torch.Generator().manual_seed(seed)
    data, policies = zip(*(fake_datum(prompt, response, generator) for prompt, response in sizes), strict=True)
    return list(data), list(policies)


def column(data, name):
    return pad_sequence([datum.loss_fn_inputs[name] for datum in data], batch_first=True)


def slopes(loss, policies):
    """The loss's gradient with respect to every datum's log-probabilities, as one row."""
    return torch.cat(torch.autograd.grad(loss, policies, allow_unused=False))


def score(tokens):
    """What the fake reference says: a number for each token that depends on it and its place, None for the first."""
    return [None, *(-0.001 * token - 0.1 * place for place, token in enumerate(tokens[1:], start=1))]


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop in which time passes only when there is nothing else to do, and then at once to the next timer.

    Whatever is waited for, no timeout is over because the machine is slow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped, self.select = 0.0, self._selector.select
        self._selector.select = self.skip

    def time(self) -> float:
        """Seconds, from 0 on."""
        return self.skipped

    def skip(self, timeout: float | None) -> Any:
        """In the place of a wait for connections, of which there are none."""
        if timeout is None:
            return self.select(None)
        self.skipped += timeout
        return self.select(0)


def skipping(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in a `SkippingLoop`."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(work)


@dataclass
class FakeSampler:
    """A sampling client with the asynchronous form only; keeps what it was asked and how many asked at once."""

    delays: dict[int, float] = field(default_factory=dict)
    faults: dict[int, list] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def compute_logprobs_async(self, prompt):
        return await self.answer(prompt)

    async def answer(self, prompt):
        """The scores of a prompt, after the delay and the faults that its last token has coming."""
        tokens = list(prompt.to_ints())
        self.asked.append(tokens)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delays.get(tokens[-1], 0))
            fault = self.faults.get(tokens[-1], [])
            found = fault.pop(0) if fault else None
            if isinstance(found, BaseException):
                raise found
            return score(tokens) if found is None else found
        except asyncio.CancelledError:
            self.cancelled.append(tokens[-1])
            raise
        finally:
            self.now -= 1
