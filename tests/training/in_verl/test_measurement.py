"""What verl logs, read while it grows, under klamp's names and in klamp's units."""

from __future__ import annotations

import json

import pytest

from klamp.training.config import TrainConfig
from klamp.training.in_verl.run import LogReader, metrics_of, scores_of

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


@pytest.mark.parametrize("average", ["dapo", "grpo"])
def test_a_mean_stays_a_mean(average):
    assert metrics_of(ROW, config_of(loss_type=average, advantage_baseline="mean"))["kl/k3"] == 0.02


def test_the_kl_has_the_name_of_its_estimator():
    assert metrics_of(ROW, config_of(kl_estimator="k1", kl_horizon="sequence"))["kl/k1"] == pytest.approx(0.08)
    found = metrics_of(ROW, config_of(kl_estimator="k2"))
    assert not [name for name in found if name.startswith("kl/")], "klamp logs no k2"


def test_a_kl_in_the_reward_is_k1():
    row = {name: x for name, x in ROW.items() if "kl_" not in name}
    row |= {"actor/reward_kl_penalty": 0.1, "actor/reward_kl_penalty_coeff": 0.2}
    found = metrics_of(row, config_of(kl_placement="reward", kl_estimator="k1", kl_horizon="sequence"))
    assert (found["kl/k1"], found["beta"]) == (0.1, 0.2)


def test_a_run_without_a_kl_has_none():
    row = {name: x for name, x in ROW.items() if "kl_" not in name}
    assert "beta" not in metrics_of(row, config_of(beta=0.0))


def test_an_evaluation_is_no_step():
    row = {"step": 0, "val-core/addition/acc/mean@1": 0.75, "val-core/sorting 2/acc/mean@1": 0.5}
    row |= {"val-aux/addition/reward/mean@1": 0.1, "val-core/unknown/acc/mean@1": 0.2}
    assert metrics_of(row, config_of()) == {}
    assert scores_of(row, ["addition", "sorting 2", "reversal"]) == {"addition": 0.75, "sorting 2": 0.5}
    assert scores_of(ROW, ["addition"]) == {}
