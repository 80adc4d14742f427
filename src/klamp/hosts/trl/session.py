"""What klamp remembers about a TRL trainer between the trainer's calls, and its part of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

from klamp.config import KLConfig
from klamp.core.term import KLTerm
from klamp.hosts.common.coefficient import check_once
from klamp.hosts.common.control import KLControl, go_on_from, read_state
from klamp.hosts.common.window import Window
from klamp.hosts.trl.fast_scoring import FastScoring
from klamp.hosts.trl.teacher import Teacher


@dataclass(frozen=True)
class Scoring:
    """One call of TRL's scoring method: its result and, but for the model, its arguments."""

    logprobs: Tensor
    """[B, T] log-probabilities that the call returned."""
    hidden: Tensor | None = None
    """[B, T, H] hidden states from which the tokens were predicted, where the exact KL is wanted."""
    positional: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Session:
    """Everything that klamp keeps for one trainer."""

    kl: KLConfig | None
    """None: TRL's own KL is left alone; it is measured all the same where there is one."""
    control: KLControl | None
    term: KLTerm
    windows: dict[str, Window]
    """The measurements of the present step in each mode, train and eval."""
    reference: str = ""
    """Where the reference comes from, in words."""
    expected_zero: bool = True
    """Whether policy and reference should be equal before the first update."""
    starts_at_reference: bool = True
    """Whether the reference has the weights that training started from."""
    sync_gap: float = 0.0
    """How far off the sampler's log-probabilities were when they were last looked into, nats per token."""
    out_of_sync: bool = False
    """Whether the user was told that the sampler is out of sync."""
    resumed: bool = False
    exact_rows: int = 0
    """How many completions of a group have their exact KL measured."""
    exact_everywhere: bool = False
    """Whether every completion has its exact KL measured."""
    losses: int = 0
    """The number of losses that went through klamp's hook."""
    lengths: list[int] = field(default_factory=list)
    """The lengths of this process's last completions, in tokens."""
    scorable: Tensor | None = None
    """Which of the last completions (of all processes) any reward function gave a reward to."""
    spread: float | None = None
    """The standard deviation that the last advantages were divided by, in reward; None: there was none."""
    rewards: Tensor | None = None
    """The rewards of the last completions of all processes, a group in each row; None: there is no single one."""
    fast: FastScoring | None = None
    """klamp's scorer in the place of TRL's; None: nobody asked for it."""
    teacher: Teacher | None = None
    """Whom a second KL holds the policy to; None: nobody."""
    learns: Tensor | None = None
    """Which completions of the present loss have a gradient, [B]; None: any may."""
    record: Any = None
    """The `ReportCallback` that completions are written by; None: nobody asked for one."""
    seen: list[Scoring] | None = None
    """The calls of TRL's scoring method that were collected; None while nobody collects."""

    @classmethod
    def of(cls, kl: KLConfig | None) -> Session:
        """A new session."""
        return cls(
            kl=kl,
            control=None if kl is None else KLControl(kl),
            term=KLTerm() if kl is None else kl.build_term(),
            windows={mode: Window() for mode in ("train", "eval")},
        )

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states are wanted of the calls that are collected."""
        prefixes = self.teacher is not None and self.teacher.how is not None
        return self.seen is not None and (self.exact_rows > 0 or prefixes)

    @contextmanager
    def listening(self, learns: Tensor | None = None) -> Iterator[list[Scoring]]:
        """A context that collects the calls of TRL's scoring method.

        Args:
            learns: which completions have a gradient in it, [B]; None: any may.
        """
        outer, seen = (self.seen, self.learns), list[Scoring]()
        self.seen, self.learns = seen, learns
        try:
            yield seen
        finally:
            self.seen, self.learns = outer


def only_scoring(seen: list[Scoring]) -> Scoring:
    """The single call of TRL's scoring method inside a loss; its log-probabilities are those of the KL.

    Raises:
        UnsupportedVersion: there was none, or more than one.
    """
    check_once(len(seen), "calls of _get_per_token_logps_and_entropies")
    return seen[0]


STATE = "klamp_state.json"
"""klamp's part of a checkpoint: the controller of beta and the frozen reference length."""


def save_state(trainer: Any, trial: Any) -> None:
    """Write klamp's state beside the trainer's own, on the process that saves."""
    control = trainer._klamp.control
    if control is not None and trainer.args.should_save:
        folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
        (folder / STATE).write_text(json.dumps(control.state_dict(), indent=2) + "\n", encoding="utf-8")


def load_state(trainer: Any, folder: str | None) -> None:
    """Continue from a checkpoint, see `KLControl.load_state_dict`; where one side has no KL of klamp's, with a warning.

    Raises:
        RunFolderError, ConfigError: the state is damaged.
    """
    session = trainer._klamp
    if folder is None:
        return
    session.resumed = True
    path = Path(folder) / STATE
    if session.control is not None and path.exists():
        session.control.load_state_dict(read_state(path))
    elif session.control is not None:
        trainer._caution(
            f"the checkpoint {folder} holds no {STATE}: beta starts again from its configured value, and a reference "
            "length that has to be measured cannot be."
        )
    elif path.exists():
        trainer._caution(
            f"the checkpoint {folder} was written with klamp's KL, and no KL field is set now: beta={trainer.beta:g} "
            "is that of TRL's own. Set the fields that the run was started with."
        )


SETTINGS = ("weight_decay", "betas", "eps", "momentum")
"""What a checkpoint's optimizer holds and the arguments say."""


@contextmanager
def settings_kept(trainer: Any, *, hosts_schedule: bool) -> Iterator[None]:
    """A context for loading a checkpoint's optimizer and schedule: moments and step are the checkpoint's.

    `SETTINGS` are those asked for now, and so is the learning rate, unless groups have rates of their own.

    Args:
        trainer: whose arguments say what is asked for.
        hosts_schedule: whether the schedule is TRL's; another goes on as whoever made it says.
    """
    asked = [{name: group[name] for name in SETTINGS if name in group} for group in trainer.optimizer.param_groups]
    schedule, rates = trainer.lr_scheduler, list(getattr(trainer.lr_scheduler, "base_lrs", []))
    yield
    for group, settings in zip(trainer.optimizer.param_groups, asked, strict=True):
        group.update(settings)
    if hosts_schedule and isinstance(schedule, LambdaLR) and len(set(rates)) == 1:
        warmup = TrainingArguments.get_warmup_steps(trainer.args, max(trainer.args.max_steps, 0))
        if said := go_on_from(schedule, schedule.last_epoch, rates[0], warmup=warmup):
            trainer._caution(said)
