"""What the KL of a run will really do, read back from the host: one form for every host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from klamp.config import KLConfig, describe
from klamp.config.beyond import NO_PRICE
from klamp.config.teacher import UNBIASED, TeacherConfig


@dataclass(frozen=True, kw_only=True)
class EffectiveTerm:
    """One KL that is in force, in words."""

    term: str
    """Whose it is: klamp's, or the host's own."""
    beta: float
    """The coefficient in force now, in loss (or reward) per nat."""
    price: str
    """Reward that is given up for one nat of KL of a whole completion, at that coefficient; or why it is unknown."""
    controller: str = "fixed"
    """How the coefficient moves."""
    value: str
    """What the KL's value is."""
    gradient: str
    """Whose gradient it has."""
    placement: str
    """Where it enters."""
    clip: str = "none"
    """Its budget, if any."""

    @classmethod
    def of(
        cls, kl: KLConfig, *, beta: float, price: str, controller: str | None = None, clip: str | None = None
    ) -> EffectiveTerm:
        """klamp's term of a configuration; controller and clip None: as the configuration says."""
        return cls(
            term="klamp's",
            beta=beta,
            price=price if beta >= 0 else NO_PRICE,
            controller=controller or describe.describe_controller(kl),
            value=describe.describe_value(kl),
            gradient=f"{describe.describe_gradient(kl)}: {describe.DIVERGENCES[kl.kl_gradient]}",
            placement=describe.PLACEMENTS[kl.kl_placement],
            clip=clip or describe.describe_clip(kl),
        )

    @classmethod
    def to_teacher(cls, teacher: TeacherConfig, *, who: str, coefficient: float) -> EffectiveTerm:
        """klamp's term of a KL to a teacher: whose scores, and the coefficient in force."""
        gradient = f"{teacher.build_term().gradient}, per {teacher.teacher_horizon}"
        off = "not " if teacher.teacher_estimator == "topk" and teacher.teacher_tail not in UNBIASED else ""
        return cls(
            term=f"klamp's, to the teacher: {who}",
            beta=coefficient,
            price="like beta's, at equal placement and average",
            controller=f"teacher_schedule={teacher.teacher_schedule!r}",
            value=describe.describe_teacher_value(teacher),
            gradient=f"{gradient}: {off}{describe.TAUGHT[teacher.teacher_direction]}",
            placement=describe.PLACEMENTS[teacher.teacher_placement],
        )


@dataclass(frozen=True, kw_only=True)
class Effective:
    """The KL of a run, in words; `str` gives one line per field."""

    host: str
    """Which trainer, and its version where it is known."""
    terms: tuple[EffectiveTerm, ...]
    """The KLs in force: none, one, or two where one is in the loss and another in the reward."""
    normalizer: str
    """How the tokens of the loss become one number."""
    reference: str
    """Where the reference comes from."""
    notes: tuple[str, ...] = ()
    """What may surprise."""

    def __str__(self) -> str:
        return "\n".join(f"{name:11}{value}" for name, value in self._rows())

    def _rows(self) -> Iterator[tuple[str, object]]:
        yield "host", self.host
        for term in self.terms:
            yield from ((field.name, getattr(term, field.name)) for field in fields(term))
        if not self.terms:
            yield "term", "none"
        yield "normalizer", self.normalizer
        yield "reference", self.reference
        yield from (("note", note) for note in self.notes)


def that_apply(rows: Iterable[tuple[bool, str]]) -> tuple[str, ...]:
    """The notes whose condition holds."""
    return tuple(text for applies, text in rows if applies)
