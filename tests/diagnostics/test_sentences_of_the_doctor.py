"""Sentences of the doctor, as in test_sentences.py: the rules over tokens, samplers and teachers, the likely causes,
its own lines, and the words of `alarms.yaml`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnostics.histories import history_of, look, noisy
from tests.diagnostics.sentences import Pair, holds, uncovered, valued, written
from tests.diagnostics.test_sentences import PAIRS as OF_CURVES

from klamp.cli import doctor as command
from klamp.cli import main
from klamp.config import KLConfig, LossConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import ESTIMATORS
from klamp.diagnostics import alarms_teacher, alarms_tokens, causes, doctor, sync
from klamp.diagnostics.alarms import ALARMS
from klamp.diagnostics.doctor import examine
from klamp.diagnostics.history import History, RunSettings
from klamp.diagnostics.sync import OF_SAMPLER, OF_TRAINER, WEIGHTS, Reported, SyncReport

R = RunSettings
H: Any = history_of  # its curves are dictionaries here


def sampled(*deltas: float, **curves: Any) -> History:
    """A run whose one completion the sampler finds so much likelier than the trainer, token by token."""
    row = {"tokens": ["a"] * len(deltas), "policy": [-5.0] * len(deltas), "sampler": [-5.0 + d for d in deltas]}
    return written([row | {"ref": None}], **curves)


def scored(*teacher: float) -> History:
    """A run whose one completion the teacher gives these log-probabilities."""
    row = {"tokens": ["a"] * len(teacher), "policy": [-0.1 * i for i in range(len(teacher))], "teacher": teacher}
    return written([row | {"ref": None}], teacher__unscored=[0.0])


UP = noisy(0.2, 10, scale=0.001) + noisy(0.8, 20, scale=0.001)
LOST = {"reward": UP[10:] + UP[:10], "reward_std": [0.3] * 30}
PAYS = {"length": [10.0] * 10 + [30.0 + 0.1 * (-1) ** i for i in range(10)], "length__reward_correlation": [0.5] * 20}
WEAK = {"beta": [0.01] * 30, "kl__k3_sequence": [2.0] * 30}
KL = [0.002 * i for i in range(20)]
FAR = {"length": [10.0] * 40, "train__learning_rate": [0.1] * 40}
TAUGHT = {"teacher__coef": [0.1] * 60}
PULLED = {"length": [10.0] * 20, "reward_std": [0.5] * 20, "teacher__kl": [0.2] * 20}
FELL = {"teacher__overlap_ratio": noisy(0.8, 10, scale=0.002) + noisy(0.7, 10, scale=0.002)}
OVERLAP = [fmean(part) for part in (FELL["teacher__overlap_ratio"][:10], FELL["teacher__overlap_ratio"][10:])]
FIRST = (4.0, 4.0, *[0.5] * 6)

PAIRS: list[Pair] = [
    (
        "mask-on-prompt",
        "in 1 of 2 sequences; 1 in sequence 1 alone, from position 0: '4'",
        written([{"sampled": (True,) * 3}, {"sampled": (False, True, True)}], reward=[1.0]),
        written([{"sampled": (False, True, True), "trained": (False, True, True)}], reward=[1.0]),
    ),
    (
        "end-token-lost",
        "in 1 of 1 completions the last token ('<eos>') is not trained on",
        written([{"trained": (True, True, False), "ended": True}], reward=[1.0]),
        written([{"trained": (True, True, False), "ended": False}], reward=[1.0]),
    ),
    (
        "sampler-mismatch",
        "sampler/k1 is 0.05 (0.2, mean of 2), sampler/k3 is 0.001 (0.001, mean of 2) nats per token",
        H(sampler__k1=[0.35, 0.05], sampler__k3=[0.001] * 2),
        H(sampler__k1=[0.009, -0.025], sampler__k3=[0.001] * 2),
    ),
    (
        "sampler-mismatch",
        "each of 60 tokens is at least as likely under the sampler: it cuts the distribution",
        sampled(*[0.3] * 60, sampler__k3=[0.05]),
        sampled(*[0.3] * 59, -0.3, sampler__k3=[0.05]),
    ),
    (
        "sampler-mismatch",
        "it came with the updates (sampler/k3 was 0.001 before the first one)",
        H(sampler__k3=[0.001, 0.02, 0.4]),
        H(settings=R(steps_counted=True), sampler__k3=[0.001, 0.02, 0.4]),  # the first row need not be the first step
    ),
    (
        "sampler-mismatch",
        "it was there before the first update (sampler/k3 was 0.02), so a missing sync alone does not explain it: "
        "other data types or kernels, or a temperature or truncation (top-p, top-k) that is a little different",
        H(sampler__k3=[0.02, 0.02]),
        H(first=7, sampler__k3=[0.02, 0.02]),
    ),
    (
        "sampler-mismatch",
        "first tokens are 8.0 times as far apart as later ones: the trainer does not see the prompt",
        sampled(*FIRST, sampler__k3=[2.0]),
        sampled(0.5, *FIRST[1:], sampler__k3=[2.0]),
    ),
    (
        "sampler-mismatch",
        "the trainer scores with another temperature, another prompt or template, or without the adapter",
        H(sampler__k3=[2.0]),
        H(sampler__k3=[0.001, 2.0]),
    ),
    (
        "sampler-mismatch",
        "the sampler still has the weights that training started from: it is as far from the policy as the reference "
        "is (0.038 and 0.038 nats per token)",
        H(k3=KL, sampler__k3=KL),
        H(settings=R(other_reference=True), k3=KL, sampler__k3=KL),  # the reference is not the start
    ),
    (
        "teacher-silent",
        "20% of the trained tokens have no number of the teacher's",
        H(teacher__unscored=[0.2] * 5),
        H(teacher__unscored=[0.05] * 5),
    ),
    (
        "teacher-silent",
        "all 20 tokens have the log-probability -1.5 under the teacher",
        scored(*[-1.5] * 20),
        scored(*[-1.5] * 19, -1.4),
    ),
    (
        "teacher-not-reached",
        "teacher/kl was 0.5 nats per token at first and is 0.48",
        H(**TAUGHT, teacher__kl=[0.5] * 10 + [0.48] * 50),
        H(**TAUGHT, teacher__kl=[0.5] * 10 + [0.3] * 50),
    ),
    (
        "teacher-outside-head",
        "the head holds 40% of the teacher's mass (teacher/teacher_mass.b)",
        H(**{"teacher__teacher_mass": [0.9] * 5, "teacher__teacher_mass.b": [0.4] * 5}),
        H(**{"teacher__teacher_mass": [0.9] * 5, "teacher__teacher_mass.b": [0.6] * 5}),
    ),
    (
        "teacher-outside-head",
        f"teacher/overlap_ratio went from {OVERLAP[0]:.3g} to {OVERLAP[1]:.3g}, means of 10 values",
        H(**FELL, teacher__teacher_mass=[0.9] * 20),
        H(teacher__overlap_ratio=[0.8] * 20, teacher__teacher_mass=[0.9] * 20),
    ),
    (
        "teacher-inert",
        "a teacher is configured, with coefficient 0.1; the last 3 steps have no teacher/kl",
        H(settings=R(teacher_coef=0.1), reward=[0.5] * 3),
        H(settings=R(teacher_coef=0.1), reward=[0.5] * 3, teacher__kl=[0.2]),
    ),
    (
        "teacher-inert",
        "the last 3 values of teacher/kl are exactly 0, as if the teacher were the policy",
        H(teacher__kl=[0.0] * 3),
        H(teacher__kl=[0.0] * 3, groups__saturated=[1.0] * 3),
    ),
    (
        "teacher-inert",
        "teacher/kl is 5e-05 nats per token, about 0 as at first, as if the teacher were the policy",
        H(teacher__kl=[6e-5] * 4 + [5e-5]),
        H(teacher__kl=[6e-3] * 4 + [5e-5]),
    ),
    (
        "teacher-inert",
        "train/teacher_penalty is 0 in 10 values, and teacher/kl 0.3 nats per token",
        H(train__teacher_penalty=[0.0] * 10, teacher__kl=[0.3] * 10, teacher__coef=[0.1] * 10),
        H(train__teacher_penalty=[0.0] * 10, teacher__kl=[0.3] * 10, teacher__coef=[0.0] * 10),
    ),
    (
        "teacher-inert",
        f"the teacher pulls with {100 * 1e-3 * 4**0.5 / 0.5:.2g} % of the reward's strength, means of 20",
        H(**PULLED, teacher__coef=[1e-3] * 20),
        H(**PULLED, teacher__coef=[1e-2] * 20),
    ),
    (
        "teacher-drowns-reward",
        "the best policy is about 0.005 nats per completion from the teacher, and earns about 0.05 more than it",
        H(**PULLED, teacher__coef=[5.0] * 20),
        H(**PULLED, teacher__coef=[1.0] * 20),
    ),
    (
        "teacher-prefers-wrong",
        "within groups the reward and what the teacher finds likelier than the policy correlate by -0.40",
        H(teacher__reward_correlation=[-0.4] * 10),
        H(teacher__reward_correlation=[-0.2] * 10),
    ),
    (
        "teacher-ends-elsewhere",
        "the teacher gives the policy's ends a probability of 0.01",
        H(teacher__end=[0.01] * 5),
        H(teacher__end=[0.5] * 5),
    ),
    (
        "kl-spike",
        "the learning rate (up to 0.1), if the KL stays there: the KL rose by 0.45 nats per token from one logged step",
        H(k3=[0.05] * 5 + [0.5], train__learning_rate=[0.1] * 6),
        H(k3=[0.05] * 5 + [30.0], train__learning_rate=[0.1] * 6),
    ),
    (
        "kl-spike",
        "a few tokens, or numbers that are wrong: 29.9 nats per token is farther than a policy moves",
        H(k3=[0.05] * 5 + [30.0]),
        H(k3=[0.05] * 5 + [10.0]),
    ),
    (
        "kl-far",
        "the learning rate (up to 0.1): the KL rose by 1.5 nats per token from one logged step to the next",
        H(k3=[0.0] * 20 + [1.5] * 20, **FAR),
        H(k3=[0.05 * i for i in range(40)], **FAR),
    ),
    (
        "reward-collapse",
        "no KL to a reference holds the policy (beta is 0)",
        H(**LOST, beta=[0.0] * 30),
        H(**LOST),  # nobody says what beta is
    ),
    (
        "reward-collapse",
        f"it pulls with {100 * 1e-3 * 4**0.5 / 0.3:.2g} % of the reward's strength at beta 0.01. Raise beta",
        H(**LOST, **WEAK, beta__price=[1e-3] * 30),
        H(**LOST, **WEAK, beta__price=[1e-3] * 30, settings=R(target_kl=0.1)),  # which sets it
    ),
    (
        "reward-collapse",
        "at beta 0.01. Lower target_kl",
        H(**LOST, **WEAK, beta__price=[1e-3] * 30, settings=R(target_kl=0.1)),
        H(**LOST, **WEAK, beta__price=[1e-1] * 30, settings=R(target_kl=0.1)),
    ),
    (
        "length-exploited",
        "within groups the two correlate by 0.50",
        H(**PAYS),
        H(length__reward_correlation=[0.5] * 20),
    ),
    (
        "reward-collapse",
        "completions repeat themselves (70 % of their tokens stand in a pair that was there before)",
        H(**LOST, length__repeated=[0.7] * 30),
        H(**LOST, length__repeated=[0.3] * 30),
    ),
    (
        "reward-collapse",
        "the sampler is not the policy (0.05 nats per token apart): see what sampler-mismatch says",
        H(**LOST, sampler__k3=[0.05] * 30),
        H(**LOST, sampler__k3=[0.005] * 30),
    ),
]


def side(who: str, **gaps: float) -> str:
    return Reported(side=who, gaps={name.replace("_", " "): gap for name, gap in gaps.items()}).text


def readings() -> list[tuple[str, str]]:
    """What is said of either side where a reading explains it, and where the right one does as well."""
    pairs = [
        (Reported(side=who, gaps={WEIGHTS: 1.0, name: 0.01}), Reported(side=who, gaps={WEIGHTS: 0.02, name: 0.01}))
        for who, meant in (("sampler", OF_SAMPLER), ("trainer", OF_TRAINER))
        for name in meant
    ]
    told = [(explained.text, right.text) for explained, right in pairs]
    degrees = [side("sampler", weights=gap) for gap in (1e-4, 0.05, 1.0)]
    assert [text.split("(")[0] for text in degrees] == [
        "the sampler has the weights' log-probabilities ",
        "the sampler has them to 0.05 nats per token, as other data types or kernels do",
        "the sampler is 1 nats per token off, and no reading that was tried explains it",
    ]
    return [*told, *zip(degrees, degrees[1:] + degrees[:1], strict=True)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}: {pair[1][:40]}")
def test_a_sentence_is_printed_where_it_is_true_and_not_beside_that(pair: Pair) -> None:
    holds(pair)


@pytest.mark.parametrize("module", [alarms_tokens, alarms_teacher, causes, sync])
def test_no_sentence_is_without_a_record(module: Any) -> None:
    assert uncovered(module, [*OF_CURVES, *PAIRS], readings() if module is sync else []) == []


# --- the doctor's own lines -------------------------------------------------------------------------------------------

FOREIGN = R(other_kernels=True)
CALM = [0.0, 0.02, 0.03, 0.03, 0.03, 0.03]
SOUND, JUMPED = H(k3=[*CALM, 0.04]), H(k3=[*CALM, 0.7])
AGAIN = H(k3=[0.01] * 9, train__grad_norm=[1.0, 5e3, 1.0, 1.0, 5e3, 1.0, 1.0, 1.0, 1.0])
ONCE = H(k3=[0.01] * 9, train__grad_norm=[1.0, 5e3, *[1.0] * 7])
LINES = [
    # what is printed, of this record, and not of that
    ("log: klamp run, 1 logged step up to step 1", H(k3=[0.0]), SOUND),
    ("no alarm; ", SOUND, JUMPED),
    ("no alarm in what was looked at", H(reward=[0.5], train__loss=[0.1]), H(settings=R(beta=0.0), reward=[0.5])),
    ("no KL to the reference was found", H(reward=[0.5]), H(reward=[0.5], beta=[0.0])),
    ("alarm: kl-spike: the KL jumped (step 7)", JUMPED, H(k3=[*CALM, 0.1])),
    ("(step 2, and 1 more)", AGAIN, ONCE),
    ("cost 2 logged steps, from step 2 to 5 ", AGAIN, ONCE),
    ("cost 2 steps, from step 2 to 3 ", H(k3=[0.01, 5e3, 5e3, 0.01]), ONCE),
    ("options as klamp and TRL call them", H(settings=FOREIGN, k3=[*CALM, 0.7]), H(settings=FOREIGN, k3=[0.3])),
    ("tokens to blame, step 7 ", written([{"ref": (-1.0, -9.0, -0.5)}], 7, k3=[*CALM, 0.7]), JUMPED),
    ("step 5, the nearest that was written", written([{"ref": (-1.0, -9.0, -0.5)}], 5, k3=[*CALM, 0.7]), JUMPED),
    ("the record has no evaluations", SOUND, valued({"a": 0.5}, {"a": 0.5})),
    ("no loss_type (--loss_type says it)", SOUND, H(settings=R(loss_type="grpo", verifier="rules"), k3=[0.0])),
    ("changed after step 3: beta", History(rows=SOUND.rows, changes={3: "beta .1 to .2"}), SOUND),
    ("caution rows are counted", History(rows=SOUND.rows, cautions=["rows are counted"]), SOUND),
    ("not read odd_kl: what it is can be said, as", History(rows=SOUND.rows, unread={"odd_kl": ""}), SOUND),
]


def shown(history: History, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints of a record, wherever its lines are broken."""
    command.show(examine(history), Path("log"))
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("text", "true", "false"), LINES, ids=[text for text, _, _ in LINES])
def test_a_line_of_the_doctor(text: str, true: Any, false: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in shown(true, capsys)
    assert text not in shown(false, capsys)


def test_no_line_of_the_doctor_is_without_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    printed = [(shown(true, capsys), shown(false, capsys)) for _, true, false in LINES]
    found = [(finding.in_a_line, "") for finding in examine(H(k3=[0.0, *CALM, 0.7])).findings]
    command.show_sync({4: SyncReport(tokens=1, sides=(Reported(side="sampler", gaps={WEIGHTS: 1.0}),))})
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("sync at step 4: NO, 1 token sampler the sampler is 1 nats per token off")
    always = [(text, "") for text, _ in printed]  # headings
    assert uncovered(doctor, [], [*printed, *found]) == []
    assert set(uncovered(command, [], [*printed, *always, (out, "")])) <= {"klamp\\ doctor"}


@pytest.mark.parametrize(
    ("rows", "flags", "text", "others"),
    [
        ([{"step": 1, "reward": 0.5}] * 2, (), "no alarm, and the KL was not looked at", ("--beta", "0")),
        ([{"step": 1, "odd": 0.5}], ("--map", "policy/entropy=odd"), "it has policy/entropy", ("--map", "kl=odd")),
    ],
)
def test_why_a_record_says_nothing(
    rows: list[Any], flags: Any, text: str, others: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for each, there in ((flags, True), (others, False)):
        main(["doctor", str(file), *each])
        assert (text in " ".join("".join(capsys.readouterr()).split())) is there


@settings(max_examples=60, deadline=None)
@given(
    bad=st.lists(st.booleans(), min_size=2, max_size=30).filter(any),
    every=st.integers(1, 10),
    seconds=st.floats(1.0, 5e3),
)
def test_a_cost_is_that_of_the_steps_in_which_it_was_there(bad: list[bool], every: int, seconds: float) -> None:
    history = H(kl__k1=[0.0] * len(bad), train__grad_norm=[5e3 if x else 1.0 for x in bad])
    metrics = [dict(row.metrics) | {"speed/step_seconds": seconds} for row in history.rows]
    history.rows = [type(history.rows[0])(step=every * i, metrics=m) for i, m in enumerate(metrics, start=1)]
    (huge,) = [each for each in examine(history).findings if each.alarm.name == "huge-values"]
    hours = ((sum(bad) - 1) * every + 1) * seconds / 3600
    assert huge.hours == pytest.approx(hours)
    first, last = (every * (i + 1) for i in (bad.index(True), len(bad) - 1 - bad[::-1].index(True)))
    numbers = [float(x) for x in re.findall(r"[\d.]+(?:e[+-]\d+)?", huge.cost)]
    assert numbers[0] == sum(bad) and {first, last} <= set(numbers)
    assert numbers[-1] == pytest.approx(hours if hours >= 1 else 60 * hours, rel=0.06)
    assert not re.search(r"(?<![\d.])1 (steps|hours|minutes)\b", huge.cost)


# --- the words of alarms.yaml -----------------------------------------------------------------------------------------


def test_every_alarm_has_a_record_for_which_its_words_are_printed_and_one_for_which_they_are_not() -> None:
    assert {pair[0] for pair in (*OF_CURVES, *PAIRS)} == set(ALARMS)


HEDGED = re.compile(r"\b(mostly|often|may|usual|or|unless|where|if|hardly)\b", re.IGNORECASE)
FACTS = {
    "step-zero-kl": ("differ before any training:",),  # the rule
    "reference-differs": ("is another model than", "A KL in the loss then pulls"),  # the rule; the term's optimum
    "negative-k1": ("A k3 is never below 0",),  # below
    "k3-far-above-k1": ("both estimate the same KL", "k3 grows with ref/policy"),  # below
    "kl-far": ("words repeat, other skills go",),  # after "mostly"
    "kl-growing": ("without being paid for it",),  # the rule
    "length-exploited": ("the longer completions earn more",),  # the rule
    "saturated": ("Advantages to a group's mean are 0", "the reward has no gradient"),
    "dilution": ("cost less KL",),  # the rule
    "detached-reference": ("Nothing trains the policy;",),  # the first of several
    "not-trained": ("No step teaches it",),  # the rule
    "advantage-scale": ("as large as the advantages", "beta then means another thing"),
    "mask-on-prompt": ("they carry the group's",),  # the rule
    "sampler-mismatch": ("What samples is not what is scored", "Every estimate takes"),  # the rule
    "kl-dominates": ("even the best policy stays",),  # the rule
    "huge-values": ("k3 is exponential", "Clipping the gradient", "of a norm of 1e5 clipped to 0.1"),  # below
    "dr-grpo-with-kl": ("Dr.", "GRPO leaves the KL out", "a rule is right however far"),  # docs/sources.md
    "retention": ("Of a skill that is not", "Of the task itself"),  # headings
    "teacher-outside-head": ("The tail must say", "With the overlap"),  # the rule
    "teacher-drowns-reward": ("Even the best policy stays",),  # the rule
    "teacher-ends-elsewhere": ("it pulls the policy's end away",),  # after "mostly"
    "kl-high": ("The GRPO tutorial", "By itself it is not", "a language model was", "digits are learned"),  # cited
    "kl-low": ("Near the reference after 20",),  # the rule
}


def test_no_cause_is_told_as_certain_but_what_the_rule_itself_or_arithmetic_shows() -> None:
    for name, alarm in ALARMS.items():
        clauses = re.split(r"(?<=[.:;])\s+", alarm.means)
        certain = [each for each in clauses if not HEDGED.search(each)]
        assert [each for each in certain if not any(fact in each for fact in FACTS.get(name, ()))] == [], name
        assert len(certain) == len(FACTS.get(name, ())), name


@pytest.mark.parametrize(
    ("name", "claim", "history"),
    [
        ("huge-values", "a thousand times too large", H(k3=[0.01], train__loss=[1.5e3])),  # a sum over tokens
        ("huge-values", "The KL or the gradient exploded", H(k3=[0.01] * 3, train__kl_penalty=[math.nan] * 3)),
        ("kl-far", "Each token is e times likelier", H(k3=[2.0] * 5, k1=[0.1] * 5, length=[10.0] * 5)),
        ("reference-differs", "The KL then pulls", H(settings=R(other_reference=True, beta=0.0), k3=[0.3])),
        ("repetition", "its entropy is gone,", H(length__repeated=[0.1] * 5 + [0.9] * 5, policy__entropy=[3.0] * 10)),
        ("saturated", "nothing is left to learn:", H(groups__saturated=[1.0] * 20, teacher__kl=[0.3] * 20)),
        ("dr-grpo-with-kl", "beta above 0", H(settings=R(loss_type="dr_grpo", verifier="rules"), k3=[0.01])),
        ("kl-spike", "one update moved the policy far", H(k3=[0.05] * 5 + [0.9])),  # rows may be ten updates apart
        ("not-trained", "No step moves its weights", H(train__grad_norm=[0.0] * 20)),  # weight decay does
        ("teacher-ends-elsewhere", "Their end tokens differ:", H(teacher__end=[0.01] * 5)),  # or it would go on
        ("kl-low", "else the updates are small", H(k3=[0.005] * 20, settings=R(target_kl=0.005))),  # it is held there
    ],
)
def test_a_cause_that_a_record_does_not_have_is_not_told_as_a_fact(name: str, claim: str, history: History) -> None:
    assert look(name, history) is not None
    assert claim not in f"{ALARMS[name].text} {ALARMS[name].means}"


@given(delta=st.floats(-30, 30))
def test_what_is_said_of_k3(delta: float) -> None:
    """Of the log-ratio policy - ref: never below 0, and exponential in how far the reference finds a token likelier."""
    value = float(ESTIMATORS["k3"].value(torch.tensor(delta, dtype=torch.float64)))
    assert value >= 0 and value == pytest.approx(math.expm1(-delta) + delta, abs=1e-9, rel=1e-9)


def test_options_that_are_named_exist_and_go_together() -> None:
    known = {each.name for config in (KLConfig, LossConfig, TeacherConfig) for each in fields(config)}
    of_trl = {"max_grad_norm", "mask_truncated_completions", "max_completion_length", "requires_grad"}
    words = " ".join(alarm.next_step + alarm.means for alarm in ALARMS.values())
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", words)) - known <= of_trl
    TeacherConfig(teacher_model="t", teacher_estimator="topk", teacher_head="union", teacher_tail="sampled")
