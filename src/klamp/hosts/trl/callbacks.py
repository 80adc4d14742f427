"""Callbacks for a TRL trainer: the alarms of `klamp doctor` in the loop, and the files that `klamp report` shows."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from klamp._version import __version__
from klamp.config.describe import describe_anchors, describe_teacher
from klamp.doctor.examine import AlarmFinding, AlarmWatch
from klamp.doctor.history import RunSettings
from klamp.doctor.metrics import evaluations, settings_of, translate
from klamp.errors import KLWarning
from klamp.hosts.common.coefficient import TEACHER, loss_mask
from klamp.hosts.common.kl_fields import read_again
from klamp.hosts.common.versions import hardware, installed_version
from klamp.hosts.trl.reference import weights_are_split
from klamp.hosts.trl.session import TRLTrainer
from klamp.names import ABOUT, ALARMS_FILE, ANSWERS, COMPLETIONS, REPORT, TRAINER_STATE
from klamp.scoring.probe import in_mode

PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "vllm", "deepspeed")


class DoctorCallback(TrainerCallback):
    """Looks at the log of a TRL trainer with every alarm of `klamp doctor`, while the run goes on.

    An alarm is a `KLWarning`, once, and a line of `alarms.jsonl` in output_dir; notes are only written. The thresholds
    count logged rows: log every step (`logging_steps=1`, GRPOConfig's default is 10).

    Args:
        stop_on: names of alarms that end the run: a checkpoint is saved, and `train()` returns.
        on_alarm: a function that is called with each alarm, once, on the main process, for example to send a message.
        other_reference: whether the reference is another model than the one that training starts from;
            `klamp.trl.GRPOTrainer` says so itself.

    Attributes:
        findings: every alarm and note that rose, the first first.

    Raises:
        UnknownNameError: stop_on has a name that no alarm has.
    """

    def __init__(
        self,
        stop_on: Sequence[str] = (),
        *,
        on_alarm: Callable[[AlarmFinding], object] | None = None,
        other_reference: bool = False,
    ) -> None:
        self.on_alarm = on_alarm
        self.watch = AlarmWatch(RunSettings(), stop_on=(stop_on,) if isinstance(stop_on, str) else tuple(stop_on))
        self.other_reference = other_reference
        self.findings: list[AlarmFinding] = []

    @property
    def stopped_by(self) -> AlarmFinding | None:
        """The alarm of stop_on that ended the run; None: none did."""
        return self.watch.stopped_by

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the settings, and the log of a resumed run, so that no alarm is reported twice."""
        settings = settings_of_arguments(args, other_reference=self.other_reference)
        self.watch = AlarmWatch(settings, stop_on=self.watch.stop_on)
        self.findings = []
        for row in state.log_history:
            self._look(int(row.get("step", 0)), row)
        self.watch.stopped_by = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Look at a logged row; warn of what is new, and stop the run if an alarm of stop_on rose."""
        if not logs or "train_runtime" in logs:  # the last row sums up the run
            return
        main = state.is_world_process_zero
        for finding in self._look(state.global_step, logs):
            if not main:
                continue
            _append(Path(str(args.output_dir)) / ALARMS_FILE, [finding.record])
            if finding.alarm.level == "alarm":
                self._notify(finding)
                _warn(f"{finding.in_a_line}. {finding.alarm.means} Next step: {finding.alarm.next_step}")
        if self.stopped_by is not None and not control.should_training_stop:
            control.should_training_stop = control.should_save = True
            if main:
                _warn(f"training stops after step {state.global_step}: stop_on names {self.stopped_by.alarm.name}")

    def _notify(self, finding: AlarmFinding) -> None:
        try:
            if self.on_alarm is not None:
                self.on_alarm(finding)
        except Exception as error:  # of any service
            _warn(f"the notice of {finding.alarm.name} was not sent: {type(error).__name__}: {error}")

    def _look(self, step: int, logs: Mapping[str, Any]) -> list[AlarmFinding]:
        scores, metrics = evaluations(logs), translate(logs)
        findings = self.watch.evaluation(step, scores) if scores else []
        if metrics and not any(name.startswith("eval_") for name in logs):
            findings = [*findings, *self.watch.step(step, metrics)]
        self.findings += findings
        return findings


def _warn(text: str) -> None:
    warnings.warn(text, KLWarning, stacklevel=3)


def settings_of_arguments(args: Any, *, other_reference: bool = False) -> RunSettings:
    """What the alarms need of a GRPOConfig or DistillationConfig, TRL's or klamp's."""
    fields = vars(args) if "num_generations" in vars(args) else {**vars(args), "beta": None}  # there: a divergence
    batch, group = fields.get("generation_batch_size"), fields.get("num_generations")
    return replace(
        settings_of(fields, set()),
        other_reference=other_reference,
        moving_reference=bool(fields.get("sync_ref_model")),
        prompts=batch // group if batch and group else None,
    )


def _append(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


class ReportCallback(TrainerCallback):
    """Writes what `klamp report OUTPUT_DIR` shows beside the log of a TRL trainer.

    klamp's trainers have one by default (without answers, in `_klamp_report`), unless their klamp_report is False.
    Completions are the main process's; answers are greedy, to the first prompts of the evaluation set (else of the
    training set), before and after; split weights give no answers.

    Args:
        every: steps between those whose completions are written.
        completions: how many of a step.
        answers: how many prompts are answered before and after.
        folder: where the files are in output_dir; empty: output_dir itself.
    """

    def __init__(self, *, every: int = 10, completions: int = 8, answers: int = 4, folder: str = "") -> None:
        self.every, self.completions, self.answers, self.place = every, completions, answers, folder
        self.trainer: Any = None
        self.about: dict[str, Any] = {}
        self.step, self.written = 0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the settings, and answer before the first step; a run that goes on keeps what was written."""
        if self.trainer is None or not state.is_world_process_zero:
            return
        self.folder = Path(str(args.output_dir)) / self.place
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (TRAINER_STATE, *((COMPLETIONS, ANSWERS) if state.global_step == 0 else ())):
            (self.folder / name).unlink(missing_ok=True)
        self.about, self.started = about(self.trainer), time.monotonic()
        self._write()
        if state.global_step == 0:
            self._answer(0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answer after the last step; write the log, which TRL leaves in checkpoints alone, and how long it took."""
        if self.trainer is None or not state.is_world_process_zero:
            return
        self._answer(state.global_step)
        state.save_to_json(str(self.folder / TRAINER_STATE))
        self.about["seconds"] = time.monotonic() - self.started
        self._write()

    def _write(self) -> None:
        (self.folder / ABOUT).write_text(json.dumps(self.about, indent=1, default=str), encoding="utf-8")

    def take(self, inputs: Mapping[str, Any], logprobs: torch.Tensor) -> None:
        """Write completions of a micro-batch with the policy's log-probabilities [B, T], as many as are due."""
        trainer, step = self.trainer, self.trainer.state.global_step + 1
        self.step, self.written = step, self.written if self.step == step else 0
        due = (step == 1 or step % self.every == 0) and trainer.model.training and bool(self.about)
        rows = range(min(self.completions - self.written, len(logprobs)) if due else 0)
        self.written += len(rows)
        if not rows:
            return
        try:
            _append(self.folder / COMPLETIONS, [self._row(inputs, logprobs, i) for i in rows])
        except Exception as error:  # of a processor or a disk; it ends no run
            self.completions = 0
            _warn(f"klamp's report has no more completions: {type(error).__name__}: {error}")

    def _row(self, inputs: Mapping[str, Any], logprobs: torch.Tensor, i: int) -> dict[str, Any]:
        tokenizer, present = self.trainer._tokenizer, inputs["completion_mask"][i].bool()
        ids = inputs["completion_ids"][i][present].tolist()
        scores = {"policy": logprobs, "ref": inputs.get("ref_per_token_logps")}
        scores |= {"sampler": inputs.get("sampling_per_token_logps"), "teacher": inputs.get(TEACHER)}
        return {f"{name}_logprobs": x[i][present].tolist() for name, x in scores.items() if x is not None} | {
            "step": self.step,
            "prompt": tokenizer.decode(inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]),
            "completion": tokenizer.decode(ids, skip_special_tokens=True),
            "advantage": float(inputs["advantages"][i].flatten()[0]),
            "tokens": tokenizer.convert_ids_to_tokens(ids),
            "trained": loss_mask(inputs)[i][present].tolist(),
            "ended": bool(ids) and ids[-1] == tokenizer.eos_token_id,
        }

    def _answer(self, step: int) -> None:
        held_out, train = self.trainer.eval_dataset, self.trainer.train_dataset
        rows, skill = (held_out, "held out") if hasattr(held_out, "select") else (train, "training prompts")
        if not self.answers or weights_are_split(self.trainer) or not hasattr(rows, "select"):
            return
        try:
            answers = [answer(self.trainer, rows[i]) for i in range(min(self.answers, len(rows)))]
        except Exception as error:  # a prompt, a reward or a model of another kind
            reason = " ".join(str(error).split())[:200]
            _warn(f"klamp's report has no answers: {type(error).__name__}: {reason}")
            return
        _append(self.folder / ANSWERS, [{"step": step, "skill": skill, **row} for row in answers])


