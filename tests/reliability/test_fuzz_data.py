"""Data files, odd or damaged in drawn ways: a task whose rows can be scored, or one error that names the place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tests.reliability.drawn import LINES, check_readable, check_says_what, check_says_why, examples, run, values

from klamp.cli.verify_model import read_prompts
from klamp.errors import KlampError
from klamp.tasks import Task, TaskConfig, arithmetic_tokenizer, load_task

TOKENIZER = arithmetic_tokenizer()
COLUMNS = ("prompt", "answer", "skill", "length")

good = st.integers(1, 99).map(lambda i: {"prompt": f"{i}+1=", "answer": i + 1, "skill": "sum", "length": i})
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "x", 3]), "content": values}), max_size=2)
cells = st.one_of(values, messages, st.sampled_from(["1+1=", 2, 3.0]))
odd = st.dictionaries(st.sampled_from([*COLUMNS, "", "other"]), cells, max_size=5)
row = st.one_of(good, good, good, odd, st.tuples(good, odd).map(lambda both: both[0] | both[1]))


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Lines of JSON, some of which are none; or the rows as a list; or a part of either."""
    rows = [json.dumps(each) for each in draw(st.lists(row, max_size=12))]
    for hostile in draw(st.lists(st.sampled_from(LINES), max_size=1)):
        rows.insert(draw(st.integers(0, len(rows))), hostile)
    text = ("[" + ",".join(rows) + "]" if draw(st.booleans()) else "\n".join(rows)).encode("utf-8", "surrogatepass")
    kind = draw(st.sampled_from(["whole", "whole", "whole", "cut", "bytes", "mark"]))
    at = draw(st.integers(0, min(len(text), 400)))
    if kind == "cut":
        return text[:at]
    if kind == "bytes":
        return text[:at] + draw(st.binary(min_size=1, max_size=4)) + text[at:]
    return b"\xef\xbb\xbf" + text if kind == "mark" else text


configs = st.fixed_dictionaries(
    {},
    optional={
        "prompt_column": st.sampled_from([*COLUMNS, "", "none"]),
        "answer_column": st.sampled_from([*COLUMNS, "none"]),
        "skill_column": st.sampled_from(["skill", "prompt", None]),
        "reference_length_column": st.sampled_from(["length", "prompt", None]),
        "eval_size": st.sampled_from([1, 3, 10**6]),
        "train_size": st.sampled_from([0, 1, 5]),
        "reward": st.sampled_from(["", "exact_match", "format_regex", "no_such", "os:getcwd", "math:nothing"]),
        "system_prompt": st.sampled_from(["", "Be brief.", "{"]),
        "task_seed": st.sampled_from([0, 7]),
    },
)


def check_task(file: Path, config: dict[str, Any], answer: str = "2") -> None:
    """Load the task of a file and score its first rows, or be told why not."""
    try:
        task: Task = load_task(TaskConfig(task=str(file), **config), TOKENIZER)
        for each in task.train[:2]:
            for completion in (each.answer, answer, ""):
                assert isinstance(task.score(each, completion), float)
    except KlampError as error:
        check_says_why(error)


@given(text=texts(), suffix=st.sampled_from([".jsonl", ".json", ".JSONL"]), config=configs)
@example(text=b'{"prompt": ' + b"[" * 100_000, suffix=".jsonl", config={})
@example(text=b'{"prompt": "\\ud800", "answer": 1}', suffix=".json", config={})
@example(text=b'{"prompt": "1+1=", "answer": ' + b"9" * 5000 + b"}", suffix=".jsonl", config={})
@examples(120)
def test_json_files(text: bytes, suffix: str, config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"data{suffix}"
        file.write_bytes(text)
        check_task(file, config)


def of_three(cell: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """A column of three rows."""
    return st.lists(cell, min_size=3, max_size=3)


chats = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=3)}))
columns = st.dictionaries(
    st.sampled_from([*COLUMNS, "other"]),
    st.one_of(
        of_three(st.one_of(st.none(), st.sampled_from(["1+1=", "2+1=", ""]))),
        of_three(st.one_of(st.none(), st.integers(-(2**40), 2**40))),
        of_three(st.one_of(st.none(), st.floats(), st.binary(max_size=2))),
        of_three(st.dates()),
        of_three(chats),
    ),
    min_size=1,
)


@given(table=columns, damage=st.one_of(st.none(), st.integers(0, 2000)), config=configs)
@examples(60)
def test_parquet_files(table: dict[str, list[Any]], damage: int | None, config: dict[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.parquet"
        try:
            parquet.write_table(pyarrow.table(table), file)
        except (pyarrow.ArrowException, TypeError):  # a column of several kinds is no table
            return
        if damage is not None:
            whole = file.read_bytes()
            file.write_bytes(whole[:damage] + b"\x00\xff" + whole[damage + 2 :])
        check_task(file, config)


@given(text=texts(), suffix=st.sampled_from([".jsonl", ".txt"]))
@examples(40)
def test_files_of_prompts(text: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"prompts{suffix}"
        file.write_bytes(text)
        try:
            assert all(isinstance(prompt, str) for prompt in read_prompts(str(file)))
        except KlampError as error:
            check_says_what(error)


@given(text=texts(), name=st.sampled_from(["data.jsonl", "data.csv", "data.arrow", "data", "data.jsonl.gz"]))
@examples(20)
def test_a_command_that_names_a_data_file(text: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(text)
        check_readable(run(["train", "--dry_run", "--task", str(Path(folder) / name)]))
