"""What a TRL trainer's KL will really do, read from the trainer: TRL's own, klamp's, and what may surprise."""

import re
from pathlib import Path

import pytest
import trl
from tests.hosts.trl.hosts import arguments, build, klamp_trainer, model, with_kl

from klamp.config import KLConfig
from klamp.errors import ConfigError
from klamp.hosts.common.control import NEVER_ZERO
from klamp.trl import attach, effective


def test_effective_reads_the_trainer_not_the_wish(tmp_path: Path) -> None:
    stock = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
    assert effective(stock).terms == () and effective(stock).reference == "none: beta is 0"
    trainer = klamp_trainer(model(), tmp_path, beta=0.1, importance_sampling_level="sequence", loss_type="bnpo")
    found = effective(trainer)
    assert (found.terms[0].value, found.reference) == ("k3 times the policy ratio", "a frozen copy in memory")
    assert found.normalizer == "mean over the tokens of each micro-batch (TRL's own, loss_type='bnpo')"
    assert any("broadcasts" in note for note in found.notes)
    assert any("micro-batch" in note for note in found.notes)
    with_kl(trainer, KLConfig(beta=0.2, target_kl=0.05, kl_clip_method="hard", kl_reference_length=9))
    found = effective(trainer)
    (term,) = found.terms
    assert (term.term, term.beta, term.value, term.placement) == ("klamp's", 0.2, "k3", "in the loss")
    assert term.gradient == "reverse per token: KL(policy||ref)"
    assert term.controller == "hold controller from 0.2, towards 0.05 nats per token"
    assert term.clip == "hard clip at 0.5 nats x 9 tokens"
    assert "beta       0.2" in str(found).splitlines()
    with_kl(trainer, KLConfig(beta=0.2, kl_clip_method="hard"))
    assert effective(trainer).terms[0].clip.endswith("length (the data's column, or measured at the start)")


def test_what_is_no_trainer_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"^effective takes a trl\.GRPOTrainer") as caught:
        effective(trl.GRPOTrainer)
    assert caught.value.got and caught.value.why and caught.value.fix


def test_attach_refuses_what_is_no_configuration(tmp_path: Path) -> None:
    stock = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
    with pytest.raises(ConfigError, match=r"kl must be a KLConfig[\s\S]*KLConfig\(\*\*kl\)"):
        attach(stock, {"beta": 0.1})  # pyright: ignore[reportArgumentType]


def test_the_page_shows_what_effective_prints(tmp_path: Path) -> None:
    given = {"loss_type": "dapo", "num_generations": 8, "per_device_train_batch_size": 8}
    given |= {"kl_clip_method": "hard", "kl_clip_threshold": 0.1}
    lines = str(effective(klamp_trainer(model(), tmp_path, beta=0.02, **given))).splitlines()
    page = (Path(__file__).resolve().parents[3] / "docs" / "trl.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert [line for line in shown.splitlines() if line not in ("...", *lines)] == []


def test_the_price_of_beta_is_the_one_that_is_logged(tmp_path: Path) -> None:
    trainer = klamp_trainer(model(), tmp_path, beta=0.1, scale_rewards="none", kl_monitor=True)
    (term,) = effective(trainer).terms
    assert term.price == "0.2 reward per nat of a whole completion = beta 0.1 x 2 (the mean of 2 holds the own reward)"
    trainer.train()
    logged = {row["beta/price"] for row in trainer.state.log_history if "beta/price" in row}
    assert logged == {0.2}


@pytest.mark.parametrize(
    ("options", "price"),
    [
        ({"scale_rewards": "batch"}, "0.2 x the standard deviation of the batch's rewards per nat"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "unknown: each reward function is divided"),
    ],
)
def test_the_price_of_trls_own_beta_or_why_it_is_unknown(tmp_path: Path, options: dict[str, str], price: str) -> None:
    trainer = build(trl.GRPOTrainer, model(), arguments(trl.GRPOConfig, tmp_path))
    trainer.beta = 0.1
    for name, value in options.items():
        setattr(trainer.args, name, value)
        setattr(trainer, name, value)
    (term,) = effective(trainer).terms
    assert term.price.startswith(price)


def test_what_may_surprise_is_noted(tmp_path: Path) -> None:
    moving = klamp_trainer(model(), tmp_path, beta=0.1, reference="ema")
    assert any("checkpoints of TRL do not hold it" in note for note in effective(moving).notes)
    monitored = klamp_trainer(model(), tmp_path, kl_monitor=True)
    assert monitored.beta == NEVER_ZERO
    assert any("smallest number" in note for note in effective(monitored).notes)
    assert effective(klamp_trainer(model(), tmp_path, beta=0.1, kl_gradient="reverse")).notes == ()
