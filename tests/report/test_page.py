"""The whole page, the answers before and after on it, and the configurations."""

import base64
import hashlib
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.report.pages import Node, completion, parse, run_of

from klamp.doctor.history import Answer, Row, RunSettings
from klamp.errors import DataError
from klamp.report.headlines import headlines
from klamp.report.page import LIMIT, LONGEST, answer_section, render, settings_section
from klamp.report.run import ReportRun, ScoreFormat

HOSTILE = "</script></style><img src=x onerror=alert(1)><!--\u202e\ud800\x00"


def whole_run(name: str = "a") -> ReportRun:
    rows = [completion(step=s, ref=(-1.0, -2.0 - s / 7, -0.5), prompt="40+2=", reward=1.0) for s in range(1, 8)]
    return run_of(
        name=name,
        completions=rows,
        scores=[(0, {"addition": 0.5, "reversal": 1.0}), (7, {"addition": 0.9, "reversal": 1.0})],
        settings=RunSettings(rl_skill="addition"),
        details={"config": {"beta": 0.04}, "versions": {"klamp": "0.1.0"}},
        reward=[0.1] * 7,
        k1=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.6],
        k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7],
        length=[4.0] * 7,
    )


def document(*runs: ReportRun) -> Node:
    return parse(render(runs))


def test_its_sections_and_its_title() -> None:
    made = document(whole_run())
    sections = ["overview", "alarms", "curves", "answers", "tokens", "configuration"]
    assert [section.attributes["id"] for section in made.one("main").all("section")] == sections
    assert made.one("h1").text == "a" and made.one("head").one("title").text == "a · klamp report"
    assert made.one(of="source").text == "runs/a · klamp run, 7 logged steps up to step 7"
    assert len(made.all("figure")) == 4


def test_every_link_has_its_target_every_id_is_unique_and_headings_step_down_one_at_a_time() -> None:
    for runs in ([whole_run()], [whole_run("a"), whole_run("b")]):
        made = document(*runs)
        ids = [node.attributes["id"] for node in made.walk() if "id" in node.attributes]
        assert len(set(ids)) == len(ids)
        links = [link.attributes["href"] or "" for link in made.all("a")]
        assert links and all(link.startswith("#") and link[1:] in ids for link in links)
        for node in made.walk():
            for name in ("aria-labelledby", "for"):
                assert set((node.attributes.get(name) or "").split()) <= set(ids)
        levels = [int(node.name[1]) for node in made.walk() if re.fullmatch("h[1-6]", node.name)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_the_policy_allows_its_own_style_and_script_and_nothing_else() -> None:
    made = document(whole_run())
    policy = made.one("meta", http_equiv="Content-Security-Policy").attributes["content"] or ""
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["form-action"] == "'none'"
    (script,) = made.all("script")
    for name, node in (("style-src", made.one("style")), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(node.text.encode()).digest()).decode()
        assert allowed[name] == f"'sha256-{digest}'"
    assert set(allowed) == {"default-src", "base-uri", "form-action", "style-src", "script-src"}


def test_nothing_is_loaded_nothing_is_inline_and_the_script_writes_no_markup() -> None:
    page = render([whole_run()])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.replace("// ", ""))
    made = parse(page)
    for node in made.walk():
        assert not {"style", "src", "srcset"} & set(node.attributes)
        assert not any(name.startswith("on") for name in node.attributes)
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert not re.search(markup, made.one("script").text)


def test_hostile_text_everywhere() -> None:
    run = run_of(
        name=HOSTILE,
        completions=[completion(tokens=(HOSTILE, "b", "c"), prompt=HOSTILE, group=HOSTILE, ref=(-3.0, -2.0, -0.5))],
        scores=[(0, {HOSTILE: 0.5}), (1, {HOSTILE: 0.1})],
        details={"config": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}},
        k3=[0.5],
    )
    for runs in ([run], [run, whole_run()]):
        page = render(runs)
        page.encode("utf-8")
        assert "<img" not in page and "<!--" not in page and "\u202e" not in page and "\x00" not in page
        made = parse(page)
        assert not made.all("img") and len(made.all("script")) == 1
        seen = HOSTILE.replace("\u202e", "⟨U+202E⟩").replace("\ud800", "⟨U+D800⟩").replace("\x00", "⟨U+0000⟩")
        assert made.text.count(seen) >= 6


