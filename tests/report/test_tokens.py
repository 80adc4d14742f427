"""The completions of a page, token by token: which come first, as many as fit, and the worst tokens."""

import json
import math
from typing import Any

import pytest
from tests.report.pages import Node, completion, parse, run_of

from klamp.report.run import ReportRun
from klamp.report.tokens import (
    FRAME,
    LONGEST,
    PATIENCE,
    Shown,
    card,
    fitting,
    legend,
    ranked,
    said,
    shade,
    token_section,
    worst_tokens,
)


def ref(size: float) -> dict[str, Any]:
    return {"ref": (-1.0, -2.0 - size, -0.5)}


def shown(**changes: Any) -> Shown:
    return ranked([run_of(completions=[completion(**changes)])])[0]


def test_the_worst_comes_first() -> None:
    rows = [completion(step=1, **ref(0.5)), completion(step=2, **ref(-2.0))]
    runs = [run_of(completions=rows), run_of(completions=[completion(step=1, **ref(1.0))])]
    places = [(each.run, each.completion.step, each.worst) for each in ranked(runs)]
    assert places == [(0, 2, 2.0), (1, 1, 1.0), (0, 1, 0.5)]


def test_what_an_alarm_blames_comes_before_everything() -> None:
    steps = [completion(step=s, **ref(0.5)) for s in range(1, 7)] + [completion(step=7, **ref(3.0))]
    far = completion(step=3, policy=(-1.0, -9.0, -0.5), ref=(-1.0, -2.0, -0.5), trained=(True, False, True))
    run = run_of(completions=[*steps, far], k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7])
    first = ranked([run])[0]
    assert (first.completion.step, first.blamed) == (7, frozenset({1}))


def test_twins_are_one() -> None:
    rows = [completion(**ref(0.5)), completion(**ref(0.6)), completion(**ref(0.5)), completion(**ref(0.5), reward=1.0)]
    assert [(each.index, each.times) for each in ranked([run_of(completions=rows)])] == [(1, 1), (0, 2), (3, 1)]


def test_sums_are_over_trained_tokens() -> None:
    row = shown(policy=(-1.0, -2.0, -0.5), ref=(-1.5, -5.0, math.nan), trained=(True, False, True))
    assert (row.against, row.worst, row.k1) == ("reference", 0.5, 0.5)
    assert row.k3 == pytest.approx(math.exp(-0.5) - 0.5)
    assert row.ratios[0] == 0.5 and math.isnan(row.ratios[1]) and math.isnan(row.ratios[2])


def test_without_a_reference_the_sampler_is_compared_with_and_k3_is_of_the_one_that_drew_the_tokens() -> None:
    other = (-1.0, -2.5, -0.5)
    drawn, held, alone = shown(ref=None, sampler=other), shown(ref=other), shown(ref=None)
    assert (drawn.against, drawn.worst) == ("sampler", 0.5)
    assert drawn.k3 == pytest.approx(math.exp(0.5) - 1 - 0.5), "as sampler/k3 is: tokens of the sampler"
    assert held.k3 == pytest.approx(math.exp(-0.5) - 1 + 0.5), "as kl/k3 is: tokens of the policy"
    assert (alone.against, alone.worst, alone.k1) == (None, 0.0, 0)


def test_worst_tokens_each_once() -> None:
    twin, rewarded = completion(**ref(-1.0)), completion(**ref(-1.0), reward=0.5)
    rows = [twin, twin, rewarded, completion(step=2, policy=(-1.0, -2.0, -0.5), ref=(-1.0, -2.25, -3.0))]
    found = worst_tokens(dict(enumerate(ranked([run_of(completions=rows)]))), most=2)
    assert found == [(0, 2), (1, 1)]


def test_of_a_long_completion_the_worst_stretch_is_shown() -> None:
    n = 3 * LONGEST
    deltas = [0.0] * n
    deltas[2 * LONGEST] = 4.0
    tokens, policy = ["a"] * n, [-1.0] * n
    begin, end = shown(tokens=tokens, policy=policy, ref=[-1.0 - d for d in deltas]).span
    assert end - begin == LONGEST and begin < 2 * LONGEST < end
    assert shown(tokens=tokens, policy=policy, ref=policy).span == (0, LONGEST)


def node(label: str = "", **changes) -> Node:
    return parse(card(shown(**changes), 7, read=str, label=label)).one("article")


def test_shades() -> None:
    assert [shade(ratio) for ratio in (0.0, 0.09, -0.09)] == ["z"] * 3
    assert [shade(ratio) for ratio in (0.1, 0.31, 1.0, 50.0)] == ["p1", "p2", "p3", "p4"]
    assert [shade(ratio) for ratio in (-0.1, -0.5, -2.9, -3.0)] == ["n1", "n2", "n3", "n4"]


