"""Starts the program of another trainer for a run of `klamp train --backend trl` or `verl`.

klamp makes the run's folder and writes its configuration. The engine's program then runs in the foreground: in the
place of this process, or, for TRL in one process, in it. Output, checkpoints, logs and processes are the engine's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from klamp.errors import TrainingStopped
from klamp.hosts.common.versions import caution_beside, check_version
from klamp.lab.config import TrainConfig
from klamp.lab.engines.trl.arguments import trl_arguments
from klamp.lab.engines.verl.overrides import Layout, command
from klamp.lab.folders import check_folder, make_folder, run_folder, write_whole
from klamp.lab.observers import versions
from klamp.lab.resumed import check_resume, identity, newest_complete, plain
from klamp.lab.setup import check_processes
from klamp.names import CONFIG, IDENTITY, VERSIONS

LAUNCHED = ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
"""What torchrun and `accelerate launch` tell their processes."""


def launch(config: TrainConfig, argv: Sequence[str]) -> None:
    """Run the configuration that the arguments `argv` of `klamp train` made; returns if TRL trained in this process.

    Raises:
        KlampError: what does not fit, before any work.
        TrainingStopped: TRL was interrupted, or an alarm of stop_on ended the run.
    """
    if config.run.backend == "verl":
        check_version("verl")
        caution_beside("vllm")
        from klamp.lab.engines.verl.data import write_inputs

        folder = opened(config)
        write_inputs(config, Layout(folder))
        record(config, folder)
        replace_process(command(config, folder, sys.executable))
    elif words := accelerate_command(config, argv, sys.executable):
        replace_process(words)
    else:
        check_version("trl")
        from klamp.lab.engines.trl import program

        folder = opened(config)
        try:
            program.train(config, folder, begin=lambda: record(config, folder))
        except KeyboardInterrupt as stop:
            raise TrainingStopped(
                "TRL was interrupted", got="Ctrl-C", fix=f"continue from its newest checkpoint: --resume {folder}"
            ) from stop


def opened(config: TrainConfig) -> Path:
    """The folder of a run, which is made, or taken up where a run is continued; of several processes by the first."""
    check_processes(config)
    if os.environ.get("RANK", "0") != "0":
        return Path(config.run.output_dir or "")
    folder, _ = make_folder(config)
    check_folder(folder, resume=config.run.resume)
    check_resume(config, folder)
    return folder


def record(config: TrainConfig, folder: Path) -> None:
    """Write what the run has: its configuration, its versions, and which model and data it is of."""
    if os.environ.get("RANK", "0") == "0":
        goes_on = config.run.resume and newest_complete(folder) is not None
        noted = identity(config, folder if goes_on else None)
        write_whole(folder / IDENTITY, json.dumps(noted, indent=2))
        write_whole(folder / VERSIONS, json.dumps(versions(), indent=2))
        write_whole(folder / CONFIG, yaml.safe_dump(plain(config) | {"resume": False}, sort_keys=False))


def accelerate_command(config: TrainConfig, argv: Sequence[str], python: str) -> list[str]:
    """The command that starts this `klamp train` once for each GPU; none for one, or where a launcher has done so."""
    if config.run.gpus == 1 or any(name in os.environ for name in LAUNCHED):
        return []
    named = [] if config.run.output_dir else ["--output_dir", str(run_folder(config))]
    processes = ["--multi_gpu", "--num_processes", str(config.run.gpus), "--num_machines", "1"]
    return [python, "-m", "accelerate.commands.launch", *processes, "-m", "klamp.cli", "train", *argv, *named]


def engine_plan(config: TrainConfig, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of TRL's configuration, and the command that a run starts; for `--dry-run`."""
    folder = run_folder(config)
    if config.run.backend == "verl":
        return {}, command(config, folder, "python")
    words = accelerate_command(config, argv, "python")
    return trl_arguments(config, folder, processes=config.run.gpus if words else None), words


def replace_process(words: Sequence[str]) -> None:
    """Run a command in the place of this process, so that its exit code and all signals are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], list(words))
