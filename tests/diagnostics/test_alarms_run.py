"""Rules over advantages, evaluations, settings, and what the reward makes of a policy: where each threshold lies."""

import math
import random
from dataclasses import replace

import pytest
from tests.diagnostics.histories import completion, history_of, look, noisy

from klamp.doctor.examine import examine
from klamp.doctor.history import History, Row, RunSettings


@pytest.mark.parametrize(
    ("curves", "alarmed"),
    [
        ({"k3": [999.0]}, False),
        ({"k3": [1e3]}, True),
        ({"train__grad_norm": [1e5]}, True),
        ({"train__grad_norm": [999.0]}, False),
        ({"speed__tokens_per_second": [1e6]}, False),
        ({"policy__entropy": [math.nan]}, True),
        ({"train__loss": [-math.inf]}, True),
    ],
)
def test_huge_values(curves: dict, alarmed: bool) -> None:
    assert (look("huge-values", history_of(**curves)) is not None) is alarmed


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
    history = history_of(k1=[0.0])
    history.add_completions([completion(policy=policy, trained=trained)])
    evidence = look("huge-values", history)
    assert (None if evidence is None else evidence.text) == text
    if trained is None and text:  # as where the reference has no such token
        (each,) = history.completions[1]
        history.completions[1] = [replace(each, policy=(-1.0,) * 3, ref=policy)]
        assert look("huge-values", history) == evidence


def test_advantages_that_are_too_large() -> None:
    assert look("advantage-scale", history_of(advantage__max=[10.5])) is not None
    assert look("advantage-scale", history_of(advantage__max=[2.5], advantage__min=[-10.5])) is not None
    assert look("advantage-scale", history_of(advantage__max=[9.9])) is None
    history = history_of(reward=[1.0])
    history.add_completions([completion(reward=3.0, advantage=-11.0)])
    assert look("advantage-scale", history) is not None


@pytest.mark.parametrize(
    ("spread", "saturated", "settings", "alarmed"),
    [
        (1e-5, 0.0, RunSettings(), True),
        (1e-5, 0.0, RunSettings(scale_rewards="none"), False),
        (1e-5, 0.0, RunSettings(loss_type="dr_grpo"), False),
        (0.3, 0.0, RunSettings(), False),
        (0.0007, 0.998, RunSettings(), False),  # one group of 500, of a rewards' usual spread
        (0.0, 1.0, RunSettings(), False),
    ],
)
def test_rewards_that_differ_by_rounding(spread: float, saturated: float, settings: RunSettings, alarmed: bool) -> None:
    history = history_of(settings=settings, reward=[0.7], reward_std=[spread], groups__saturated=[saturated])
    assert (look("advantage-scale", history) is not None) is alarmed


@pytest.mark.parametrize(
    ("changes", "curves", "alarmed"),
    [
        ({}, {}, True),
        ({"loss_type": "grpo"}, {}, False),
        ({"verifier": "model"}, {}, False),
        ({"verifier": None}, {}, False),
        ({"beta": 0.0}, {}, False),
        ({"beta": 0.0}, {"beta": [0.02]}, True),
        ({"beta": None}, {"k3": [0.1]}, True),
    ],
)
def test_dr_grpo_with_kl(changes: dict, curves: dict, alarmed: bool) -> None:
    settings = RunSettings(**{"loss_type": "dr_grpo", "verifier": "rules", "beta": 0.04} | changes)
    assert (look("dr-grpo-with-kl", history_of(settings=settings, **curves)) is not None) is alarmed


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


def wiggle(values: list[float], size: float = 0.01) -> list[float]:
    return [value + size * (-1) ** i for i, value in enumerate(values)]


def collapsed(*levels: float, steps: int = 10, **curves: list[float]) -> bool:
    reward = wiggle([level for level in levels for _ in range(steps)])
    return look("reward-collapse", history_of(reward=reward, **curves)) is not None


def test_a_reward_collapses_by_three_tenths_of_its_best_and_says_where_the_learning_rate_did_it() -> None:
    assert collapsed(0.3, 0.7, 0.45) and not collapsed(0.3, 0.7, 0.55)
    assert collapsed(-0.2, -0.5), "a reward may be negative"
    assert not collapsed(0.7, 0.2, steps=4)
    assert not collapsed(0.02, 0.0, reward_std=[0.1] * 20), "less than half of what completions differ by"
    kl = [0.0] * 8 + [0.5 * i for i in range(12)]
    evidence = look("reward-collapse", history_of(reward=wiggle([0.7] * 10 + [0.0] * 10), k3=kl, beta=[0.01] * 20))
    assert evidence is not None and evidence.causes[0].startswith("the learning rate: the KL rose by 0.5 nats")


def rewards_drawn(*shares: float, completions: int, seed: int) -> list[float]:
    """The mean reward of each step where so many completions earn 0 or 1, with these chances of 1."""
    draw = random.Random(seed)
    return [sum(draw.random() < share for _ in range(completions)) / completions for share in shares]


def falls(rewards: list[float]) -> int:
    runs = (history_of(reward=rewards[:done]) for done in range(10, len(rewards) + 1))
    return sum(look("reward-collapse", run) is not None for run in runs)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("completions", [4, 16, 64])
def test_a_reward_that_jumps_has_not_collapsed_and_one_that_is_gone_has(completions: int, share: float) -> None:
    sound = [rewards_drawn(*[share] * 100, completions=completions, seed=seed) for seed in range(2)]
    assert sum(map(falls, sound)) == 0
    lost = rewards_drawn(*[0.7] * 50, *[0.0] * 50, completions=completions, seed=0)
    assert falls(lost) >= 25 and not falls(lost[:50])


