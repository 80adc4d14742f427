"""`TeacherConfig`, the second anchor: whom the policy is to become like, how the KL to it is measured, where it enters.

The terms are a reference's; but a teacher may replace a reward, and may see another prompt.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.config import anchor
from klamp.config.anchor import choice
from klamp.config.fields import Need, accepts_aliases, aliases_of, check_server, one_of, setting, without_effect
from klamp.config.kl import ALIASES
from klamp.core.arguments import AT_LEAST_0, check_fields
from klamp.core.controllers import Schedule, kl_schedule_factor
from klamp.core.term import KLBaseline, KLTerm, OffPolicy, Placement
from klamp.core.topk import Tail
from klamp.core.types import Direction, Horizon
from klamp.errors import KLWarning, Refusal, refuse

TeacherKind: TypeAlias = Literal["auto", "adapter_off", "ema", "periodic", "live"]
TeacherEstimator: TypeAlias = Literal["k1", "k3", "exact", "topk"]
TeacherHead: TypeAlias = Literal["student", "teacher", "union"]

COEFFICIENT = AT_LEAST_0.but("a negative coefficient drives the policy from its teacher", "use 0 for no teacher")
OF_THE_POLICY = ("adapter_off", "ema", "periodic", "live")
"""Kinds of teachers that are made of the policy, and need no model of their own."""

TAILS: Mapping[Tail, str] = {
    "sampled": "",
    "centered": "",
    "bucket": "counts all words outside of the head as one: a lower bound, right only where the two models' ratio is "
    "the same in all of them",
    "generalised": "follows the generalised divergence over the head alone: 0 at the teacher, another one elsewhere",
    "none": "drops the words outside of the head: its gradient is not 0 at the teacher, and training leaves it",
}
"""What a tail does; empty: it is unbiased."""
UNBIASED = [tail for tail, text in TAILS.items() if not text]

A_TEACHER = Need("a teacher (teacher_model, teacher_url or teacher_kind) and a teacher_coef above 0", lambda c: c.named)
NAMED, TOPK = (A_TEACHER,), (A_TEACHER, one_of("teacher_estimator", "topk"))
HEAD = (A_TEACHER, Need("teacher_estimator='topk' (or teacher_baseline='bucket')", lambda c: c.head_size is not None))
SAMPLED = one_of("teacher_estimator", "k1", "k3")
NOT_IN_REWARD = one_of("teacher_placement", "loss", "advantage")
A_SERVER = Need("teacher_url", lambda c: bool(c.teacher_url))
TOKEN_IN_SUM = Need(
    "teacher_off_policy='sequence' (no sampled token is in the sum; only its prefix was sampled)",
    lambda c: (
        c.teacher_off_policy != "token"
        or (c.teacher_tail in UNBIASED if c.teacher_estimator == "topk" else c.teacher_estimator != "exact")
    ),
)


@accepts_aliases
@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The KL to a teacher, in nats: who it is, what is measured, what its gradient does, and where it enters.

    Equation: the loss gains teacher_coef times the KL of `teacher_direction`, as `KLTerm` and `topk_kl` have it. With a
    reference as well, and horizon `sequence`, the run ends at log p = (r + beta log ref + coef log teacher) / (beta +
    coef) + const.

    Raises:
        UnknownNameError: an unknown field or choice; names the nearest.
        ConfigError: a combination that cannot work or would not do what its name says.

    Source: GKD arXiv:2306.13649, MiniLLM arXiv:2306.08543
    """

    teacher_model: str | None = setting(None, aliases=("teacher_model_name_or_path",))
    """The teacher, named like the model; None: no teacher, or one that teacher_kind makes of the policy."""
    teacher_url: str | None = choice(
        "url", "teacher", limits=(anchor.NO_SERVER,), aliases=("teacher_model_server_url", "teacher_model_server")
    )
    teacher_name: str | None = choice("name", "teacher", needs=(A_TEACHER, A_SERVER))
    teacher_models: tuple[str, ...] = setting((), limits=(anchor.SEVERAL_TEACHERS,))
    """Several teachers, each KEY=MODEL; teacher_key names a prompt's teacher."""
    teacher_key: str = ""
    """Column of the data that holds the KEY of each prompt's teacher."""
    teacher_kind: TeacherKind = setting("auto", limits=(anchor.MOVING_TEACHER, anchor.FROM_A_FOLDER))
    """Made of the policy: adapter_off, ema, periodic, live (the present policy); auto: teacher_model or teacher_url."""
    teacher_coef: float = setting(
        1.0, COEFFICIENT, needs=NAMED, aliases=("teacher_kl_coef", "distillation_coef", "distillation_loss_coef")
    )
    """Coefficient of the KL to the teacher, in reward (or loss) per nat; 0: no teacher."""
    teacher_direction: Direction = setting("reverse", needs=NAMED)
    """reverse KL(policy||teacher), forward KL(teacher||policy), or js (half of each to their mean)."""
    teacher_estimator: TeacherEstimator = setting("k1", needs=NAMED, limits=(anchor.NO_VOCABULARY,))
    """k1 or k3 of the sampled token, exact (over the vocabulary), or topk (a head of teacher_top_k and a tail)."""
    teacher_top_k: int = setting(64, AT_LEAST_0, needs=HEAD, aliases=("loss_top_k", "topk_logits_k", "gkd_logits_topk"))
    """topk: tokens of the head; 0: the tail alone, which estimates any direction from the sampled token."""
    teacher_head: TeacherHead = setting("student", needs=HEAD)
    """topk: whose likeliest tokens are the head; reverse is least noisy with the student's, forward the teacher's."""
    teacher_tail: Tail = setting("sampled", needs=TOPK)
    """topk: the words outside of the head: sampled, or centered (both unbiased; the latter is less noisy in the reverse
    direction), or with a bias bucket, generalised, none."""
    teacher_baseline: KLBaseline = choice(
        "baseline", "teacher", needs=(A_TEACHER, SAMPLED, NOT_IN_REWARD), limits=(anchor.NO_BASELINE,)
    )
    teacher_horizon: Horizon = choice("horizon", "teacher", needs=NAMED)
    teacher_placement: Placement = choice(
        "placement", "teacher", needs=NAMED, limits=(anchor.ADVANTAGES_FIRST, anchor.IN_THE_LOSS)
    )
    teacher_off_policy: OffPolicy = choice("off_policy", "teacher", needs=(A_TEACHER, TOKEN_IN_SUM))
    teacher_max_log_ratio: float | None = choice(
        "max_log_ratio", "teacher", needs=(A_TEACHER, SAMPLED), limits=(anchor.WITHOUT_A_NUMBER,)
    )
    teacher_prompt: str = setting("", needs=NAMED, limits=(anchor.ONE_PROMPT,))
    """Column of the data with the teacher's own prompt; the answer is the policy's."""
    teacher_schedule: Schedule = choice("schedule", "teacher", needs=NAMED, limits=(anchor.READ_ONCE,))
    teacher_warmup_steps: int = choice("warmup_steps", "teacher", needs=NAMED, limits=(anchor.READ_ONCE,))
    teacher_decay: float = choice("decay", "teacher", needs=(A_TEACHER, one_of("teacher_kind", "ema")))
    teacher_reset_steps: int = choice("reset_steps", "teacher", needs=(A_TEACHER, one_of("teacher_kind", "periodic")))

    def __post_init__(self) -> None:
        check_fields(self)
        check_server(self.teacher_url, "teacher_url", key="the environment variable KLAMP_REFERENCE_KEY")
        refuse(refusals(self))
        for text in self.cautions():
            warnings.warn(text, KLWarning, stacklevel=4)

    @property
    def named(self) -> bool:
        """Whether a teacher is named, be it at coefficient 0."""
        return any((self.teacher_model, self.teacher_url, *self.teacher_models)) or self.teacher_kind in OF_THE_POLICY

    @property
    def models(self) -> dict[str, str]:
        """Key -> model of each teacher that is a model; the key of a single one is empty."""
        return dict(pair.split("=", 1) for pair in self.teacher_models) or {"": self.teacher_model or ""}

    @property
    def head_size(self) -> int | None:
        """How many tokens its head has, in the KL or in its baseline; None: no head is made."""
        in_baseline = self.teacher_baseline == "bucket" and SAMPLED.is_met(self)
        return self.teacher_top_k if self.teacher_estimator == "topk" or in_baseline else None

    @property
    def there(self) -> bool:
        """Whether a KL to a teacher is asked for; without it none is loaded and none is scored."""
        return self.teacher_coef > 0 and self.named

    @property
    def kind(self) -> str:
        """What the teacher is: made of the policy as named, remote with an address, frozen with a model; none."""
        if not self.there:
            return "none"
        return "remote" if self.teacher_url else "frozen" if self.teacher_kind == "auto" else self.teacher_kind

    def cautions(self) -> list[str]:
        """What this configuration may not do although its name suggests it; each with the way out."""
        tail = self.teacher_tail if self.teacher_estimator == "topk" and self.there else "sampled"
        if tail == "none" and self.teacher_direction == "js":  # whose corrections of the generalised form cancel
            tail = "generalised"
        texts = [f"teacher_tail={self.teacher_tail!r} {TAILS[tail]}. Use teacher_tail='sampled'."]
        return (texts if TAILS[tail] else []) + without_effect(self)

    def coefficient(self, step: int, steps: int) -> float:
        """The coefficient in force at a step (from 0) of so many."""
        if not self.there:
            return 0.0
        warmup = self.teacher_warmup_steps
        return self.teacher_coef * kl_schedule_factor(step, steps, schedule=self.teacher_schedule, warmup_steps=warmup)

    def build_term(self) -> KLTerm:
        """The KL term for `grpo_loss`."""
        own = self.teacher_estimator in ("exact", "topk") and self.teacher_horizon == "token"
        return anchor.build_term(
            self, "teacher", anchor="teacher", gradient="own" if own else "reverse", mean_over="trained"
        )


