"""The loss that the server runs: the same value, gradient and metrics as the one that runs here."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import tinker
from tests.hosts.tinker.wire import assert_same_gradient, by_autograd, datums, move, over_the_wire

from klamp import KLConfig
from klamp.diagnostics.metrics import OWN_INTERFACES
from klamp.errors import ConfigError, UnsupportedVersion
from klamp.tinker import build_datum, compute_grpo_kl_loss, count_tokens, create_kl_loss, forward_backward_kl

# torch.fx traces the core's estimators with stand-ins for tensors, which the tests' run-time checks would refuse.
pytestmark = pytest.mark.usefixtures("shapes_unchecked")
needs_custom_losses = pytest.mark.skipif(
    not hasattr(tinker.ServiceClient, "create_custom_loss"), reason="create_custom_loss came with tinker 0.36"
)

CONFIGURATIONS = {
    "default": {},
    "k1 own": {"kl_estimator": "k1", "kl_gradient": "own"},
    "k2 own": {"kl_estimator": "k2", "kl_gradient": "own"},
    "forward": {"kl_gradient": "forward"},
    "abs": {"kl_estimator": "abs"},
    "none": {"kl_gradient": "none"},
    "off-policy": {"kl_off_policy": "token", "kl_max_weight": 1.05, "kl_max_log_ratio": 0.3},
    "normalizer": {"kl_normalizer": "sequence_mean"},
    "advantage": {"kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"},
    "reward": {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"},
}


@needs_custom_losses
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_server_computes_the_same_loss_and_gradient(service, trainer, reference, standin, name):
    data, kl = datums(reference), KLConfig(beta=0.3, **CONFIGURATIONS[name])
    move(trainer, data)
    server_loss = create_kl_loss(service, cliprange=0.1, kl=kl)
    assert server_loss.on_server
    forward = standin.tokens["forward"]
    result = forward_backward_kl(trainer, data, cliprange=0.1, kl=kl, server_loss=server_loss).result()
    assert standin.tokens["forward"] == forward  # one pass, no forward of its own
    compare(result, standin, data, kl=kl, cliprange=0.1)


def compare(result, standin, data, **options):
    found = over_the_wire(standin)
    value, expected = by_autograd(standin, data, functools.partial(compute_grpo_kl_loss, **options))
    assert_same_gradient(found, expected)
    assert result.metrics["loss:sum"] == pytest.approx(value, abs=1e-6)
    return expected


@needs_custom_losses
def test_where_the_service_takes_no_uploads_the_sdk_runs_it_here(service, trainer, reference, standin):
    data, kl = datums(reference), KLConfig(beta=0.3)
    move(trainer, data)
    made = create_kl_loss(service, kl=kl)
    here = dataclasses.replace(made, handle=dataclasses.replace(made.handle, loss_id=None))
    assert not here.on_server
    result = forward_backward_kl(trainer, data, kl=kl, server_loss=here).result()
    compare(result, standin, data, kl=kl)


@needs_custom_losses
def test_one_loss_serves_every_beta_normalizer_and_mask(service, trainer, reference, standin):
    kl = KLConfig(beta=0.3, target_kl=0.1, kl_exclude_prefix=1)
    server_loss = create_kl_loss(service, kl=kl)
    data = datums(reference)
    data = [
        build_datum(
            *(d.model_input.to_ints()[:p], d.loss_fn_inputs["target_tokens"].to_torch()[p - 1 :].tolist(), 0.4),
            *(d.loss_fn_inputs[name].to_torch()[p - 1 :] for name in ("logprobs", "ref_logprobs")),
            mask=[1] * (len(d.model_input.to_ints()) - p) + [0],
            kl_mask=[0] + [1] * (len(d.model_input.to_ints()) - p),
        )
        for d, p in zip(data, (3, 3, 2, 2), strict=True)
    ]
    data = [data[0], *data[2:]]  # the second has no token left
    move(trainer, data)
    options = {"beta": 0.7, "normalizer": "sequence_mean"}
    result = forward_backward_kl(trainer, data, kl=kl, server_loss=server_loss, **options).result()
    compare(result, standin, data, kl=kl, **options)
    assert result.metrics["custom/train_kl_penalty:sum"] > 0
    for tensor in standin.weights().values():
        tensor.grad = None
    totals = count_tokens(datums(reference))
    result = forward_backward_kl(trainer, data, kl=kl, server_loss=server_loss, totals=totals).result()
    compare(result, standin, data, kl=kl, totals=totals)


@needs_custom_losses
def test_metrics_of_the_server(service, trainer, reference, standin):
    data, kl = datums(reference), KLConfig(beta=0.3)
    move(trainer, data)
    usual = forward_backward_kl(trainer, data, kl=kl).result().metrics
    found = forward_backward_kl(trainer, data, kl=kl, server_loss=create_kl_loss(service, kl=kl)).result().metrics
    names = ("kl/k1", "kl/k3", "train/policy_loss", "train/kl_penalty")
    documented = OWN_INTERFACES["klamp.tinker, on the server"]
    ours = {documented[name]: value for name, value in found.items() if name in documented}
    assert ours == pytest.approx({name: usual[name] for name in names}, rel=1e-5)


@needs_custom_losses
def test_at_beta_0_the_kl_is_not_in_the_loss_and_no_reference_is_needed(service, trainer, reference, standin):
    server_loss = create_kl_loss(service, kl_coef=0.0)
    data = datums(reference)
    for datum in data:
        del datum.loss_fn_inputs["ref_logprobs"]
    result = forward_backward_kl(trainer, data, kl_coef=0.0, server_loss=server_loss).result()
    compare(result, standin, data, kl_coef=0.0)
    assert result.metrics["custom/train_kl_penalty:sum"] == result.metrics["custom/kl_k3:sum"] == 0


@needs_custom_losses
def test_a_loss_made_for_another_configuration_is_refused(service, trainer, reference):
    server_loss, data = create_kl_loss(service, kl=KLConfig(beta=0.3)), datums(reference)
    for options in ({"kl": KLConfig(beta=0.3, kl_gradient="forward")}, {"kl_coef": 0.3, "cliprange": 0.1}):
        with pytest.raises(ConfigError, match="made for another configuration"):
            forward_backward_kl(trainer, data, server_loss=server_loss, **options)
    assert forward_backward_kl(trainer, data, kl_coef=0.1, server_loss=server_loss).result()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kl_clip_method", {"kl_clip_method": "hard", "kl_reference_length": 3}),
        ("kl_horizon", {"kl_horizon": "sequence"}),
        ("kl_horizon", {"kl_horizon": "sequence", "kl_off_policy": "sequence"}),
        ("kl_off_policy", {"kl_off_policy": "sequence"}),
    ],
)
def test_what_needs_more_than_one_token_is_refused(name, changes):
    with pytest.raises(ConfigError, match=f"{name} of this configuration cannot run on the server"):
        create_kl_loss(object(), kl=KLConfig(beta=0.3, **changes))


def test_an_sdk_without_custom_losses_is_named():
    with pytest.raises(UnsupportedVersion, match="no custom losses on the server"):
        create_kl_loss(object(), kl=KLConfig(beta=0.3))
