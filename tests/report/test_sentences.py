"""Every sentence of a report, over runs of many kinds: it is printed where it is true and nowhere else, and its numbers
are those of the runs' own rows and tokens; a text in the report's code that stands in no table here fails too."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.report import facts
from tests.report.facts import KL, SEQUENCE
from tests.report.pages import Node, parse
from tests.report.worlds import World, worlds

import klamp.report
from klamp.report.headlines import side_by_side
from klamp.report.text import count

SOURCE = Path(klamp.report.__file__).parent
BROWSER = Path(__file__).parents[1] / "browser"
Holds = Callable[..., bool]


def right(*_: object) -> bool:
    return True


@dataclass(frozen=True)
class Claim:
    """When a sentence is true of a page, whether what stands in its gaps is right, and how it is found."""

    when: Callable[[World], bool]
    holds: Holds = right
    entire: bool = False
    """Whether it is all that an element says, so that a longer text with its words is another one."""
    pattern: str = ""
    """Where its gaps need one."""


def entire(when: Callable[[World], bool], holds: Holds = right) -> Claim:
    return Claim(when, holds, entire=True)


def logs(*names: str) -> Claim:
    return Claim(lambda w: w.logs(*names))


def alone(when: Callable[[World], bool], holds: Holds = right, **how: str | bool) -> Claim:
    """What is said of a single run only."""
    return Claim(lambda w: w.one and when(w), holds, **how)  # pyright: ignore[reportArgumentType]


def several(when: Callable[[World], bool], holds: Holds = right, **how: str | bool) -> Claim:
    """What is said of several runs only."""
    return Claim(lambda w: not w.one and when(w), holds, **how)  # pyright: ignore[reportArgumentType]


def always(_: World) -> bool:
    return True


def measured_after(world: World) -> bool:
    return any(run.kl_after is not None for run in world.runs)


def configured(world: World) -> bool:
    return any(run.config for run in world.runs)


def versioned(world: World) -> bool:
    return any(run.versions for run in world.runs)


CURVE = r"(\S+): (\S+) at (\w+ \S+), (\S+) at (\w+ \S+); lowest (\S+), highest (\S+) at (\w+ \d+)\."

RUNS: dict[str, Claim] = {
    "no alarm": Claim(lambda w: facts.judged(w, sound=True) or facts.judged(w, sound=False)),
    "no alarm in what was looked at": Claim(lambda w: facts.judged(w, sound=False)),
    "nothing could be checked": Claim(facts.nothing),
    ", in {} of {} runs": several(
        lambda w: bool(facts.findings(w)),
        lambda w, few, every: (int(few), int(every)) in facts.shares(w),
        pattern=r", in (\d+) of (\d+) runs",
    ),
    "; {} of {} checked": alone(always, facts.checked),
    "; the KL was not looked at{}": Claim(
        lambda w: bool(facts.blind(w)), lambda w, where: facts.named(where, facts.blind(w), w)
    ),
    "The KL was not looked at{}: {}.": Claim(
        lambda w: bool(facts.blind(w)), lambda w, where, _: facts.named(where, facts.blind(w), w)
    ),
    "Nothing was found{}.": Claim(
        lambda w: bool(facts.quiet(w)), lambda w, where: facts.named(where, facts.quiet(w), w)
    ),
    ", and {} more": Claim(
        lambda w: any(steps > 1 for *_, steps in facts.findings(w)),
        lambda w, more: int(more) + 1 in [steps for *_, steps in facts.findings(w)],
        pattern=r"step \d+, and (\d+) more",
    ),
    "{} of {} could not be checked{}": entire(lambda w: any(r.diagnosis.unchecked for r in w.runs), facts.unchecked),
    "needs {}": entire(lambda w: any(r.diagnosis.unchecked for r in w.runs)),
    "tokens to blame": Claim(facts.blamed),
    "step {}, completion {}, position {}": entire(lambda w: facts.blamed(w) or facts.apart(w), facts.is_there),
    " up to step {}": alone(
        lambda w: bool(w.runs[0].history.rows), lambda w, step: int(step) == w.runs[0].history.rows[-1].step
    ),
    "{} compared": several(always, lambda w, runs: runs == f"{len(w.runs)} runs", entire=True),
}
HEADLINES: dict[str, Claim] = {
    "last logged value": alone(lambda w: 1 in map(len, facts.lasts(w))),
    "mean of last {} logged values{}": alone(lambda w: any(len(x) > 1 for x in facts.lasts(w)), facts.mean_as_said),
    ", {} not finite": alone(lambda w: bool(facts.lost_of_lasts(w)), pattern=r"logged values, (\d+) not finite"),
    "constant": entire(facts.constant),
    "highest {} at step {}": entire(facts.has_a_kl, facts.highest),
    "KL from the start (exact)": Claim(measured_after),
    "KL from the start per completion (exact)": Claim(measured_after),
    "after training (outcome.json)": alone(measured_after),
    "on held-out prompts": entire(measured_after),
    "evaluation after step {}": alone(
        lambda w: bool(w.skills()), lambda w, step: int(step) in [rows[-1][0] for *_, rows in w.skills()], entire=True
    ),
    "not evaluated later": Claim(lambda w: any(len(rows) == 1 for *_, rows in w.skills())),
    "as at the first evaluation": Claim(
        lambda w: any(len(rows) > 1 and rows[0][1] == rows[-1][1] for *_, rows in w.skills())
    ),
    ", trained": Claim(lambda w: any(w.runs[i].history.settings.rl_skill == s for i, s, _ in w.skills())),
    ", not trained": Claim(
        lambda w: any(w.runs[i].history.settings.rl_skill not in (None, s) for i, s, _ in w.skills())
    ),
    "points of 100": Claim(facts.in_points),
    "Divergence from the teacher": logs("teacher/kl"),
    "KL to the teacher": Claim(lambda w: any(c.teacher is not None for c in w.completions())),
    "the KL was not looked at": several(lambda w: bool(facts.blind(w)), entire=True),
    "Means of the last {} logged values (of the last half, where there are fewer than {}), what is not finite left "
    "out; scores of the last evaluation.": several(always, lambda w, few, twice: (few, twice) == ("5", "10")),
    " KL from the start: exact, against the model that training started from, measured after training on completions "
    "to held-out prompts, in the runs that have an outcome.json.": several(measured_after),
}
CHARTS: dict[str, Claim] = {
    "No metric over steps was logged.": Claim(lambda w: not facts.every_curve(w) and not w.skills()),
    "KL to the reference": Claim(lambda w: w.logs(*KL, "kl/exact_forward"), pattern="^KL to the reference(?:$|:)"),
    "exact forward": logs("kl/exact_forward"),
    "KL per completion": logs(*SEQUENCE, "kl/budget", "kl/after_clip"),
    "Divergence from each anchor": Claim(facts.several_anchors),
    "reference ({})": alone(
        lambda w: facts.several_anchors(w) and w.logs(*KL),
        lambda w, best: next(name for name in KL if w.logs(name)) == f"kl/{best}",
        entire=True,
    ),
    "sampler (k3)": alone(lambda w: facts.several_anchors(w) and w.logs("sampler/k3"), entire=True),
    "sampler (k3), at the last update": Claim(lambda w: facts.near(w) and w.logs("policy/kl_old")),
    "teachers, mean": Claim(lambda w: w.logs("teacher/kl.math")),
    "Completion length": logs("length/mean"),
    "Cut and saturated": logs("length/truncated", "groups/saturated"),
    "Sampler against trainer": logs("sampler/k1", "sampler/k3", "sampler/abs"),
    "k1, k3: alarm above {}": entire(facts.all_sampled, lambda w, x: float(x) == facts.alarm_of_the_sampler()),
    "largest of a step": logs("kl/log_ratio_max"),
    "99th percentile": logs("kl/log_ratio_p99"),
    "Gradient norm": logs("train/grad_norm"),
    "beta rests from {} to {}": entire(facts.near, lambda w, low, high: (low, high) == ("0.05", "0.15")),
    "{}, at the end": Claim(lambda w: w.one and facts.config(w, "target_kl") and bool(facts.changes(w))),
    "{}: {}, {}; lowest {}, highest {}.": Claim(facts.drawn, facts.in_order, pattern=CURVE),
    "{}: no finite value.": Claim(facts.nowhere_finite, pattern=r"(\w+): no finite value\."),
    "{} not finite.": Claim(
        lambda w: bool(facts.lost(w)),
        lambda w, said: said in [count(number, "value") for number in facts.lost(w)],
        pattern=r"(\d+ values?) not finite\.",
    ),
    "Alarm {}, {}, rose at step {}.": alone(
        facts.marked, lambda w, _, name, step: (name, int(step)) in [(f[1], f[3]) for f in facts.findings(w)]
    ),
    "{}, {} runs": Claim(
        lambda w: bool(facts.groups(w)),
        lambda w, name, n: facts.groups(w)[name] == int(n),
        pattern=r"^([^ :,]+), (\d+) runs$",
    ),
    "; {} of {} logged steps, the extremes among them": Claim(
        lambda w: any(len(curve) > 400 for curve in facts.every_curve(w)),
        lambda w, some, every: int(some) < int(every) and int(every) in map(len, facts.every_curve(w)),
    ),
}
COMPLETIONS: dict[str, Claim] = {
    "No answers of an evaluation were written.": Claim(lambda w: not facts.answers(w)),
    "after step {}": entire(
        lambda w: bool(facts.answers(w)), lambda w, step: int(step.split(",")[0]) in facts.answers(w)
    ),
    "Greedy answers to held-out prompts, with their scores{}.": Claim(lambda w: bool(facts.answers(w))),
    " The teacher's are its own, to the prompt that it sees.": Claim(lambda w: bool(facts.answers(w, "teacher"))),
    " A teacher at a URL only scores: it is not asked for answers.": Claim(lambda w: facts.config(w, "teacher_url")),
    "teacher of {}": several(lambda w: bool(facts.answers(w, "teacher")), entire=True),
    "No completions with token log-probabilities were written. klamp writes some every log_completions_every steps; "
    "for other trainers see the names that `klamp doctor` reads.": Claim(lambda w: not w.completions()),
    "The only completion that was written.": Claim(lambda w: len(w.completions()) == 1),
    ", {} where twins are joined": Claim(
        lambda w: facts.twins(w) > 0, lambda w, cards: cards == count(len(w.completions()) - facts.twins(w), "card")
    ),
    ", the worst token first": Claim(lambda w: len(w.completions()) > 1),
    " after those that an alarm blames": Claim(facts.blamed),
    "{}. The others are left out for the size of the page.": Claim(facts.small),
    "No token here has a log-ratio other than 0.": Claim(lambda w: bool(w.completions()) and not facts.apart(w)),
    "Worst tokens": Claim(facts.apart),
    "tokens with the largest |log-ratio| on this page": Claim(facts.apart),
    "Only tokens {} to {} of {} are shown.": Claim(
        facts.cut, lambda w, a, b, n: int(b) - int(a) == 2999 and int(n) in [len(c.tokens) for c in w.completions()]
    ),
    "{} completions are the same": entire(lambda w: facts.twins(w) > 0, lambda w, n: int(n) <= facts.twins(w) + 1),
    ", ended": Claim(lambda w: any(c.ended for c in w.completions())),
    ", cut off": Claim(lambda w: any(c.ended is False for c in w.completions())),
    ", shaded by log policy − log {}": Claim(lambda w: facts.anchored(w, "ref", "teacher", "sampler"), facts.shaded),
    "Shades compare the policy with the": Claim(facts.choice),
    "{}… ({} more characters)": entire(
        facts.long_prompts, lambda w, _, more: int(more) in [len(c.prompt) - 2000 for c in w.completions()]
    ),
}
CONFIGURATION: dict[str, Claim] = {
    "The record does not hold the {}.": Claim(
        lambda w: not configured(w) or not versioned(w),
        lambda w, what: not {"configuration": configured, "versions": versioned}[what](w),
        entire=True,
        pattern=r"^The record does not hold the (\w+)\.$",
    ),
    "Changed at a resume": Claim(lambda w: bool(facts.changes(w))),
    "{}, after step {}: {}": Claim(
        lambda w: bool(facts.changes(w)), lambda w, name, step, text: (int(step), text) in facts.changes(w)
    ),
}
CLAIMS = RUNS | HEADLINES | CHARTS | COMPLETIONS | CONFIGURATION
"""A sentence as it stands in the code, {} for what it fills in -> when it is true."""

ELSEWHERE = {
    "Made by klamp {}. This file loads nothing from anywhere.": "test_page.py, of every page",
    "a page stays below {} bytes": "test_page.py",
    "{} runs, {} bytes without any completion": "test_page.py",
    "in {} of {} runs": "above, with a comma before it",
    "after the clip": "test_curves.py: every curve is a metric",
    "|log policy − log ref|": "a title, whose curves are above",
    **dict.fromkeys(("not trained on", "prompt, or a tool's answer", "blamed by an alarm", "no number"), "a legend"),
    **dict.fromkeys(("log policy − log ", "policy likelier"), "a legend: test_tokens.py"),
}
"""What is true of every page that has it, or is no part of a page -> where it is tested."""
LABELS = """
    Next step; share of the k3; Over steps; Before and after; Token by token; To the content
    klamp report; klamp run; {} · klamp report; logged step; headline numbers of each run; name fewer runs; all runs
    answers of the first and the last evaluation; the report would be too large
    in context; worst token first; largest KL first; by step; last step first; highest reward first; lowest reward first
    longest first; Step from; blamed by an alarm; Filter the completions; Show more
    Step {}, completion {}; , in nats; last: step {}; {} at step {}; Tokens of step {}, completion {}{}
