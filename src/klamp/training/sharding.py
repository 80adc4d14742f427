"""FSDP2: the policy's weights are divided among processes, and put together for every pass over the model.

The scorer is one unit: its weights are gathered once for a pass, and its gradient is shared out once at the end of it.
How often the model itself runs in between depends on the lengths of each process's completions; with a unit per layer,
processes would wait for each other at different layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from klamp.errors import ConfigError
from klamp.training.master_weights import MASTERS

OLDEST_TORCH = "2.13"
"""FSDP2 finds the tensors of a dataclass and takes weights without a gradient; older ones were not tried."""

OPTIONS = "--fsdp_auto_wrap_policy NO_WRAP --fsdp_cpu_ram_efficient_loading false"
"""What `accelerate launch` must be told besides; its defaults are others."""


class Whole(NamedTuple):
    """A sharded policy put together for a checkpoint, in the main process's memory; empty on other processes."""

    weights: dict[str, Tensor]
    """The weights by name; tensors that the model shares are one tensor here too."""
    optimizer: dict[str, Any]
    """The `state_dict()` of the optimizer."""


def asked_for() -> bool:
    """Whether the launcher asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_version() -> None:
    """Refuse FSDP1, before accelerate sets it up.

    Raises:
        ConfigError: it was asked for.
    """
    version = os.environ.get("FSDP_VERSION", "1")
    if asked_for() and version != "2":
        raise ConfigError(
            "klamp train does not run under FSDP1",
            got=f"fsdp_version {version}, which is 1 where none is given",
            why="it flattens the weights, which klamp reads by name",
            fix=f"launch with --fsdp_version 2 {OPTIONS}; or train with TRL and klamp.trl",
        )


def is_used(accelerator: Accelerator) -> bool:
    """Whether accelerate shards by FSDP here, as was asked for.

    Raises:
        ConfigError: it was asked for, and accelerate does not.
    """
    if not asked_for():
        return False
    if accelerator.distributed_type is DistributedType.FSDP:
        return True
    if accelerator.num_processes == 1:  # whose weights are whole either way
        return False
    raise ConfigError(
        "FSDP was asked for, and accelerate does not use it here",
        got=f"{accelerator.num_processes} processes on {accelerator.device.type}",
        why="accelerate shards on GPUs and their like only; on CPUs every process would hold all weights",
        fix="launch without FSDP: torchrun, or accelerate launch --multi_gpu (which also joins CPU processes)",
    )


def check_fsdp(accelerator: Accelerator) -> None:
    """Refuse settings of FSDP2 under which klamp's own loop would not do what was asked for.

    Raises:
        ConfigError: accelerate does not use it here, or an option that klamp has no use for.
    """
    found = unusable_options(accelerator) if is_used(accelerator) else {}
    if found:
        raise ConfigError(
            "klamp train does not run under FSDP set up so",
            got=", ".join(found),
            why="its policy is one FSDP2 unit in the data type of the model, since processes run it unequally often; "
            "these settings would be passed over or leave some weights wrong",
            fix=f"launch with {', '.join(found.values())}; for a unit per layer, --backend trl or klamp.trl",
        )


def check_precision(accelerator: Accelerator) -> None:
    """Refuse accelerate's mixed precision, which would cast what the policy learns from and not its reference.

    Raises:
        ConfigError: the launcher asks for it.
    """
    if accelerator.mixed_precision != "no":
        raise ConfigError(
            "klamp train does not run in accelerate's mixed precision",
            got=f"mixed_precision {accelerator.mixed_precision}",
            why="the learning pass would be cast and the reference's not: a KL between two equal models, and not 0",
            fix="give klamp's --dtype bfloat16 instead, and launch with --mixed_precision no "
            "(or unset ACCELERATE_MIXED_PRECISION)",
        )


def unusable_options(accelerator: Accelerator) -> dict[str, str]:
    """Settings of FSDP that klamp cannot use: the setting as it is given -> what to give instead."""
    state: Any = accelerator.state
    plugin, backend = state.fsdp_plugin, state.dynamo_plugin.backend
    wrap, precision = plugin.auto_wrap_policy, accelerator.mixed_precision
    old = TorchVersion(torch.__version__) < OLDEST_TORCH
    found = [
        (old, f"torch {torch.__version__}", f"torch {OLDEST_TORCH} or newer"),
        (wrap is not None, f"fsdp_auto_wrap_policy {_name(wrap)}", "--fsdp_auto_wrap_policy NO_WRAP"),
        (
            plugin.cpu_ram_efficient_loading,
            "fsdp_cpu_ram_efficient_loading true",
            "--fsdp_cpu_ram_efficient_loading false",
        ),
        (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "fsdp_offload_params true", "--fsdp_offload_params false"),
        (plugin.activation_checkpointing, "fsdp_activation_checkpointing true", "gradient_checkpointing of klamp"),
        (plugin.ignored_modules is not None, "ignored_modules", "no ignored_modules"),
        (precision != "no", f"mixed_precision {precision}", "--mixed_precision no and the dtype of klamp"),
        (backend != DynamoBackend.NO, f"dynamo_backend {backend.value.lower()}", "--dynamo_backend no"),
        (accelerator.parallelism_config is not None, "a parallelism_config", "no parallelism_config"),
    ]
    return {given: instead for wrong, given, instead in found if wrong}


def _name(wrap: Any) -> str:
    return str(getattr(getattr(wrap, "func", wrap), "__name__", wrap))


def prepare(scorer: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Make a scorer ready for its processes: wrapped for data parallelism, or with its weights divided among them."""
    if accelerator.distributed_type is not DistributedType.FSDP:
        return accelerator.prepare_model(scorer)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    fully_shard(scorer, mesh=mesh, reshard_after_forward=False)  # in place; its backward pass comes next
    if isinstance(scorer, FSDPModule):
        scorer.set_reduce_scatter_unused_params(True)  # a weight without a gradient here may have one elsewhere
    return scorer


