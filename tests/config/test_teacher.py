"""The configuration of a teacher: every refusal and caution, each with a way out, and the term that it builds."""

import warnings
from typing import Any

import pytest
from tests.config.drawn import unchecked

from klamp.config import TEACHER_ALIASES, KLConfig, LossConfig, TeacherConfig, build_objective
from klamp.config.teacher import refusals
from klamp.core.term import KLTerm
from klamp.errors import ConfigError, UnknownNameError

DIR: dict[str, Any] = {"teacher_model": "DIR"}
URL: dict[str, Any] = {"teacher_url": "http://host:1"}
TOPK = DIR | {"teacher_estimator": "topk"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (DIR | URL, "the teacher is named twice"),
    (DIR | {"teacher_kind": "live"}, "the teacher is named twice"),
    ({"teacher_models": ("a=DIR",)}, "belongs with teacher_key"),
    ({"teacher_models": ("DIR",), "teacher_key": "t"}, "takes KEY=MODEL"),
    ({"teacher_models": ("a=X", "a=Y"), "teacher_key": "t"}, "takes KEY=MODEL"),
    (DIR | {"teacher_direction": "forward"}, "is not what k1 of a token estimates"),
    (DIR | {"teacher_direction": "js", "teacher_estimator": "k3"}, "is not what k3 of a token estimates"),
    (TOPK | {"teacher_direction": "forward", "teacher_horizon": "sequence"}, "has no sequence horizon"),
    (URL | {"teacher_estimator": "exact"}, "'exact' with teacher_head='student' cannot use a server"),
    (URL | {"teacher_estimator": "topk", "teacher_head": "union"}, "teacher_head='union' cannot use a server"),
    (TOPK | {"teacher_top_k": 0, "teacher_tail": "none"}, "is no KL"),
    (TOPK | {"teacher_top_k": 0, "teacher_tail": "bucket"}, "is no KL"),
    (DIR | {"teacher_placement": "advantage", "teacher_estimator": "topk"}, "takes teacher_estimator='k1' only"),
    (DIR | {"teacher_placement": "reward"}, "has teacher_horizon='sequence'"),
    (DIR | {"teacher_placement": "advantage", "teacher_off_policy": "token"}, "has no meaning"),
    (DIR | {"teacher_horizon": "sequence", "teacher_off_policy": "token"}, "needs teacher_off_policy='sequence'"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_work_is_refused_with_the_reason(fields, text):
    with pytest.raises(ConfigError, match=text) as caught:
        TeacherConfig(**fields)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("fields", [{"teacher_head": "teacher"}, {"teacher_top_k": 0}])
def test_a_server_s_own_head_is_taken(fields):
    assert TeacherConfig(**URL, teacher_estimator="topk", **fields).teacher_estimator == "topk"


def test_every_row_of_the_table_is_among_these():
    tables = [refusals(unchecked(TeacherConfig, **fields)) for fields in ({}, *(fields for fields, _ in REFUSED))]
    unset, *reached = ({i for i, row in enumerate(table) if row.applies} for table in tables)
    assert set.union(*reached) == set(range(len(tables[0]))) and not unset


def test_who_the_teacher_is():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TeacherConfig().kind == "none" and not TeacherConfig().there
        assert TeacherConfig(**DIR).kind == "frozen" and TeacherConfig(**URL).kind == "remote"
        assert TeacherConfig(teacher_kind="ema").kind == "ema" and TeacherConfig(teacher_kind="live").there
        off = TeacherConfig(teacher_model="DIR", teacher_coef=0.0)
        assert off.named and not off.there and off.kind == "none" and off.coefficient(3, 10) == 0


def test_the_names_of_other_trainers():
    for alias, name in TEACHER_ALIASES.items():
        kind = type(getattr(TeacherConfig(), name))
        value: Any = 0.25 if kind is float else 7 if kind is int else "http://h:1" if "url" in name else "DIR"
        given = {alias: value} if name in ("teacher_model", "teacher_url") else DIR | {alias: value}
        given |= {"teacher_estimator": "topk"} if name == "teacher_top_k" else {}
        assert getattr(TeacherConfig(**given), name) == value, alias
    with pytest.raises(UnknownNameError, match="teacher_model"):
        TeacherConfig(teacher_modell="DIR")  # pyright: ignore[reportCallIssue]


def test_the_coefficient_follows_its_schedule():
    teacher = TeacherConfig(teacher_model="DIR", teacher_coef=2.0, teacher_schedule="linear", teacher_warmup_steps=2)
    assert [teacher.coefficient(step, 6) for step in (0, 1, 2, 4)] == pytest.approx([0.0, 1.0, 2.0, 1.0])


def test_the_term_and_the_objective():
    sequence = DIR | {"teacher_horizon": "sequence"}
    teacher = TeacherConfig(**sequence, teacher_coef=0.5, teacher_max_log_ratio=4.0, teacher_off_policy="sequence")
    term = KLTerm(
        anchor="teacher", mean_over="trained", value="k1", horizon="sequence", max_log_ratio=4.0, off_policy="sequence"
    )
    assert teacher.build_term() == term
    objective = build_objective(KLConfig(), LossConfig(), max_length=4, teacher=teacher)
    assert objective.terms[1:] == ((0.5, term),) and objective.terms[0].term == KLConfig().build_term()
    assert build_objective(KLConfig(), LossConfig(), max_length=4, teacher=TeacherConfig()).terms[1:] == ()
    whole = TeacherConfig(**DIR, teacher_estimator="exact", teacher_direction="js").build_term()
    assert (whole.value, whole.gradient, whole.of_prefixes) == ("exact", "own", True)
    later = TeacherConfig(**sequence, teacher_estimator="exact").build_term()
    tokens = TeacherConfig(**DIR, teacher_estimator="k3").build_term()
    assert (later.gradient, tokens.gradient) == ("reverse", "reverse")
    inside = TeacherConfig(**sequence, teacher_placement="reward")
    with pytest.raises(ConfigError, match="divided by the group's std") as caught:
        build_objective(KLConfig(beta=0.0), LossConfig(scale_rewards="std"), max_length=4, teacher=inside)
    assert "teacher_placement='reward'" in str(caught.value)