def test_a_page_of_metrics_only_says_what_is_missing() -> None:
    made = document(run_of(k3=[0.0, 0.02]))
    missing = [node.text for node in made.all(of="missing")]
    assert len(missing) == 5 and any("No completions" in text for text in missing)
    assert len(made.all("figure")) == 1
    empty = document(run_of(completions=[completion()]))
    assert "No metric over steps was logged." in empty.text


def heavy(count: int) -> ReportRun:
    tokens, policy = [f"token{i}" for i in range(200)], [-1.0 - i / 300 for i in range(200)]
    refs = [[-1.0 - i / 200 - step / 1000 for i in range(200)] for step in range(count)]
    rows = [completion(step=step, tokens=tokens, policy=policy, ref=ref) for step, ref in enumerate(refs)]
    return run_of(completions=rows, reward=[0.5] * 20)


def test_a_page_stays_below_its_limit() -> None:
    limit, run = 300_000, heavy(40)
    page = render([run], limit=limit)
    assert 0.8 * limit < len(page.encode()) <= limit < LIMIT
    assert page == render([run], limit=limit), "the same runs give the same page"
    made = parse(page)
    cards = made.all("article", of="completion")
    steps = [int(card.attributes["data-step"] or 0) for card in cards]
    assert steps[:-1] == list(range(39, 40 - len(cards), -1)), "the worst first; the last that finds room is smaller"
    assert 0 <= steps[-1] < steps[-2] and len(cards) > 2
    assert f"{len(cards)} of 40 completions" in made.one(id="left-out").text


def test_long_runs_give_way_to_the_limit() -> None:
    k1, k3 = ([step * factor % 97 for step in range(210)] for factor in (7919, 7907))
    run = run_of(k1=k1, k3=k3)
    runs = [replace(run, name=str(i)) for i in range(12)]
    assert len(render(runs).encode()) > 100_000 >= len(render(runs, limit=100_000).encode())
    with pytest.raises(DataError, match="too large"):
        render(runs, limit=50_000)


TAG = "<script>alert(1)</script>"


def answer(step: int, completion: str, **changes: Any) -> Answer:
    usual = {"question": "1+1=", "skill": "addition", "score": 0.0}
    return Answer(step=step, completion=completion, **usual | changes)


def run_with(name: str, *answers: Answer) -> ReportRun:
    run = run_of(name=name, k3=[0.0, 0.1])
    run.history.answers.extend(answers)
    return run


def section(*runs: ReportRun) -> Node:
    return parse(answer_section(runs))


def test_a_question_stands_beside_what_was_answered_first_and_last() -> None:
    other = {"question": "rev abcd=", "skill": "reversal"}
    first = [answer(0, "3"), answer(0, "dcba", score=1.0, **other)]
    last = [answer(9, "2", score=1.0), answer(9, "dcb", **other)]
    made = section(run_with("a", *first, answer(5, "4"), *last))
    assert made.one("table").rows() == [
        ["question", "after step 0", "after step 9"],
        ["1+1=addition", "3score 0.0", "2score 100.0"],
        ["rev abcd=reversal", "dcbascore 100.0", "dcbscore 0.0"],
    ]


def test_a_run_that_was_evaluated_once_has_answered_nothing_after_that() -> None:
    made = section(run_with("a", answer(20, "3")))
    assert made.one("table").rows() == [["question", "after step 20", "after"], ["1+1=addition", "3score 0.0", "–"]]


def test_several_runs_stand_side_by_side_after_what_the_first_answered_before() -> None:
    first = run_with("a", answer(0, "3"), answer(9, "2"))
    other = run_with("b", answer(0, "3"), answer(7, "5"), answer(7, "x", question="another"))
    made = section(run_with("none"), first, other)
    assert made.one("table").rows() == [
        ["question", "after step 0, a", "none", "a", "b"],
        ["1+1=addition", "3score 0.0", "–", "2score 0.0", "5score 0.0"],
    ]


