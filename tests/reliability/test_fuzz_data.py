"""Data files, odd or damaged in drawn ways: a task whose rows can be scored, or one error that names the place."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tests.reliability.drawn import LINES, check_readable, check_says_why, examples, run, values

from klamp.errors import KlampError
from klamp.lab.tasks import TaskConfig, arithmetic_tokenizer, load_task

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


@given(text=texts(), name=st.sampled_from(["data.jsonl", "data.csv", "data.arrow", "data", "data.jsonl.gz"]))
@examples(20)
def test_a_command_that_names_a_data_file(text: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(text)
        check_readable(run(["train", "--dry_run", "--task", str(Path(folder) / name)]))


SOUND = "".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1, "skill": "sum"}) + "\n" for i in range(20)).encode()
options = st.fixed_dictionaries(
    {"reward": st.sampled_from(["", "exact_match"])},
    optional={
        "skill_column": st.sampled_from(["skill", "prompt"]),
        "reference_length_column": st.sampled_from(["length", "other"]),
        "eval_size": st.sampled_from([1, 10**6]),
    },
)


@given(text=texts(), config=options)
@example(text=SOUND, config={"reward": "", "skill_column": "skill"})
@examples(60)
def test_a_task_whose_rows_can_be_scored_or_an_error_with_its_reason(text: bytes, config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.jsonl"
        file.write_bytes(text)
        try:
            task = load_task(TaskConfig(task=str(file), **config), arithmetic_tokenizer())
        except KlampError as error:
            if text == SOUND:
                raise
            check_says_why(error)
            return
    assert task.train and task.evaluation[task.rl_skill]
    for each in (*task.train, *task.evaluation[task.rl_skill]):
        assert each.prompt and all(math.isfinite(task.score(each, text)) for text in (each.answer, "2", ""))
