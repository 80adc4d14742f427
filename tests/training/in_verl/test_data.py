"""The files that verl reads hold klamp's prompts in their order; the reward is the task's; other data are noticed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import parquet

from klamp.errors import DataError, RewardError
from klamp.tasks import load_task
from klamp.tasks.base import Example, Task, TaskConfig
from klamp.training.in_verl import data as reward
from klamp.training.in_verl.data import answered, digest, held_out_rows, opening, training_rows, write_data
from klamp.training.in_verl.overrides import TEACHER, Layout
from klamp.training.models import load_tokenizer
from klamp.training.trainer import Trainer


def test_a_step_holds_the_prompts_of_klamps_own_loop(quick, context_of):
    trainer = Trainer(context_of(max_steps=5), [])
    rows = list(training_rows(quick(max_steps=5), trainer.context.task))
    assert len(rows) == 5 * 3
    for step in range(5):
        part = rows[3 * step : 3 * step + 3]
        assert [row["prompt"] for row in part] == [
            [{"role": "user", "content": example.prompt}] for example in trainer.prompts(step)
        ]
        assert [row["reward_model"]["ground_truth"] for row in part] == [e.answer for e in trainer.prompts(step)]


def test_a_prompt_names_its_teacher(quick):
    task = Task(
        name="t",
        train=[Example(prompt=f"p{i}", skill="a", fields={"subject": subject}) for i, subject in enumerate("xy")],
        evaluation={},
        rl_skill="a",
        score=lambda *_: 0.0,
    )
    config = quick(teacher_models=("x=one", "y=two"), teacher_key="subject")
    named = {row["prompt"][0]["content"]: row[TEACHER] for row in training_rows(config, task)}
    assert named == {"p0": "x", "p1": "y"}
    assert TEACHER not in next(training_rows(quick(), task))


def test_held_out_prompts_of_every_skill_that_is_answered():
    examples = {skill: [Example(prompt=f"{skill}{i}", skill=skill) for i in range(2)] for skill in ("a", "b", "c")}
    task = Task(
        name="t", train=examples["a"], evaluation=examples, rl_skill="a", score=lambda *_: 0.0, read=frozenset({"b"})
    )
    assert answered(task) == ["a", "c"]
    rows = list(held_out_rows(task))
    found = [(row["data_source"], row["extra_info"]["where"], row["extra_info"]["index"]) for row in rows]
    assert found == [("a", "a", 0), ("a", "a", 1), ("c", "c", 0), ("c", "c", 1)]


def test_the_files(quick, tmp_path):
    config, layout = quick(), Layout(tmp_path)
    tokenizer = load_tokenizer(config.model.model)
    task = load_task(config.task, tokenizer)
    write_data(config, task, tokenizer, layout)
    assert parquet.read_table(layout.train).to_pylist() == list(training_rows(config, task))
    assert parquet.read_table(layout.held_out).to_pylist() == list(held_out_rows(task))
    told = json.loads(layout.task.read_text())
    assert TaskConfig(**told["task"]) == config.task
    assert load_tokenizer(told["tokenizer"]).get_vocab() == tokenizer.get_vocab()


def test_data_files_are_found_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "held-out.jsonl", "rows:2.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert opening(TaskConfig(task="rows:2.jsonl"), Layout(tmp_path))["task"]["task"] == str(tmp_path / "rows:2.jsonl")
    told = opening(TaskConfig(task="rows.jsonl", eval_split="held-out.jsonl"), Layout(tmp_path / "run"))
    assert told["task"]["task"] == str(tmp_path / "rows.jsonl")
    assert told["task"]["eval_split"] == str(tmp_path / "held-out.jsonl")
    assert told["folder"] == str(tmp_path)
    assert opening(TaskConfig(), Layout(tmp_path))["task"]["task"] == "arithmetic"


def test_a_prompt_without_room_is_refused_and_one_that_just_fits_is_not(quick, tmp_path):
    config = quick(eval_size=1)
    tokenizer = load_tokenizer(config.model.model)
    task = load_task(config.task, tokenizer)
    shown = [*task.train, *(e for rows in task.evaluation.values() for e in rows)]
    longest = max(len(tokenizer(e.prompt, add_special_tokens=False)["input_ids"]) for e in shown)
    write_data(quick(eval_size=1, max_prompt_length=longest), task, tokenizer, Layout(tmp_path / "a"))
    with pytest.raises(DataError, match="longer than max_prompt_length") as caught:
        write_data(quick(eval_size=1, max_prompt_length=longest - 1), task, tokenizer, Layout(tmp_path / "b"))
    assert f"max_prompt_length to {longest}" in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_a_digest_tells_prompts_and_answers_apart():
    pairs = [("a", "b"), ("a", "c"), ("ab", ""), ("", "ab")]
    assert len({digest(Example(prompt=prompt, answer=answer)) for prompt, answer in pairs}) == 4


def test_every_path_is_absolute_and_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [path for path in vars(Layout(Path("runs/one"))).values() if isinstance(path, Path)]
    assert len(paths) > 8
    assert all(path.is_relative_to(tmp_path / "runs" / "one") for path in paths)


def test_the_newest_checkpoint_is_what_verl_says_last(tmp_path):
    layout = Layout(tmp_path)
    assert layout.newest_step() == 0
    layout.checkpoint(4).mkdir(parents=True)
    assert layout.newest_step() == 0, "it may still be written"
    for text, step in (("", 0), ("4", 4), ("12\n", 12)):
        layout.newest.write_text(text)
        assert layout.newest_step() == step


@pytest.fixture
def written(quick, tmp_path, monkeypatch):
    """(task, a training row, arguments besides the completion) of a run whose files are written."""

    def make(**changes):
        reward.open_task.cache_clear()
        config, layout = quick(**changes), Layout(tmp_path / "run")
        tokenizer = load_tokenizer(config.model.model)
        task = load_task(config.task, tokenizer)
        write_data(config, task, tokenizer, layout)
        row = next(iter(training_rows(config, task)))
        truth = row["reward_model"]["ground_truth"]
        return task, row, {"ground_truth": truth, "extra_info": row["extra_info"], "task": str(layout.task)}

    return make


def test_scores_are_the_tasks(written):
    task, row, given = written(reward="exact_match")
    example = task.train[row["extra_info"]["index"]]
    for text in (example.answer, "x", ""):
        score = reward.score(row["data_source"], text, **given, reward_router_address="verl's own")
        assert score == task.score(example, text)
    assert reward.score(row["data_source"], example.answer, **given) == 1.0


def test_a_reward_function_of_the_users_is_found_in_the_folder_of_the_run(written, tmp_path, monkeypatch):
    (tmp_path / "lengths_of_mine.py").write_text("def reward(prompt, completion, **row):\n    return len(completion)\n")
    monkeypatch.chdir(tmp_path)
    _, row, given = written(reward="lengths_of_mine:reward")
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path not in ("", str(tmp_path))])
    monkeypatch.delitem(__import__("sys").modules, "lengths_of_mine", raising=False)
    monkeypatch.chdir("/")
    assert reward.score(row["data_source"], "12345", **given) == 5.0


def test_the_task_is_opened_once_by_all_threads(written, monkeypatch):
    _, row, given = written()
    opened = []
    load = reward.load_task
    monkeypatch.setattr(reward, "load_task", lambda *args: opened.append(args) or load(*args))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: reward.score(row["data_source"], text, **given), "1234"))
    assert len(opened) == 1


@pytest.mark.parametrize("change", [{"index": 999}, {"where": "elsewhere"}, {"digest": "0" * 16}])
def test_other_data_than_were_written_are_noticed(change, written):
    _, row, given = written()
    given["extra_info"] = {**given["extra_info"], **change}
    with pytest.raises(RewardError, match="not the one whose prompts were written"):
        reward.score(row["data_source"], "1", **given)


def test_a_data_set_of_the_hub_in_a_folder_is_found_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    told = opening(TaskConfig(task="hub:data::train", eval_split="hub:openai/gsm8k:main:test"), Layout(tmp_path))
    assert told["task"]["task"] == f"hub:{tmp_path}/data::train"
    assert told["task"]["eval_split"] == "hub:openai/gsm8k:main:test"