def test_what_the_teacher_answers_is_a_column_more_and_text() -> None:
    taught = [answer(0, "3"), answer(9, "4"), replace(answer(9, TAG, score=1.0), who="teacher")]
    made = section(run_with("a", *taught))
    assert made.one("table").rows() == [
        ["question", "after step 0", "after step 9", "teacher"],
        ["1+1=addition", "3score 0.0", "4score 0.0", f"{TAG}score 100.0"],
    ]
    assert not made.all("script") and "The teacher's are its own" in made.text
    runs = [run_with(n, *taught) for n in "ab"] + [run_with("c", replace(taught[2], completion="2"))]
    columns = ["question", "after step 0, a", "a", "b", "c", "teacher of a", "teacher of c"]
    assert section(*runs).one("table").rows()[0] == columns, "a and b have one"


def test_a_teacher_at_a_url_has_no_column_and_that_is_said() -> None:
    run = run_with("a", answer(0, "3"), answer(9, "4"))
    assert "teacher" not in section(run).text
    run.history.config = {"teacher_url": "http://host:8000"}
    made = section(run)
    assert made.one("table").rows()[0] == ["question", "after step 0", "after step 9"]
    assert "A teacher at a URL only scores" in made.text


def test_scores_are_written_as_in_the_overview() -> None:
    run = run_with("a", answer(0, "3", score=0.996), answer(9, "2", score=1.0))
    run.history.evaluations += [Row(step=0, metrics={"addition": 0.996}), Row(step=9, metrics={"addition": 1.0})]
    tile, *_ = headlines(run, ["addition"], ScoreFormat.of([run]))
    made = section(run)
    assert made.one("table").rows()[1] == ["1+1=addition", "3score 99.6", f"2score {tile.value}"]
    assert f"with their scores ({tile.unit})." in made.text
    run.history.evaluations += [Row(step=10, metrics={"addition": 2.5})]
    made = section(run)
    assert made.one("table").rows()[1] == ["1+1=addition", "3score 0.996", "2score 1"], "they do not lie in 0 to 1"
    assert "with their scores." in made.text


def test_what_a_model_wrote_is_text_and_not_too_long_and_without_answers_it_says_so() -> None:
    made = section(run_with("a", answer(0, TAG + "y" * 1000, question=TAG), answer(1, " ", question=TAG)))
    assert not made.all("script") and TAG in made.text
    assert f"{TAG}{'y' * (LONGEST - len(TAG))}…" in made.text
    assert "(nothing)" in made.text
    assert section(run_with("a")).text == "No answers of an evaluation were written."
    assert "ReportCallback(answers=4)" in section(run_of(source="TRL trainer state")).text


def run(name: str = "a", **config):
    details = {"config": {"beta": 0.01, "seed": 0} | config, "versions": {"klamp": "0.1.0", "torch": name}}
    return run_of(name=name, details=details)


def test_runs_have_a_column_each_of_their_fields_and_versions() -> None:
    one = run("a", beta=0.04, output_dir="<runs/x>", kl_exclude_tokens=())
    one.history.changes = {3: "beta 0.04 -> 0.01"}
    made = parse(settings_section([one, run("b"), run_of(name="c")]))
    fields, versions = made.all("table")
    assert fields.rows()[:3] == [["field", "a", "b", "c"], ["beta", "0.04", "0.01", "–"], ["seed", "0", "0", "–"]]
    assert fields.rows()[3:] == [["output_dir", "<runs/x>", "–", "–"], ["kl_exclude_tokens", "(empty)", "–", "–"]]
    assert versions.rows()[1:] == [["klamp", "0.1.0", "0.1.0", "–"], ["torch", "a", "b", "–"]]
    assert "a, after step 3: beta 0.04 -> 0.01" in made.text
    assert parse(settings_section([one])).all("table")[0].rows()[0] == ["field", "value"]
    assert len(parse(settings_section([run_of()])).all(of="missing")) == 2, "neither is in the record"
