"""One forward and backward pass of the KL loss, in the same way for every version of the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from klamp.config import KLConfig
from klamp.errors import ConfigError
from klamp.hosts.tinker.datums import with_inputs
from klamp.hosts.tinker.loss import loss_of_rows
from klamp.hosts.tinker.options import KL_COEF, LossOptions, make_settings
from klamp.hosts.tinker.versions import load_tinker


def forward_backward_kl(
    client: Any,
    data: Sequence[Any],
    kl_coef: float = KL_COEF,
    cliprange: float | tuple[float, float] = 0.2,
    kl: KLConfig | None = None,
    **options: Unpack[LossOptions],
) -> Any:
    """Forward and backward pass of `compute_grpo_kl_loss` through a `TrainingClient`: the gradient adds up there.

    The data is checked before anything is sent: an error inside a loss would leave the client unusable. The service
    gets datums that hold `target_tokens` only, so that SDKs before 0.32 take them too; the loss reads the full ones.
    Two passes over the data: a forward, then a forward and backward.

    Args:
        client: a `TrainingClient`, or the SDK's future of one; in async code one that was awaited.
        data: datums as `build_datum` makes them.
        kl_coef: see `compute_grpo_kl_loss`.
        cliprange: see there.
        kl: see there.
        options: those of `compute_grpo_kl_loss`, see `LossOptions`.

    Returns:
        What the client returns: a future of `ForwardBackwardOutput`, with the loss's metrics in its `metrics`. Submit
        `optim_step` before waiting for it. With SDKs before 0.36 the call itself waits for the first pass.

    Raises:
        ConfigError: see `compute_grpo_kl_loss`; in async code a client that nobody has awaited.
        DataError, ShapeError, NonFiniteError, EmptyMaskError: data that cannot be used; nothing was sent.
        UnsupportedVersion: the SDK is missing or outside the range.

    What the service answers is checked inside the loss: NaN there raises NonFiniteError where the result is asked for,
    no gradient is sent, and SDKs from 0.36 on then take no more requests on this client. Save the state before.
    """
    load_tinker()
    client = _awaited(client)
    settings = make_settings(kl_coef, cliprange, kl, **options)
    rows = settings.read(data)

    def loss(_: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return loss_of_rows(rows, logprobs_list, settings)

    bare = [with_inputs(datum, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in data]
    return client.forward_backward_custom(bare, loss)


def _awaited(client: Any) -> Any:
    """The client, where newer SDKs have handed out a future of it.

    Raises:
        ConfigError: it would have to be waited for, in async code.
    """
    if not hasattr(client, "result_async"):
        return client
    if _in_async_code() and not client.future().done():
        raise ConfigError(
            "the training client has to be awaited before it is used in async code",
            got=type(client).__name__,
            why="the SDK hands out a future of it; to wait for it here would block the event loop",
            fix="client = await service.create_lora_training_client(...), once, before the first step",
        )
    return client.result()


def _in_async_code() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