"""
"""Names of parts, of columns and of what can be chosen: they claim nothing."""
MARKUP = ("default-src", "<!doctype", "width=device", "light dark", "headlines few", "{}-title")
"""How texts begin that nobody reads."""
SCRIPT = """
    {}: values by step; , log scale; {}: logarithmic axis; Light theme; Dark theme
    log-ratio to the {}; Show {} more; not trained on; prompt, or a tool's answer; blamed by an alarm; {} of {} shown
"""
"""What the page's script writes, and no claim; its claims stand in tests/browser."""
SELECTORS = (
    "use strict",
    "table.",
    "curve s",
    "dot s",
    ".",
    "#",
    "(prefers",
    "title, ",
)
SCRIPT_CLAIMS = ("; {} on the page", "No completion is like that.")


def tiles(world: World) -> list[Node]:
    return world.page.all(of="tile")


def listed(names: str) -> set[str]:
    return {each.strip() for line in names.splitlines() for each in re.split(r";(?= \S)(?! \{\} on)", line)} - {""}


def is_text(text: str) -> bool:
    """Whether a literal has two words, and is none of the markup."""
    words = re.findall(r"[^\W\d_]{2,}", text.replace("{}", ""))
    return len(words) > 1 and " " in text.strip() and not text.startswith(MARKUP)


