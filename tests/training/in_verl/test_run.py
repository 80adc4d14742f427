"""What verl logs, under klamp's names and in klamp's units, and what a run takes of it; whole runs: test_train.py."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from tests.training.conftest import IN_REWARD
from tests.training.test_trainer import Recorder

from klamp.errors import DataError, ModelError, RunFolderError
from klamp.training.config import TrainConfig
from klamp.training.in_verl import run
from klamp.training.in_verl.run import LogReader, VerlRun, check_teachers, context_of, metrics_of, scores_of
from klamp.training.setup import make_accelerator


@pytest.fixture
def run_of(quick, tmp_path):
    """A run that is not started, and what it tells."""

    def make(**changes):
        config, told = quick(**changes), Recorder()
        folder = tmp_path / "run"
        context = context_of(config, make_accelerator(config, folder), folder, [])
        run = VerlRun(context, [told])
        return run, told

    return make


def row(step, kl=0.0, **more):
    return {"step": step, "critic/score/mean": 0.5, "response_length/mean": 3.0, "actor/kl_loss": kl, **more}


def test_a_kl_at_the_first_step_is_warned_of_where_it_is_that_of_the_first_update(run_of):
    for changes, warned in (({}, True), ({"num_iterations": 2}, False)):
        run, told = run_of(**changes)
        run.take(row(1, kl=0.3))
        assert bool(told.told("warning")) == warned
    run, told = run_of()
    run.take(row(1, kl=0.001))
    run.take(row(2, kl=0.3))
    assert not told.told("warning")


def test_a_row_is_a_step_an_evaluation_or_both(run_of):
    run, told = run_of()
    skill, *_ = run.context.task.evaluation
    run.take({"step": 0, f"val-core/{skill}/acc/mean@1": 0.25})
    run.take(row(1))
    run.take(row(2, **{f"val-core/{skill}/acc/mean@1": 0.75}))
    assert told.calls == [("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2)]
    assert (run.before, run.after, run.step) == ({skill: 0.25}, {skill: 0.75}, 2)


def test_completions_are_kept_as_often_as_they_are_logged(run_of):
    run, _ = run_of(log_completions_every=3, max_steps=9)
    run.layout.rollouts.mkdir(parents=True)
    for step in range(1, 9):
        (run.layout.rollouts / f"{step}.jsonl").write_text("{}\n")
        run.take(row(step))
    kept = sorted(path.stem for path in run.layout.rollouts.iterdir())
    assert kept == ["1", "3", "6", "8"], "the last one may still be written"


def test_what_it_goes_on_from(run_of, tmp_path):
    run, _ = run_of()
    run.resume()
    assert run.step == 0, "it was killed before its first"
    other = run.layout.checkpoints / "step-000003"
    other.mkdir(parents=True)
    with pytest.raises(RunFolderError, match="no checkpoint"):
        run.resume()
    other.rmdir()
    run.layout.newest.write_text("4")
    with pytest.raises(RunFolderError, match=r"damaged(?s:.*)write the number of another one into"):
        run.resume()  # somebody deleted its folder: verl would begin anew, and repeat the steps
    run.layout.checkpoint(4).mkdir()
    lines = [
        {"step": 0, "eval/a": 0.1},
        {"step": 4, "reward": 0.4},
        {"step": 4, "eval/a": 0.3},
        {"step": 5, "reward": 1},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.resume()
    assert (run.step, run.before, run.after, run.metrics) == (4, {"a": 0.1}, {"a": 0.3}, {"reward": 0.4})


def test_what_is_known_before_the_first_step(run_of):
    run, _ = run_of(gpus=2, machines=3, ray_address="head:6379", lora_r=2)
    info = run.info()
    assert (info.processes, info.device) == (6, "a Ray cluster at head:6379")
    assert info.reference == "the policy with its adapter off, in verl"
    assert run_of(beta=0.0)[0].info().reference == "none"


ROW = {
    "step": 3,
    "critic/score/mean": 0.5,
    "response_length/mean": 4.0,
    "actor/kl_loss": 0.02,
    "actor/kl_coef": 0.01,
    "actor/lr": 1e-4,
    "timing_s/step": 2.0,
    "perf/unknown": 7.0,
}


def config_of(**changes):
    return TrainConfig.from_flat(
        {"backend": "verl", "max_completion_length": 16, "prompts_per_step": 2, "num_generations": 5, **changes}
    )


def test_lines_come_once_and_whole(tmp_path):
    file = tmp_path / "metrics.jsonl"
    reader = LogReader(file)
    assert list(reader.new()) == [], "not there yet"
    lines = [json.dumps({"step": step, "data": {"reward": step / 2}}) + "\n" for step in range(3)]
    file.write_text(lines[0] + lines[1][:9])
    assert list(reader.new()) == [{"step": 0, "reward": 0.0}]
    assert list(reader.new()) == []
    with file.open("a") as opened:
        opened.write(lines[1][9:] + '{"another": "line"}\n' + lines[2])
    assert [row["step"] for row in reader.new()] == [1, 2]


def test_names_and_units_are_klamps():
    found = metrics_of(ROW, config_of(num_iterations=2))
    assert found["kl/k3"] == pytest.approx(0.02 * 16 / 4)
    assert found["speed/tokens_per_second"] == 2 * 5 * 4.0 / 2.0
    rest = {"reward": 0.5, "beta": 0.01, "length/mean": 4.0, "train/learning_rate": 1e-4}
    rest |= {"speed/step_seconds": 2.0, "policy/updates": 2.0}
    assert {name: found[name] for name in found if name not in ("kl/k3", "speed/tokens_per_second")} == rest


REWARD_KL = {"actor/reward_kl_penalty": 0.1, "actor/reward_kl_penalty_coeff": 0.2}
WITHOUT_KL = {name: x for name, x in ROW.items() if "kl_" not in name}


@pytest.mark.parametrize(
    ("row", "changes", "expected"),
    [
        (ROW, {"loss_type": "dapo", "advantage_baseline": "mean"}, {"kl/k3": 0.02, "beta": 0.01}),
        (ROW, {"loss_type": "grpo", "advantage_baseline": "mean"}, {"kl/k3": 0.02, "beta": 0.01}),
        (ROW, {"kl_estimator": "k1", "kl_horizon": "sequence"}, {"kl/k1": 0.02 * 16 / 4, "beta": 0.01}),
        (ROW, {"kl_estimator": "k2"}, {"beta": 0.01}),
        (WITHOUT_KL | REWARD_KL, IN_REWARD, {"kl/k1": 0.1, "beta": 0.2}),
        (WITHOUT_KL, {"beta": 0.0}, {}),
    ],
    ids=["a mean stays a mean", "of sequences too", "k1", "klamp logs no k2", "in the reward", "none"],
)
def test_the_kl_has_the_name_of_its_estimator_and_the_unit_of_its_average(row, changes, expected):
    found = metrics_of(row, config_of(**changes))
    about_kl = {name: x for name, x in found.items() if name == "beta" or name.startswith("kl/")}
    assert about_kl == pytest.approx(expected)


def test_the_kl_to_a_teacher_has_klamps_names_already():
    row = ROW | {"actor/teacher/k1": -0.1, "actor/teacher/kl": 0.04, "actor/teacher/coef": 0.5}
    found = metrics_of(row, config_of(teacher_model="there"))
    expected = {"teacher/k1": -0.1, "teacher/kl": 0.04, "teacher/coef": 0.5}
    assert {name: x for name, x in found.items() if name.startswith("teacher/")} == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"teacher_model": "nowhere/DIR"}, "nowhere/DIR"),
        ({"teacher_models": ("a=builtin",), "teacher_key": "who"}, "who"),
    ],
    ids=["no such model", "no such column"],
)
def test_a_teacher_that_is_not_there_is_refused_before_verl_starts(quick, tmp_path, changes, text):
    config = quick(**changes)
    accelerator = make_accelerator(config, tmp_path / "run")
    with pytest.raises((DataError, ModelError), match=text), ExitStack() as last:
        VerlRun.build(config, accelerator, tmp_path / "run", [], last)
    assert not (tmp_path / "run" / "verl").exists()


def test_a_teacher_has_room_for_a_token_more_than_the_policy(run_of, monkeypatch):
    context = run_of(teacher_model="builtin")[0].context
    prompts = (len(context.tokenizer(e.prompt, add_special_tokens=False)["input_ids"]) for e in context.task.train)
    needed = max(prompts) + context.config.rollout.max_completion_length + 1
    monkeypatch.setattr(run, "describe_folder", lambda folder: (needed, None))
    check_teachers(context)
    monkeypatch.setattr(run, "describe_folder", lambda folder: (needed - 1, None))
    with pytest.raises(DataError, match="too long"):
        check_teachers(context)


def test_an_evaluation_is_no_step():
    row = {"step": 0, "val-core/addition/acc/mean@1": 0.75, "val-core/sorting 2/acc/mean@1": 0.5}
    row |= {"val-aux/addition/reward/mean@1": 0.1, "val-core/unknown/acc/mean@1": 0.2}
    assert metrics_of(row, config_of()) == {}
    assert scores_of(row, ["addition", "sorting 2", "reversal"]) == {"addition": 0.75, "sorting 2": 0.5}
    assert scores_of(ROW, ["addition"]) == {}
