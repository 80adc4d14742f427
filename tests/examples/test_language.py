"""examples/language without its weights: the two YAML files, the tasks' rows and rewards."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from examples.language.tasks import SKILLS, WORDS, happy_words, score_contained, score_happy, words
from tests.hosts.trl.hosts import tokenizer as bpe_tokenizer

from klamp.lab.config import TrainConfig
from klamp.lab.tasks import Example, TaskConfig, load_task
from klamp.lab.tasks.base import is_held_out

TASKS = "examples/language/tasks.py"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return bpe_tokenizer()


@pytest.mark.parametrize("name", ["describe", "short-answers"])
def test_a_yaml_file_names_the_folder_and_a_task_that_loads(name: str, tokenizer: Any) -> None:
    file = Path("examples/language") / f"{name}.yaml"
    config = TrainConfig.from_flat(yaml.safe_load(file.read_text(encoding="utf-8")))
    assert config.model.model == "examples/language/smollm2"
    assert len(load_task(config.task, tokenizer).train) > 300


def test_happy_words_are_counted_in_any_case_and_as_whole_words() -> None:
    assert score_happy("A Beautiful, beautiful house; joyful! Joyfully not.") == 3 / 8
    assert score_happy("A Beautiful, beautiful house; joyful!", distinct=True) == 2 / 8
    assert score_happy("unhappy happyness brightly") == 0
    assert score_happy("happy " * 20) == 1


def test_an_answer_is_a_whole_word() -> None:
    answer = Example(prompt="q", answer="small|little|Port of Spain")
    scores = {"It is 'Little'.": 1, "It is smaller.": 0, "Spain has a port": 0, "port of spain": 1}
    assert {text: score_contained(answer, text) for text in scores} == scores


def test_no_question_gives_its_answer_away_and_rows_are_distinct() -> None:
    for name in ("capitals", "opposites"):
        file, question = SKILLS[name]
        for first, answer in words(file):
            assert not score_contained(Example(prompt="q", answer=answer), question(first)), first
    for file in WORDS.iterdir():
        rows = [row[0].lower() for row in words(file.name)]
        assert len(set(rows)) == len(rows), file.name
    assert len(happy_words()) == 60 and not any(score_happy(thing) for (thing,) in words("things.txt"))


@pytest.mark.parametrize("name", ["describe", "describe_distinct", "sentiment"])
def test_a_task_holds_out_a_fifth_and_keeps_the_other_skills(name: str, tokenizer: Any) -> None:
    task = load_task(TaskConfig(task=f"{TASKS}:{name}"), tokenizer)
    assert task.name == name and task.rl_skill == name.partition("_")[0]
    assert list(task.evaluation) == [task.rl_skill, "capitals", "opposites", "own-answers"]
    held_out = task.evaluation[task.rl_skill]
    assert not {e.prompt for e in held_out} & {e.prompt for e in task.train}
    assert all(is_held_out(e.fields["prompt"], 5) for e in held_out)
    assert task.read == {"own-answers"}
    small = load_task(TaskConfig(task=f"{TASKS}:{name}", train_size=10, eval_size=7), tokenizer)
    assert small.train == task.train[:10] and {len(rows) for rows in small.evaluation.values()} == {7}


def test_a_data_set_of_reasoning_gym_is_scored_by_its_own_rules(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym")
    sizes = {"train_size": 20, "eval_size": 5}
    task = load_task(TaskConfig(task="examples/language/reasoning.py:leg_counting", **sizes), tokenizer)
    assert (len(task.train), len(task.evaluation["leg_counting"])) == (20, 5)
    example = task.train[0]
    assert task.score(example, f"<think>so</think> <answer>{example.answer}</answer>") == 1.0
    assert task.score(example, "many") < 0.5
