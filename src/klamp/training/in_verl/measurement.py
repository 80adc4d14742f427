"""What verl logged of a step, under klamp's names and in klamp's units."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp.config.loss import LOSS_TYPES
from klamp.diagnostics.metrics import METRICS
from klamp.diagnostics.names import evaluations, flat, is_verl_line, translate
from klamp.training.config import TrainConfig

SCORE_OF = "{skill}/acc/mean@1"
"""verl's name of a skill's score, behind the prefix of an evaluation."""

KL_LOSS, STEP_TIME = "actor/kl_loss", "timing_s/step"
OURS = "kl/k3"
"""Logged by klamp's driver, where there is one, with everything else about the KL."""


class LogReader:
    """The lines of a file that grows, each once and whole.

    Args:
        file: verl's file log; it need not be there yet.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.read = file, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The steps that were logged since the last call, as flat rows; lines of another kind are left out."""
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.read)
                content = opened.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            if is_verl_line(row):
                yield flat(row)


def scores_of(row: Mapping[str, Any], skills: Sequence[str]) -> dict[str, float]:
    """Skill -> its mean score, where a row holds an evaluation."""
    found = evaluations(row)
    named = {skill: SCORE_OF.format(skill=skill) for skill in skills}
    return {skill: found[name] for skill, name in named.items() if name in found}


def metrics_of(row: Mapping[str, Any], config: TrainConfig) -> dict[str, float]:
    """The metrics of a step; none where the row holds an evaluation only.

    verl averages the KL in the loss as it averages the loss. A sum over tokens that is divided by the longest
    completion is put back to a mean over tokens; the mean of sequence means stays as it is.

    Args:
        row: flat, as verl logged it.
        config: of the run.
    """
    found = translate(row)
    if "reward" not in found:
        return {}
    if KL_LOSS in row and OURS not in row:
        found |= _kl_in_loss(found.pop("kl/k3"), found, config)
    if STEP_TIME in row:
        completions = config.rollout.prompts_per_step * config.rollout.num_generations
        found["speed/step_seconds"] = seconds = float(row[STEP_TIME])
        if "length/mean" in found and seconds > 0:
            found["speed/tokens_per_second"] = completions * found["length/mean"] / seconds
    return found | {"policy/updates": float(config.optim.num_iterations)}


def _kl_in_loss(logged: float, found: Mapping[str, float], config: TrainConfig) -> dict[str, float]:
    """The KL in the loss, per token, under the name of its estimator where klamp has one."""
    fixed = LOSS_TYPES[config.loss.loss_type].reduction == "fixed_length"
    factor = config.rollout.max_completion_length / found["length/mean"] if fixed and found.get("length/mean") else 1.0
    name = f"kl/{config.kl.kl_estimator}"
    return {name: logged * factor} if name in METRICS else {}