def is_sharded(module: nn.Module) -> bool:
    """Whether the model's weights are divided among processes."""
    return isinstance(module, FSDPModule)


@contextmanager
def gathered(module: nn.Module, *, split_after_passes: bool = False) -> Iterator[None]:
    """A context in which every process holds all weights, to read only; all processes must enter it.

    Args:
        module: sharded as one unit or layer by layer, or not at all.
        split_after_passes: whether a unit gives up the weights of others after each pass while it trains.
    """
    units = [
        each for each in module.modules() if isinstance(each, FSDPModule)
    ]  # the outermost is first: it prepares all
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(split_after_passes, recurse=False)
            unit.reshard()


def whole(x: Any) -> Any:
    """A tensor put together from its parts, any other thing as it is; all processes must call this."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def put_together(policy: nn.Module, optimizer: Optimizer, *, keep: bool) -> Whole:
    """Weights and optimizer moments for a checkpoint, one tensor at a time; all processes must call this.

    Args:
        policy: sharded.
        optimizer: its.
        keep: whether this process keeps them.
    """
    seen: dict[int, Tensor] = {}
    found = Whole({}, {"state": {}, "param_groups": []})
    for name, weight in policy.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            full = whole(weight).detach()
            seen[id(weight)] = full.cpu() if keep else full.new_empty(0)
        found.weights[name] = seen[id(weight)]
    saved = optimizer.state_dict()
    for index, moments in saved["state"].items():
        full = {name: whole(x) for name, x in moments.items()}
        if keep:
            found.optimizer["state"][index] = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in full.items()}
    found.optimizer["param_groups"] = saved["param_groups"]
    if MASTERS in saved:
        copies = (whole(x) for x in saved[MASTERS])
        found.optimizer[MASTERS] = [x.cpu() if keep else x.new_empty(0) for x in copies]
    return found if keep else Whole({}, {})


def split_like(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The saved state of an optimizer with its tensors divided as the weights are."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(weight, DTensor) for weight in weights):
        return saved

    def split(x: Any, weight: Tensor) -> Any:
        if not isinstance(weight, DTensor) or not isinstance(x, Tensor) or x.shape != weight.shape:
            return x
        return distribute_tensor(x.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)

    state = {i: {n: split(x, weights[i]) for n, x in moments.items()} for i, moments in saved["state"].items()}
    found = saved | {"state": state}
    if MASTERS in saved:
        found[MASTERS] = [split(x, weight) for x, weight in zip(saved[MASTERS], weights, strict=True)]
    return found
