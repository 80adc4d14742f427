"""The page for newcomers: every command on it is one that klamp understands, every field and preset exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from klamp.cli.arguments import parse_train
from klamp.cli.explain import read_request
from klamp.cli.flags import read_options
from klamp.cli.options import RecommendOptions
from klamp.cli.recommend import situation_of
from klamp.config import PRESETS
from klamp.config.recommend import RULES, Rule, recommend
from klamp.config.situation import Situation
from klamp.training.config import TrainConfig
from klamp.verify.printed import FORMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "which-kl.md").read_text(encoding="utf-8")
CODE = [
    *re.findall(r"`([^`\n]+)`", PAGE),
    *(line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()),
]
COMMANDS = sorted({line.partition("#")[0].strip() for line in CODE if line.startswith("klamp ")})


def test_there_are_commands_of_each_kind() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} == {"train", "explain", "verify", "recommend"}


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("klamp train")])
def test_a_train_command_is_understood(command: str) -> None:
    words = shlex.split(command.replace("NAME", "grpo"))[2:]
    assert parse_train(words).config


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("klamp explain ")])
def test_an_explain_command_names_what_exists(command: str) -> None:
    request = read_request(shlex.split(command)[2:])
    names = [name for name in request.options.names if not name.endswith(".yaml")]
    assert set(names) <= {*PRESETS, *FORMS}
    assert parse_train(request.flags).config


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("klamp recommend ")])
def test_a_recommend_command_is_understood(command: str) -> None:
    options = read_options(RecommendOptions, shlex.split(command)[2:], command="klamp recommend")
    assert recommend(situation_of(options)).choices


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("flags", sorted({c for c in CODE if c.startswith("--")}))
def test_flags_that_stand_alone_are_understood(flags: str) -> None:
    assert parse_train(shlex.split(flags)).config


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("entry", sorted({c for c in CODE if re.fullmatch(r"\w+: \S+", c)}))
def test_entries_of_a_file_are_understood(entry: str) -> None:
    name, value = entry.split(": ")
    assert str(parse_train([f"--{name}", value]).config.flat()[name]) == value


ROWS = dict(re.findall(r"^\| ([^|`]+) \| `(klamp train[^`]*)`", PAGE, re.M))
SITUATIONS = {
    "anything, for the first time": Situation(),
    "rule-based reward, only this task matters": Situation(gamed=False, keeps=False),
    "the reward is a model, or can be gamed": Situation(gamed=True, keeps=False),
    "the model must not forget": Situation(gamed=False),
    "several updates per rollout, or an inference engine that lags": Situation(lags=True),
    "a small vocabulary, or memory to spare": Situation(small_vocabulary=True),
    "completions must not grow under the KL": Situation(steady_length=True),
    "the exact gradient over completions, and a run that ends where beta says": Situation(ends_where_beta_says=True),
    "a KL that is free up to a distance": Situation(free_kl=0.1),
    "log-ratios of many nats in half precision": Situation(low_precision=True),
}


def test_the_rows_of_the_table_are_the_rules_of_recommend_in_their_order() -> None:
    papers = "a paper's numbers, as the paper has them"
    assert list(ROWS) == [*(rule.situation for rule in RULES), papers]
    assert list(SITUATIONS) == [rule.situation for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.situation)
def test_a_row_sets_what_its_rule_sets(rule: Rule) -> None:
    defaults = TrainConfig().flat()
    of_page = parse_train(shlex.split(ROWS[rule.situation])[2:]).config.flat()
    assert rule.applies(SITUATIONS[rule.situation])
    settled = {name: choice.value for name, choice in rule.settle(SITUATIONS[rule.situation]).items()}
    sizes = ("num_generations", "num_iterations", "max_completion_length")
    assert {name: value for name, value in settled.items() if value != defaults[name] and name not in sizes} == {
        name: value for name, value in of_page.items() if value != defaults[name]
    }
