"""Plans as YAML files."""

from __future__ import annotations

import pytest

from klamp.ablation.plan import Arm
from klamp.cli.ablate_arguments import PlanFile, read_plan_file, seeds_of
from klamp.errors import ConfigError


def read(tmp_path, text: str) -> PlanFile:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    return read_plan_file(file)


def test_every_part(tmp_path) -> None:
    text = """
        name: n
        base: {run: {max-steps: 3}, kl_penalty: 0.5, preset: dapo}
        sweep: {kl_coef: [0, 1], kl-estimator: [k1], kl_exclude_tokens: [[], [special, 3]], target_kl: [null, 0.1]}
        arms: {one: , two: {kl: {kl_clip_method: hard}}}
        seeds: [3, 1]
        kl_prompts: 12
    """
    assert read(tmp_path, text) == PlanFile(
        name="n",
        base={"max_steps": 3, "beta": 0.5, "preset": "dapo"},
        sweep={
            "beta": (0.0, 1.0),
            "kl_estimator": ("k1",),
            "kl_exclude_tokens": ((), ("special", 3)),
            "target_kl": (None, 0.1),
        },
        arms=(Arm(name="one"), Arm(name="two", values={"kl_clip_method": "hard"})),
        seeds=(3, 1),
        kl_prompts=12,
    )


def test_how_often_is_a_plan_too(tmp_path) -> None:
    assert read(tmp_path, "seeds: 4").seeds == (0, 1, 2, 3)
    assert read(tmp_path, "seeds: [4]").seeds == (4,), "in a file a list is a list"


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("", "is empty", "sweep"),
        ("# base: {beta: 0.1}", "is empty", "sweep"),
        ("arm: {}", "unknown key", "arms"),
        ("beta: 0.1", "beta stands by itself", "base: {beta: ...}"),
        ("base: {bta: 1}", "unknown key", "beta"),
        ("base: 3", "base in", "beta: 0.01"),
        ("arms: [a, b]", "arms in", "beta: 0.01"),
        ("arms: {a: 3}", "the arm a in", "beta: 0.01"),
        ("arms: {a: {kl_estimator: k9}}", "unknown kl_estimator", ""),
        ("sweep: {beta: 0.1}", "sweep of beta", "beta: [0.1, ...]"),
        ("sweep: {beta: [x]}", "beta in", ""),
        ("sweep: {bta: [1]}", "unknown key", "beta"),
        ("seeds: 0", "seeds in", ""),
        ("seeds: [1, -2]", "seeds in", ""),
        ("seeds: true", "seeds in", ""),
        ("seeds: []", "seeds in", ""),
        ("kl_prompts: 0", "kl_prompts in", ""),
        ("kl_prompts: true", "kl_prompts in", ""),
        ("a: [", "not valid YAML", ""),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path, text, what, fix) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert what in caught.value.what and fix in caught.value.fix and "plan.yaml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan_file(tmp_path / "no.yaml")


def test_seeds() -> None:
    assert seeds_of([3], "--seeds") == (0, 1, 2) and seeds_of([3], "seeds in f") == (3,)
    with pytest.raises(ConfigError):
        seeds_of(10**6, "seeds in f")
