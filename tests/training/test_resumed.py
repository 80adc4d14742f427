"""What a resume may change: a short list; everything else is refused, with how to start a new run."""

import json
import shutil
from pathlib import Path

import pytest
from tests.training.conftest import TINY, refused, rows_of, steps_of, stored, tiny_llama

from klamp.cli.arguments import parse_train
from klamp.doctor.readers import read_record
from klamp.doctor.readers.klamp_run import describe_changes, in_force
from klamp.errors import ConfigError, RunFolderError
from klamp.lab import checkpoint
from klamp.lab.backends import train_run
from klamp.lab.checkpoint import check_resume, identity, identity_in
from klamp.lab.config import TrainConfig
from klamp.lab.folders import plain, read_config, with_history
from klamp.names import IDENTITY

BEGUN = {**TINY, "max_steps": 2, "eval_every": 0, "save_every": 0, "beta": 0.1, "warmup_steps": 0}
BEGUN |= {"lr_scheduler_type": "constant", "eval_size": 1}


@pytest.fixture
def resumed(tmp_path, llama):
    folder = tmp_path / "run"

    def ask(begun=None, /, **changes):
        was = TrainConfig.from_flat({**BEGUN, "model": llama, **(begun or {})})
        saved = folder / "checkpoints" / "step-000002"
        saved.mkdir(parents=True, exist_ok=True)
        if not (saved / IDENTITY).exists():
            (saved / IDENTITY).write_text(json.dumps(identity(was)))
        now = plain(was) | {"output_dir": str(folder), "resume": True, "max_steps": 4} | changes
        return check_resume(TrainConfig.from_flat(now), folder)

    return ask


OTHER = {"backend": "trl", "dtype": "bfloat16", "lora_r": 2, "seed": 1, "eval_size": 9, "num_iterations": 2}
OTHER |= {"prompts_per_step": 2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "kl_estimator": "k1"}
OTHER |= {"reward": "exact_match", "reference": "ema", "chat_template": True, "system_prompt": "Hi"}


@pytest.mark.parametrize("field", OTHER)
def test_what_cannot_change_is_refused_with_how_to_start_a_new_run(resumed, field, tmp_path):
    policy = tmp_path / "run" / "checkpoints" / "step-000002" / "policy"
    words = f"(?s)a resume cannot change {field}.*{field} .*->.*step 2.*klamp train --model {policy}"
    with refused(ConfigError, words):
        resumed(**{field: OTHER[field]})


NEW = {"learning_rate": 1e-3, "max_grad_norm": 0.5, "beta": 0.2, "target_kl": 0.1, "stop_on": ["kl-far"]}
NEW |= {"save_every": 7, "keep_checkpoints": 5, "eval_every": 3, "log_completions": 1, "report_to": ["tensorboard"]}


@pytest.mark.parametrize("field", NEW)
def test_what_people_change_after_a_spike_may_change(resumed, field):
    step, words = resumed(**{field: NEW[field]})
    assert step == 2 and f"{field} " in words and "max_steps 2 -> 4" in words


@pytest.mark.parametrize("moving", ["ema", "periodic"])
@pytest.mark.parametrize(("field", "was", "now"), [("beta", 0.0, 0.1), ("reference", "frozen", None)])
def test_a_moving_reference_cannot_begin_at_a_resume(resumed, moving, field, was, now):
    with refused(ConfigError, f"(?s)cannot change {field}.*the run had no reference that moves"):
        resumed({"reference": moving, field: was}, **{field: now or moving})


def test_another_model_or_data_is_named_and_a_copy_is_the_same(resumed, llama, gpt2, tmp_path):
    copied = str(shutil.copytree(llama, tmp_path / "copy"))
    assert f"-> {copied}" in resumed(model=copied)[1]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    others = {"model": gpt2, "ref_model": gpt2, "teacher_model": gpt2, "task": str(tmp_path / "rows.jsonl")}
    for field, other in others.items():
        with refused(ConfigError, f"(?s)cannot change {field}.*{other}.*{tmp_path / 'run'}"):
            resumed(**{field: other})
    stored(tiny_llama(hidden_size=16), Path(copied))
    with pytest.raises(ConfigError, match="cannot change model"):
        resumed(model=copied)


def test_steps_that_are_done_are_not_taken_back_and_without_one_all_may_change(resumed, tmp_path):
    with refused(ConfigError, "(?s)cannot change max_steps.*2 steps are done"):
        resumed(max_steps=1)
    config = TrainConfig.from_flat({"resume": True, "output_dir": str(tmp_path / "run"), "seed": 5})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert check_resume(config, tmp_path / "run") is None


@pytest.mark.parametrize("damage", ["", "[3", "{}", '{"run": 1, "config": 2}'])
def test_a_checkpoint_that_does_not_say_whose_it_is_is_not_continued(resumed, tmp_path, damage):
    resumed()
    (tmp_path / "run" / "checkpoints" / "step-000002" / IDENTITY).write_text(damage)
    with refused(RunFolderError, "(?s)does not say which run.*klamp train --model"):
        resumed()


