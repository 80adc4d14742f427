"""The processes of a run: what a launcher may ask of it, and what is said when one of them is waited for in vain.

klamp's own loop has its processes on one machine, each with all weights, in the model's own data type. A wait is over
when the connection to another process breaks, or when `process_timeout` is: the group of the processes is made with it.
Whom it was for, torch does not say; the launcher says which process died.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import DistError
from torch.nn.utils import clip_grad_norm_

from klamp.errors import ConfigError, KlampError, TrainerFailed
from klamp.hosts.common.rollout import Alone
from klamp.training.config import TrainConfig

FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
"""The variables by which `accelerate launch` asks for them."""
SPLITS = {FSDP: "FSDP", DEEPSPEED: "DeepSpeed"}
"""The variables by which `accelerate launch` asks for weights that are divided among processes."""


def asked_for(variable: str) -> bool:
    """Whether the launcher asks for what a variable of accelerate's names."""
    return os.environ.get(variable, "false").lower() == "true"


def check_one_machine() -> None:
    """Refuse what klamp's own loop does not do, before accelerate sets it up.

    Raises:
        ConfigError: the launcher asks for weights that are divided among processes, or for several machines.
    """
    asked = [words for variable, words in SPLITS.items() if asked_for(variable)]
    everywhere = os.environ.get("WORLD_SIZE", "1")
    here = os.environ.get("LOCAL_WORLD_SIZE", everywhere)
    if everywhere != here:
        asked.append(f"{everywhere} processes, {here} of them on this machine")
    if asked:
        raise ConfigError(
            "klamp's own loop is for one machine, with all weights in each process",
            got=", ".join(asked),
            why="TRL has FSDP2, DeepSpeed and vLLM, and verl several machines; both take the same configuration",
            fix="launch it in the same way with --backend trl, or without a launcher with --backend verl",
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


def check_alone(config: TrainConfig, *, why: str) -> None:
    """Refuse several processes where one is enough.

    Args:
        config: the run.
        why: where the work is done instead.

    Raises:
        ConfigError: a launcher started several.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"backend={config.run.backend!r} runs in one process",
            got=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            why=why,
            fix="start it without torchrun",
        )


class OneProcess(Alone):
    """What a step asks of accelerate, in a program that starts no processes and has nothing set up by accelerate.

    Args:
        device: of the policy.
    """

    num_processes, is_main_process = 1, True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which gradients are added up, as they always are here."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to those of the weights."""
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], bound: float) -> Tensor:
        """Shorten the gradient to a bound; its norm before."""
        return clip_grad_norm_(parameters, bound)


def timeout_of(config: TrainConfig) -> timedelta:
    """The longest wait for another process, as torch takes it."""
    return timedelta(seconds=config.run.process_timeout)


def is_wait_in_vain(error: Exception) -> bool:
    """Whether an error is that of a wait for another process; gloo has no class of its own, but names its files."""
    return isinstance(error, DistError) or "gloo" in str(error)


@contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """A context in which a wait in vain is an error of klamp.

    Args:
        config: of the run.

    Raises:
        TrainerFailed: another process is gone, has left the run, or did not come within `process_timeout`.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, KlampError) or not is_wait_in_vain(error):
            raise
        raise TrainerFailed(
            "the processes of the run lost each other",
            got=str(error).partition("\n")[0],
            why=f"one of them died, left the run, or took longer than process_timeout={config.run.process_timeout:g} s",
            fix="see which one the launcher or that process itself names, and whether its machine ran out of memory; "
            "raise process_timeout if one may take longer; then --resume",
        ) from error