def test_repetition_is_half_of_the_tokens_and_more_than_before() -> None:
    def repeated(start: float, now: float, steps: int = 5) -> bool:
        return look("repetition", history_of(length__repeated=[start] * 5 + [now] * steps)) is not None

    assert repeated(0.0, 0.51)
    assert not repeated(0.0, 0.49) and not repeated(0.4, 0.55), "the task wants it"
    assert not repeated(0.0, 0.9, steps=2)
    for sound in (2, 3, 4):  # a collapse within the first five steps
        assert look("repetition", history_of(length__repeated=[0.0] * sound + [0.9] * 6)) is not None
    assert look("repetition", history_of(length__repeated=[0.3, 0.2, 0.9, 0.3, 0.8, 0.2, 0.9, 0.5, 0.4, 0.7])) is None


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ([0.0] * 20, "no completion earns anything"),
        ([0.8, *[1.0] * 20], "equal rewards within each prompt"),
        ([0.6] * 30 + [0.0] * 20, "the reward was 0.6 once"),
    ],
)
def test_saturated_groups_say_why(reward: list[float], cause: str) -> None:
    evidence = look("saturated", history_of(reward=reward, groups__saturated=[1.0] * len(reward)))
    assert evidence is not None and evidence.causes[0].startswith(cause)
    assert look("saturated", history_of(groups__saturated=[0.98] * 20)) is None, "99 in 100 are"
    assert look("saturated", history_of(groups__saturated=[1.0] * 19)) is None


def test_truncated_is_more_than_at_the_start_or_of_no_use_and_not_what_a_reward_for_length_makes() -> None:
    def cut(start: float, now: float, **curves: list[float]) -> bool:
        return look("truncated", history_of(length__truncated=[start] * 5 + [now] * 5, **curves)) is not None

    assert cut(0.0, 0.26) and not cut(0.0, 0.24)
    assert not cut(1.0, 1.0) and not cut(0.2, 0.29), "by design"
    assert cut(1.0, 1.0, groups__saturated=[0.7] * 10), "and the answers earn little"
    assert not cut(1.0, 1.0, groups__saturated=[0.3] * 5 + [1.0] * 5), "they earn, and then all do"
    assert look("truncated", history_of(length__truncated=[0.9] * 4)) is None
    curves = {"length": [10.0] * 10 + [20.0] * 10, "length__truncated": [0.0] * 10 + [0.9] * 10}
    grown = history_of(**curves, length__reward_correlation=[0.8] * 20)
    assert look("truncated", grown) is None
    assert look("truncated", history_of(**curves, length__reward_correlation=[0.1] * 20)) is not None


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


def test_a_run_that_begins_late_is_not_called_idle_from_the_start() -> None:
    assert look("not-trained", history_of(first=40, train__grad_norm=[0.0] * 5)) is None


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


def test_a_sampled_token_that_its_sampler_calls_impossible() -> None:
    for sampler, lost in (((-1.0, -math.inf, -0.5), True), ((-1.0, math.nan, -0.5), False)):
        history = history_of(k3=[0.0])
        history.add_completions([completion(sampler=sampler)])
        evidence = look("huge-values", history)
        assert (evidence is not None and "1 trained token" in evidence.text) is lost


@pytest.mark.parametrize(("reward", "cut", "before"), [(-1.0, 1.0, True), (0.6, 1.0, False), (-1.0, 0.2, False)])
def test_completions_that_were_broken_before_the_loss_say_so(reward: float, cut: float, before: bool) -> None:
    """What came first: a step's completions are written before its loss."""
    curves = {"train__loss": [0.1] * 8 + [math.nan], "reward": [0.6] * 8 + [reward], "length": [40.0] * 8 + [512.0]}
    found = look("huge-values", history_of(**curves, length__truncated=[0.0] * 8 + [cut]))
    assert found is not None and [cause[:28] for cause in found.causes] == ["the weights were broken befo"] * before


@pytest.mark.parametrize("seed", range(10))
def test_a_learning_rate_that_ended_and_one_that_is_rounded_to_0(seed: int) -> None:
    noise = noisy(1.0, 80, scale=0.15, seed=seed)

    def late(kl: list[float], rate: list[float]) -> list[int]:
        found = examine(history_of(k3=kl, train__learning_rate=rate)).findings
        return [f.last_step for f in found if f.alarm.name == "not-trained" and f.last_step > 30]

    assert late([5e-4 * min(i, 25) * x for i, x in enumerate(noise)], [1e-6] * 25 + [0.0] * 55) == [80]
    assert not late([5e-4 * i * x for i, x in enumerate(noise)], [0.0] * 80), "the policy moves: the 0 is rounded"


@pytest.mark.parametrize(
    ("left", "reward", "steps", "alarmed"),
    [
        (0.19, 0.5, 60, True),
        (0.19, 0.5, 59, False),
        (0.21, 0.5, 60, False),  # a quarter of 0.8 is 0.2
        (0.19, 0.95, 60, False),  # learned
        (0.19, 1.9, 60, True),
    ],
)
def test_an_entropy_that_is_gone_while_the_reward_stands_still(
    left: float, reward: float, steps: int, alarmed: bool
) -> None:
    entropy, rewards = [0.8] * 5 + [left] * (steps - 5), noisy(reward, steps, scale=0.01)
    history = history_of(policy__entropy=entropy, reward=rewards)
    assert (look("entropy-collapse", history) is not None) is alarmed
