"""The completions of a page: as many as fit, the worst first."""

import json

from tests.report.pages import Node, completion, parse, run_of

from klamp.report.run import ReportRun
from klamp.report.tokens import FRAME, PATIENCE, fitting, ranked, said, token_section


def many(count: int) -> ReportRun:
    return run_of(
        completions=[completion(step=s, ref=(-1.0 - s / 10, -2.0, -0.5), reward=s / 10) for s in range(count)]
    )


def numbers(card: Node) -> dict[str, list[float | None]]:
    return json.loads(card.attributes["data-numbers"] or "")


def section(*runs: ReportRun, room: int = 10**6) -> Node:
    completions = ranked(runs)
    return parse(token_section(runs, completions, fitting(runs, completions, room=room)))


def test_the_worst_tokens_link_to_their_completions() -> None:
    made = section(many(3))
    table = made.one("table", of="worst")
    assert table.rows() == [
        ["token", "log-ratio", "policy", "reference", "in context", "where"],
        ["4", "+0.2", "36.8 %", "30.1 %", "42<eos>", "step 2, completion 1, position 1"],
        ["4", "+0.1", "36.8 %", "33.3 %", "42<eos>", "step 1, completion 1, position 1"],
    ]
    assert [(a.attributes["href"], a.attributes["data-position"]) for a in table.all("a")] == [
        ("#c0", "0"),
        ("#c1", "0"),
    ]


def test_the_worst_ones_are_kept_where_room_is_short_and_a_too_large_one_makes_room_for_smaller_ones() -> None:
    run = many(30)
    completions = ranked([run])
    one = [*fitting([run], completions, room=FRAME + 1000)]
    some = [*fitting([run], completions, room=FRAME + 10_000)]
    assert one == [0] and some == list(range(len(some))) and 3 < len(some) < 20
    assert said(completions, completions[: len(some)]).startswith(f"{len(some)} of 30 completions")
    assert fitting([run], completions, room=0) == {}
    n = 2000
    large = completion(step=9, tokens=["a"] * n, policy=[-1.0] * n, ref=[-4.0] * n)
    run = run_of(completions=[large, completion(ref=(-1.5, -2.0, -0.5))])
    assert [*fitting([run], ranked([run]), room=FRAME + 3000)] == [1]


def test_filters_have_labels_and_limits() -> None:
    made = section(many(4))
    form = made.one("form")
    labels = {label.attributes["for"] for label in form.all("label") if "for" in label.attributes}
    controls = {each.attributes["id"]: each for each in form.walk() if each.name in ("input", "select")}
    assert labels | {"f-blamed"} == set(controls)
    assert (controls["f-step-from"].attributes["min"], controls["f-step-to"].attributes["max"]) == ("0", "3")
    assert "disabled" in controls["f-blamed"].attributes, "no alarm blames anything"
    assert "hidden" in form.attributes, "without a script it would do nothing"
    assert "f-run" not in controls


def test_the_anchors_that_were_recorded_are_offered_for_the_shades_and_one_alone_is_no_choice() -> None:
    teacher, sampler = (-1.0, -2.0, -3.5), (-1.0, -2.0, -0.5)
    made = section(run_of(completions=[completion(teacher=teacher, sampler=sampler), completion(step=2)]))
    choice = made.one(id="against")
    assert [each.attributes["value"] for each in choice.all("option")] == ["reference", "teacher", "sampler"]
    assert "hidden" in choice.attributes and choice.attributes["data-edges"] == "0.1 0.3 1.0 3.0"
    assert sorted(numbers(made.one("article", id="c0"))) == ["p", "r", "s", "t"]
    made = section(run_of(completions=[completion(ref=None, teacher=teacher, prompt="</script>")]))
    assert not made.all(id="against") and "log policy − log teacher" in made.text
    assert made.one(of="tokens").all("span")[2].classes == ["p4"]
    assert made.one("table", of="worst").rows()[1][:4] == ["<eos>", "+3", "60.7 %", "3.0 %"]


def test_several_runs_are_told_apart() -> None:
    runs = [
        run_of(name="a", completions=[completion(ref=(-1.5, -2.0, -0.5))]),
        run_of(name="b", completions=[completion()]),
    ]
    made = section(*runs)
    assert [card.one(of="run").text for card in made.all("article")] == ["a", "b"]
    assert [option.text for option in made.one("select", id="f-run").all("option")] == ["all runs", "a", "b"]
    assert made.one("table", of="worst").rows()[0][-2:] == ["run", "where"]


def test_without_completions_or_without_a_log_ratio_it_says_what_is_missing() -> None:
    made = section(run_of(k3=[0.1]))
    assert made.one("p").text.startswith("No completions with token log-probabilities were written.")
    for source, way in {"klamp run": "log_completions_every", "TRL trainer state": "ReportCallback"}.items():
        text = section(run_of(source=source)).text
        others = {"log_completions_every", "ReportCallback"} - {way}
        assert way in text and not any(other in text for other in others)
    assert "ReportCallback" in section(run_of(source="TensorBoard")).text
    assert not made.all("form")

    made = section(run_of(completions=[completion()]))
    assert "No token here has a log-ratio other than 0." in made.text and len(made.all("article")) == 1


def test_worst_tokens_stand_in_their_context() -> None:
    n = 30
    tokens, policy = [f"{i}\n" for i in range(n)], [-1.0] * n
    row = completion(tokens=tokens, policy=policy, ref=[-1.0 - 0.5 * (i == 20) for i in range(n)])
    (cell,) = section(run_of(completions=[row])).one("table", of="worst").all("code", of="context")
    assert cell.text == "…" + "".join(f"{i}↵" for i in range(12, 25)) + "…"
    assert (cell.one("b").text, cell.one("b").classes) == ("20↵", ["p2"])


def test_the_search_for_what_fits_ends(monkeypatch) -> None:
    run, drawn = many(3 * PATIENCE), []
    monkeypatch.setattr("klamp.report.tokens.card", lambda *given, **_: drawn.append(given) or "x" * 1000)
    assert len(fitting([run], ranked([run]), room=FRAME + 2500)) == 2
    assert len(drawn) == 2 + PATIENCE
