"""A policy that is there is scored as its run scored it, and measured as an ablation measures it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.training.conftest import TINY, rows_of

from klamp.ablation.measure import evaluate, measure
from klamp.errors import ModelError
from klamp.training.backends import train_run
from klamp.training.checkpoint import newest
from klamp.training.config import TrainConfig
from klamp.training.folders import scores_of


def trained(llama: str, folder: Path, **changes) -> TrainConfig:
    values = {"model": llama, **TINY, "eval_size": 7, "max_steps": 3, **changes}
    config = TrainConfig.from_flat({**values, "output_dir": str(folder)})
    train_run(config)
    return config


@pytest.mark.parametrize("changes", [{}, {"lora_r": 2}, {"beta": 0.0, "temperature": 1.5}], ids=["all", "lora", "hot"])
def test_the_scores_are_those_that_the_run_itself_found(llama, tmp_path, changes) -> None:
    folder = tmp_path / "run"
    config = trained(llama, folder, **changes)
    found = evaluate(config, newest(folder) / "policy")
    evaluations = [scores for row in rows_of(folder) if (scores := scores_of(row))]
    assert found.before == evaluations[0] and found.after == evaluations[-1]
    assert found.rl_skill == "addition" and found.state == "done"
    assert found.numbers == measure(config, folder)
    assert found.numbers["kl/reverse"] > 1e-5, "something was learned"


def test_the_kl_is_measured_on_no_more_prompts_than_asked_for(llama, tmp_path) -> None:
    config = trained(llama, tmp_path)
    found = evaluate(config, newest(tmp_path) / "policy", prompts=2)
    assert found.numbers == measure(config, tmp_path, prompts=2) != measure(config, tmp_path)
    assert found.after == evaluate(config, newest(tmp_path) / "policy").after, "the scores are over all of them"


def test_without_a_start_there_are_scores_alone(llama) -> None:
    config = TrainConfig.from_flat({"model": llama, **TINY})
    found = evaluate(config, None, start=False)
    assert set(found.after) == {"addition", "subtraction", "reversal"}
    assert not found.before and not found.numbers
    same = evaluate(config, None)
    assert same.before == same.after == found.after and abs(same.numbers["kl/reverse"]) < 1e-6


def test_two_models_of_another_vocabulary_have_no_kl(llama, tmp_path) -> None:
    from tests.training.conftest import stored, tiny_llama

    other = stored(tiny_llama(vocab_size=60), tmp_path / "other")
    config = TrainConfig.from_flat({"model": llama, **TINY})
    with pytest.raises(ModelError, match="another vocabulary"):
        evaluate(config, other)