def test_the_history_says_what_was_in_force_when():
    first, second, third = (TrainConfig.from_flat({"beta": beta}) for beta in (0.1, 0.5, 0.2))
    values = with_history(second, with_history(first, {}, 0), 4)
    assert values["history"] == [{"until": 4, "beta": 0.1}]
    again = with_history(third, values, 6)
    assert [in_force(again, step)["beta"] for step in (1, 4, 5, 6, 7)] == [0.1, 0.1, 0.5, 0.5, 0.2]
    assert describe_changes(again) == {4: "beta 0.1 -> 0.5", 6: "beta 0.5 -> 0.2"}
    assert describe_changes(with_history(third, again, 3)) == {3: "beta 0.1 -> 0.2"}, "later checkpoints were deleted"
    assert with_history(third, again, 8) == again, "a resume that changes nothing adds nothing"
    assert "history" not in with_history(first, values, 4), "taken back before a step was done"
    assert in_force(values | {"history": [{"until": "x", "beta": 3}, 7, {"until": 2, "no_field": 1}]}, 1)["beta"] == 0.5


@pytest.fixture
def begun(run_once):
    return lambda **changes: run_once(**BEGUN | changes)


def go_on(source: Path, folder: Path, **changes) -> Path:
    """The copy of a run, resumed to a fourth step."""
    shutil.copytree(source, folder)
    values = plain(read_config(folder)[1]) | {"output_dir": str(folder), "resume": True, "max_steps": 4} | changes
    train_run(TrainConfig.from_flat(values))
    return folder


def test_a_checkpoint_holds_the_runs_identity(begun, tmp_path):
    first = identity_in(checkpoint.checkpoints(begun())[-1])
    assert len(first["run"]) == 32 and first["config"]["beta"] == 0.1 and len(first["sha256"]["model"]) == 64
    state = checkpoint.load_state(checkpoint.checkpoints(begun())[-1])
    assert {"task", "reference"} == state["fingerprints"].keys(), "the task's holds the chat template"
    later = identity_in(checkpoint.checkpoints(go_on(begun(), tmp_path / "run", beta=0.5))[-1])
    assert later["run"] == first["run"] and later["config"]["beta"] == 0.5 and later["sha256"] == first["sha256"]


@pytest.mark.parametrize(("edit", "named"), [("num_iterations: 4", "num_iterations"), ("", "")])
def test_an_edited_config_yaml_is_refused_and_nothing_is_written(begun, tmp_path, edit, named):
    folder = Path(shutil.copytree(begun(num_iterations=2), tmp_path / "run"))
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("num_iterations: 2", edit) if edit else "")
    before = [(path, path.stat().st_mtime_ns) for path in folder.rglob("*")]
    config = parse_train(["--resume", str(folder), "--max_steps", "6"])[0]
    with pytest.raises(ConfigError, match=f"a resume cannot change {named}"):
        train_run(config)
    assert [(path, path.stat().st_mtime_ns) for path in folder.rglob("*")] == before


def test_new_values_count_from_the_next_step_on_and_readers_know_since_when(begun, tmp_path):
    folder = go_on(begun(), tmp_path / "run", beta=0.5, learning_rate=1e-3)
    rows = steps_of(folder)
    assert [row["beta"] for row in rows] == [0.1, 0.1, 0.5, 0.5]
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([5e-3, 5e-3, 1e-3, 1e-3])
    assert [read_config(folder, step)[1].kl.beta for step in (2, 3)] == [0.1, 0.5]
    history = read_record(folder)
    assert "beta 0.1 -> 0.5, " in history.changes[2] and "history" not in history.config
    again = go_on(folder, tmp_path / "again")  # a plain resume does not go back to the old values
    assert rows_of(again) == rows_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("was", "now"), [(0.1, 0.0), (0.0, 0.1)])
def test_a_kl_can_come_and_go_and_a_clip_has_its_length_measured(begun, tmp_path, was, now):
    rows = steps_of(go_on(begun(beta=was, kl_clip_method="hard"), tmp_path / "run", beta=now))
    for row, beta in zip(rows[1:3], (was, now), strict=True):
        assert ("kl/k3" in row, "kl/budget" in row, row["beta"]) == (beta > 0, beta > 0, beta)


@pytest.mark.slow
def test_a_finished_run_goes_on_by_the_longer_plan(begun, tmp_path):
    source = begun(lr_scheduler_type="cosine", max_steps=3, warmup_steps=2)
    folder = go_on(source, tmp_path / "run", max_steps=6)
    rates = [row["train/learning_rate"] for row in steps_of(folder)][3:]
    assert rates == pytest.approx([4.268e-3, 2.5e-3, 7.322e-4], rel=1e-3)
