"""A completion, token by token."""

import json
import math

from tests.report.pages import Node, completion, parse, run_of

from klamp.report.tokens import LONGEST, card, legend, ranked, shade


def shown(**changes):
    return ranked([run_of(completions=[completion(**changes)])])[0]


def node(label: str = "", **changes) -> Node:
    return parse(card(shown(**changes), 7, read=str, label=label)).one("article")


def test_shades() -> None:
    assert [shade(ratio) for ratio in (0.0, 0.09, -0.09)] == ["z"] * 3
    assert [shade(ratio) for ratio in (0.1, 0.31, 1.0, 50.0)] == ["p1", "p2", "p3", "p4"]
    assert [shade(ratio) for ratio in (-0.1, -0.5, -2.9, -3.0)] == ["n1", "n2", "n3", "n4"]


def test_a_card() -> None:
    made = node(ref=(-1.5, -1.0, -0.5), prompt="40+2=", reward=1.0, advantage=-0.5, ended=True)
    strip = made.one(of="tokens")
    assert [(token.text, token.classes) for token in strip.all("span")] == [
        ("4", ["p2"]),
        ("2", ["n3"]),
        ("<eos>", ["z"]),
    ]
    assert made.one(of="prompt").one(of="words").text == "40+2="
    facts = {each.one("dt").text: each.one("dd").text for each in made.one(of="facts").all("div")}
    k3 = math.exp(-0.5) + 0.5 - 1 + math.exp(1.0) - 1 - 1
    assert facts == {
        "reward": "1",
        "advantage": "−0.5",
        "KL (k3 | k1)": f"{k3:.3f} | −0.5 nats",
        "largest": "1 nats",
        "length": "3 tokens, ended",
    }
    data = {key: value for key, value in made.attributes.items() if key.startswith("data-")}
    assert data == {
        "data-number": "7",
        "data-run": "0",
        "data-step": "1",
        "data-reward": "1",
        "data-worst": "1",
        "data-kl": f"{k3:.6g}",
        "data-length": "3",
        "data-numbers": '{"p":[-1.0,-2.0,-0.5],"r":[-1.5,-1.0,-0.5]}',
    }
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
    assert json.loads(made.attributes["data-numbers"] or "") == {"p": [-1.12346, None, None], "s": [-1.0, -2.0, -0.5]}
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
