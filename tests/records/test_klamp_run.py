"""klamp's own run folders, also those of another version or cut short."""

import json
from pathlib import Path

import pytest
import yaml
from tests.records.test_records import lines

from klamp.doctor.readers import read_record
from klamp.doctor.readers.klamp_run import runs_in
from klamp.errors import DataError
from klamp.lab.config import TrainConfig
from klamp.lab.folders import plain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run writes: two steps, two evaluations, completions of the second step."""
    kl = {"beta": 0.04, "reference": "ema", "kl_placement": "advantage", "kl_estimator": "k1", "kl_horizon": "sequence"}
    config = plain(TrainConfig.from_flat({**kl, "eval_size": 9}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"a_field_of_next_year": 3}))
    rows = [{"step": 0, "eval/addition": 0.5}, {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75, "kl/k3": 0.1}]
    lines(tmp_path / "metrics.jsonl", *rows, {"step": 2, "eval/addition": 0.75})
    row = {"step": 2, "tokens": ["4"], "policy_logprobs": [-1.0], "ref_logprobs": [-1.5], "prompt": "2+2="}
    lines(tmp_path / "completions.jsonl", row, row | {"ended": True, "trained": [False], "reward": 1.0})
    return tmp_path


def test_everything_is_read_and_a_caution_once_though_a_resumed_run_says_it_again(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"rl_skill": "addition"}))
    history = read_record(folder)
    assert [(row.step, row.metrics) for row in history.rows] == [
        (1, {"reward": 0.5}),
        (2, {"reward": 0.75, "kl/k3": 0.1}),
    ]
    assert [(row.step, row.metrics) for row in history.evaluations] == [(0, {"addition": 0.5}), (2, {"addition": 0.75})]
    first, second = history.completions[2]
    assert first.log_ratios() == [(0, 0.5)] and first.group == "2+2=" and first.ended is None
    assert second.log_ratios() == [] and second.ended and second.reward == 1.0
    settings = history.settings
    assert (settings.beta, settings.rl_skill, settings.eval_size) == (0.04, "addition", 9)
    assert settings.moving_reference and not settings.other_reference
    assert read_record(folder).cautions == []
    lines(folder / "cautions.jsonl", *({"step": step, "text": text} for step, text in [(0, "a"), (0, "b"), (2, "a")]))
    assert read_record(folder).cautions == ["a", "b"]


def test_a_run_that_did_not_end(folder: Path) -> None:
    (folder / "completions.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    history = read_record(folder)
    assert history.step == 2 and history.completions == {} and history.settings.rl_skill is None
    assert "before its last step" in history.cautions[0], "a reward may have ended the process with exit code 0"
    (folder / "metrics.jsonl").unlink()
    (folder / "versions.json").write_text("{}")
    with pytest.raises(DataError, match="has not finished a step"):
        read_record(folder)


def test_a_damaged_configuration(folder: Path) -> None:
    (folder / "config.yaml").write_text("beta: [")
    with pytest.raises(DataError, match="not YAML"):
        read_record(folder)


DAMAGED = {
    "no object": "[1]",
    "text": '{"step": "x"}',
    "no step": '{"other": 1}',
    "too large": '{"step": 1, "reward": 1' + 400 * "0" + "}",
    "too deep": "[" * 100_000,
    "half": '{"step"',
    "half of a pair": '{"step": 1, "reward": "\\ud800"}',
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl", "answers.jsonl"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_named(tmp_path, name, damage):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    with (tmp_path / name).open("a") as file:
        file.write(f'{DAMAGED[damage]}\n{{"step": 1}}\n')
    with pytest.raises(DataError, match="line") as caught:
        read_record(tmp_path)
    assert str(tmp_path / name) in str(caught.value.got)


def klamp_run(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(TrainConfig.from_flat(changes))))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return folder


def test_the_versions_and_the_configuration(tmp_path: Path) -> None:
    folder = klamp_run(tmp_path / "run", beta=0.04)
    (folder / "versions.json").write_text(json.dumps({"klamp": "0.1.0", "torch_threads": 1}))
    history = read_record(folder)
    assert history.details.versions == {"klamp": "0.1.0", "torch_threads": "1"}
    assert history.config["beta"] == 0.04
    details = read_record(klamp_run(tmp_path / "other")).details
    assert details.versions == {} and details.words == ()


def test_the_runs_of_a_sweep_come_in_the_order_of_their_numbers_and_what_is_none_has_none(tmp_path: Path) -> None:
    run = klamp_run(tmp_path / "run")
    assert runs_in(run) == runs_in(run / "metrics.jsonl") == ([], [])
    (tmp_path / "runs" / "Nov21_10-00-00_host").mkdir(parents=True)
    assert runs_in(tmp_path) == ([], []), "TRL keeps its event files in a folder of that name"
    names = ["beta-0_seed-0", "beta-0_seed-10", "beta-0.01_seed-2", "beta-0.1_seed-0", "beta-10_seed-0", "none_seed-0"]
    for name in reversed(names):
        klamp_run(tmp_path / "runs" / name)
    runs, failed = runs_in(tmp_path)
    assert [folder.name for folder in runs] == names and failed == [tmp_path / "runs" / "Nov21_10-00-00_host"]
