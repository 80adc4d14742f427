"""verl without a GPU: its processes load this platform "cpu", and what torch and vLLM need. For tests only."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
import torch.distributed.fsdp
from verl.plugin.platform import PlatformBase, PlatformRegistry

HERE = torch.device("cpu")
ROOM = 2**34
"""Bytes of memory that verl is told of; it only logs them."""


def nothing(*args: Any, **options: Any) -> None:
    """What a GPU would do and a CPU need not."""


def zero(*args: Any, **options: Any) -> int:
    """Memory of a GPU that is in use: none."""
    return 0


def device_module() -> types.ModuleType:
    """`torch.cpu` with the calls beside it that verl makes of `torch.cuda`."""
    module = types.ModuleType("torch_cpu_for_verl")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, zero)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
        setattr(module, name, nothing)
    module.is_available = lambda: False  # where verl asks, it is about to measure memory
    module.mem_get_info = lambda *args: (ROOM, ROOM)
    module.get_device_name = lambda *args: "cpu"
    module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    return module


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    """The processor as verl's accelerator: collectives by gloo, weights to vLLM through shared memory."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return HERE

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


def gloo_once() -> None:
    """verl asks for gloo on CPUs and for the platform's on its device, "cpu:gloo,cpu:gloo", which torch refuses."""
    start = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)

    torch.distributed.init_process_group = init_process_group


def no_pinned_memory() -> None:
    """FSDP2 keeps the reference in pinned memory, which takes CUDA."""
    policy = torch.distributed.fsdp.CPUOffloadPolicy
    start = policy.__init__

    def __init__(self: Any, pin_memory: bool = False) -> None:
        start(self, pin_memory=False)

    policy.__init__ = __init__


gloo_once()
no_pinned_memory()
