"""The hooks of a run: each can be left out, and a run calls them in the order in which things happen."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from klamp.training.observers import Observer
from klamp.training.trainer import train_run

HOOKS = [name for name, _ in inspect.getmembers(Observer, inspect.isfunction)]


class Recorder(Observer):
    """Writes down every call by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in HOOKS:
            return lambda *given: self.calls.append((name, given))
        return super().__getattribute__(name)


def test_every_hook_may_be_left_as_it_is() -> None:
    quiet = Observer()
    for name in HOOKS:
        hook = getattr(quiet, name)
        assert hook(*[None] * len(inspect.signature(hook).parameters)) is None
        assert hook.__doc__, "it says when it is called"


def test_a_run_calls_its_hooks_in_the_order_of_what_happens(config_of, tmp_path: Path) -> None:
    recorder = Recorder()
    summary = train_run(config_of(max_steps=2, eval_every=1, save_every=2, log_completions_every=1), [recorder])
    names = [name for name, _ in recorder.calls if name not in ("on_warning", "on_alarm", "on_loading")]
    step = ["on_completions", "on_step", "on_evaluation", "on_answers"]
    assert names[:3] == ["on_start", "on_evaluation", "on_answers"]
    assert names[3 : 3 + 2 * len(step)] == step * 2
    assert names[3 + 2 * len(step) :] == ["on_checkpoint", "on_end", "close"]
    given = dict(recorder.calls)
    assert given["on_start"][0].start_step == 0
    assert given["on_start"][0].output_dir == tmp_path / "run"
    assert [what[0] for name, what in recorder.calls if name == "on_step"] == [1, 2]
    assert [what[0] for name, what in recorder.calls if name == "on_evaluation"] == [0, 1, 2]
    assert given["on_end"] == (summary,)
    assert summary.steps == 2
    assert summary.final_metrics == given["on_step"][1]


def test_close_comes_last_after_an_error_too(config_of) -> None:
    class Breaks(Recorder):
        def __getattribute__(self, name: str) -> Any:
            if name == "on_step":
                raise RuntimeError("a broken observer")
            return super().__getattribute__(name)

    recorder = Breaks()
    with pytest.raises(Exception, match="a broken observer"):
        train_run(config_of(max_steps=1), [recorder])
    names = [name for name, _ in recorder.calls]
    assert names[-1] == "close"
    assert names.count("close") == 1
    assert "on_end" not in names
