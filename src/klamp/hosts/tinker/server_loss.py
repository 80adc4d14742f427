"""The KL loss run by the server: traced once, uploaded, done in one pass (SDK 0.36 and later, alpha).

The SDK traces a function of one datum with torch.fx and sums it over datums; where the service does not take uploads
the SDK runs the same graph on this machine, in the usual two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from klamp.config import KLConfig
from klamp.core.objective import Objective
from klamp.core.term import KLTerm
from klamp.errors import ConfigError, Refusal, UnsupportedVersion, refuse
from klamp.hosts.tinker.datums import tensor_data, with_inputs
from klamp.hosts.tinker.options import KL_COEF, Settings, make_settings
from klamp.hosts.tinker.padded import Rows
from klamp.hosts.tinker.server_formula import INPUTS, datum_loss, input_rows
from klamp.hosts.tinker.versions import load_tinker


@dataclass(frozen=True)
class ServerLoss:
    """A KL loss that the service knows; made by `create_kl_loss`, for clients of the same session."""

    handle: Any
    """The SDK's `LossHandle`."""
    objective: Objective
    """What it computes; its beta and reduction are not part of it."""

    @property
    def on_server(self) -> bool:
        """Whether the server runs it; else the SDK does, here."""
        return getattr(self.handle, "loss_id", None) is not None

    def forward_backward(self, client: Any, data: Sequence[Any], rows: Rows, settings: Settings) -> Any:
        """See `forward_backward_kl`.

        Raises:
            ConfigError: it was made for another configuration.
        """
        if _fixed(settings.objective) != _fixed(self.objective):
            raise ConfigError(
                "server_loss was made for another configuration",
                got=f"made for {_fixed(self.objective)}, called with {_fixed(settings.objective)}",
                why="the loss is fixed when it is created; only beta and the normaliser may change",
                fix="create_kl_loss with the same kl and cliprange",
            )
        columns = input_rows(rows, settings)
        datums = []
        for i, (datum, length) in enumerate(zip(data, rows.lengths, strict=True)):
            inputs = {name: tensor_data(column[i, :length]) for name, column in columns.items()}
            datums.append(with_inputs(datum, {"target_tokens": datum.loss_fn_inputs["target_tokens"], **inputs}))
        return client.forward_backward_custom(datums, self.handle)


def create_kl_loss(
    service_client: Any,
    kl_coef: float = KL_COEF,
    cliprange: float | tuple[float, float] = 0.2,
    kl: KLConfig | None = None,
) -> ServerLoss:
    """Trace the loss of `compute_grpo_kl_loss` and hand it to the service; pass the result as `server_loss`.

    It covers the losses that are sums over single tokens: kl_estimator k1, k2, k3 or abs, every kl_gradient, kl_horizon
    `token`, kl_off_policy `none` or `token`; and every horizon with kl_placement `advantage`. A clip of the KL and
    the sequence horizon in the loss need more than one token at a time, and stay with the usual route.

    Metrics come back under the names that the SDK asks for: `custom/train_policy_loss:sum`,
    `custom/train_kl_penalty:sum`, `custom/kl_k1:sum`, `custom/kl_k3:sum` (means over the KL's tokens, summed over
    datums).

    Whether a service takes uploads is its own choice (`ServerLoss.on_server` says what it chose); a function that a
    server refuses raises what the SDK raises.

    Args:
        service_client: the `ServiceClient` whose training client is used.
        kl_coef: see `compute_grpo_kl_loss`.
        cliprange: see there.
        kl: see there.

    Raises:
        ConfigError: a configuration that needs more than one token at a time.
        UnsupportedVersion: an SDK without `create_custom_loss`.
    """
    load_tinker()
    objective = make_settings(kl_coef, cliprange, kl).objective
    _check_local(objective.kl)
    if not hasattr(service_client, "create_custom_loss"):
        raise UnsupportedVersion(
            "this version of the Tinker SDK has no custom losses on the server",
            why="create_custom_loss came with tinker 0.36",
            fix="pip install 'tinker>=0.36,<0.39', or leave server_loss out: forward_backward_kl works without",
        )
    ranks = dict.fromkeys(("logprobs", *INPUTS), 1)
    handle = service_client.create_custom_loss(datum_loss(objective), input_ranks=ranks).result()
    return ServerLoss(handle, objective)


def _fixed(objective: Objective) -> Objective:
    return replace(
        objective, beta=0.0, reduction="token_mean", max_length=None, kl=replace(objective.kl, normalizer=None)
    )


def _check_local(term: KLTerm) -> None:
    in_loss = term.placement == "loss"
    refused = {
        "kl_clip_method": term.clip_method != "none",
        "kl_horizon": in_loss and term.horizon == "sequence",
        "kl_off_policy": in_loss and term.off_policy == "sequence",
    }
    refuse(
        Refusal(
            wrong,
            f"{name} of this configuration cannot run on the server",
            why="the server's losses see one datum at a time, and this one is written per token",
            fix="leave server_loss out: forward_backward_kl without it has every control",
        )
        for name, wrong in refused.items()
    )
