"""Data files, odd or damaged in drawn ways: a task, or one error that names the place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.reliability.drawn import LINES, check_readable, examples, run, values

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
