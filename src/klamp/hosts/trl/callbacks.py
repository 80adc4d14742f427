"""The alarms of `klamp doctor` in the loop of transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from klamp.diagnostics.doctor import AlarmWatch, Finding
from klamp.diagnostics.history import RunSettings
from klamp.diagnostics.names import evaluations, settings_of, translate
from klamp.errors import KLWarning
from klamp.hosts.common.kl_fields import kl_config
from klamp.names import ALARMS_FILE


class DoctorCallback(TrainerCallback):
    """Looks at the log of a TRL trainer with every alarm of `klamp doctor`, while the run goes on.

    Give it to `klamp.trl.GRPOTrainer` or to TRL's own: `callbacks=[DoctorCallback(stop_on=["reward-collapse"])]`. An
    alarm is a `KLWarning`, once, and a line of `alarms.jsonl` in output_dir; notes are only written. The thresholds
    count logged rows: log every step (`logging_steps=1`, GRPOConfig's default is 10).

    Args:
        stop_on: names of alarms that end the run: a checkpoint is saved, and `train()` returns.
        on_alarm: a function that is called with each alarm, once, on the main process, for example to send a message.
        other_reference: whether the reference is another model than the one that training starts from;
            `klamp.trl.GRPOTrainer` says so itself where it is given a ref_model.

    Attributes:
        findings: every alarm and note that rose, the first first.
        stopped_by: the alarm of stop_on that ended the run; None: none did.

    Raises:
        UnknownNameError: stop_on has a name that no alarm has.
    """

    def __init__(
        self,
        stop_on: Sequence[str] = (),
        *,
        on_alarm: Callable[[Finding], object] | None = None,
        other_reference: bool = False,
    ) -> None:
        self.on_alarm = on_alarm
        self.watch = AlarmWatch(RunSettings(), stop_on=(stop_on,) if isinstance(stop_on, str) else tuple(stop_on))
        self.other_reference = other_reference
        self.findings: list[Finding] = []

    @property
    def stopped_by(self) -> Finding | None:
        """The alarm of stop_on that ended the run."""
        return self.watch.stopped_by

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the settings; a run that is continued is read from its log, and what was told is not told again."""
        settings = settings_of_arguments(args, other_reference=self.other_reference)
        self.watch = AlarmWatch(settings, stop_on=self.watch.stop_on)
        self.findings = []
        for row in state.log_history:
            self._look(int(row.get("step", 0)), row)
        self.watch.stopped_by = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at a logged row; warn of what is new, and stop the run where it was asked for."""
        if not logs or "train_runtime" in logs:  # the last row sums up the run
            return
        for finding in self._look(state.global_step, logs):
            if state.is_world_process_zero:
                _write(Path(str(args.output_dir)) / ALARMS_FILE, finding)
                if finding.alarm.level == "alarm":
                    self._tell(finding)
                    told = f"{finding.in_a_line}. {finding.alarm.means} Next step: {finding.alarm.next_step}"
                    warnings.warn(told, KLWarning, stacklevel=2)
        if self.stopped_by is not None and not control.should_training_stop:
            control.should_training_stop = control.should_save = True
            if state.is_world_process_zero:
                name = self.stopped_by.alarm.name
                warnings.warn(
                    f"training stops after step {state.global_step}: stop_on names {name}", KLWarning, stacklevel=2
                )

    def _tell(self, finding: Finding) -> None:
        """Call on_alarm; an error in it is a warning, since no run ends for a notice."""
        try:
            if self.on_alarm is not None:
                self.on_alarm(finding)
        except Exception as error:  # of whatever service it is
            text = f"the notice of {finding.alarm.name} was not sent: {type(error).__name__}: {error}"
            warnings.warn(text, KLWarning, stacklevel=2)

    def _look(self, step: int, logs: Mapping[str, Any]) -> list[Finding]:
        scores, metrics = evaluations(logs), translate(logs)
        found = self.watch.evaluation(step, scores) if scores else []
        if metrics and not any(name.startswith("eval_") for name in logs):
            found = [*found, *self.watch.step(step, metrics)]
        self.findings += found
        return found


def settings_of_arguments(args: Any, *, other_reference: bool = False) -> RunSettings:
    """What the alarms need of a GRPOConfig or DistillationConfig, TRL's or klamp's.

    Args:
        args: the trainer's arguments.
        other_reference: whether the reference is another model than the one that training starts from.
    """
    given = asdict(args) if is_dataclass(args) and not isinstance(args, type) else vars(args)
    if "num_generations" not in given:  # in distillation TRL's beta names a divergence
        return settings_of({name: value for name, value in given.items() if name != "beta"}, set())
    batch, group = (getattr(args, name, None) for name in ("generation_batch_size", "num_generations"))
    prompts = batch // group if batch and group else None
    settings = replace(settings_of(given, set()), other_reference=other_reference, prompts=prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # said when the arguments were made
        kl = kl_config(args)
    moving = bool(getattr(args, "sync_ref_model", False))
    if kl is None:
        return replace(settings, moving_reference=moving)
    return replace(
        settings,
        beta=kl.beta,
        target_kl=kl.target_kl,
        moving_reference=moving or kl.reference in ("ema", "periodic"),
    )


def _write(file: Path, finding: Finding) -> None:
    """Append a finding to a run's list of alarms."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(finding.record) + "\n")
