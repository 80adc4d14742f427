"""What a run takes from verl's log; whole runs are in test_train.py."""

from __future__ import annotations

import json

import pytest
from tests.training.in_verl.test_train import Told

from klamp.errors import RunFolderError
from klamp.training.in_verl.run import VerlRun, context_of
from klamp.training.setup import make_accelerator


@pytest.fixture
def run_of(quick, tmp_path):
    """A run that is not started, and what it tells."""

    def make(**changes):
        config, told = quick(**changes), Told()
        folder = tmp_path / "run"
        context = context_of(config, make_accelerator(config, folder), folder, [])
        run = VerlRun(context, [told])
        run.tell(lambda o: o.on_start(run.info()))
        told.notes.clear()
        return run, told

    return make


def row(step, kl=0.0, **more):
    return {"step": step, "critic/score/mean": 0.5, "response_length/mean": 3.0, "actor/kl_loss": kl, **more}


def test_a_kl_at_the_first_step_is_warned_of_where_it_is_that_of_the_first_update(run_of):
    for changes, warned in (({}, True), ({"num_iterations": 2}, False)):
        run, told = run_of(**changes)
        run.take(row(1, kl=0.3))
        assert any(note[0] == "warning" for note in told.notes) == warned
    run, told = run_of()
    run.take(row(1, kl=0.001))
    run.take(row(2, kl=0.3))
    assert not [note for note in told.notes if note[0] == "warning"]


def test_a_row_is_a_step_an_evaluation_or_both(run_of):
    run, told = run_of()
    skill, *_ = run.context.task.evaluation
    run.take({"step": 0, f"val-core/{skill}/acc/mean@1": 0.25})
    run.take(row(1))
    run.take(row(2, **{f"val-core/{skill}/acc/mean@1": 0.75}))
    assert told.notes == [("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2)]
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
