"""`klamp.trl.effective` on a trainer of Unsloth's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.unsloth.hosts import attached, model, move, saved, trainer

import klamp.trl
from benchmarks.unsloth_cpu import with_switches
from klamp.config import KLConfig
from klamp.hosts.unsloth.effective import clamp_note
from klamp.hosts.unsloth.host import Clamps

PAST = "Unsloth's own k3 stops at 10 nats per token: past a log-ratio of -2.61 and +11.00 it has no gradient"


def test_a_stock_trainer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = with_switches(AutoModelForCausalLM.from_pretrained(saved(model(), tmp_path)))
    found = klamp.trl.effective(trainer(tmp_path, made, beta=0.25, loss_type="bnpo"))
    assert found.host.startswith("unsloth 2026.10.7, trl 1.15.0, UnslothGRPOTrainer")
    (term,) = found.terms
    assert (term.term, term.beta, found.reference) == ("Unsloth's own", 0.25, "loaded by Unsloth")
    assert term.value == "k3 times the policy ratio"
    assert term.price.startswith("0.333 x the standard deviation of a group's rewards per nat of a whole completion")
    assert found.normalizer.startswith("mean over the tokens of the optimizer step")
    assert f"{PAST}, and nothing says so" in found.notes
    assert "TRL" not in "".join(found.notes)


def test_an_attached_one(tmp_path: Path) -> None:
    host = attached(tmp_path, KLConfig(beta=0.25, target_kl=0.1))
    found = klamp.trl.effective(host)
    (term,) = found.terms
    assert (term.term, term.beta) == ("klamp's", 0.25)
    assert term.controller == "hold controller from 0.25, towards 0.1 nats per token"
    assert term.price.startswith("0.333 x the standard deviation of a group's rewards per nat of a whole completion")
    assert found.reference == "a frozen copy in memory"
    assert found.normalizer == ("mean over completions of the mean over tokens (Unsloth's own, loss_type='grpo')")
    assert f"{PAST}; klamp's KL has none of these clamps" in found.notes
    host.current_gradient_accumulation_steps = 1
    inputs = host._generate_and_score_completions([{"prompt": "abc"}] * 4)
    move(host.model, 1.0)
    host.compute_loss(host.model, inputs)
    seen = host._klamp_beyond
    assert seen.tokens > 0
    assert found != klamp.trl.effective(host)
    assert any(note.endswith(f"; {seen.tokens} of {seen.of} trained tokens were past them")
               for note in klamp.trl.effective(host).notes)  # fmt: skip
    assert "Unsloth's own k3 stops" in str(klamp.trl.effective(host))


@pytest.mark.parametrize(
    ("clamps", "text"),
    [
        (Clamps(None, None, 1e9), "Unsloth's own KL has no clamp"),
        (Clamps(None, 11.0, 10.0), "past a log-ratio of +11.00 it"),
    ],
)
def test_an_unsloth_with_other_clamps(clamps: Clamps, text: str) -> None:
    assert text in clamp_note(clamps, None, own=True)
