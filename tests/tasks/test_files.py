"""Data files: columns, splits, and errors that name the row."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from klamp.errors import DataError, MissingLibrary, UnknownNameError
from klamp.lab.tasks import Task, TaskConfig, arithmetic_tokenizer, load_task
from klamp.lab.tasks.files import read_rows

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(40)]


def write(folder: Path, rows: list[Any], name: str = "data.jsonl") -> str:
    path = folder / name
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("[" + ",".join(lines) + "]" if path.suffix == ".json" else "\n".join(lines) + "\n")
    return str(path)


def load(path: str, **options: Any) -> Task:
    return load_task(TaskConfig(task=path, **options), arithmetic_tokenizer())


def held_out(task: Task) -> list[str]:
    return [e.prompt for rows in task.evaluation.values() for e in rows]


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet", "DATA.JSONL"])
def test_every_format_gives_the_same_task(tmp_path: Path, name: str) -> None:
    task = load(write(tmp_path, ROWS, name))
    expected = load(write(tmp_path, ROWS, "expected.jsonl"))
    assert [e.prompt for e in task.train] == [e.prompt for e in expected.train]
    assert held_out(task) == held_out(expected)
    assert len(task.train) == 36
    first = task.train[0]
    assert first.answer == str(int(first.prompt.split("+")[0]) + 1)
    assert first.fields == {"prompt": first.prompt, "answer": first.answer}
    assert (task.score(first, first.answer), task.score(first, "no")) == (1.0, 0.0)


def test_the_split_is_stable_disjoint_and_moves_with_the_seed(tmp_path: Path) -> None:
    rows = [*ROWS, *ROWS[:20]]  # repeated prompts must not end up on both sides
    path = write(tmp_path, rows)
    task = load(path)
    assert set(held_out(task)).isdisjoint(e.prompt for e in task.train)
    assert {*held_out(task), *(e.prompt for e in task.train)} == {r["prompt"] for r in ROWS}
    assert held_out(load(path)) == held_out(task)
    assert held_out(load(write(tmp_path, rows[::-1], "b.jsonl")))[::-1] == held_out(task)
    assert held_out(load(path, task_seed=1)) != held_out(task)


def test_columns_can_have_any_name(tmp_path: Path) -> None:
    rows = [{"q": f"{i}", "gold": None if i else "x", "kind": "b" if i % 3 else "a", "n": i + 1.0} for i in range(30)]
    options = {"prompt_column": "q", "answer_column": "gold", "skill_column": "kind", "reference_length_column": "n"}
    task = load(write(tmp_path, rows), reward="tests.ablation.rewards:digits", **options)
    example = next(e for e in task.train if e.prompt == "7" or e.prompt == "8")
    number = int(example.prompt)
    assert example.skill == ("b" if number % 3 else "a")
    assert example.reference_length == number + 1
    assert example.answer == ""
    assert example.fields["q"] == example.fields["prompt"] == example.prompt
    assert example.fields["kind"] == example.skill
    # twice as many rows are of skill b: it is the one that is trained, and comes first
    assert task.rl_skill == "b"
    assert list(task.evaluation) == ["b", "a"]


def test_a_file_of_held_out_rows(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    other = write(tmp_path, [{"prompt": "9+9=", "answer": "18"}], "held.jsonl")
    task = load(path, eval_split=other)
    assert len(task.train) == 40
    assert held_out(task) == ["9+9="]
    skills = [{**row, "skill": "x"} for row in ROWS]
    path = write(tmp_path, skills)
    other = write(tmp_path, [{"prompt": "1", "answer": "1", "skill": "y"}], "held.jsonl")
    with pytest.raises(DataError, match="no held-out row is of the skill that is trained, 'x'"):
        load(path, eval_split=other, skill_column="skill")


def test_chat_messages_in_a_column(tmp_path: Path) -> None:
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "answer": "1"} for i in range(10)]
    for name in ("m.jsonl", "m.parquet"):
        task = load_task(TaskConfig(task=write(tmp_path, rows, name), system_prompt="s"), tokenizer)
        number = task.train[0].fields["prompt"][0]["content"]
        assert task.train[0].prompt == f"[system]s[user]{number}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*ROWS, {"prompt": " ", "answer": "1"}], "row 41 of data.jsonl has no prompt"),
        ([{"question": "q", "answer": "1"}], r"(?s)no column 'prompt'.*the columns answer, question"),
        ([*ROWS, "{broken"], "line 41 of data.jsonl: {broken"),
        (["[1, 2]"], r"(?s)line 1 of data.jsonl.*\[1, 2\] is not an object"),
        ([], "no rows"),
        ([ROWS[0]] * 5, "too few different prompts"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path, rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_column": "gold"}, "no column 'gold'"),
        ({"skill_column": "kind"}, "no column 'kind'"),
        ({"reference_length_column": "n"}, "no column 'n'"),
        *(
            ({"reference_length_column": name}, "row 1 of data.jsonl has no usable reference length")
            for name in ("answer", "zero", "half", "true", "null")
        ),
    ],
)
def test_columns_that_are_not_there_or_not_usable(tmp_path: Path, options: dict[str, str], message: str) -> None:
    row = {"answer": "x", "zero": 0, "half": 1.5, "true": True, "null": None}
    path = write(tmp_path, [{"prompt": f"{i}", **row} for i in range(3)])
    with pytest.raises(DataError, match=message):
        load(path, **options)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(str(tmp_path / "missing.jsonl"))
    for name in ("damaged.parquet", "damaged.json", "damaged.jsonl"):
        (tmp_path / name).write_bytes(b"[\xff\xfe")
        with pytest.raises(DataError, match="cannot be read"):
            load(str(tmp_path / name))
    with pytest.raises(UnknownNameError, match="unknown task"):
        load(str(tmp_path / "data.csv"))


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800"}', '{"prompt": "\\uDFFF", "answer": "1"}', "[" * 100_000])
@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_text_that_nothing_can_be_done_with_is_refused(tmp_path, line, name):
    (tmp_path / name).write_text(line if name.endswith("l") else f"[{line}]")
    with pytest.raises(DataError) as caught:
        read_rows(str(tmp_path / name))
    str(caught.value).encode()
    text = '{"prompt": "\\ud83d\\ude00"}'
    (tmp_path / name).write_text("\ufeff" + (text if name.endswith("l") else f"[{text}]"), encoding="utf-8")
    assert read_rows(str(tmp_path / name)) == [{"prompt": "😀"}]


def test_a_data_set_of_the_hub_is_read_by_its_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {i}", "solution": str(i)} for i in range(count)]
        write(tmp_path, rows, f"{split}.jsonl")
    read = read_rows(f"hub:{tmp_path}")
    assert [row["question"] for row in read] == ["train 0", "train 1", "train 2"]
    assert [row["solution"] for row in read_rows(f"hub:{tmp_path}::test")] == ["0", "1"]
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        read_rows(f"hub:{tmp_path}::validation")
    assert "validation" in str(caught.value.why) and "hub:NAME::SPLIT" in str(caught.value.fix)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingLibrary, match="a data set of the hub needs datasets"):
        read_rows(f"hub:{tmp_path}")
