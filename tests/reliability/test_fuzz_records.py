"""Records of runs, damaged in drawn ways, before `klamp doctor`, `klamp report` and a resume: at most one error."""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from tests.reliability.drawn import LINES, check_readable, examples, or_refused, run, values

from klamp.config import KLConfig
from klamp.hosts.common.control import KLControl, read_state
from klamp.lab.ablate.results import Outcome, read_outcome
from klamp.lab.checkpoint import load_state
from klamp.lab.config import TrainConfig
from klamp.lab.folders import plain
from klamp.lab.observers import AlarmObserver

HOLD = KLConfig(beta=0.1, target_kl=0.05)
HELD = KLControl(HOLD)


def lines(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


TOKENS = {"tokens": ["4", "2"], "policy_logprobs": [-0.5, -1.0], "ref_logprobs": [-0.6, -1.5]}
STEPS = [{"step": step, "reward": 0.5, "kl/k3": 0.1 * step, "train/grad_norm": 1.0} for step in range(1, 5)]
SCORES = [{"step": step, "eval/addition": 0.5, "eval/words": 0.25} for step in (0, 4)]
ANSWER = {"skill": "addition", "question": "2+2=", "completion": "4", "score": 1.0}
KLAMP = {
    "config.yaml": yaml.safe_dump(plain(TrainConfig())),
    "metrics.jsonl": lines(SCORES[0], *STEPS, SCORES[1]),
    "completions.jsonl": lines(
        *(
            TOKENS | {"step": step, "sampler_logprobs": [-0.5, -1.1], "trained": [True, True], "prompt": "2+2="}
            | {"ended": True, "reward": 1.0, "advantage": 0.5, "completion": "42"}
            for step in (1, 4)
        )
    ),
    "answers.jsonl": lines(*(ANSWER | {"step": step} for step in (0, 4))),
    "alarms.jsonl": lines({"step": 2, "name": "kl-spike", "level": "alarm", "text": "the KL jumped"}),
    "cautions.jsonl": lines({"step": 0, "text": "mind the gap"}),
    "summary.json": json.dumps(
        {"rl_skill": "addition", "before": {"addition": 0.5}, "after": {"addition": 0.75}, "seconds": 3.5}
    ),
    "versions.json": json.dumps({"klamp": "0.1.0", "torch": "2.11"}),
}  # fmt: skip
TRL_ROWS = [{"step": step, "kl": 0.1 * step, "rewards/accuracy/mean": 0.5, "loss": 0.1} for step in range(1, 5)]
RECORDS: Mapping[str, Mapping[str, str]] = {
    "klamp": KLAMP,
    "TRL": {"trainer_state.json": json.dumps({"log_history": [*TRL_ROWS, {"step": 4, "eval_reward": 0.5}]})},
    "metrics": {"metrics.jsonl": lines(*TRL_ROWS)},
    "verl": {
        "log.jsonl": lines(*({"step": step, "data": {"actor/kl_loss": 0.1, "val-core/a/acc": 1}} for step in (1, 2)))
    },
    "completions": {
        "rows.jsonl": lines(*(TOKENS | {"step": step, "reward": 1.0, "prompt": "2+2="} for step in (1, 2)))
    },
    "rollouts": {f"{step}.jsonl": lines(TOKENS | {"loss_mask": [0, 1], "finish_reason": "stop"}) for step in (1, 2)},
}
"""Kind of record -> what its folder holds."""


def parts_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a value, itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, each in inside for deeper in parts_of(each, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A value with another one at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@st.composite
def damages(draw: st.DrawFn, text: str, name: str) -> bytes:
    """A file of a record after something happened to it."""
    whole = text.encode()
    kind = draw(st.sampled_from(["value", "value", "value", "line", "cut", "bytes", "empty", "twice"]))
    rows = text.splitlines() if name.endswith(".jsonl") else [text]
    at = draw(st.integers(0, len(rows) - 1))
    if kind == "value":
        dump, load = (yaml.safe_dump, yaml.safe_load) if name.endswith(".yaml") else (json.dumps, json.loads)
        row = load(rows[at])
        new = draw(values)
        if dump is yaml.safe_dump and not isinstance(new, bool | int | float | None):
            new = json.loads(json.dumps(new))
        rows[at] = dump(changed(row, draw(st.sampled_from(parts_of(row))), new))
        return ("\n".join(rows) + "\n").encode("utf-8", "surrogatepass")
    if kind == "line":
        rows.insert(at, draw(st.sampled_from(LINES)))
        return ("\n".join(rows) + "\n").encode()
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole)))]
    if kind == "bytes":
        start = draw(st.integers(0, len(whole)))
        return whole[:start] + draw(st.binary(min_size=1, max_size=6)) + whole[start + draw(st.integers(0, 6)) :]
    return b"" if kind == "empty" else whole + whole


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, dict[str, bytes]]:
    kind = draw(st.sampled_from(sorted(RECORDS)))
    kind = draw(st.sampled_from(["klamp", kind]))
    files = {name: text.encode() for name, text in RECORDS[kind].items()}
    for name in draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True)):
        files[name] = draw(damages(RECORDS[kind][name], name))
    return kind, files


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@given(record=damaged(), json_too=st.booleans())
@examples(40)
def test_a_damaged_record_is_read_or_refused(record: tuple[str, dict[str, bytes]], json_too: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), record[1])
        ended = run(["doctor", name, *(["--json"] if json_too else [])])
        check_readable(ended)
        assert len(ended.err) < 5000, ended.err[:2000]
        if json_too and ended.code != 2:
            json.loads(ended.out)
        ended = run(["report", name])
        check_readable(ended)
        assert (folder / "report.html").is_file() == (ended.code == 0)
        if ended.code == 0:
            (folder / "report.html").read_text(encoding="utf-8")


