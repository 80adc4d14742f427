"""YAML files: flat or by section, with aliases, typed as flags are, and every mistake said with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.cli.arguments import read_file
from klamp.errors import ConfigError, UnknownNameError

DEMO = Path(__file__).resolve().parents[2] / "examples" / "config_demo.yaml"


@pytest.fixture
def write(tmp_path: Path):
    def save(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return save


def test_the_demo_file_says_what_the_grpo_tutorial_prints() -> None:
    assert read_file(DEMO) == {"beta": 0.01, "target_kl": 0.05}


def test_values_are_typed_as_their_fields(write) -> None:
    text = """
learning_rate: 1e-5        # YAML itself reads this as a text
max-steps: 500
beta: 1
resume: yes
target_kl: null
report_to: [tensorboard, wandb]
kl_exclude_tokens: 7
kl_controller_gains: [1, 0, 0.5]
scale_rewards: none
chat_template: ~
preset: grpo
"""
    assert read_file(write(text)) == {
        "learning_rate": 1e-5,
        "max_steps": 500,
        "beta": 1.0,
        "resume": True,
        "target_kl": None,
        "report_to": ("tensorboard", "wandb"),
        "kl_exclude_tokens": (7,),
        "kl_controller_gains": (1.0, 0.0, 0.5),
        "scale_rewards": "none",
        "chat_template": None,
        "preset": "grpo",
    }


def test_sections_may_be_nested(write) -> None:
    text = "kl: {kl_penalty: 0.02, target_kl: 0.1}\ntask:\n  task: rows.jsonl\nmodel: my/model\nseed: 3\n"
    assert read_file(write(text)) == {
        "beta": 0.02,
        "target_kl": 0.1,
        "task": "rows.jsonl",
        "model": "my/model",
        "seed": 3,
    }


def test_an_empty_file_sets_nothing(write) -> None:
    assert read_file(write("# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "got", "fix"),
    [
        ("max_stepz: 3", "max_stepz", "did you mean max_steps?"),
        ("kl_pnalty: 3", "kl_pnalty", "did you mean kl_penalty?"),
        ("kl: {betta: 1}", "betta", "did you mean beta?"),
        ("kl: {learning_rate: 1}", "learning_rate", "see `klamp train --help` for every name"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_the_file(write, text: str, got: str, fix: str) -> None:
    path = write(text)
    with pytest.raises(UnknownNameError) as caught:
        read_file(path)
    assert (caught.value.got, caught.value.fix) == (got, fix)
    assert str(path) in caught.value.what


@pytest.mark.parametrize("key", ["config", "dry_run", "all", "prepare", "debug"])
def test_options_of_the_command_line_are_no_keys(write, key: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_file(write(f"{key}: true"))
    assert "option of the command line" in caught.value.why


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_steps: abc", "a whole number"),
        ("max_steps: 1.5", "a whole number"),
        ("max_steps: true", "a whole number"),
        ("max_steps: null", "a whole number"),
        ("max_steps: [1, 2]", "a whole number"),
        ("beta: {x: 1}", "a number"),
        ("resume: maybe", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_and_file(write, text: str, part: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert caught.value.what == f"{text.partition(':')[0]} in {path} cannot be read"
    assert part in caught.value.why


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("beta: 0.1\nkl_penalty: 0.2", "beta is given twice"),
        ("beta: 0.1\nkl: {beta: 0.2}", "beta is given twice"),
        ("beta: 0.1\nbeta: 0.2", "not valid YAML"),
        ("beta: [0.1", "not valid YAML"),
        ("- beta", "holds no names"),
        ("beta", "holds no names"),
    ],
)
def test_files_that_cannot_be_meant(write, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(write(text))
    assert part in caught.value.what


def test_two_names_that_agree_are_no_error(write) -> None:
    assert read_file(write("beta: 0.1\nkl_penalty: 0.1\nkl: {kl_coef: 0.1}")) == {"beta": 0.1}


def test_a_missing_file_names_the_ones_beside_it(write) -> None:
    there = write("beta: 0.1")
    with pytest.raises(ConfigError) as caught:
        read_file(there.with_name("ran.yaml"))
    assert there.name in caught.value.fix
    with pytest.raises(ConfigError):
        read_file(there.parent)
