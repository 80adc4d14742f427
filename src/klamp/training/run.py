"""The skeleton of a run, whoever trains: what is refused, built, resumed, told, measured, kept and closed, and when."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

import torch
from accelerate import Accelerator
from torch import nn

from klamp.errors import KlampError, TrainingStopped
from klamp.hosts.common.step_zero import STEP_ZERO_KL, likely_reasons, step_zero_text
from klamp.tasks.base import Example
from klamp.tasks.prompts import chat_cautions
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.evaluation import Evaluation, evaluate, teacher_answers
from klamp.training.folders import METRICS_FILE, lines_until, scores_of
from klamp.training.observers import AlarmObserver, Observer, RunInfo, RunSummary
from klamp.training.processes import explained
from klamp.training.references import FrozenReference
from klamp.training.resumed import check_resume
from klamp.training.rollouts import Rollout
from klamp.training.runlog import RunLog, begin_trackers
from klamp.training.sampling import examples_of_step
from klamp.training.setup import make_accelerator, opened_folder
from klamp.training.updates import UpdateOutput, completion_row

HANGUP = getattr(signal, "SIGHUP", None)
"""None on Windows."""
ENDS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None)
"""The signals that end a run."""


class Interrupt:
    """Notes the first signal, so that the step under way ends whole; raises at the second."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def deferred_interrupts() -> Iterator[Interrupt]:
    """Let Ctrl-C, SIGTERM and SIGHUP end a run after the step under way, with its state saved.

    A SIGHUP that is ignored, as `nohup` has it, stays so.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    heard = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN or number != HANGUP]
    previous = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Training:
    """A run under way: how far it is, what it measured last, and whom it tells.

    A backend is a subclass with these parts: `refuse`, `build`, `resume`, `cautions`, `begin`, `take_steps`, `kept` and
    `close`; `train` puts them together, and `run` those from the first step to the last.
    """

    step_zero_kl = STEP_ZERO_KL
    """KL per token before the first update that is worth a warning."""

    def __init__(self, context: Context, observers: Sequence[Observer]) -> None:
        self.context = context
        self.alarms = AlarmObserver(self.tell, rl_skill=context.task.rl_skill, stop_on=context.config.run.stop_on)
        self.observers = [*observers, self.alarms] if context.accelerator.is_main_process else []
        self.step = 0
        self.before: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.changes = ""
        self.noted: list[str] = []

    @classmethod
    def train(cls, config: TrainConfig, observers: Sequence[Observer]) -> RunSummary:
        """Run a configuration to its last step, from its newest checkpoint if it is to be resumed.

        Args:
            config: what to run.
            observers: told what happens; the run's folder and trackers are served besides.

        Raises:
            KlampError: bad input before any work, or an error in the run with its state saved; see `klamp.errors`.
        """
        cls.refuse(config)
        with explained(config), opened_folder(config) as folder, ExitStack() as last:
            going = check_resume(config, folder)
            accelerator = make_accelerator(config, folder)
            try:
                run = cls.build(config, accelerator, folder, [RunLog(accelerator), *observers], last)
                run.changes = going[1] if going else ""
                if config.run.resume:
                    run.resume()
                run.tell(lambda o: o.on_start(run.info()))
                run.warn(*run.cautions(), *run.noted)
                begin_trackers(accelerator, config, folder, done=run.step)
                return run.run()
            finally:
                for observer in observers if accelerator.is_main_process else ():
                    observer.close()
                cls.close(accelerator, config)

    def run(self) -> RunSummary:
        """Take all steps.

        Raises:
            TrainingStopped: interrupted; the state is saved.
            KlampError: a reward or a loss that cannot be used, a trainer that failed; the state is saved.
        """
        started = time.perf_counter()
        self.begin()
        with deferred_interrupts() as interrupt:
            try:
                with explained(self.context.config):
                    self.take_steps(interrupt)
            except KeyboardInterrupt as stop:
                raise self.stopped(*self.kept()) from stop
            except KlampError as error:
                step, folder = self.kept()
                if folder is not None:
                    error.add_note(f"  the state after step {step} is saved in {folder}")
                raise
        summary = RunSummary(
            output_dir=self.context.output_dir,
            steps=self.step,
            seconds=time.perf_counter() - started,
            rl_skill=self.context.task.rl_skill,
            before=self.before,
            after=self.after,
            final_metrics=self.metrics,
        )
        self.tell(lambda o: o.on_end(summary))
        return summary

    # the parts of a backend -------------------------------------------------------------------------------------------

    @staticmethod
    def refuse(config: TrainConfig) -> None:
        """Refuse a run that cannot be started here, before any work: what the backend needs is missing."""

    @classmethod
    def build(
        cls, config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer], last: ExitStack
    ) -> Self:
        """Load all that the run needs, and check that it fits together.

        Args:
            config: in force.
            accelerator: its processes and trackers.
            folder: of the run, locked.
            observers: whom it tells; first of all its folder and trackers.
            last: takes what is to be closed after everything else.

        Raises:
            KlampError: whatever does not fit, before any work.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run's folder; from the first step where there is none yet.

        Raises:
            RunFolderError: it is damaged, or another backend's.
        """
        raise NotImplementedError

    def cautions(self) -> Iterable[str]:
        """What the user should know before the first step."""
        return chat_cautions(self.context.config.task, self.context.tokenizer, self.context.stop)

    def begin(self) -> None:
        """Evaluate before the first step, and where a run ended between a step and its evaluation."""
        if not self.before:
            self.before = self.after = self.evaluate()
        elif self.is_due(self.context.config.run.eval_every) and not self.after:
            self.after = self.evaluate()

    def take_steps(self, interrupt: Interrupt) -> None:
        """Take all steps that are left; a step that is under way at an interrupt ends whole.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        raise NotImplementedError

    def save(self) -> Path | None:
        """Have a checkpoint of the last step written; its folder, where it is there already."""
        raise NotImplementedError

    def kept(self) -> tuple[int, Path | None]:
        """The step to continue from, and its checkpoint; None: there is none."""
        raise NotImplementedError

    @staticmethod
    def close(accelerator: Accelerator, config: TrainConfig) -> None:
        """Close the trackers, and end the group of the processes."""
        accelerator.end_training()

    # what they are made of --------------------------------------------------------------------------------------------

    def end_step(self, metrics: dict[str, float], interrupt: Interrupt) -> BaseException | None:
        """What a step ends with, once it is counted: it is told of, evaluated and saved where that is due.

        Args:
            metrics: of the step.
            interrupt: whether one is waiting.

        Returns:
            What ends the run here, the same for all processes; None: it goes on.
        """
        run = self.context.config.run
        self.metrics = metrics
        self.tell(lambda o: o.on_step(self.step, metrics))
        if self.is_due(run.eval_every):
            self.after = self.evaluate()
        if self.is_due(run.save_every):
            self.save()
        if self.step == run.max_steps:
            return None
        if run.stop_on and self._anywhere(self.alarms.stopped_by is not None):
            return self.alarms.stop(self.step, run.max_steps)
        return KeyboardInterrupt() if self._anywhere(interrupt.asked) else None

    def tell(self, hook: Callable[[Observer], None]) -> None:
        """Call a hook of every observer; on the main process only."""
        for observer in self.observers:
            hook(observer)

    def warn(self, *texts: str) -> None:
        """Tell every observer of cautions."""
        for text in texts:
            self.tell(lambda o, text=text: o.on_warning(text))

    def prompts(self, step: int) -> list[Example]:
        """The prompts of a step: consecutive slices of a fresh order in every epoch."""
        rows, config = self.context.task.train, self.context.config
        picked = examples_of_step(step, len(rows), size=config.rollout.prompts_per_step, seed=config.run.seed)
        return [rows[i] for i in picked]

    def examine(self) -> Evaluation:
        """Every skill's score now, and some answers."""
        return evaluate(self.context)

    def evaluate(self) -> dict[str, float]:
        """Evaluate every skill now and tell the observers; after the last step with the teacher's answers too."""
        found, last = self.examine(), self.step == self.context.config.run.max_steps
        answers = [*found.answers, *(teacher_answers(self.context) if last else ())]
        self.tell(lambda o: o.on_evaluation(self.step, found.scores))
        self.tell(lambda o: o.on_answers(self.step, answers))
        return found.scores

    def recall(self) -> None:
        """Take up what metrics.jsonl says of the steps that are done: the first scores, the last step, its scores."""
        rows = lines_until(self.context.output_dir / METRICS_FILE, self.step)
        evaluated, steps = [row for row in rows if scores_of(row)], [row for row in rows if "reward" in row]
        self.before = scores_of(evaluated[0]) if evaluated else {}
        self.metrics = {name: x for name, x in steps[-1].items() if name != "step"} if steps else {}
        self.after = scores_of(evaluated[-1]) if evaluated and evaluated[-1]["step"] == self.step else {}

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps (0: only at the end) is to be done after this one."""
        return self.step == self.context.config.run.max_steps or bool(every and self.step % every == 0)

    def _check_step_zero(self, kl: float) -> None:
        context = self.context
        if self.step or kl <= self.step_zero_kl or context.config.model.ref_model:
            return
        adapter = context.config.model.lora_r > 0
        reasons = likely_reasons(context.policy, self.reference_model(), adapter=adapter, loaded=False)
        self.warn(step_zero_text(kl, reasons))

    def reference_model(self) -> nn.Module | None:
        """The reference, where it is a model of its own in this process."""
        return self.context.reference.model if isinstance(self.context.reference, FrozenReference) else None

    def _show_completions(self, rollout: Rollout, output: UpdateOutput) -> None:
        run = self.context.config.run
        if not run.log_completions or (self.step and (self.step + 1) % run.log_completions_every):
            return
        rows = [completion_row(self.context, rollout, output, i) for i in range(len(rollout.texts))]
        self.tell(lambda o: o.on_completions(self.step + 1, rows[: run.log_completions]))

    def _anywhere(self, asked: bool) -> bool:
        """Whether any process was asked to stop, so that all of them stop after the same step."""
        asked_for = self.context.sum_over_processes(torch.tensor(float(asked), device=self.context.device))
        return bool(asked_for > 0)

    def stopped(self, step: int, folder: Path | None) -> TrainingStopped:
        """The error that ends an interrupted run.

        Args:
            step: the step to continue from.
            folder: its checkpoint; None: there is none.
        """
        return TrainingStopped(
            f"training was stopped after step {self.step} of {self.context.config.run.max_steps}",
            got="an interrupt",
            resumable=folder is not None,
            why=f"the state after step {step} is saved in {folder}" if folder else "no step was saved yet",
            fix=f"continue with: klamp train --resume {self.context.output_dir}"
            if folder
            else "start it again in another folder, or in this one from its first step, with --resume",
        )

    def info(self) -> RunInfo:
        """What is known before the first step."""
        context = self.context
        every = sum(p.numel() for p in context.policy.parameters())
        trained = sum(p.numel() for p in context.policy.parameters() if p.requires_grad)
        return RunInfo(
            config=context.config,
            output_dir=context.output_dir,
            start_step=self.step,
            parameters=every - trained if context.config.model.lora_r else every,
            trainable_parameters=trained,
            reference="none" if context.reference is None else context.reference.describe(),
            device=str(context.device),
            processes=context.processes,
            changes=self.changes,
        )
