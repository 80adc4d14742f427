"""What klamp reads from a TRL trainer, what it keeps for one, and its part of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.surrogates import TrustRegion
from klamp.core.term import KLTerm, Weighted
from klamp.hosts.common.anchors import check_same, prefix_kl
from klamp.hosts.common.control import KLControl, read_state
from klamp.hosts.common.step_metrics import Window
from klamp.scoring.model_parts import PrefixKL, Traits
from klamp.scoring.vllm_reference import VLLMReference


class TRLTrainer(Protocol):
    """What klamp reads from a GRPO or distillation trainer of TRL's, klamp's or Unsloth's, and writes into it."""

    accelerator: Any
    args: Any  # TRL's arguments, with klamp's fields if they are klamp's
    model: Any
    ref_model: Any  # None: the policy with its adapter off, or no reference
    state: Any
    callback_handler: Any
    train_dataset: Any
    eval_dataset: Any
    reward_funcs: Any
    reward_func_names: Any
    reward_weights: Any
    beta: float  # the coefficient that the host multiplies its KL with
    temperature: float
    loss_type: str
    num_generations: Any
    aux_loss_enabled: bool
    off_policy_mask_threshold: float | None
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    add_callback: Callable[..., None]
    is_world_process_zero: Callable[[], bool]
    _tokenizer: Any
    _metrics: dict[str, Any]  # mode (train or eval) -> name -> the values that the next logged row averages
    _entropy_bonus_enabled: bool
    _get_output_dir: Callable[..., Any]
    _get_per_token_logps_and_entropies: Callable[..., Any]
    _tokenize_prompts: Callable[..., Any]
    # klamp's own, from `KLMixin`
    _klamp: Any
    """Its `Session`, or None."""
    _caution: Callable[[str], None]
    _host_class: Callable[[str], type]
    _refresh_beta: Callable[[], float]
    _never_exact: str  # why no trainer of this class can have the exact KL; empty if one can


def mode_of(trainer: TRLTrainer) -> str:
    """Whether the trainer trains or evaluates: TRL's names, train and eval."""
    return "train" if trainer.model.training else "eval"


def log(trainer: TRLTrainer, metrics: Mapping[str, float]) -> None:
    """Add numbers to the next row that the trainer logs."""
    for name, value in metrics.items():
        trainer._metrics[mode_of(trainer)][name].append(value)


def progress(trainer: TRLTrainer) -> tuple[int, int]:
    """The optimizer step, from 0, and the number of steps of the run."""
    return trainer.state.global_step, max(trainer.state.max_steps, 1)


@dataclass(frozen=True)
class Scoring:
    """One call of TRL's scoring method: its result and, but for the model, its arguments."""

    logprobs: Tensor  # [B, T]
    hidden: Tensor | None = None  # [B, T, H] states that predicted the tokens, if a KL over the vocabulary is wanted
    positional: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Calls:
    """The calls of TRL's scoring method that are being collected."""

    scorings: list[Scoring] | None = None  # None: nobody collects
    learns: Tensor | None = None  # [B] completions of the present loss that have a gradient; None: any may

    @contextmanager
    def collected(self, learns: Tensor | None = None) -> Iterator[list[Scoring]]:
        """A context that collects the calls; `learns` as in the field of this name."""
        outer, scorings = (self.scorings, self.learns), list[Scoring]()
        self.scorings, self.learns = scorings, learns
        try:
            yield scorings
        finally:
            self.scorings, self.learns = outer


@dataclass
class LastRollout:
    """What `measure.after_rewards` keeps of the last completions."""

    lengths: list[int] = field(default_factory=list)  # of this process's completions, in tokens
    scorable: Tensor | None = None  # which completions of all processes any reward function gave a reward to
    rewards: Tensor | None = None  # of all processes, a group in each row; None: there is no single reward
    spread: float | None = None  # the deviation that advantages were divided by, in reward; None: by none


@dataclass
class Warned:
    """What `measure` has warned of, or need not look at."""

    step_zero: bool = False  # the KL before the first update was looked at, or cannot be 0
    positions: bool = False  # a batch with padding in front of a prompt was looked at
    sync_gap: float = 0.0  # the sampler's newest gap, nats per token; infinite: the user was warned


class ReferenceFacts(NamedTuple):
    """Where a trainer's reference comes from."""

    source: str = ""  # in words; empty: the host's own
    is_start: bool = True  # it has the weights that training started from
    exact_rows: int = 0  # how many completions of a group have their exact KL measured


@dataclass
class FastScoring:
    """Whether and how klamp scores the completions of one of TRL's trainers."""

    reason: str = ""  # why it is not used at all; empty if it is
    traits: dict[int, Traits] = field(default_factory=dict)  # of each model, by the `id` of its innermost module
    reasons: set[str] = field(default_factory=set)  # the reasons already reported

    def __str__(self) -> str:
        if self.reason:
            return f"fast_scoring is asked for, and TRL's own scoring is used: {self.reason}"
        if not self.traits:
            return "fast_scoring is asked for; what the model allows is found out at the first batch"
        shared = all(traits.sharing == "gradient" for traits in self.traits.values())
        once = "each distinct prompt once" if shared else "each completion with its prompt where the cache is no help"
        apart = "".join(f"; but not where {reason}" for reason in sorted(self.reasons))
        first = "; generation by transformers runs each distinct prompt once" if shared else ""
        return f"completions are scored by klamp: {once}, no padding in the head, no logits held{first}{apart}"


