"""What people have of a run besides its record: printed lines, tables, exports, in whatever encoding."""

import json
import math
from pathlib import Path

import pytest
from tests.records.test_records import lines

from klamp.doctor.readers import read_record
from klamp.errors import DataError

VERL = "(TaskRunner pid=1) step:{0} - actor/kl_loss:0.00{0} - critic/score/mean:0.5 - training/global_step:{0} - x:nan"
TRL = "  5%|#   | {0}/30 [00:01<00:20]{{'loss': 0.1, 'grad_norm': nan, 'kl': 0.00{0}, 'reward': 0.5, 'step': {0}}}"
UNSLOTH = "{0}\t0.1\t0.5\t0.00{0}"
CHART = '"{0}","0.00{0}","0.00{0}","0.5"'


def text(path: Path, form: str, *, before: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before + "".join(form.format(step) + "\n" for step in range(1, 6)), encoding="utf-8")
    return path


FORMS = [
    *((f"train{end}", VERL, "starting ray\n\n") for end in (".log", ".txt", "")),
    *((f"train{end}", TRL, "") for end in (".log", ".txt", ".jsonl", "")),
    ("train.jsonl", VERL, ""),
    ("train.log", VERL.replace(":0.00{0}", ":np.float64(0.00{0})"), ""),
    ("train.log", "{{'loss': np.float32(0.1), 'reward': 0.5, 'kl': np.float64(0.00{0}), 'step': {0}}}", ""),
    ("train.txt", "1,50{0}  0.00{0}   0.5", "step   kl      reward\n"),
    ("train.txt", 'INFO 12:00:0{0} {{"step": {0}, "kl": 0.00{0}, "reward": 0.5, "loss": NaN, "clip": null}}', ""),
    ("table.csv", UNSLOTH, "Step\tTraining Loss\treward\tkl\n"),
    ("table.csv", UNSLOTH, "Step\tTraining Loss\trewards / x / mean\tkl\n"),
    ("table.csv", CHART, '"Step","lake-7 - train/kl","lake-7 - train/kl__MIN","lake-7 - train/reward"\n'),
    ("table.csv", "| {0} | 0.00{0} | 0.5 |", "| step | kl | reward |\n|---|---|---|\n"),
]  # fmt: skip
"""File, how a step is written, what comes before the steps."""


@pytest.mark.parametrize(("name", "form", "before"), FORMS)
def test_a_step_a_number_and_a_table_as_trainers_print_them(tmp_path: Path, name: str, form: str, before: str) -> None:
    history = read_record(text(tmp_path / name, form, before=before))
    reward = None if " / " in before else 0.5  # Unsloth's mean of one of several rewards
    assert [(row.step % 1500, row.metrics["kl/k3"], row.metrics.get("reward")) for row in history.rows] == [
        (step, step / 1000, reward) for step in range(1, 6)
    ]
    assert form is not TRL or math.isnan(history.rows[0].metrics["train/grad_norm"])
    if name == "table.csv":
        assert not history.unread, "the same curve once more is no other KL"
        assert [row.step for row in read_record(tmp_path).rows] == [1, 2, 3, 4, 5], "the only log of its folder"


def test_a_list_under_any_name(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps([{"step": 1, "kl": 0.001}, {"step": 2, "kl": 0.002}], indent=1), encoding="utf-8")
    assert [row.metrics["kl/k3"] for row in read_record(file).rows] == [0.001, 0.002]


def test_a_chart_with_several_runs_and_a_text_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="several runs") as caught:
        read_record(text(tmp_path / "two.csv", "{0},0.1,0.2", before="Step,a - train/kl,b - train/kl\n"))
    assert caught.value.why == "a, b" and "one run" in caught.value.fix
    with pytest.raises(DataError, match="no rows of metrics") as caught:
        read_record(text(tmp_path / "notes.txt", "note {0}, and more"))
    assert "trainer_state.json" in caught.value.fix and "CSV" in caught.value.fix
    with pytest.raises(DataError, match="no metric that klamp reads"):
        read_record(text(tmp_path / "other.csv", "{0},1", before="step,apples\n"))


ROWS = [{"step": step, "kl": step / 1000, "reward": 0.5} for step in range(1, 4)]


def test_utf_16_the_other_way_round(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"\xfe\xff" + "".join(json.dumps(row) + "\r\n" for row in ROWS).encode("utf-16-be"))
    assert [(row.step, row.metrics["kl/k3"]) for row in read_record(file).rows] == [(1, 0.001), (2, 0.002), (3, 0.003)]


@pytest.mark.parametrize("name", ["train.log", "train.json", "train.jsonl"])
def test_numbers_of_a_text_in_another_encoding_are_read_and_bytes_are_refused(tmp_path: Path, name: str) -> None:
    file, row = tmp_path / name, '{"note": "\u00e9t\u00e9", "step": 1, "kl": 0.1}'
    file.write_bytes((f'{{"log_history": [{row}]}}' if name.endswith("json") else row).encode("latin-1") + b"\n")
    assert read_record(file).rows[0].metrics == {"kl/k3": 0.1}
    file.write_bytes(b"\xff\x00" * 8)
    with pytest.raises(DataError):
        read_record(file)


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    state = json.dumps({"log_history": ROWS}, indent=1)
    for name, content in (("a.json", rows), ("b.json", state), ("c.json", json.dumps({"log_history": ROWS}))):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert [row.step for row in read_record(tmp_path / name).rows] == [1, 2, 3], name


def test_a_curve_that_tensorboard_exported_is_read_where_one_says_what_it_is(tmp_path: Path) -> None:
    file = text(tmp_path / "curve.csv", "160{0}00,{0},0.00{0}", before="Wall time,Step,Value\n")
    with pytest.raises(DataError, match="no metric that klamp reads") as caught:
        read_record(file)
    assert "--map" in caught.value.fix
    rows = read_record(file, {"kl/k3": "Value"}).rows
    assert rows[-1].metrics == {"kl/k3": 0.005}


def test_a_dump_by_metric_is_a_record_and_any_other_object_is_none(tmp_path: Path) -> None:
    file, table = tmp_path / "metrics.json", {"train/kl_penalty": {"1": 0.0, "2": 0.1}, "train/reward": {"2": 0.5}}
    file.write_text(json.dumps(table), encoding="utf-8")
    for path in (file, tmp_path):
        assert [dict(row.metrics) for row in read_record(path).rows] == [{"kl/k3": 0.0}, {"kl/k3": 0.1, "reward": 0.5}]
    for other in ({"a": {"b": 1}}, {}):
        file.write_text(json.dumps(other), encoding="utf-8")
        with pytest.raises(DataError, match="no log_history"):
            read_record(file)


@pytest.mark.parametrize("name", ["my_step", "learner/updates", "Global Step", "num_iter"])
def test_a_step_under_another_name_is_found_where_it_counts(tmp_path: Path, name: str) -> None:
    history = read_record(lines(tmp_path, *({name: 10 * i, "kl": 0.4, "timing_s/step": 3.5} for i in range(1, 4))))
    assert [row.step for row in history.rows] == [10, 20, 30]
    assert not history.settings.steps_counted


def test_rows_without_a_step_are_counted_and_that_is_said(tmp_path: Path) -> None:
    history = read_record(lines(tmp_path, *({"kl": 0.4, "timing_s/step": 3.5 + i} for i in range(3))))
    assert history.settings.steps_counted and [row.step for row in history.rows] == [1, 2, 3]
    assert history.cautions == ["no column says the step: rows are counted, and the first need not be the first step"]
