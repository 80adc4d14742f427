"""Stands in for `python -m verl.trainer.main_ppo`: reads its arguments and files; logs, saves, fails as verl.

Its behaviour is a JSON object in the variable STAND_IN:

    patient   whether it goes on from a checkpoint only once klamp has sealed it
    fail      the step in which it ends with code 3
    full      the step whose checkpoint finds no room
    hang      the step in which it stops answering, and so does a helper in a process group of its own
    offset    nats that the KL has from the first step on
    score     whether answers are scored with klamp's reward function, which takes seconds to load
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TOLD = json.loads(os.environ.get("STAND_IN", "{}"))
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def arguments() -> dict[str, str]:
    pairs = (word.lstrip("+").split("=", 1) for word in sys.argv[1:])  # noqa: TID251  (a program of its own)
    return {key: value.strip("'") for key, value in pairs}


def log(file: Path, step: int, data: dict[str, object]) -> None:
    """A line in two writes, as a reader may find it."""
    line = json.dumps({"step": step, "data": data}) + "\n"
    for part in (line[:10], line[10:]):
        with file.open("a", encoding="utf-8") as opened:
            opened.write(part)


def evaluation(given: dict[str, str], step: int) -> dict[str, object]:
    from pyarrow import parquet

    rows = parquet.read_table(given["data.val_files"]).to_pylist()
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["data_source"], []).append(scored(given, row) if TOLD.get("score") else step / 10)
    means = {skill: sum(all_of) / len(all_of) for skill, all_of in found.items()}
    parts = {f"val-core/{skill}/acc/mean@1": x for skill, x in means.items()}
    return parts | {"val-aux/num_turns/mean": 2}


def scored(given: dict[str, str], row: dict) -> float:
    from klamp.training.in_verl.data import score

    truth = row["reward_model"]["ground_truth"]
    told = given["reward.custom_reward_function.reward_kwargs.task"]
    return score(row["data_source"], "7", truth, row["extra_info"], task=told, reward_router_address=None)


def sealed(folder: Path) -> None:
    """Return once klamp has seen a checkpoint; where it never does, it ends this program."""
    from klamp.training.checkpoint import SEAL

    while not (folder / SEAL).exists():
        time.sleep(0.02)


def hang() -> None:
    helper = subprocess.Popen([sys.executable, "-c", STUBBORN], process_group=0)
    print(f"helper {helper.pid}", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def main() -> None:
    given = arguments()
    file = Path(given["ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"])
    saved, rollouts = Path(given["trainer.default_local_dir"]), Path(given["trainer.rollout_data_dir"])
    newest, steps = saved / "latest_checkpointed_iteration.txt", int(given["trainer.total_training_steps"])
    first = int(newest.read_text()) if given["trainer.resume_mode"] == "auto" else 0
    file.write_text("")
    rollouts.mkdir(parents=True, exist_ok=True)
    if given["trainer.val_before_train"] == "True":
        log(file, first, evaluation(given, first))
    for step in range(first + 1, steps + 1):
        print(f"step {step}", flush=True)
        if step == TOLD.get("hang"):
            hang()
        if step == TOLD.get("fail"):
            print("RuntimeError: an engine died", file=sys.stderr)
            sys.exit(3)
        if step % int(given["trainer.save_freq"]) == 0 or step == steps:
            if step == TOLD.get("full"):
                raise OSError(28, "No space left on device")
            (saved / f"global_step_{step}").mkdir(parents=True)
            (saved / f"global_step_{step}" / "weights.pt").write_bytes(b"weights")
            newest.write_text(str(step))
            if TOLD.get("patient"):
                sealed(saved / f"global_step_{step}")
        (rollouts / f"{step}.jsonl").write_text("{}\n")
        data: dict[str, object] = {
            "training/global_step": step,
            "critic/score/mean": 0.25,
            "response_length/mean": 4.0,
            "actor/kl_loss": 0.03 * (step - 1) + TOLD.get("offset", 0.0),
            "actor/kl_coef": 0.01,
            "actor/grad_norm": None if step == 2 else 1.5,
            "timing_s/step": 2.0,
        }
        if step % int(given["trainer.test_freq"]) == 0 or step == steps:
            data |= evaluation(given, step)
        log(file, step, data)


if __name__ == "__main__":
    main()
