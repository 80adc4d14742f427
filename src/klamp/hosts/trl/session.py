"""What klamp remembers about a TRL trainer between the trainer's calls, and its part of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from klamp.config import KLConfig
from klamp.core.term import KLTerm
from klamp.hosts.common.coefficient import check_once
from klamp.hosts.common.control import KLControl, read_state
from klamp.hosts.common.step_metrics import Window
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

    control: KLControl | None
    """None: TRL's own KL is left alone; it is measured all the same where there is one."""
    term: KLTerm
    windows: dict[str, Window]
    """The measurements of the present step in each mode, train and eval."""
    reference: str = ""
    """Where a reference comes from that klamp supplies, in words."""
    expected_zero: bool = True
    """Whether policy and reference should be equal before the first update."""
    starts_at_reference: bool = True
    """Whether the reference has the weights that training started from."""
    sync_gap: float = 0.0
    """How far off the sampler's log-probabilities were at the last look, nats per token; infinite: the user knows."""
    exact_rows: int = 0
    """How many completions of a group have their exact KL measured."""
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
        return cls(
            control=None if kl is None else KLControl(kl),
            term=KLTerm() if kl is None else kl.build_term(),
            windows={mode: Window() for mode in ("train", "eval")},
        )

    @property
    def kl(self) -> KLConfig | None:
        """The configuration of klamp's KL."""
        return None if self.control is None else self.control.kl

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states are wanted of the calls that are collected."""
        prefixes = self.teacher is not None and self.teacher.how is not None
        return self.seen is not None and (self.exact_rows > 0 or prefixes)

    @contextmanager
    def listening(self, learns: Tensor | None = None) -> Iterator[list[Scoring]]:
        """A context that collects the calls of TRL's scoring method; `learns` as in the field of this name."""
        outer, seen = (self.seen, self.learns), list[Scoring]()
        self.seen, self.learns = seen, learns
        try:
            yield seen
        finally:
            self.seen, self.learns = outer


def only_scoring(seen: list[Scoring]) -> Scoring:
    """The single call of TRL's scoring method inside a loss; its log-probabilities are those of the KL."""
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
    """Continue from a checkpoint, see `KLControl.load_state_dict`; warn if one side has no KL of klamp's."""
    session = trainer._klamp
    if folder is None:
        return
    session.expected_zero = False
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