TEACHER_ALIASES: Mapping[str, str] = aliases_of(TeacherConfig)
"""Other names of a field, as TRL, verl, ms-swift and NeMo-RL have them."""
ALL_ALIASES: Mapping[str, str] = {**ALIASES, **TEACHER_ALIASES}
"""With the KL's fields: the names in a file or on a command line."""


def refusals(c: TeacherConfig) -> list[Refusal]:
    """Every combination that cannot work or would not do what its name says."""
    named = [name for name in ("teacher_model", "teacher_url", "teacher_models") if getattr(c, name)]
    keys = [pair.partition("=")[0] for pair in c.teacher_models]
    made, spread = c.teacher_kind in OF_THE_POLICY, c.teacher_direction != "reverse"
    return [
        Refusal(
            len(named) > 1 or (made and bool(named)),
            "the teacher is named twice",
            got=", ".join(named + [f"teacher_kind={c.teacher_kind!r}"] * made),
            why="a completion has one teacher",
            fix="keep one of them; several teachers are teacher_models KEY=MODEL with teacher_key",
        ),
        Refusal(
            bool(c.teacher_models) != bool(c.teacher_key)
            or any("=" not in pair or not all(pair.split("=", 1)) for pair in c.teacher_models)
            or len({*keys}) < len(keys),
            "teacher_models takes KEY=MODEL, each key once, and belongs with teacher_key",
            got=f"teacher_models={c.teacher_models}, teacher_key={c.teacher_key!r}",
            why="the column teacher_key of the data holds the KEY of each prompt's teacher",
            fix="for instance teacher_models math=DIR code=DIR and teacher_key subject; teacher_model for one teacher",
        ),
        Refusal(
            spread and SAMPLED.is_met(c),
            f"teacher_direction={c.teacher_direction!r} is not what {c.teacher_estimator} of a token estimates",
            why="k1 and k3 of the policy's own tokens estimate KL(policy||teacher)",
            fix="use teacher_estimator='exact', or 'topk' (with teacher_top_k=0 from the sampled token alone)",
        ),
        Refusal(
            spread and (c.teacher_horizon == "sequence" or c.teacher_tail == "centered"),
            f"teacher_direction={c.teacher_direction!r} has no sequence horizon, and no centered tail",
            why="over the policy's prefixes it sums to no divergence; the tail's constant is the reverse KL's",
            fix="use teacher_horizon='token' and teacher_tail='sampled', or teacher_direction='reverse'",
        ),
        of_a_server(c, bool(c.teacher_url), who="a server"),
        Refusal(
            c.teacher_estimator == "topk" and c.teacher_tail not in UNBIASED and c.teacher_top_k == 0,
            "a head of no tokens without a sampled tail is no KL",
            got=f"teacher_top_k=0, teacher_tail={c.teacher_tail!r}",
            why="nothing of the two models is left in the sum",
            fix="leave teacher_tail='sampled'",
        ),
        *anchor.placement_refusals(c, "teacher"),
    ]


def of_a_server(c: TeacherConfig, applies: bool, *, who: str) -> Refusal:
    """What a server cannot measure: it returns its own likeliest tokens and the sampled one; `who`: its name."""
    heads = c.teacher_estimator == "topk" or c.teacher_baseline == "bucket"
    own_head = heads and (c.teacher_head == "teacher" or not c.teacher_top_k)
    return Refusal(
        applies and not own_head and not (SAMPLED.is_met(c) and c.teacher_baseline == "none"),
        f"teacher_estimator={c.teacher_estimator!r} with teacher_head={c.teacher_head!r} cannot use {who}",
        got=f"teacher_baseline={c.teacher_baseline!r}",
        why=f"{who} returns the likeliest tokens of its own model and the sampled one, no others",
        fix="use 'k1' or 'k3' without a baseline; teacher_estimator='topk' or teacher_baseline='bucket' with "
        "teacher_head='teacher'; or a teacher_model",
    )
