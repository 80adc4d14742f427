"""A run by verl: its arguments, field by field; its files hold klamp's prompts, its reward is the task's."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tests.training.in_trl.test_program import SHARED, assert_each_field_once, names_of

from klamp.config import KLConfig, TeacherConfig
from klamp.config.loss import TRUST
from klamp.errors import ConfigError, DataError
from klamp.hosts.verl.overrides import overrides
from klamp.lab.config import TrainConfig
from klamp.lab.engines import verl as engine
from klamp.lab.engines.verl import ACTOR, TEACHER, Layout, held_out_rows, training_rows, write_data
from klamp.lab.loop import Trainer
from klamp.lab.models import load_tokenizer, model_path
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import Example, Task, TaskConfig


@pytest.fixture
def quick(config_of):
    return lambda **changes: config_of(**{"backend": "verl", "max_prompt_length": 20, "cpu": False, **changes})


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


def task_of(train: list[Example], evaluation: dict[str, list[Example]], **more: Any) -> Task:
    return Task(name="t", train=train, evaluation=evaluation, rl_skill="a", score=lambda *_: 0.0, **more)


def test_a_prompt_names_its_teacher(quick):
    examples = [Example(prompt=f"p{i}", skill="a", fields={"subject": subject}) for i, subject in enumerate("xy")]
    task = task_of(examples, {})
    config = quick(teacher_models=("x=one", "y=two"), teacher_key="subject")
    named = {row["prompt"][0]["content"]: row[TEACHER] for row in training_rows(config, task)}
    assert named == {"p0": "x", "p1": "y"}
    assert TEACHER not in next(training_rows(quick(), task))


def test_held_out_prompts_of_every_skill_that_is_answered():
    examples = {skill: [Example(prompt=f"{skill}{i}", skill=skill) for i in range(2)] for skill in ("a", "b", "c")}
    rows = held_out_rows(task_of(examples["a"], examples, read=frozenset({"b"})))
    found = [(row["data_source"], row["prompt"][0]["content"]) for row in rows]
    assert found == [("a", "a0"), ("a", "a1"), ("c", "c0"), ("c", "c1")]


@pytest.fixture
def written(quick, tmp_path):
    """Writes the files of a run; returns its configuration, its task and the layout."""

    def make(**changes):
        engine.open_task.cache_clear()
        config, layout = quick(**changes), Layout(tmp_path / "run")
        tokenizer = load_tokenizer(config.model.model)
        task = load_task(config.task, tokenizer)
        write_data(config, task, tokenizer, layout)
        return config, task, layout

    return make


def test_the_files(written):
    config, task, layout = written()
    assert parquet.read_table(layout.train).to_pylist() == list(training_rows(config, task))
    assert parquet.read_table(layout.held_out).to_pylist() == list(held_out_rows(task))
    told = json.loads(layout.task.read_text())
    assert TaskConfig(**told["task"]) == config.task
    assert load_tokenizer(told["tokenizer"]).get_vocab() == load_tokenizer(config.model.model).get_vocab()


def test_a_prompt_without_room_is_refused_and_one_that_just_fits_is_not(quick, tmp_path):
    config = quick(eval_size=1)
    tokenizer = load_tokenizer(config.model.model)
    task = load_task(config.task, tokenizer)
    shown = [*task.train, *(e for rows in task.evaluation.values() for e in rows)]
    longest = max(len(tokenizer(e.prompt, add_special_tokens=False)["input_ids"]) for e in shown)
    engine.write_inputs(quick(eval_size=1, max_prompt_length=longest), Layout(tmp_path / "a"))
    with pytest.raises(DataError, match="too long") as caught:
        engine.write_inputs(quick(eval_size=1, max_prompt_length=longest - 1), Layout(tmp_path / "b"))
    assert f"the limit is {longest - 1}" in str(caught.value) and "max_prompt_length" in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_every_path_is_absolute_and_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [path for path in vars(Layout(Path("runs/one"))).values() if isinstance(path, Path)]
    assert len(paths) > 8
    assert all(path.is_relative_to(tmp_path / "runs" / "one") for path in paths)


@pytest.fixture
def scored(written):
    """Writes the files of a run; returns its task, a training row and the score of a completion for that row."""

    def make(**changes):
        config, task, layout = written(**changes)
        row = next(iter(training_rows(config, task)))
        given = {"ground_truth": row["reward_model"]["ground_truth"], "extra_info": row["extra_info"]}
        given |= {"task": str(layout.task), "reward_router_address": "verl's own"}
        return task, row, lambda text: engine.score(row["data_source"], text, **given)

    return make


def test_scores_are_the_tasks(scored):
    task, row, score = scored(reward="exact_match")
    example = next(e for e in task.train if e.prompt == row["prompt"][0]["content"])
    for text in (example.answer, "x", ""):
        assert score(text) == task.score(example, text)
    assert score(example.answer) == 1.0


def test_data_files_and_a_reward_of_the_users_are_found_in_the_folder_of_the_run(scored, tmp_path, monkeypatch):
    (tmp_path / "lengths_of_mine.py").write_text(
        "def reward(prompt, completion, **row):\n    return len(completion) + 10 * row['extra']\n"
    )
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "extra": 2} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    *_, score = scored(reward="lengths_of_mine:reward", task="rows.jsonl")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "lengths_of_mine", raising=False)
    monkeypatch.chdir("/")
    assert score("12345") == 25.0
    assert Path.cwd() == Path("/")


def test_the_task_is_opened_once_by_all_threads(scored, monkeypatch):
    *_, score = scored()
    opened = []
    load = engine.load_task
    monkeypatch.setattr(engine, "load_task", lambda *args: opened.append(args) or load(*args))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(score, "1234"))
    assert len(opened) == 1


def test_a_teacher_has_room_for_a_token_more_than_the_policy(quick, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(engine, "check_prompts", lambda *given: seen.append(given[-1]) or 1)
    config = quick(teacher_models=(f"a={quick().model.model}",), teacher_key="answer")
    monkeypatch.setattr(engine, "check_keys", lambda *given: None)
    engine.write_inputs(config, Layout(tmp_path / "run"))
    assert seen == [config.rollout.max_completion_length + 1], "its engine writes one"


FOLDER = Path("runs/one")

TRANSLATED: dict[str, Any] = {**SHARED, "loss_type": "dapo", "surrogate": "cispo", "scale_rewards": "std"}
TRANSLATED |= {"advantage_baseline": "mean", "model": "there/another", "dtype": "bfloat16", "master_weights": "none"}
TRANSLATED |= {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ("q_proj",), "max_prompt_length": 100}
TRANSLATED |= {"lr_scheduler_type": "constant", "output_dir": "elsewhere", "resume": True, "log_completions": 0}
TRANSLATED |= {"log_answers": 0, "gpus": 2, "machines": 2, "ray_address": "auto"}
TRANSLATED |= {"verl_args": ("trainer.save_freq=3",)}
"""Another value of each field that is translated."""
NEEDS: dict[str, dict[str, Any]] = {
    "loss_type": {"advantage_baseline": "mean"},
    "scale_rewards": {"advantage_baseline": "mean"},
    "master_weights": {"dtype": "bfloat16"},
    "lora_alpha": {"lora_r": 4},
    "lora_target_modules": {"lora_r": 4},
    "resume": {"output_dir": "somewhere"},
}
"""Field -> the fields that it needs."""

REFUSED = (
    *("ref_model", "sampler_url"),
    *("mask_truncated_completions", "exact_kl_completions", "cpu", "stop_on", "log_completions_every"),
    *TRUST,
)
"""Fields of which only the default can be honoured: test_backends.py; of the KL: tests/hosts/test_every_field.py."""
AROUND = (*("backend", "tokenizer", "sampler", "gpu_memory"),)
"""Fields that the launcher uses, besides those of the task; vLLM samples in any case."""


def words_of(**changes: Any) -> list[str]:
    config = TrainConfig.from_flat({"backend": "verl", **changes})
    return engine.verl_overrides(config, Path(config.run.output_dir or FOLDER))


def values(words: list[str]) -> dict[str, str]:
    return dict(word.lstrip("+").split("=", 1) for word in words)


def test_every_field_is_in_one_of_the_lists():
    configs = (TaskConfig, TeacherConfig, KLConfig)
    assert_each_field_once(TRANSLATED, REFUSED, AROUND, *map(names_of, configs))


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("field", TRANSLATED)
def test_another_value_is_another_argument(field: str):
    needed = NEEDS.get(field, {})
    assert words_of(**needed, **{field: TRANSLATED[field]}) != words_of(**needed)


def test_the_kl_is_that_of_the_host_word_for_word():
    kl = KLConfig(beta=0.3, kl_gradient="forward")
    assert set(overrides(kl)) <= set(words_of(beta=0.3, kl_gradient="forward"))


def test_each_key_stands_once_and_the_users_own_come_last():
    own = ["trainer.logger=[console]", "actor_rollout_ref.actor.clip_ratio_c=3", "+a.b=1", "~data.seed"]
    words = words_of(verl_args=own)
    keys = [word.partition("=")[0] for word in words]
    assert len(keys) == len(set(keys)) and words[-4:] == own


MODE, SCALE, ADDRESS = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor", "ray_kwargs.ray_init.address"
MEAN = {"advantage_baseline": "mean", "max_completion_length": 9}
TWICE_TWO = {"gpus": 2, "machines": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (MEAN | {"loss_type": "dr_grpo"}, {MODE: "seq-mean-token-sum-norm", SCALE: "9"}),
        (MEAN | {"loss_type": "grpo"}, {MODE: "seq-mean-token-mean", SCALE: None}),
        (MEAN | {"loss_type": "dapo"}, {MODE: "token-mean", SCALE: None}),
        (TWICE_TWO, {f"{ACTOR}.ppo_micro_batch_size_per_gpu": "16", "trainer.n_gpus_per_node": "2"}),
        ({}, {ADDRESS: "local"}),  # Ray would join any cluster
        ({"ray_address": "auto"}, {ADDRESS: "auto"}),
        ({"max_steps": 9, "save_every": 0}, {"trainer.save_freq": "9", "trainer.total_training_steps": "9"}),
        ({"max_steps": 9, "eval_every": 0}, {"trainer.test_freq": "9"}),
        ({"max_steps": 2, "warmup_steps": 5}, {f"{ACTOR}.optim.lr_warmup_steps": "2"}),
    ],
)
def test_averages_shares_and_counts_have_verls_arguments(changes: dict[str, Any], expected: dict[str, str | None]):
    options = values(words_of(**changes))
    assert {name: options.get(name) for name in expected} == expected


def test_a_step_that_does_not_divide_over_the_gpus_is_refused():
    with pytest.raises(ConfigError, match="do not divide") as caught:
        words_of(gpus=3)
    assert "a multiple of 3" in caught.value.fix


def test_a_model_is_found_from_everywhere(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_path("mine") == str(tmp_path / "mine")
    assert model_path("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert Path(model_path("builtin")).is_absolute()


def test_a_teacher_is_that_of_the_host_with_its_weights_where_they_are(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    place = "distillation.teacher_models.teacher_model.model_path"
    options = values(words_of(teacher_model="mine", teacher_estimator="k3", teacher_coef=0.3))
    expected = values(overrides(KLConfig(), TeacherConfig(teacher_model="x", teacher_estimator="k3", teacher_coef=0.3)))
    assert options[place] == str(tmp_path / "mine")
    assert all(options[key] == value for key, value in expected.items() if key != place and "distillation" in key)
    alone = values(words_of(teacher_model="mine", reward="none", beta=0.0))
    key = "distillation.distillation_loss.use_task_rewards"
    assert (options[key], alone[key]) == ("True", "False")


def test_several_teachers_are_told_apart_by_a_column_of_klamps(tmp_path):
    words = words_of(teacher_models=[f"a={tmp_path}", "b=builtin"], teacher_key="subject")
    options = values(words)
    assert options["distillation.teacher_key"] == TEACHER and options["distillation.n_gpus_per_node"] == "2"
    assert options["distillation.teacher_models.teacher_1.model_path"] == str(tmp_path)
    assert Path(options["distillation.teacher_models.teacher_2.model_path"]).is_absolute()
    assert len({word.partition("=")[0].lstrip("+") for word in words}) == len(words)