def literals(source: str) -> Iterator[str]:
    """The texts of a module, {} where an f-string fills something in; no docstrings."""
    tree = ast.parse(source)
    unseen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            unseen |= set(map(id, node.values))
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unseen:
            yield node.value


def test_every_text_of_the_report_stands_in_a_table_here_and_none_that_is_gone() -> None:
    there = {text for file in SOURCE.glob("*.py") for text in literals(file.read_text(encoding="utf-8"))}
    known = {*CLAIMS, *ELSEWHERE} | listed(LABELS)
    unknown = [text for text in there if is_text(text) and text not in known and text.strip() not in known]
    assert unknown == [], "say in CLAIMS when it is true"
    assert {*CLAIMS, *ELSEWHERE} - there == set(), "nothing prints it any more"


def test_every_text_of_the_script_is_known_and_its_claims_are_tried_in_a_browser() -> None:
    code = [line for file in SOURCE.glob("assets/*.js") for line in file.read_text().splitlines()]
    parts = [a or b for line in code for a, b in re.findall(r'"([^"]*)"|`([^`]*)`', line.partition("// ")[0])]
    found = {re.sub(r"\$\{[^}]*\}", "{}", part) for part in parts}
    unknown = {text for text in found if is_text(text) and not text.startswith(SELECTORS)} - listed(SCRIPT)
    assert unknown <= {*SCRIPT_CLAIMS}, unknown
    tried = "".join(file.read_text() for file in BROWSER.glob("*.py"))
    assert all(text.replace("{}", "").strip("; ") in tried for text in SCRIPT_CLAIMS)


