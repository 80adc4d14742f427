"""The table of what lies where, done: a tiny run by `local` and by `trl`, and each of its lines carried out."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.training.lies import cells, folder_of, loaded, loaded_adapter, scores, spans

from klamp.cli import main
from klamp.lab.backends import launch, train_run
from klamp.lab.config import TrainConfig
from klamp.lab.models import load_model

STEPS = {"max_steps": 2, "save_every": 1, "eval_every": 0, "eval_size": 1, "beta": 0.1, "learning_rate": 2e-2}
ROWS = (
    "a checkpoint, in the run's folder", "the model in it, as transformers loads it",
    "with `lora_r`, the adapter, as peft loads it", "evaluate it, or train on from it", "in Python", "go on",
)  # fmt: skip


@pytest.fixture
def run(config_of: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., Path]:
    def make(backend: str, **changes: object) -> Path:
        config = config_of(**(STEPS | {"backend": backend, "warmup_steps": 0} | changes))
        if backend == "local":
            train_run(config)
        else:
            launch(config, [])
        return tmp_path / "run"

    return make


@pytest.mark.parametrize("backend", ["local", "trl"])
def test_a_model_lies_where_the_page_says_and_every_line_does_what_it_says(
    backend: str, run: Callable[..., Path], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(backend)
    model, begun = loaded(folder, backend), load_model(llama)
    assert (scores(model) - scores(begun)).abs().max() > 1e-2, "it is the trained one"
    evaluate, option = spans(cells(backend)["evaluate it, or train on from it"])
    assert main(shlex.split(evaluate.replace("RUN", str(folder)))[1:]) == 0
    assert str(folder) in capsys.readouterr().out
    given = shlex.split(option.replace("FOLDER", str(folder_of(folder, backend))))
    assert given[0] == "--model" and torch.equal(scores(load_model(given[1])), scores(model))
    (resume,) = spans(cells(backend)["go on"])
    assert "--resume RUN" in resume
    words = ["train", "--resume", str(folder), "--max_steps", "3"]
    assert main(words) == 0
    assert (scores(loaded(folder, backend)) - scores(model)).abs().max() > 1e-4, "it went on"


@pytest.mark.parametrize("backend", ["local", "trl"])
def test_an_adapter_lies_where_the_page_says(backend: str, run: Callable[..., Path], llama: str) -> None:
    folder = run(backend, lora_r=4, learning_rate=0.2)
    model = loaded_adapter(folder, backend)
    assert (scores(model) - scores(load_model(llama))).abs().max() > 1e-3
    assert any("lora_" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("backend", ["trl", "verl"])
def test_the_table_has_the_rows_that_are_done_here(backend: str) -> None:
    assert tuple(cells(backend)) == ROWS
