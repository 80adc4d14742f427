"""What each command takes besides the configuration of a run: fields become flags, the texts under them their help.

The text of a class is the first part of the command's help. Nothing but the standard library is loaded for them, so
that a help is there at once. A field's metadata says what its type cannot:

    word    it is no flag but a word (or words) after the command, called so in the help
    least   the smallest number that it takes
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
    """KL and loss fields of a published recipe; klamp explain lists the recipes."""
    dry_run: bool = False
    """Print what would run, and start nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PlanOptions):
    """Trains a language model with GRPO, its KL to a reference held where you want it. Without flags it trains a small
    model on the built-in arithmetic task: minutes on a CPU, no download. If a field is set more than once, the last one
    of these wins: defaults, --preset, --config, flags.

      klamp train
      klamp train --config config_demo.yaml --kl_penalty 0.01 --output_dir out --max_steps 500
      klamp train --model DIR_OR_HUB_ID --task data.jsonl --reward math_verify --lora_r 16 --dry_run
    """

    prepare: bool = False
    """Print how a run is divided over GPUs, why, and the commands to type there (backend trl, verl)."""


@dataclass(frozen=True, kw_only=True)
class AblateOptions(PlanOptions):
    """Trains the same thing in several ways, several seeds each, and compares the results in a table and a picture. A
    flag of klamp train with one value holds for all arms; with several values it is compared, and several such flags
    make a grid. The same command with the same --output_dir continues what is not done.

      klamp ablate --beta 0 0.001 0.01 0.1 --seeds 3
      klamp ablate --kl_clip_method none hard --kl_clip_threshold 0.05 0.1 --seeds 5 7 11 --dry_run
      klamp ablate --plan plan.yaml --output_dir out --ray auto
      klamp ablate --runs output_beta_*     # compares existing runs
    """

    seeds: tuple[int, ...] = (3,)
    """One number: how many (3 is 0 1 2). Several: those seeds."""
    runs: tuple[Path, ...] = ()
    """Folders of existing runs (or of an ablation): they are measured and compared, nothing is trained."""
    plan: str | None = None
    """YAML file with `base`, `sweep` or `arms`, and `seeds`."""
    output_dir: str | None = None
    """Folder of the ablation; None: the next free runs/ablation-NAME-NNN."""
    kl_prompts: int | None = field(default=None, metadata={"least": 1})
    """Held-out prompts that a run's KL is measured on; None: 256, or the plan's number."""
    workers: int | None = field(default=None, metadata={"least": 1})
    """Processes at a time; None: one per core, or one on a GPU."""
    ray: str | None = None
    """Run on the Ray cluster at this address; local: a cluster of this machine only, started for the ablation."""
    cpus_per_run: float = field(default=1.0, metadata={"least": 0})
    """With --ray: CPUs of a run, and its threads."""
    gpus_per_run: float = field(default=0.0, metadata={"least": 0})
    """With --ray: GPUs of a run; a fraction shares one."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Scores an existing policy: every skill on its held-out prompts, as the run itself did, the exact KL to the model
    that training started from, and how much of the other skills is left. A run's folder, or one of its checkpoints,
    includes its task and its start; for any other model give --task and --ref_model (here: the start).

      klamp evaluate --checkpoint output_beta_0.01
      klamp evaluate --checkpoint runs/arithmetic-001/checkpoints/step-000080 --json
      klamp evaluate --checkpoint DIR --ref_model START --task data.jsonl --reward math_verify
    """

    checkpoint: str | None = None
    """A run's folder (its newest checkpoint), one of its checkpoints, or any model: a folder, a hub id, `builtin`."""
    kl_prompts: int = field(default=256, metadata={"least": 1})
    """Held-out prompts of the trained skill that the KL is measured on, at most."""
    json: bool = False
    """One JSON object instead of text."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Proves klamp's claims about values, gradients, placements, clips, controllers and number types by enumerating
    small worlds in float64; some seconds on one core. The exit code is 1 if a claim fails.

      klamp verify               # every claim
      klamp verify direction     # is GRPO's k3 formula backwards? for whose tokens is it right?
      klamp verify convergence   # which settings reach the optimum that they claim?
    """

    question: Question | None = field(default=None, metadata={"word": "QUESTION"})
    """One question instead of every claim."""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Explains a KL term: which divergence it pulls towards, which share of the sequence's gradient it keeps, where it
    clips, its price, its cost, its cautions. Nothing is loaded or trained; gradients are measured by enumeration. Every
    flag of klamp train can be given.

      klamp explain recommended
      klamp explain config_demo.yaml --length 2000
      klamp explain --kl_estimator k3 --kl_gradient own --beta 0.04
    """

    names: tuple[str, ...] = field(default=(), metadata={"word": "CONFIG"})
    """Presets, printed forms and YAML files; none: the flags alone."""
    length: int | None = field(default=None, metadata={"least": 1})
    """Expected completion length in tokens, for prices, budgets and costs; None: kl_reference_length, or
    max_completion_length if it is given, else 1000."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Runs the KL of an installed trainer, or of any function, through the enumeration oracle: the bias of its value,
    the divergence whose gradient it follows, where that gradient stops, how far out it is right in each floating-point
    type; of distillation also its noise at the teacher, padding, and a teacher of a larger vocabulary. The exit code is
    0 if each KL follows the divergence that it names, 1 if one does not, 2 if a name cannot be audited, 3 if a KL could
    not be computed.

      klamp audit trl
      klamp audit my_losses:kl
      klamp audit my_losses:distil --means forward
    """

    names: tuple[str, ...] = field(metadata={"word": "NAME"})
    """Hosts that are installed here, or any `module:function`."""
    means: Meant = "reverse"
    """The divergence that a function is meant to be."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Prints the verdict of klamp.check on a capture file: the policy loss, the KL and its coefficient that explain the
    gradient, and what is wrong. Needs neither torch nor the trainer. The exit code is 0 if nothing is wrong, 1 if
    something is, 2 if the file cannot be read, 3 if the capture cannot tell.

      klamp check check.safetensors
      klamp check check.safetensors --json
    """

    path: Path = field(metadata={"word": "FILE"})
    """Capture file that klamp.check(..., save=FILE) wrote."""
    json: bool = False
    """One JSON object instead of text."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Shows what is wrong with a run, with the evidence and the next step. PATH is what the run left: a klamp run
    folder, TRL's trainer_state.json (or the folder of its checkpoints), a TensorBoard folder, a W&B offline run, JSONL
    of metrics (verl's file log too), or JSONL of completions with token log-probabilities (klamp's, prime-rl's and
    verl's names). The exit code is 0 for a healthy run, 1 if an alarm rose, 2 if the record cannot be read or holds
    nothing to check.

      klamp doctor runs/arithmetic-001
      klamp doctor outputs/checkpoint-500/trainer_state.json --loss_type dr_grpo --verifier rules
      klamp doctor runs/arithmetic-001 --check-sync
      klamp doctor outputs --json --fail-on huge-values kl-spike
      klamp doctor log.jsonl --map kl=my_kl reward=my_reward
    """

    path: Path = field(metadata={"word": "PATH"})
    """Folder or file that a run left behind."""
    json: bool = False
    """One JSON object instead of text."""
    fail_on: tuple[str, ...] = ()
    """Exit with 1 for these alarms and notes only; none: for every alarm."""
    beta: float | None = field(default=None, metadata={"least": 0})
    """Coefficient of the KL, if the record does not have it."""
    loss_type: str | None = None
    """Type of the loss (grpo, dr_grpo, ...), if the record does not have it."""
    verifier: Verifier | None = None
    """What gives the reward (rules, or a model), if the record does not have it."""
    check_sync: bool = False
    """Score kept completions again, and say whose log-probabilities sampler and trainer reported."""
    map: tuple[str, ...] = ()
    """OURS=THEIRS: klamp's name of a metric (or kl, reward, length, ...), and its name in the record."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Writes one self-contained HTML file: headline numbers, alarms, curves over steps, completions with every token
    shaded by its log-ratio, configuration and versions. Several runs are compared: their curves in the same charts,
    their numbers and configurations side by side.

      klamp report runs/arithmetic-001
      klamp report runs/arithmetic-001 runs/arithmetic-002 --output compared.html
      klamp report sweeps/beta
    """

    runs: tuple[Path, ...] = field(metadata={"word": "RUN"})
    """What `klamp doctor` reads, or the folder of an ablation, all of whose runs are compared."""
    output: Path | None = None
    """File to write; None: report.html in the folder of the one run (or sweep) that is named, else in this folder."""