def pattern_of(sentence: str, claim: Claim) -> re.Pattern[str]:
    gaps = "(.*?)".join(map(re.escape, sentence.split("{}"))) + ("$" if sentence.endswith("{}") else "")
    return re.compile(claim.pattern or (f"^{gaps}$" if claim.entire else gaps))


def test_a_headline_number_is_the_mean_that_it_is_said_to_be() -> None:
    seen = set[str]()
    for name, world in worlds().items():
        rows = (
            side_by_side(world.runs)[1]
            if len(world.runs) > 1
            else [[each.one("dt").text, each] for each in tiles(world)]
        )
        for label, *cells in rows:
            words = str(label).partition(",")[0]
            for run, cell in zip(world.runs, cells, strict=True):
                number = (parse(cell).all("b") if isinstance(cell, str) else cell.all(of="big"))[:1]
                if words in facts.LABELLED and number:
                    assert number[0].text == facts.mean_of(run, facts.LABELLED[words]), f"{words} of {name}"
                    seen.add(words)
    assert seen >= {
        "Reward",
        "KL (exact)",
        "KL (k3)",
        "KL per completion (exact)",
        "Divergence from the teacher",
        "beta",
    }


@pytest.mark.parametrize("sentence", CLAIMS)
def test_a_sentence_is_printed_where_it_is_true_and_nowhere_else(sentence: str) -> None:
    claim, seen = CLAIMS[sentence], set[bool]()
    pattern = pattern_of(sentence, claim)
    for name, world in worlds().items():
        printed = [match for text in world.said for match in pattern.finditer(text)]
        true = bool(claim.when(world))
        assert bool(printed) is true, f"{name}: {'missing' if true else [match[0][:200] for match in printed[:3]]}"
        wrong = [match[0] for match in printed if not claim.holds(world, *match.groups())]
        assert wrong == [], f"{name}: its numbers are others"
        seen.add(true)
    assert seen == {True, False}, "it needs a run of which it is true, and one of which it is false"