def test_a_card() -> None:
    made = node(ref=(-1.5, -1.0, -0.5), prompt="40+2=", reward=1.0, advantage=-0.5, ended=True)
    strip = made.one(of="tokens")
    assert [(token.text, *token.classes) for token in strip.all("span")] == [("4", "p2"), ("2", "n3"), ("<eos>", "z")]
    assert made.one(of="prompt").one(of="words").text == "40+2="
    facts = [each.text for each in made.one(of="facts").all("div")]
    k3 = math.exp(-0.5) + 0.5 - 1 + math.exp(1.0) - 1 - 1
    assert facts[:2] == ["reward1", "advantage−0.5"]
    assert facts[2:] == [f"KL (k3 | k1){k3:.3f} | −0.5 nats", "largest1 nats", "length3 tokens, ended"]
    data = {"number": "7", "run": "0", "step": "1", "reward": "1", "worst": "1", "kl": f"{k3:.6g}", "length": "3"}
    assert {name: made.attributes[f"data-{name}"] for name in data} == data
    assert numbers(made) == {"p": [-1.0, -2.0, -0.5], "r": [-1.5, -1.0, -0.5]}
    assert "data-blamed" not in made.attributes
    assert "log policy − log reference" in (strip.attributes["aria-label"] or "")


def test_the_distances_to_the_other_anchors_wait_for_the_choice() -> None:
    made = node(ref=(-1.5, -1.0, -0.5), teacher=(-1.0, -4.0, math.nan), sampler=(-1.0, -2.0, -0.5)).one(of="facts")
    seen = [each.one("dt").text for each in made.all("div") if "hidden" not in each.attributes]
    assert seen == ["KL (k3 | k1)", "largest", "length"]
    kl, largest = made.all("div", data_of="teacher")
    k3 = math.exp(-2.0) + 2 - 1
    assert (kl.text, largest.text) == (f"KL to the teacher (k3 | k1){k3:.2f} | +2 nats", "largest2 nats")
    assert (kl.attributes["data-kl"], kl.attributes["data-worst"]) == (f"{k3:.6g}", "2")
    assert made.all("div", data_of="sampler")[0].text == "mismatch (k3 | k1)0 | 0 nats"


def test_tokens_that_do_not_count_are_marked() -> None:
    made = node(policy=(-1.0, -2.0, math.nan), trained=(False, False, True), sampled=(False, True, True), ended=False)
    assert [token.classes for token in made.one(of="tokens").all("span")] == [["u", "q"], ["u", "m"], ["u"]]
    assert made.one(of="facts").all("dd")[-1].text == "2 tokens, cut off"


def test_twins_and_runs_are_named() -> None:
    row = completion()
    (twins,) = ranked([run_of(completions=[row, row])])
    made = parse(card(twins, 0, read=str, label="beta 0.1"))
    assert made.one("h4").text == "Step 1, completion 1 ×2"
    assert made.one(of="run").text == "beta 0.1"
    assert not node().all(of="run") and node().one("h4").text == "Step 1, completion 1"


def test_numbers_for_the_script_and_long_completions_that_are_cut_and_say_so() -> None:
    made = node(policy=(-1.123456789, math.nan, -math.inf), ref=None, sampler=(-1.0, -2.0, -0.5))
    assert numbers(made) == {"p": [-1.12346, None, None], "s": [-1.0, -2.0, -0.5]}
    n = LONGEST + 10
    made = node(tokens=["a"] * n, policy=[-1.0] * n, ref=[-1.0] * n)
    assert len(made.one(of="tokens").all("span")) == LONGEST
    assert made.one(of="aside").text.startswith(f"Only tokens 1 to {LONGEST} of {n} are shown")


def test_the_legend_names_what_is_compared() -> None:
    made = parse(legend(["reference"]))
    swatches = ["−3", "−1", "−0.3", "−0.1", "0", "+0.1", "+0.3", "+1", "+3"]
    assert [each.text for each in made.all(of="swatch")] == swatches
    assert [each.classes[1] for each in made.all(of="swatch")][:2] == ["n4", "n3"]
    assert "reference likelier" in made.text and "log policy − log reference" in made.text


def many(count: int) -> ReportRun:
    rows = [completion(step=s, ref=(-1.0 - s / 10, -2.0, -0.5), reward=s / 10) for s in range(count)]
    return run_of(completions=rows)


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
    links = [(a.attributes["href"], a.attributes["data-position"]) for a in table.all("a")]
    assert links == [("#c0", "0"), ("#c1", "0")]


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
    made = section(*(run_of(name=name, completions=[completion(**ref(0.5))]) for name in "ab"))
    assert [card.one(of="run").text for card in made.all("article")] == ["a", "b"]
    assert [option.text for option in made.one("select", id="f-run").all("option")] == ["all runs", "a", "b"]
    assert made.one("table", of="worst").rows()[0][-2:] == ["run", "where"]


def test_without_completions_or_without_a_log_ratio_it_says_what_is_missing() -> None:
    made = section(run_of(k3=[0.1]))
    assert made.one("p").text.startswith("No completions with token log-probabilities were written.")
    assert not made.all("form")
    ours, trl, other = (section(run_of(source=name)).text for name in ("klamp run", "TRL trainer state", "TensorBoard"))
    assert "log_completions_every" in ours and "ReportCallback" not in ours
    assert "ReportCallback" in trl and "log_completions_every" not in trl and "ReportCallback" in other
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