def report_of(trainer: TRLTrainer, *, default: bool) -> ReportCallback | None:
    """The callback that records a trainer's completions: its own, else by `default` a new one; None: nothing does."""
    own = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ReportCallback)]
    if not own and default and getattr(trainer.args, "klamp_report", True):
        own = [ReportCallback(completions=4, answers=0, folder=REPORT)]
        trainer.add_callback(*own)
    for callback in own:
        callback.trainer = trainer
    return own[-1] if own else None


def about(trainer: TRLTrainer) -> dict[str, Any]:
    """Settings, versions, model, data and KL of a trainer."""
    args, rows = trainer.args, trainer.train_dataset
    kl, teacher, _ = read_again(args)
    versions = {name: installed_version(name) for name in PACKAGES}
    data = getattr(getattr(rows, "info", None), "dataset_name", None) or "a data set"
    data += f" of {len(rows):,} prompts" if hasattr(rows, "__len__") else ""
    own = f"TRL's own, beta {args.beta:g}" if args.beta else "none: beta is 0"
    own = own if teacher is None else f"to the teacher {describe_teacher(teacher)}"
    rewards = ", ".join(getattr(trainer, "reward_func_names", ()))
    return {
        "model": getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
        "task": f"{data}, reward {rewards}" if rewards else data,
        "kl": own if kl is None else describe_anchors(kl, teacher),
        "config": args.to_dict(),
        "versions": {"klamp": __version__, "python": platform.python_version(), "hardware": hardware(cpu=args.use_cpu)}
        | {name: version for name, version in versions.items() if version},
    }


