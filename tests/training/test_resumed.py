"""What a resume may change: every field is done, refused with the reason, or the run's identity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tests.training.conftest import TINY, rows_of, steps_of, stored, tiny_llama

from klamp.errors import ConfigError
from klamp.records import read_record
from klamp.records.klamp_run import read_config
from klamp.training import checkpoint
from klamp.training.backends import train_run
from klamp.training.config import TrainConfig, field_owners
from klamp.training.folders import lines_of
from klamp.training.resumed import (
    FIXED,
    FIXED_BY,
    IDENTIFIED,
    check_resume,
    identity,
    in_force,
    plain,
    told,
    with_history,
)

BEGUN = {**TINY, "max_steps": 2, "eval_every": 0, "save_every": 0, "beta": 0.1, "warmup_steps": 0}
BEGUN |= {"lr_scheduler_type": "constant", "eval_size": 1}


@pytest.fixture
def resumed(tmp_path, llama):
    """Asks to resume a run of two steps to a fourth, with some values changed; makes what is looked at of it."""
    folder = tmp_path / "run"

    def ask(by="local", begun=None, /, **changes):
        was = TrainConfig.from_flat({**BEGUN, "model": llama, "backend": by, **(begun or {})})
        name = {"trl": "checkpoint-2", "verl": "global_step_2"}.get(by, "step-000002")
        (folder / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / name / "checksums.json").touch()
        (folder / "config.yaml").write_text(yaml.safe_dump(plain(was)))
        if not (folder / "identity.json").exists():
            (folder / "identity.json").write_text(json.dumps(identity(was)))
        now = plain(was) | {"output_dir": str(folder), "resume": True, "max_steps": 4} | changes
        return check_resume(TrainConfig.from_flat(now), folder)

    return ask


OTHER = {"backend": "trl", "dtype": "bfloat16", "master_weights": "none", "lora_r": 2, "lora_alpha": 8, "seed": 1}
OTHER |= {"lora_target_modules": ("q_proj",), "prompt_column": "q", "answer_column": "a", "skill_column": "s"}
OTHER |= {"teacher_models": ("a=DIR",), "chat_template": True, "system_prompt": "Hi", "eval_size": 9, "task_seed": 3}


@pytest.mark.parametrize("field", FIXED)
def test_what_cannot_change_is_refused_with_the_reason_before_any_work(resumed, field):
    with pytest.raises(ConfigError, match=f"a resume cannot change {field}") as caught:
        resumed(**{field: OTHER[field]}, **({"teacher_key": "k"} if field == "teacher_models" else {}))
    assert f"{field} " in caught.value.got and "->" in caught.value.got and "step 2" in caught.value.got
    assert caught.value.why == FIXED[field] and "damaged" not in str(caught.value)


def test_every_field_of_the_tables_is_one():
    assert {*FIXED, *IDENTIFIED, *(name for fields in FIXED_BY.values() for name in fields)} <= field_owners().keys()


@pytest.mark.parametrize(("backend", "begun", "changes", "why"), [
    ("trl", {}, {"num_iterations": 4}, "TRL counts updates"),
    ("verl", {}, {"learning_rate": 1e-6}, "verl loads it with its optimizer"),
    ("verl", {}, {"gpus": 2}, "read what as many wrote"),
    ("verl", {"lr_scheduler_type": "cosine"}, {"max_steps": 5}, "end of its old schedule"),
    ("local", {}, {"reference": "ema"}, "reference frozen has none"),
    ("local", {"beta": 0.0, "reference": "periodic"}, {"beta": 0.1}, "reference none has none"),
])  # fmt: skip
def test_what_one_backend_or_one_checkpoint_does_not_have(resumed, backend, begun, changes, why):
    with pytest.raises(ConfigError, match=f"cannot change {next(iter(changes))}") as caught:
        resumed(backend, begun, **changes)
    assert why in caught.value.why
    if not begun:
        assert resumed(backend, kl_clip_method="hard")[1] == "kl_clip_method none -> hard, max_steps 2 -> 4"


def test_another_model_or_data_is_named_and_a_copy_is_the_same(resumed, llama, gpt2, tmp_path):
    copied = str(shutil.copytree(llama, tmp_path / "copy"))
    assert f"-> {copied}" in resumed(model=copied)[1]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    for field, other in {"model": gpt2, "ref_model": gpt2, "task": str(tmp_path / "rows.jsonl")}.items():
        with pytest.raises(ConfigError, match=f"cannot change {field}") as caught:
            resumed(**{field: other})
        assert other in caught.value.got and str(tmp_path / "run") in caught.value.got
    stored(tiny_llama(hidden_size=16), Path(copied))
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot change model"):
            resumed(model=copied)
        (tmp_path / "run" / "identity.json").write_text("[3")  # damaged, or of an older version: by name


def test_steps_that_are_done_are_not_taken_back_and_without_one_all_may_change(resumed, tmp_path):
    with pytest.raises(ConfigError, match="cannot change max_steps") as caught:
        resumed(max_steps=1)
    assert "2 steps are done" in caught.value.why
    config = TrainConfig.from_flat({"resume": True, "output_dir": str(tmp_path / "run"), "seed": 5})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert check_resume(config, tmp_path / "run") is None


def test_the_history_says_what_was_in_force_when():
    first, second, third = (TrainConfig.from_flat({"beta": beta}) for beta in (0.1, 0.5, 0.2))
    values = with_history(second, with_history(first, {}, 0), 4)
    assert values["history"] == [{"until": 4, "beta": 0.1}]
    again = with_history(third, values, 6)
    assert [in_force(again, step)["beta"] for step in (1, 4, 5, 6, 7)] == [0.1, 0.1, 0.5, 0.5, 0.2]
    assert told(again) == {4: "beta 0.1 -> 0.5", 6: "beta 0.5 -> 0.2"}
    assert told(with_history(third, again, 3)) == {3: "beta 0.1 -> 0.2"}, "the later checkpoints were deleted"
    assert with_history(third, again, 8) == again, "a resume that changes nothing adds nothing"
    assert "history" not in with_history(first, values, 4), "taken back before a step was done"
    assert in_force(values | {"history": [{"until": "x", "beta": 3}, 7, {"until": 2, "no_field": 1}]}, 1)["beta"] == 0.5


@pytest.fixture(scope="module")
def begun(llama, tmp_path_factory):
    """Runs of two steps, by what they were begun with; each is made once."""
    made = {}

    def folder(**changes):
        key = json.dumps(changes)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("begun") / "run"
            train_run(TrainConfig.from_flat({**BEGUN, "model": llama, **changes, "output_dir": str(made[key])}))
        return made[key]

    return folder


def go_on(source: Path, folder: Path, **changes) -> Path:
    """The copy of a run, resumed to a fourth step."""
    shutil.copytree(source, folder)
    values = plain(read_config(folder)[1]) | {"output_dir": str(folder), "resume": True, "max_steps": 4} | changes
    train_run(TrainConfig.from_flat(values))
    return folder


NEW = {"beta": 0.5, "learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.5, "prompts_per_step": 2}


@pytest.mark.slow
def test_new_values_count_from_the_next_step_on_and_readers_know_since_when(begun, tmp_path):
    folder = go_on(begun(), tmp_path / "run", **NEW, num_iterations=2)
    rows = steps_of(folder)
    assert [row["beta"] for row in rows] == [0.1, 0.1, 0.5, 0.5]
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([5e-3, 5e-3, 1e-3, 1e-3])
    assert [row["policy/updates"] for row in rows[2:]] == [2.0, 2.0]
    saved = checkpoint.checkpoints(folder)[-1] / "optimizer.pt"
    (group,) = torch.load(saved, weights_only=True)["param_groups"]
    assert (group["weight_decay"], tuple(group["betas"])) == (0.1, (0.5, 0.99))
    assert [read_config(folder, step)[1].kl.beta for step in (2, 3)] == [0.1, 0.5]
    history = read_record(folder)
    assert "beta 0.1 -> 0.5, " in history.changes[2] and "history" not in history.config
    assert [view.settings.beta for view in history.replay()][::5] == [0.1, 0.5]
    again = go_on(folder, tmp_path / "again")  # a plain resume does not go back to the old values
    assert rows_of(again) == rows_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("was", "now"), [(0.1, 0.0), (0.0, 0.1)])
def test_a_kl_can_come_and_go_and_a_clip_has_its_length_measured(begun, tmp_path, was, now):
    rows = steps_of(go_on(begun(beta=was), tmp_path / "run", beta=now, kl_clip_method="hard"))
    assert [("kl/k3" in row, "kl/budget" in row, row["beta"]) for row in rows[1:3]] == [
        (was > 0, False, was),
        (now > 0, now > 0, now),
    ]


@pytest.mark.slow
def test_a_finished_run_goes_on_at_a_rate_that_rises_and_says_so(begun, tmp_path):
    source = begun(lr_scheduler_type="cosine", max_steps=3)
    folder = go_on(source, tmp_path / "run", max_steps=6, warmup_steps=2)
    rates = [row["train/learning_rate"] for row in steps_of(folder)][3:]
    assert rates == pytest.approx([2.134e-3, 2.5e-3, 7.322e-4], rel=1e-3), "half of the rise, then as planned"
    assert "learning rate goes up" in lines_of(folder / "cautions.jsonl")[-1]["text"]