STATE = {
    "step": 3,
    "controller_name": "hold",
    "controller": HELD.state_dict()["controller"],
    "schedule": {"last_epoch": 3},
    "before": {"addition": 0.5},
    "metrics": {"kl/k3": 0.1},
    "reference_length": 9.5,
    "last_kl": 0.1,
}
"""What a checkpoint of klamp's holds beside weights and moments."""


@given(text=damages(json.dumps(STATE), "state.json"))
@examples(40)
def test_the_state_of_a_checkpoint_is_read_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints" / "step-000003"
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(text)
        control = KLControl(HOLD)
        for read in (load_state, lambda folder: read_state(folder / "state.json")):
            with or_refused():
                control.load_state_dict(read(folder))
                assert math.isfinite(control.beta(3, 10))


OUTCOME = Outcome(
    run="a_seed-0", arm="a", seed=0, rl_skill="addition", before={"addition": 0.5}, numbers={"reward": 0.5},
)  # fmt: skip


@given(text=damages(json.dumps(asdict(OUTCOME)), "outcome.json"))
@examples(30)
@example(text=b'{"' + b"9" * 5000 + b'": null}')  # Python's own error repeats a name that it does not know
def test_the_outcome_of_a_run_is_read_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "outcome.json").write_bytes(text)
        with or_refused():
            found = read_outcome(Path(name))
            assert found is not None and isinstance(found.numbers, dict) and isinstance(found.seed, int)


@given(record=damaged())
@examples(30)
def test_a_resume_takes_up_what_can_be_read_of_damaged_records(record: tuple[str, dict[str, bytes]]) -> None:
    """The lines that a killed process left half are no reason to give a run up: alarms go on from the others."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), {**{file: text.encode() for file, text in KLAMP.items()}, **record[1]})
        observer = AlarmObserver(lambda call: None, rl_skill="addition")
        info = SimpleNamespace(config=TrainConfig(), output_dir=folder, start_step=4)
        observer.on_start(info)  # pyright: ignore[reportArgumentType]
        observer.on_step(5, {"kl/k3": 0.1, "reward": 0.5})