def answer(trainer: TRLTrainer, row: Mapping[str, Any]) -> dict[str, Any]:
    """A greedy answer of a trainer's policy, and the sum of its rewards that are plain functions."""
    tokenizer, model = trainer._tokenizer, trainer.accelerator.unwrap_model(trainer.model)
    prompt, chat = row["prompt"], not isinstance(row["prompt"], str)
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) if chat else prompt
    options = {"add_special_tokens": not chat, "return_token_type_ids": False}  # generate takes no types of tokens
    tokens = tokenizer(text, return_tensors="pt", **options).to(model.device)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with in_mode(model, training=False):
        ids = model.generate(**tokens, do_sample=False, max_new_tokens=trainer.args.max_completion_length, **ends)
    completion = tokenizer.decode(ids[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    completions = [[{"role": "assistant", "content": completion}]] if chat else [completion]
    score = sum(
        weight * float(reward(prompts=[prompt], completions=completions, **columns)[0] or 0.0)
        for reward, weight in zip(trainer.reward_funcs, trainer.reward_weights.tolist(), strict=True)
        if not isinstance(reward, torch.nn.Module)
    )
    question = "\n".join(str(message.get("content", "")) for message in prompt) if chat else prompt
    return {"question": question, "completion": completion, "score": float(score)}
