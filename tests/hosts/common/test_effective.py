"""What is in force, in words: one form for every host, a line per field."""

import dataclasses

import pytest

from klamp.config import KLConfig
from klamp.config.describe import PLACEMENTS
from klamp.config.teacher import TeacherConfig
from klamp.hosts.common.effective import Effective, EffectiveTerm

pytestmark = pytest.mark.filterwarnings("ignore::klamp.KLWarning")  # some of these configurations are cautioned about

TERM = EffectiveTerm.of(KLConfig(beta=0.1), beta=0.2, price="0.2 reward per nat")


def effective(*terms: EffectiveTerm, notes: tuple[str, ...] = ()) -> Effective:
    return Effective(host="a host 1.0", terms=terms, normalizer="mean", reference="a copy", notes=notes)


def test_a_term_says_the_beta_in_force_and_not_the_one_asked_for() -> None:
    assert (TERM.term, TERM.beta, TERM.value, TERM.clip) == ("klamp's", 0.2, "k3", "none")
    assert TERM.controller == "fixed at 0.1", "as the configuration has it"
    assert TERM.gradient == "reverse per token: KL(policy||ref)"
    assert TERM.placement == PLACEMENTS["loss"]


def test_its_text_has_a_line_per_field_in_two_columns() -> None:
    lines = str(effective(TERM, notes=("one", "two"))).splitlines()
    names = [field.name for field in dataclasses.fields(EffectiveTerm)]
    assert [line[:11].rstrip() for line in lines] == ["host", *names, "normalizer", "reference", "note", "note"]
    assert lines[0] == "host       a host 1.0"
    assert lines[-1] == "note       two"
    assert "term       none" in str(effective()).splitlines()
    both = str(effective(TERM, dataclasses.replace(TERM, term="the host's own"))).splitlines()
    assert [line for line in both if line.startswith("term")] == ["term       klamp's", "term       the host's own"]


def test_a_kl_to_a_teacher_says_its_direction_and_horizon() -> None:
    teacher = TeacherConfig(teacher_model="big", teacher_horizon="sequence")
    found = EffectiveTerm.to_teacher(teacher, who="big", coefficient=0.5)
    assert (found.value, found.gradient, found.beta) == ("k1", "reverse, per sequence: KL(policy||teacher)", 0.5)
