"""The inputs of a run, opened without its model: what a run would refuse is refused, and nothing is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.training.conftest import stored, tiny_llama

from klamp.errors import DataError, KlampError, ModelError
from klamp.training.config import TrainConfig
from klamp.training.inputs import Inputs, open_inputs


@pytest.fixture(autouse=True)
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def rows(folder: Path, *, prompts: list[str], answer: str = "5") -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "answer": answer}) + "\n" for p in prompts), encoding="utf-8")
    return str(file)


def opened(**flat: object) -> Inputs | str:
    return open_inputs(TrainConfig.from_flat(dict(flat)))


def test_prompts_are_counted_and_measured(nothing_cached: Path) -> None:
    file = rows(nothing_cached, prompts=["1+1=", "2+2=", "33+44="])
    assert opened(task=file) == Inputs(training=2, held_out=1, longest=6)
    assert not (nothing_cached / "cache").exists()


def test_a_model_of_a_folder_says_how_much_it_holds(nothing_cached: Path) -> None:
    model = stored(tiny_llama(), nothing_cached / "model")
    assert isinstance(opened(model=model, train_size=4, eval_size=1), Inputs)
    with pytest.raises(DataError, match="too long"):
        opened(model=model, train_size=4, eval_size=1, max_completion_length=10_000)


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({"task": "missing.jsonl"}, "does not exist"),
        ({"model": "no/folder"}, "cannot load"),
        ({"tokenizer": "no/folder"}, "cannot load a tokenizer"),
        ({"reward": "no_module:score"}, "cannot be imported"),
        ({"model": "smollm2", "task": "missing.jsonl"}, "does not exist"),
        ({"model": "smollm2", "reward": "no_module:score"}, "cannot be imported"),
    ],
)
def test_what_would_stop_a_run_is_an_error(flat: dict[str, str], text: str) -> None:
    with pytest.raises(KlampError, match=text):
        opened(**flat)


@pytest.mark.parametrize("model", ["builtin", "smollm2"])
@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({"prompt_column": "question"}, "has no column 'question'"),
        ({"answer_column": "solution"}, "has no column 'solution'"),
        ({"eval_split": "held_out.jsonl"}, "does not exist"),
    ],
)
def test_a_column_that_is_missing_is_an_error_whatever_the_tokenizer(
    nothing_cached: Path, model: str, flat: dict[str, str], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        opened(task=rows(nothing_cached, prompts=["1+1=", "2+2="]), model=model, **flat)


def test_what_has_to_be_made_first_is_said_and_not_made(nothing_cached: Path) -> None:
    file = rows(nothing_cached, prompts=["1+1=", "2+2="])
    assert opened(model="smollm2", task=file) == "smollm2 is converted first"
    assert not (nothing_cached / "cache").exists()


def test_tinkers_tokenizer_is_asked_of_the_service(nothing_cached: Path) -> None:
    given = {"backend": "tinker", "model": "Qwen/Qwen3-8B", "task": rows(nothing_cached, prompts=["1=", "2="])}
    assert opened(**given) == "the tokenizer is asked of the Tinker service"
    assert opened(**given, tokenizer="builtin") == Inputs(training=1, held_out=1, longest=2)


def test_a_folder_that_holds_no_model_is_an_error_though_the_tokenizer_is_elsewhere(nothing_cached: Path) -> None:
    (nothing_cached / "empty").mkdir()
    with pytest.raises(ModelError, match="a model's configuration"):
        opened(model=str(nothing_cached / "empty"), tokenizer="builtin")
