"""Rules over advantages, evaluations, settings, and what the reward makes of a policy: where each threshold lies."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.diagnostics.histories import completion, history_of, look, noisy, rises, steps_of

from klamp.doctor.history import History, Row, RunSettings


def wiggle(values: list[float], size: float = 0.01) -> list[float]:
    return [value + size * (-1) ** i for i, value in enumerate(values)]


def levels(*values: float, steps: int = 10) -> list[float]:
    """Rewards that stay so many steps on each level."""
    return wiggle([value for value in values for _ in range(steps)])


def spread(width: float, *, saturated: float = 0.0, **settings: Any) -> dict[str, Any]:
    """One step whose rewards differ by so much within a group."""
    curves = {"reward": [0.7], "reward_std": [width], "groups__saturated": [saturated]}
    return {"settings": RunSettings(**settings), **curves}


def dr_grpo(**settings: Any) -> RunSettings:
    return RunSettings(**{"loss_type": "dr_grpo", "verifier": "rules", "beta": 0.04} | settings)


def repeated(start: float, now: float, *, sound: int = 5, steps: int = 5) -> dict[str, Any]:
    return {"length__repeated": [start] * sound + [now] * steps}


def cut(start: float, now: float, **curves: list[float]) -> dict[str, Any]:
    return {"length__truncated": [start] * 5 + [now] * 5, **curves}


def longer(correlation: float) -> dict[str, Any]:
    """Completions that double and are cut, with this correlation of length and reward."""
    curves = {"length": [10.0] * 10 + [20.0] * 10, "length__truncated": [0.0] * 10 + [0.9] * 10}
    return curves | {"length__reward_correlation": [correlation] * 20}


def gone(left: float, reward: float, *, steps: int = 60) -> dict[str, Any]:
    """A run whose entropy falls from 0.8 to what is left, while the reward stands still."""
    entropy = [0.8] * 5 + [left] * (steps - 5)
    return {"policy__entropy": entropy, "reward": noisy(reward, steps, scale=0.01)}


ROWS: list[tuple[str, bool, dict[str, Any]]] = [
    ("huge-values", False, {"k3": [999.0]}),
    ("huge-values", True, {"k3": [1e3]}),
    ("huge-values", True, {"train__grad_norm": [1e5]}),
    ("huge-values", False, {"train__grad_norm": [999.0]}),
    ("huge-values", False, {"speed__tokens_per_second": [1e6]}),
    ("huge-values", True, {"policy__entropy": [math.nan]}),
    ("huge-values", True, {"train__loss": [-math.inf]}),
    ("huge-values", True, {"k3": [0.0], "written": [completion(sampler=(-1.0, -math.inf, -0.5))]}),  # impossible
    ("huge-values", False, {"k3": [0.0], "written": [completion(sampler=(-1.0, math.nan, -0.5))]}),
    ("advantage-scale", True, {"advantage__max": [10.5]}),
    ("advantage-scale", True, {"advantage__max": [2.5], "advantage__min": [-10.5]}),
    ("advantage-scale", False, {"advantage__max": [9.9]}),
    ("advantage-scale", True, {"reward": [1.0], "written": [completion(reward=3.0, advantage=-11.0)]}),
    ("advantage-scale", True, spread(1e-5)),  # rewards that differ by rounding
    ("advantage-scale", False, spread(1e-5, scale_rewards="none")),
    ("advantage-scale", False, spread(1e-5, loss_type="dr_grpo")),
    ("advantage-scale", False, spread(0.3)),
    ("advantage-scale", False, spread(0.0007, saturated=0.998)),  # one group of 500, of a rewards' usual spread
    ("advantage-scale", False, spread(0.0, saturated=1.0)),
    ("dr-grpo-with-kl", True, {"settings": dr_grpo()}),
    ("dr-grpo-with-kl", False, {"settings": dr_grpo(loss_type="grpo")}),
    ("dr-grpo-with-kl", False, {"settings": dr_grpo(verifier="model")}),
    ("dr-grpo-with-kl", False, {"settings": dr_grpo(verifier=None)}),
    ("dr-grpo-with-kl", False, {"settings": dr_grpo(beta=0.0)}),
    ("dr-grpo-with-kl", True, {"settings": dr_grpo(beta=0.0), "beta": [0.02]}),
    ("dr-grpo-with-kl", True, {"settings": dr_grpo(beta=None), "k3": [0.1]}),
    ("reward-collapse", True, {"reward": levels(0.3, 0.7, 0.45)}),  # by three tenths of its best
    ("reward-collapse", False, {"reward": levels(0.3, 0.7, 0.55)}),
    ("reward-collapse", True, {"reward": levels(-0.2, -0.5)}),  # a reward may be negative
    ("reward-collapse", False, {"reward": levels(0.7, 0.2, steps=4)}),
    ("reward-collapse", False, {"reward": levels(0.02, 0.0), "reward_std": [0.1] * 20}),  # half of what they differ by
    ("repetition", True, repeated(0.0, 0.51)),
    ("repetition", False, repeated(0.0, 0.49)),
    ("repetition", False, repeated(0.4, 0.55)),  # the task wants it
    ("repetition", False, repeated(0.0, 0.9, steps=2)),
    *(("repetition", True, repeated(0.0, 0.9, sound=sound, steps=6)) for sound in (2, 3, 4)),  # at the start
    ("repetition", False, {"length__repeated": [0.3, 0.2, 0.9, 0.3, 0.8, 0.2, 0.9, 0.5, 0.4, 0.7]}),
    ("saturated", False, {"groups__saturated": [0.98] * 20}),  # 99 in 100 are
    ("saturated", False, {"groups__saturated": [1.0] * 19}),
    ("truncated", True, cut(0.0, 0.26)),
    ("truncated", False, cut(0.0, 0.24)),
    ("truncated", False, cut(1.0, 1.0)),  # by design
    ("truncated", False, cut(0.2, 0.29)),
    ("truncated", True, cut(1.0, 1.0, groups__saturated=[0.7] * 10)),  # and the answers earn little
    ("truncated", False, cut(1.0, 1.0, groups__saturated=[0.3] * 5 + [1.0] * 5)),  # they earn, and then all do
    ("truncated", False, {"length__truncated": [0.9] * 4}),
    ("truncated", False, longer(0.8)),  # the reward makes them longer
    ("truncated", True, longer(0.1)),
    ("not-trained", False, {"first": 40, "train__grad_norm": [0.0] * 5}),  # the record begins late
    ("entropy-collapse", True, gone(0.19, 0.5)),
    ("entropy-collapse", False, gone(0.19, 0.5, steps=59)),
    ("entropy-collapse", False, gone(0.21, 0.5)),  # a quarter of 0.8 is 0.2
    ("entropy-collapse", False, gone(0.19, 0.95)),  # learned
    ("entropy-collapse", True, gone(0.19, 1.9)),
]


@pytest.mark.parametrize(("alarm", "raised", "run"), ROWS)
def test_both_sides_of_each_threshold(alarm: str, raised: bool, run: dict[str, Any]) -> None:
    assert rises(alarm, **run) is raised


@pytest.mark.parametrize(
    ("policy", "trained", "text"),
    [
        ((-1.0, math.nan, -0.5), (True, True, True), "1 trained token has no finite log-probability"),
        ((-math.inf, math.nan, -0.5), (True, True, False), "2 trained tokens have no finite log-probability"),
        ((-1.0, math.nan, -0.5), (True, False, True), None),
        ((math.nan, -2.0, -0.5), None, None),  # without a mask the row may begin with its prompt
        ((-1.0, -math.inf, -0.5), None, "1 trained token has no finite log-probability"),
    ],
)
def test_trained_tokens_without_a_log_probability(policy: tuple, trained: tuple | None, text: str | None) -> None:
    history = history_of(k1=[0.0], written=[completion(policy=policy, trained=trained)])
    evidence = look("huge-values", history)
    assert (None if evidence is None else evidence.text) == text
    if trained is None and text:  # as where the reference has no such token
        (each,) = history.completions[1]
        history.completions[1] = [replace(each, policy=(-1.0,) * 3, ref=policy)]
        assert look("huge-values", history) == evidence


@pytest.mark.parametrize(
    ("before", "after", "size", "alarmed"),
    [
        (0.82, 0.76, 10_000, True),
        (0.82, 0.78, 10_000, False),
        (0.82, 0.62, None, False),  # as of 50 examples
        (0.82, 0.45, None, True),
        (0.82, 0.76, 32, False),  # six points of 32 examples are noise
        (0.82, 0.45, 32, True),
        (40.0, 37.0, None, True),
        (40.0, 39.0, None, False),
        (0.5, 0.9, None, False),
    ],
)
def test_retention(before: float, after: float, size: int | None, alarmed: bool) -> None:
    history = History(settings=RunSettings(rl_skill="math", eval_size=size))
    history.evaluations = [
        Row(step=0, metrics={"math": 0.9, "chat": before}),
        Row(step=5, metrics={"math": 0.1, "chat": after}),
    ]
    found = look("retention", history)
    assert (found is not None) is alarmed
    assert found is None or ("chat" in found.text and "math" not in found.text)


CAUSES: list[tuple[str, dict[str, Any], str]] = [
    ("reward-collapse", {"reward": levels(0.7, 0.0), "k3": [0.0] * 8 + [0.5 * i for i in range(12)],
                         "beta": [0.01] * 20}, "the learning rate: the KL rose by 0.5 nats"),
    ("saturated", {"reward": [0.0] * 20}, "no completion earns anything"),
    ("saturated", {"reward": [0.8, *[1.0] * 20]}, "equal rewards within each prompt"),
    ("saturated", {"reward": [0.6] * 30 + [0.0] * 20}, "the reward was 0.6 once"),
]  # fmt: skip


@pytest.mark.parametrize(("alarm", "run", "cause"), CAUSES)
def test_an_alarm_says_what_did_it(alarm: str, run: dict[str, Any], cause: str) -> None:
    equal = {"groups__saturated": [1.0] * len(run["reward"])} if alarm == "saturated" else {}
    evidence = look(alarm, history_of(**run, **equal))
    assert evidence is not None and evidence.causes[0].startswith(cause)


def rewards_drawn(*shares: float, completions: int, seed: int) -> list[float]:
    """The mean reward of each step where so many completions earn 0 or 1, with these chances of 1."""
    draw = random.Random(seed)
    return [sum(draw.random() < share for _ in range(completions)) / completions for share in shares]


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("completions", [4, 16, 64])
def test_a_reward_that_jumps_has_not_collapsed_and_one_that_is_gone_has(completions: int, share: float) -> None:
    for seed in range(2):
        sound = history_of(reward=rewards_drawn(*[share] * 100, completions=completions, seed=seed))
        assert not steps_of("reward-collapse", sound)
    lost = history_of(reward=rewards_drawn(*[0.7] * 50, *[0.0] * 50, completions=completions, seed=0))
    falls = steps_of("reward-collapse", lost)
    assert len(falls) >= 25 and min(falls) > 50


@pytest.mark.parametrize(
    ("curves", "why"),
    [
        ({"train__learning_rate": [0.0] * 5, "train__grad_norm": [0.3] * 5}, "the learning rate was set to 0"),
        ({"train__grad_norm": [0.0] * 5, "train__learning_rate": [1e-6] * 5}, "frozen weights"),
        ({"train__grad_norm": [0.0] * 5, "length__truncated": [1.0] * 5}, "every completion is cut"),
        ({"train__grad_norm": [0.4] * 9 + [0.0] * 20}, "frozen weights"),
        ({"train__grad_norm": [0.4] * 9 + [0.0] * 19}, None),
        ({"train__learning_rate": [0.0] * 4, "train__grad_norm": [0.0] * 4}, None),
        ({"train__learning_rate": [0.0, *[1e-8] * 9], "train__grad_norm": [0.3] * 10}, None),  # a warm-up
        ({"train__grad_norm": [0.0] * 5, "groups__saturated": [1.0] * 5}, None),  # nothing is asked of it
        ({"train__learning_rate": [0.0] * 20, "k3": [0.001 * i for i in range(20)]}, None),  # rounded in the log
    ],
)
def test_a_policy_that_nothing_trains(curves: dict[str, list[float]], why: str | None) -> None:
    found = look("not-trained", history_of(**curves))
    assert (found.causes[0] if found else None) == why or (found and why and found.causes[0].startswith(why))


def test_completions_of_which_no_token_is_trained_on() -> None:
    masked, own = {"trained": (False,) * 3, "ended": False}, {"trained": (False, True, True), "ended": True}

    def found(*rows: dict) -> str | None:
        history = history_of(reward=[0.5] * len(rows))
        history.add_completions(completion(step, **row) for step, row in enumerate(rows, start=1))
        seen = look("not-trained", history)
        return seen.causes[0] if seen else None

    assert str(found(masked, masked, masked)).startswith("every completion is cut at the length limit")
    assert found(*[masked | {"ended": True}] * 3) == "the loss mask is empty"
    assert found(masked, masked) is None and found(masked, own, masked) is None, "a step may be all cut"


def test_the_trained_reward_on_held_out_prompts_is_no_skill() -> None:
    history = History()
    for step, score in ((0, 0.9), (10, 0.1)):
        scores = {"reward": score, "rewards/accuracy/mean": score, "math_reward": score}
        history.evaluations.append(Row(step=step, metrics=scores))
    assert look("retention", history) is None
    for row in history.evaluations:
        row.metrics["gsm8k/acc/mean@8"] = row.metrics["reward"]  # pyright: ignore[reportIndexIssue]
    evidence = look("retention", history)
    assert evidence is not None and evidence.text == "gsm8k/acc/mean@8 went from 0.9 to 0.1"


def test_without_a_number_of_examples_the_scatter_of_the_scores_is_the_margin() -> None:
    def lost(*scores: float) -> bool:
        history = History()
        history.evaluations = [Row(step=i, metrics={"chat": score}) for i, score in enumerate(scores)]
        return look("retention", history) is not None

    assert lost(0.80, 0.79, 0.80, 0.79, 0.80, 0.70) and not lost(0.80, 0.75, 0.82, 0.73, 0.81, 0.70)
    assert not lost(0.80, 0.70), "as of 50 examples"


@pytest.mark.parametrize(("reward", "cut", "before"), [(-1.0, 1.0, True), (0.6, 1.0, False), (-1.0, 0.2, False)])
def test_completions_that_were_broken_before_the_loss_say_so(reward: float, cut: float, before: bool) -> None:
    """What came first: a step's completions are written before its loss."""
    curves = {"train__loss": [0.1] * 8 + [math.nan], "reward": [0.6] * 8 + [reward], "length": [40.0] * 8 + [512.0]}
    found = look("huge-values", history_of(**curves, length__truncated=[0.0] * 8 + [cut]))
    assert found is not None and [cause[:28] for cause in found.causes] == ["the weights were broken befo"] * before


@pytest.mark.parametrize("seed", range(3))
def test_a_learning_rate_that_ended_and_one_that_is_rounded_to_0(seed: int) -> None:
    noise = noisy(1.0, 80, scale=0.15, seed=seed)

    def late(kl: list[float], rate: list[float]) -> list[int]:
        return [step for step in steps_of("not-trained", history_of(k3=kl, train__learning_rate=rate)) if step > 30]

    assert late([5e-4 * min(i, 25) * x for i, x in enumerate(noise)], [1e-6] * 25 + [0.0] * 55)[-1] == 80
    assert not late([5e-4 * i * x for i, x in enumerate(noise)], [0.0] * 80), "the policy moves: the 0 is rounded"
