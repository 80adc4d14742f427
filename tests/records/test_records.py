"""Which reader takes which path, and what is said where none does; klamp's own run folders, also those cut short."""

import json
from pathlib import Path

import pytest
import yaml

from klamp.doctor.examine import examine
from klamp.doctor.readers import read_record
from klamp.doctor.readers.files import json_lines
from klamp.doctor.readers.klamp_run import runs_in
from klamp.doctor.readers.logs import FRAME
from klamp.errors import ConfigError, DataError
from klamp.lab.config import TrainConfig
from klamp.lab.folders import plain


def lines(path: Path, *rows: object) -> Path:
    path = path / "metrics.jsonl" if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_trainer_state_by_hand(tmp_path: Path) -> None:
    log = [{"step": i + 1, "kl": kl, "reward": 0.5, "loss": 0.1} for i, kl in enumerate([0.0, 0.01, 1e5])]
    log += [{"step": 3, "eval_reward": 0.5, "eval_runtime": 1.0}, {"step": 3, "train_runtime": 1.0, "train_loss": 0.2}]
    for step in (9, 10):
        file = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"global_step": step, "log_history": log[: 1 if step == 9 else None]}))
    history = read_record(tmp_path)
    assert [row.metrics["kl/k3"] for row in history.rows] == [0.0, 0.01, 1e5]
    assert [row.metrics for row in history.evaluations] == [{"reward": 0.5}]
    assert {f.alarm.name for f in examine(history).findings} == {"huge-values", "kl-spike"}
    (tmp_path / "log.json").write_text(json.dumps(log))  # what a notebook dumps of it
    assert read_record(tmp_path / "log.json").rows == history.rows


def test_metrics_in_lines(tmp_path: Path) -> None:
    curves = {"step": [1, 2], "env/all/reward/total": [0.5, 0.6], "optim/kl_sample_train_v1": [0.001, 0.1]}
    file = lines(tmp_path, *({name: curve[i] for name, curve in curves.items()} for i in range(2)))
    for path in (file, tmp_path):
        history = read_record(path)
        assert [row.metrics["reward"] for row in history.rows] == [0.5, 0.6]
        assert [f.alarm.name for f in examine(history).findings] == ["sampler-mismatch"]


def test_a_half_written_last_line_is_passed_over(tmp_path: Path) -> None:
    file = lines(tmp_path / "m.jsonl", {"step": 1, "kl": 0.1})
    with file.open("a") as out:
        out.write('{"step": 2, "kl": 0.')
    assert len(read_record(file).rows) == 1
    with file.open("a") as out:
        out.write('\n{"step": 3, "kl": 0.1}\n')
    with pytest.raises(DataError, match=r"(?s)line 2 is not JSON.*leave it out: sed 2d \S+ > rest.jsonl"):
        read_record(file)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("missing", None, "there is nothing to examine"),
        ("notes.txt", "hello", "a text has no rows of metrics"),
        ("state.json", "{", "a file is not JSON"),
        ("state.json", "1", "a file holds no JSON object"),
        ("state.json", '{"best": 1}', "a trainer state has no log_history"),
        ("rows.jsonl", '{"text": "a"}\n', "no metric that klamp reads"),
        ("rows.jsonl", "", "no metric that klamp reads"),
        ("rows.jsonl", "3\n", "line 1 is no JSON object"),
        ("rows.jsonl", '{"old_log_probs": [0.1], "ref_log_prob": [0.1, 0.2]}\n', "line 1 is no completion"),
        ("rows.jsonl", '{"old_log_probs": ["a"]}\n', "line 1 is no completion"),
        ("run.wandb", "hello", "a file is no W&B run"),
        ("rows.jsonl", b"\xff\xf0\x00\n", "(?s)no metric.*it holds no whole line"),
        ("rows.jsonl", "[" * 100_000, "(?s)line 1 is not JSON.*nested too deeply"),
        ("rows.jsonl", '{"step": ' + "9" * 400 + "}", "(?s)line 1 is not JSON.*a whole number of 400 digits"),
        ("rows.jsonl", '{"step": 1, "kl": 0.', "(?s)no metric.*it holds no whole line"),
        ("run.wandb", b":W&B\0\1\0" + FRAME.pack(0, 4, 1) + b"\xff" * 4, "a W&B run is damaged"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str | bytes | None, what: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=what) as caught:
        read_record(path)
    assert caught.value.why and caught.value.fix


def test_rewards_whose_sum_no_float_holds_are_read(tmp_path: Path) -> None:
    row = {"policy_logprobs": [-0.1], "ref_logprobs": [-0.1], "reward": 1e308}
    assert read_record(lines(tmp_path / "rows.jsonl", row, row)).rows[0].metrics["reward"] == pytest.approx(1e100)


def test_the_only_jsonl_of_a_folder_is_its_record(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no record of a run"):
        read_record(tmp_path)
    verls = lines(tmp_path / "verl" / "gsm8k.jsonl", {"step": 0, "data": {"val-core/x/acc/mean@1": 1.0}},
                  {"step": 1, "data": {"actor/kl_loss": 0.0}})  # fmt: skip
    for path in (verls, verls.parent):
        history = read_record(path)
        assert (history.source, history.rows[0].metrics) == ("verl file log", {"kl/k3": 0.0})
    tokens = lines(tmp_path / "tokens" / "all.jsonl", {"policy_logprobs": [-0.1], "ref_logprobs": [-0.1]})
    assert read_record(tokens.parent).source == "JSONL rollouts"
    lines(verls.parent / "other.jsonl", {"step": 1, "kl": 0.0})
    with pytest.raises(DataError, match="several logs") as caught:
        read_record(verls.parent)
    assert caught.value.why == "gsm8k.jsonl, other.jsonl"
    lines(verls.parent / "metrics.jsonl", {"step": 1, "kl": 0.5})
    assert read_record(verls.parent).rows[0].metrics == {"kl/k3": 0.5}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "completions") for name in ("rows.jsonl", "12.jsonl", "step_1/rank_0.jsonl")),
        ("metrics.jsonl", "a klamp run"),
    ],
)
def test_names_for_a_record_that_has_none_to_map(tmp_path: Path, name: str, why: str) -> None:
    lines(tmp_path / "run" / name, {"step": 1, "policy_logprobs": [-0.1], "ref_logprobs": [-0.1]})
    if "klamp" in why:
        (tmp_path / "run" / "config.yaml").write_text("beta: 0.1")
    with pytest.raises(ConfigError, match="no names to map") as caught:
        read_record(tmp_path / "run", {"kl/k3": "my_kl"})
    assert why in caught.value.why and "leave --map out" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('{"a": 1}\n{"a": "\xe9'.encode()[:-1], [{"a": 1}]),
        ('{"a": "one\u2028line"}\n'.encode(), [{"a": "one\u2028line"}]),
    ],
    ids=["cut within a letter", "a separator of lines within a text"],
)
def test_a_line_ends_where_json_lines_end(tmp_path: Path, text: bytes, rows: list[dict[str, object]]) -> None:
    (tmp_path / "file.json").write_bytes(text)
    assert list(json_lines(tmp_path / "file.json")) == rows


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
    steps = [(row.step, row.metrics) for row in history.rows]
    assert steps == [(1, {"reward": 0.5}), (2, {"reward": 0.75, "kl/k3": 0.1})]
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
