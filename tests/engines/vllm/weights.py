"""New weights for a vLLM server without a GPU: a file, which the variable WEIGHTS names, replaces NCCL."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from klamp.hosts.common.sampler_weights import pack_nothing

pack_nothing()  # in the server's worker too; packed weights are dropped, and new ones could not be loaded

LIMIT = 240
"""Seconds within which announced weights are there."""
FLAGS = (
    *("--worker-extension-cls", f"{__name__}.Extension"),
    *("--weight-transfer-config", '{"backend": "file"}'),
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enable-scale-out"),
)
"""What the server is started with; the last line is what `trl vllm-serve` says too."""


def file() -> Path:
    """Where the weights are handed over."""
    return Path(os.environ["WEIGHTS"])


class FileEngine(NCCLWeightTransferEngine):
    """vLLM's engine for whole weights, which come in a file."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing is joined."""

    def update_weights(self, update_info: Any) -> None:
        deadline = time.monotonic() + LIMIT
        while not file().exists():
            assert time.monotonic() < deadline, "the trainer sent no weights"
            time.sleep(0.02)
        self.model.load_weights(load_file(file()).items())
        file().unlink()


class Extension:
    """Adds nothing to the worker, which imports this module for it."""


def send(iterator: Iterable[tuple[str, Tensor]], post_iter_func: Callable[..., Tensor], **_others: Any) -> None:
    """Write every weight; the file gets its name when it is whole."""
    part = file().with_suffix(".part")
    save_file({item[0]: post_iter_func(item).detach().clone() for item in iterator}, part)
    part.rename(file())


def use_here() -> None:
    """Let TRL's client send weights so; it refuses devices that are not called cuda."""
    import trl.generation.vllm_client as client

    init = client.VLLMClient.init_communicator
    client.VLLMClient.init_communicator = lambda self, device=None: init(self, device="cuda")
    client.open_trainer_endpoint = lambda info: SimpleNamespace(group=SimpleNamespace())
    client.packed_nccl_broadcast_producer = send


WeightTransferEngineFactory.register_engine("file", FileEngine)