@dataclass
class Teacher:
    """What a trainer keeps of its teacher."""

    config: TeacherConfig
    model: Any = None  # None: the policy itself (with its adapter off), or a server
    server: VLLMReference | None = None  # None: a model scores
    measured: tuple[Tensor, dict[str, Tensor]] | None = None  # the last KL at each prefix and its parts, [B, T]

    def __post_init__(self) -> None:
        self.term: KLTerm = self.config.build_term()
        self.prefixes: PrefixKL | None = prefix_kl(self.config)

    def coefficient(self, trainer: TRLTrainer) -> float:
        """The coefficient in force."""
        return self.config.coefficient(*progress(trainer))


@dataclass(frozen=True)
class Session:
    """Everything that klamp keeps for one trainer. Only its parts change, each in one module."""

    control: KLControl | None  # beta in force; None: TRL's own KL is unchanged, and measured if it exists
    term: KLTerm
    reference: ReferenceFacts = field(default_factory=ReferenceFacts)
    fast: FastScoring | None = None  # klamp's scorer instead of TRL's; None: not requested
    teacher: Teacher | None = None  # the teacher of a second KL; None: no teacher
    trust: TrustRegion = field(default_factory=TrustRegion)  # masks that TRL does not have
    record: Any = None  # the `ReportCallback` that writes completions; None: nobody asked for one
    windows: dict[str, Window] = field(default_factory=lambda: {"train": Window(), "eval": Window()})
    """The measurements of the present step in each mode."""
    rollout: LastRollout = field(default_factory=LastRollout)
    warned: Warned = field(default_factory=Warned)
    calls: Calls = field(default_factory=Calls)

    @classmethod
    def of(cls, kl: KLConfig | None, **parts: Any) -> Session:
        """The session of a configuration; `parts` are fields of this class."""
        term = KLTerm() if kl is None else kl.build_term()
        return cls(None if kl is None else KLControl(kl), term, **parts)

    @property
    def kl(self) -> KLConfig | None:
        """The configuration of klamp's KL."""
        return None if self.control is None else self.control.kl

    @property
    def has_kl(self) -> bool:
        """Whether klamp's KL to a reference is asked for, or its measurement."""
        return self.kl is not None and self.kl.needs_reference

    def terms(self, trainer: Any, beta: float) -> tuple[Weighted, ...]:
        """klamp's KLs with their present coefficients; `beta` belongs to the reference."""
        own = (Weighted(beta, self.term),) if self.has_kl else ()
        teacher = self.teacher
        own = own if teacher is None else (*own, Weighted(teacher.coefficient(trainer), teacher.term))
        return own if self.kl is None else (*own, *self.kl.beside())

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states are wanted of the calls that are collected."""
        prefixes = self.teacher is not None and self.teacher.prefixes is not None
        return self.calls.scorings is not None and (self.reference.exact_rows > 0 or prefixes)


def session_of(trainer: Any) -> Session | None:
    """What klamp keeps for a trainer; None: klamp is not attached to it."""
    return getattr(trainer, "_klamp", None)


STATE = "klamp_state.json"
"""klamp's part of a checkpoint: the controller of beta and the frozen reference length."""


def save_state(trainer: TRLTrainer, trial: Any, prints: Mapping[str, Any]) -> None:
    """Write klamp's state, and fingerprints of anchors, beside the trainer's own, on the process that saves."""
    control = trainer._klamp.control
    state = {**({} if control is None else control.state_dict()), **prints}
    if state and trainer.args.should_save:
        folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def load_state(trainer: TRLTrainer, folder: str | None, prints: Mapping[str, Any]) -> None:
    """Continue from a checkpoint, see `KLControl.load_state_dict`; refuse other anchors, warn if one side has no KL."""
    if folder is None:
        return
    trainer._klamp.warned.step_zero = True
    control, path = trainer._klamp.control, Path(folder) / STATE
    state = read_state(path) if path.exists() else {}
    check_same(state, prints, instead=f"start a new run from {folder}")
    if control is not None and "controller" in state:
        control.load_state_dict(state)
    elif control is not None:
        trainer._caution(
            f"the checkpoint {folder} holds no {STATE}: beta starts again from its configured value, and a reference "
            "length that has to be measured cannot be."
        )
    elif "controller" in state:
        trainer._caution(
            f"the checkpoint {folder} was written with klamp's KL, and no KL field is set now: beta={trainer.beta:g} "
            "belongs to TRL's own KL. Set the KL fields of the run's first start."
        )
