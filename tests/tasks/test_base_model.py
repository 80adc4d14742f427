"""The base model: the same for the same configuration, cached whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp.errors import ConfigError, ModelError
from klamp.tasks import BaseModelConfig, base_model_folder, load_base_model
from klamp.tasks import base_model as module
from klamp.tasks.arithmetic import MAX_COMPLETION_LENGTH, SKILLS, examples, score_exact
from klamp.tasks.base_model import train_base_model

TINY = BaseModelConfig(hidden_size=16, layers=1, heads=2, steps=6, batch_size=8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def test_the_second_load_trains_nothing_and_gives_identical_bits(cache: Path) -> None:
    calls: list[tuple[int, int, float]] = []

    def progress(what: str, step: int, steps: int, loss: float | None) -> None:
        assert loss is not None
        calls.append((step, steps, loss))

    model, tokenizer = load_base_model(TINY, progress=progress)
    assert [(step, steps) for step, steps, _ in calls] == [(i, 6) for i in range(1, 7)]
    assert all(0 < loss < 10 for *_, loss in calls)
    again, tokenizer_again = load_base_model(TINY, progress=progress)
    assert len(calls) == 6
    assert bits(again) == bits(model)
    assert tokenizer_again.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_again.padding_side == "left"
    assert not model.training
    assert [p.name for p in cache.iterdir()] == [base_model_folder(TINY).name]
    assert list(base_model_folder(TINY).glob("*.safetensors"))


def test_same_seed_same_weights_another_seed_others() -> None:
    first = bits(train_base_model(TINY))
    torch.rand(7)  # whatever the caller drew before does not matter
    assert bits(train_base_model(TINY)) == first
    assert bits(train_base_model(replace(TINY, seed=1))) != first


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train_base_model(TINY)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_training_learns(cache: Path) -> None:
    losses: list[float] = []
    config = replace(TINY, steps=150, batch_size=32, learning_rate=1e-2)
    train_base_model(config, progress=lambda what, step, steps, loss: losses.append(loss))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), "0.51 to 0.55 with ten seeds"


@pytest.mark.parametrize(
    "change",
    [{"steps": 7}, {"seed": 1}, {"carelessness": 0.1}, {"addition": 0.4}, {"learning_rate": 1e-3}, {"layers": 2}],
)
def test_every_choice_has_a_folder_of_its_own(change: dict[str, Any]) -> None:
    assert base_model_folder(replace(TINY, **change)) != base_model_folder(TINY)
    assert base_model_folder(replace(TINY)) == base_model_folder(TINY)


def test_a_new_recipe_does_not_reuse_old_models(monkeypatch: pytest.MonkeyPatch) -> None:
    before = base_model_folder(TINY)
    monkeypatch.setattr(module, "RECIPE", module.RECIPE + 1)
    assert base_model_folder(TINY) != before


def test_new_training_rows_do_not_reuse_old_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.tasks import arithmetic

    before = base_model_folder(TINY)
    monkeypatch.setitem(arithmetic.SKILLS, "reversal", lambda rng: ("rev ab=", "ba"))
    assert base_model_folder(TINY) != before


def test_loading_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    load_base_model(TINY)
    load_base_model(TINY)
    assert capfd.readouterr() == ("", "")


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KLAMP_CACHE")
    assert base_model_folder(TINY).parent == Path.home() / ".cache" / "klamp"


def test_a_run_killed_while_training_leaves_nothing(cache: Path) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_base_model(TINY, progress=killed)
    assert not base_model_folder(TINY).exists()


def test_a_run_killed_while_writing_leaves_no_half_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "arithmetic_tokenizer", with_save(module.arithmetic_tokenizer, killed))
        with pytest.raises(KeyboardInterrupt):
            load_base_model(TINY)
    assert list(cache.iterdir()) == []  # the weights were written, and are gone again
    load_base_model(TINY)


def with_save(make: Callable[[], Any], save: Callable[..., None]) -> Callable[[], Any]:
    def made() -> Any:
        tokenizer = make()
        tokenizer.save_pretrained = save
        return tokenizer

    return made


def test_a_second_process_that_was_quicker_wins(cache: Path) -> None:
    expected: list[list[bytes]] = []

    def other_process(what: str, step: int, steps: int, loss: float | None) -> None:
        if step == steps:
            expected.append(bits(load_base_model(TINY)[0]))

    model, _ = load_base_model(TINY, progress=other_process)
    assert bits(model) == expected[0]
    assert [p.name for p in cache.iterdir()] == [base_model_folder(TINY).name]


@pytest.mark.parametrize("damage", ["cut", "missing", "garbage"])
def test_a_damaged_cache_says_which_folder_to_delete(damage: str) -> None:
    load_base_model(TINY)
    folder = base_model_folder(TINY)
    weights = next(folder.glob("*.safetensors"))
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=f"(?s)cannot be read.*{folder.name}.*delete this folder"):
        load_base_model(TINY)


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "a-file" / "cache"))
    calls: list[int] = []
    with pytest.raises(ModelError, match="(?s)cannot be written.*KLAMP_CACHE"):
        load_base_model(TINY, progress=lambda what, step, steps, loss: calls.append(step))
    assert not calls  # said before the minute of training, not after it


def test_the_folder_says_what_is_in_it() -> None:
    load_base_model(TINY)
    stored = json.loads((base_model_folder(TINY) / "base_model.json").read_text())
    assert BaseModelConfig(**stored) == TINY


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"hidden_size": 10, "heads": 4},
        {"addition": -1.0},
        {"carelessness": 1.5},
        {"addition": 0.0, "subtraction": 0.0, "reversal": 0.0},
    ],
)
def test_configurations_that_cannot_work_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(TINY, **change)


@torch.no_grad()
def accuracies(model: Any, tokenizer: Any, *, sample: bool) -> dict[str, float]:
    found = {}
    for skill in SKILLS:
        rows = examples(skill, 256, seed=11, held_out=True)
        batch = tokenizer([e.prompt for e in rows], return_tensors="pt", padding=True)
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=MAX_COMPLETION_LENGTH,
            do_sample=sample,
            **({"temperature": 1.0, "top_k": 0} if sample else {}),
        )
        texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        found[skill] = sum(score_exact(e, t) for e, t in zip(rows, texts, strict=True)) / len(rows)
    return found


@pytest.mark.slow
def test_the_default_model_leaves_rl_something_to_gain_and_something_to_lose(
    default_base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KLAMP_CACHE", str(default_base_model.parent))
    model, tokenizer = load_base_model(BaseModelConfig())
    sampled, greedy = (accuracies(model, tokenizer, sample=s) for s in (True, False))
    assert 0.4 <= sampled["addition"] <= 0.8
    assert 0.5 <= greedy["addition"] <= 0.85  # room to gain 15 points
    for skill in ("subtraction", "reversal"):
        assert sampled[skill] >= 0.9
        assert greedy[skill] >= 0.92
