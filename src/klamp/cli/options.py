"""What each command takes besides the configuration of a run: fields become flags, the texts under them their help.

Nothing is loaded for them but the standard library, so that a command's help is there at once. A field's metadata says
what its type cannot:

    word    it is no flag but a word (or words) after the command, called so in the help
    least   the smallest number that it takes; of several values, how many it takes at least
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from klamp.diagnostics.history import Verifier

Question = Literal["direction", "convergence"]
Meant = Literal["reverse", "forward", "js"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Where a configuration comes from, and whether anything is started."""

    config: str | None = None
    """A YAML file of flags' names and values, flat or by section (kl, loss, task, ...)."""
    preset: str | None = None
    """KL and loss fields as a published recipe has them; may also stand in the file."""
    dry_run: bool = False
    """Print what would run, and start nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PlanOptions):
    """Whether a run is to be launched elsewhere."""

    prepare: bool = False
    """Print how a run is divided over GPUs, why, and the commands to type there (backend trl, verl)."""


@dataclass(frozen=True, kw_only=True)
class AblateOptions(PlanOptions):
    """What an ablation compares, how often, where, and with how many processes."""

    seeds: tuple[int, ...] = (3,)
    """One number: how many (3 is 0 1 2). Several: those seeds."""
    runs: tuple[Path, ...] = field(default=(), metadata={"least": 1})
    """Folders of runs (or of an ablation) that are there: they are measured and compared, nothing is trained."""
    plan: str | None = None
    """YAML file with `base`, `sweep` or `arms`, and `seeds`."""
    output_dir: str | None = None
    """Folder of the ablation; None: runs/ablation-NAME-NNN, the one with this plan or the next free one."""
    kl_prompts: int | None = field(default=None, metadata={"least": 1})
    """Held-out prompts that a run's KL is measured on; None: 256, or as the plan says."""
    workers: int | None = field(default=None, metadata={"least": 1})
    """Processes at a time; None: one per core, or per GPU."""
    ray: str | None = None
    """Run on the Ray cluster at this address; local: one of this machine only, started for it."""
    cpus_per_run: float = 1.0
    """With --ray: CPUs of a run, and its threads."""
    gpus_per_run: float = 0.0
    """With --ray: GPUs of a run; a fraction shares one."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The policy that is evaluated, and where the numbers go."""

    checkpoint: str | None = None
    """A run's folder (its newest checkpoint), one of its checkpoints, or any model: a folder, a hub id, `builtin`."""
    kl_prompts: int = field(default=256, metadata={"least": 1})
    """Held-out prompts of the trained skill that the KL is measured on, at most."""
    json: bool = False
    """One JSON object instead of text."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is verified: klamp's claims, or one question."""

    question: Question | None = field(default=None, metadata={"word": "QUESTION"})
    """direction: is GRPO's k3 formula backwards, and for whose tokens? convergence: which settings reach the optimum
    that they claim?"""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Which KL term is explained, and for which completions."""

    names: tuple[str, ...] = field(default=(), metadata={"word": "CONFIG"})
    """Presets, printed forms and YAML files; none: the flags alone."""
    length: int | None = field(default=None, metadata={"least": 1})
    """Expected completion length in tokens, for prices, budgets and costs; None: kl_reference_length, or
    max_completion_length where it is given, else 1000."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The KL implementations that are audited."""

    names: tuple[str, ...] = field(metadata={"word": "NAME"})
    """Hosts that are installed here, or any `module:function`."""
    means: Meant = "reverse"
    """The divergence that a function is meant to be: reverse, forward or js."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Which capture is checked."""

    path: Path = field(metadata={"word": "FILE"})
    """Capture file that klamp.check(..., save=FILE) wrote."""
    json: bool = False
    """One JSON object instead of text."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Which record is examined, and which findings count."""

    path: Path = field(metadata={"word": "PATH"})
    """Folder or file that a run left behind."""
    json: bool = False
    """One JSON object instead of text."""
    fail_on: tuple[str, ...] = field(default=(), metadata={"least": 1})
    """Exit with 1 for these alarms and notes only; none: for every alarm."""
    beta: float | None = field(default=None, metadata={"least": 0})
    """Coefficient of the KL, where the record does not say it."""
    loss_type: str | None = None
    """Type of the loss (grpo, dr_grpo, ...), where the record does not say it."""
    verifier: Verifier | None = None
    """What gives the reward (rules, or a model), where the record does not say it."""
    check_sync: bool = False
    """Score kept completions again, and say whose log-probabilities sampler and trainer reported."""
    map: tuple[str, ...] = field(default=(), metadata={"least": 1})
    """OURS=THEIRS: klamp's name of a metric (or kl, reward, length, ...), and its name in the record."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Which runs are shown, and where the page goes."""

    runs: tuple[Path, ...] = field(metadata={"word": "RUN"})
    """What `klamp doctor` reads, or the folder of an ablation, all of whose runs are compared."""
    output: Path | None = None
    """File to write; None: report.html in the folder of the one run (or sweep) that is named, else in this folder."""
