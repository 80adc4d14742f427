"""What others made: paths that are no files, data, rewards, models, checkpoints; each is taken or refused in time."""

import contextlib
import json
import math
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.reliability.drawn import (
    BOMBS,
    LINES,
    PLAIN,
    check_readable,
    check_says_why,
    examples,
    or_refused,
    run,
    values,
)
from tests.reliability.test_fuzz_records import damages
from tests.training.conftest import stored, tiny_llama

from klamp.errors import KlampError, RunFolderError
from klamp.lab.checkpoint import SEAL, check, seal
from klamp.lab.models import check_weights, configuration, load_model, load_tokenizer
from klamp.lab.tasks import Example, TaskConfig, arithmetic_tokenizer, load_task
from klamp.lab.tasks.base import LARGEST_REWARD, named_reward

KINDS = ("pipe", "device", "folder", "loop", "socket", "bomb")
COMMANDS = (
    *("train --dry_run --config it.yaml", "ablate --dry_run --plan it.yaml", "ablate --dry_run --config it.yaml"),
    *("explain it.yaml", "doctor it.jsonl", "doctor it.json", "doctor it.wandb", "doctor events.out.tfevents.it"),
    *("doctor in", "report it.jsonl", "report in", "evaluate --checkpoint ./it", "ablate --runs in it"),
    *("train --dry_run --task it.jsonl", "train --dry_run --task it.json", "train --dry_run --model ./it"),
    *("train --dry_run --tokenizer ./it", "train --dry_run --task data.jsonl --reward it.py:f"),
)


def place(kind: str, path: Path) -> None:
    """Put something that is no usual file at a path."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    elif kind == "bomb":
        path.write_text("".join(BOMBS.values()))
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_usual_file_ends_in_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(20))
    Path("data.jsonl").write_text(rows)
    Path("in").mkdir()
    for path in ("in/metrics.jsonl", "in/trainer_state.json", "in/events.out.tfevents.1", "in/config.yaml"):
        with contextlib.chdir(Path(path).parent):
            place(kind, Path(Path(path).name))
    for command in COMMANDS:
        words = command.split()
        names = [Path(word.partition(":")[0]) for word in words if "it" in word and "-" not in word]
        for name in names:
            if not os.path.lexists(name):
                place(kind, name)
        ended = run(words)
        check_readable(ended)
        assert ended.code == 2 or words[0] != "doctor", f"{command}: {ended}"


CODE = (
    *("import sys; sys.exit(0)", "raise SystemExit", "1 / 0", "def f(", "import nothing_like_this", "f = 3", "g = 4"),
    *("f = print", "f = int", "f = type", "f = dict", "f = [].append", "class f: pass", "f = lambda: 1", "f = exit"),
    *("import torch\nf = torch.tensor", "import os\nf = os.getpid", "import functools\nf = functools.partial(max, 3)"),
    *("async def f(c): return 1", "def f(c): yield 1", "def f(*, c): return 1", "def f(c, /): return 1"),
    *("def f(c, gone): return 1", "def f(*c): return 1", "def f(**c): return 1", "def f(completions): return 1"),
    *("def f(c): return f(c)", "def f(c): exit(0)", "def f(c): raise SystemExit", "def f(c): raise GeneratorExit"),
    *("class C:\n  def __call__(self, c): return 1\nf = C()", "class C:\n  __call__ = 3\nf = C()"),
    *("class C:\n  def __float__(self): return 1.0\ndef f(c): return C()", "def f(c): return [1e308, -1e308]"),
    *("from fractions import Fraction\ndef f(c): return Fraction(10**400, 3)", "def f(c): return 10**400"),
)
"""Sources of modules with a reward f, or hardly one."""

source = st.one_of(
    st.sampled_from(CODE), st.sampled_from(PLAIN).map(lambda x: f"nan = inf = 0\ndef f(c): return {x!r}")
)


@given(source=source, times=st.integers(1, 2))
@example(source="def f(c): return 1e308", times=1)
@examples(30)
def test_a_reward_is_a_finite_number_that_can_be_added_up_or_an_error(source: str, times: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rewards.py").write_text(source, encoding="utf-8", errors="replace")
        asked = Example(prompt="1+1=", answer="2", fields={"prompt": "1+1=", "answer": "2"})
        rewards: list[float] = []
        with or_refused():
            rewards = [named_reward(f"{folder}/rewards.py:f")(asked, "2") for _ in range(times)]
        assert all(type(each) is float and abs(each) <= LARGEST_REWARD for each in rewards)
        assert math.isfinite(sum(rewards))


MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(stored(tiny_llama(), tmp_path_factory.mktemp("model")))


@given(data=st.data(), name=st.sampled_from(MODEL))
@examples(15)
def test_a_folder_of_a_model_is_loaded_or_refused(model: Path, data: st.DataObject, name: str) -> None:
    damaged = data.draw(damages((model / name).read_text(encoding="utf-8"), name))
    assume(name != "config.json" or not re.search(rb"\d{4}", damaged))  # transformers builds as many layers as it says
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(model, folder, dirs_exist_ok=True))
        (copy / name).write_bytes(damaged)
        for load in (load_tokenizer, configuration, check_weights, load_model):
            with or_refused():
                load(folder)


@given(data=st.data())
@examples(30)
def test_a_seal_that_is_another_one_is_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoints" / "step-000003"
        (checkpoint / "policy").mkdir(parents=True)
        for name in ("state.json", "policy/model.safetensors"):
            (checkpoint / name).write_text(name)
        seal(checkpoint)
        check(checkpoint)
        written = json.loads((checkpoint / SEAL).read_text())
        (checkpoint / SEAL).write_bytes(data.draw(damages(json.dumps(written), SEAL)))
        with or_refused(RunFolderError):
            check(checkpoint)
            found = json.loads((checkpoint / SEAL).read_text())
            assert {name: found[name] for name in written} == written


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
@examples(10)
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
@examples(30)
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
