"""The reward as verl calls it is the task's, and other data are noticed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from klamp.errors import RewardError
from klamp.tasks import load_task
from klamp.training.in_verl import data as reward
from klamp.training.in_verl.data import training_rows, write_data
from klamp.training.in_verl.overrides import Layout
from klamp.training.models import load_tokenizer


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


def test_data_that_changed_since_are_noticed(written, tmp_path):
    _, row, given = written()
    file = tmp_path / "run" / "verl" / "task.json"
    told = json.loads(file.read_text())
    told["task"]["task_seed"] = 5
    file.write_text(json.dumps(told))
    with pytest.raises(RewardError, match="not the one whose prompts were written"):
        reward.score(row["data_source"], "1", **given)
