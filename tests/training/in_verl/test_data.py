"""The files that verl reads hold klamp's prompts in their order; the reward is the task's."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import parquet

from klamp.errors import DataError
from klamp.lab.engines import verl as reward
from klamp.lab.engines.verl import TEACHER, Layout, held_out_rows, training_rows, write_data
from klamp.lab.loop import Trainer
from klamp.lab.models import load_tokenizer
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import Example, Task, TaskConfig


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
    found = [(row["data_source"], row["prompt"][0]["content"]) for row in held_out_rows(task)]
    assert found == [("a", "a0"), ("a", "a1"), ("c", "c0"), ("c", "c1")]


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


def test_a_prompt_without_room_is_refused_and_one_that_just_fits_is_not(quick, tmp_path):
    config = quick(eval_size=1)
    tokenizer = load_tokenizer(config.model.model)
    task = load_task(config.task, tokenizer)
    shown = [*task.train, *(e for rows in task.evaluation.values() for e in rows)]
    longest = max(len(tokenizer(e.prompt, add_special_tokens=False)["input_ids"]) for e in shown)
    reward.write_inputs(quick(eval_size=1, max_prompt_length=longest), Layout(tmp_path / "a"))
    with pytest.raises(DataError, match="too long") as caught:
        reward.write_inputs(quick(eval_size=1, max_prompt_length=longest - 1), Layout(tmp_path / "b"))
    assert f"the limit is {longest - 1}" in str(caught.value) and "max_prompt_length" in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_every_path_is_absolute_and_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [path for path in vars(Layout(Path("runs/one"))).values() if isinstance(path, Path)]
    assert len(paths) > 8
    assert all(path.is_relative_to(tmp_path / "runs" / "one") for path in paths)


@pytest.fixture
def written(quick, tmp_path):
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
    example = next(e for e in task.train if e.prompt == row["prompt"][0]["content"])
    for text in (example.answer, "x", ""):
        score = reward.score(row["data_source"], text, **given, reward_router_address="verl's own")
        assert score == task.score(example, text)
    assert reward.score(row["data_source"], example.answer, **given) == 1.0


def test_data_files_and_a_reward_of_the_users_are_found_in_the_folder_of_the_run(written, tmp_path, monkeypatch):
    (tmp_path / "lengths_of_mine.py").write_text(
        "def reward(prompt, completion, **row):\n    return len(completion) + 10 * row['extra']\n"
    )
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "extra": 2} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    _, row, given = written(reward="lengths_of_mine:reward", task="rows.jsonl")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "lengths_of_mine", raising=False)
    monkeypatch.chdir("/")
    assert reward.score(row["data_source"], "12345", **given) == 25.0
    assert Path.cwd() == Path("/")


def test_the_task_is_opened_once_by_all_threads(written, monkeypatch):
    _, row, given = written()
    opened = []
    load = reward.load_task
    monkeypatch.setattr(reward, "load_task", lambda *args: opened.append(args) or load(*args))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: reward.score(row["data_source"], text, **given), "1234"))
    assert len(opened) == 1


def test_a_teacher_has_room_for_a_token_more_than_the_policy(quick, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(reward, "check_prompts", lambda *given: seen.append(given[-1]) or 1)
    config = quick(teacher_models=(f"a={quick().model.model}",), teacher_key="answer")
    monkeypatch.setattr(reward, "check_keys", lambda *given: None)
    reward.write_inputs(config, Layout(tmp_path / "run"))
    assert seen == [config.rollout.max_completion_length + 1], "its engine writes one"
