"""Each reason for which TRL's own scoring is used, by name; and what none of them touches."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from tests.hosts.trl.hosts import arguments, build, klamp_trainer, model
from tests.hosts.trl.losses import generated, gradient_of, loss_of

from klamp.config import KLConfig
from klamp.errors import KLWarning
from klamp.hosts.trl import fast_scoring
from klamp.hosts.trl.fast_scoring import why_not_these
from klamp.trl import GRPOConfig, attach

MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


@pytest.fixture(scope="module")
def fast(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return klamp_trainer(base, tmp_path_factory.mktemp("limits"), beta=0.3, fast_scoring=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": "all-linear", "lora_dropout": 0.1}, r"in spite of fast_scoring: dropout is on \(p\)"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "not its last hidden states through a plain output head",
        ),
    ],
)
def test_an_adapter_that_forbids_it(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    adapter = LoraConfig(r=2, task_type="CAUSAL_LM", **options)
    with pytest.warns(match=words):
        klamp_trainer(model(), tmp_path, fast_scoring=True, trainer={"peft_config": adapter})


def test_a_subclass_that_scores_by_itself_keeps_its_own(base: Any, tmp_path: Path) -> None:
    class Mine(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
            return super()._get_per_token_logps_and_entropies(*args, **options)

    trainer = build(Mine, base, arguments(GRPOConfig, tmp_path, fast_scoring=True))
    with pytest.warns(match="Mine scores completions in a way of its own"):
        attach(trainer, KLConfig(beta=0.1))


@pytest.mark.parametrize(
    ("mask", "others", "words"),
    [
        (MASK, {"pixel_values": torch.zeros(1)}, "more than tokens (pixel_values)"),
        (MASK, {"compute_aux_loss": True}, "router's auxiliary loss"),
        (torch.tensor([[1, 0, 1, 1, 1]]), {}, "padding amid"),
        (torch.tensor([[1, 1, 1, 0, 1]]), {}, "padding amid"),
    ],
)
def test_what_completions_have_that_forbids_it(fast: Any, mask: torch.Tensor, others: Any, words: str) -> None:
    assert words in why_not_these(fast, mask, 2, others)


def test_a_reason_is_said_once_and_trl_does_the_work(base: Any, tmp_path: Path) -> None:
    trainer = klamp_trainer(base, tmp_path, beta=0.0, fast_scoring=True)
    inputs = generated(trainer) | {"token_type_ids": None}
    inputs["completion_mask"][0, 1] = 0
    with pytest.warns(match="padding amid a prompt or a completion"):
        first = gradient_of(trainer, loss_of(trainer, inputs))
    with warnings.catch_warnings(action="error", category=KLWarning):
        again = gradient_of(trainer, loss_of(trainer, inputs))
    assert torch.equal(first, again)


def test_in_mixed_precision_it_is_tried_out_against_a_prepared_model(tmp_path: Any) -> None:
    """Whose logits are in float32, so that TRL's scores are too; autocast alone would leave them 16 bits on a CPU."""
    trainer = klamp_trainer(model(), tmp_path, bf16=True, fast_scoring=True, beta=0.0)
    with torch.no_grad(), fast_scoring._as_prepared(trainer, trainer.model):
        call = fast_scoring._trial(trainer.model)
        scores = trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, **call)[0]
    assert scores.dtype == torch.float32 and (scores != scores.bfloat16().float()).any()
    trainer.train()
    assert trainer._klamp.fast.traits and not trainer._klamp.fast.reasons


def test_padding_moves_no_positions_that_a_model_learned(tmp_path: Path) -> None:
    """TRL passes GPT-2 no positions, so that padding in front of a prompt counts; generation does not count it."""
    gaps = []
    for fast in (False, True):
        trainer = klamp_trainer(model("gpt2"), tmp_path, beta=0.1, kl_monitor=True, fast_scoring=fast)
        with warnings.catch_warnings(record=True, action="always") as caught:
            inputs = generated(trainer)
            generated(trainer)
        told = [str(x.message) for x in caught if "at other positions than generation" in str(x.message)]
        assert len(told) == (not fast)
        assert not told or ("up to" in told[0] and "fast_scoring=True" in told[0])
        start, row = (inputs["prompt_mask"] == 0).sum(-1).max(0)
        assert start > 0
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)[row, None, start:]
        completion, mask = inputs["completion_ids"][row], inputs["completion_mask"][row].bool()
        with torch.no_grad():
            logprobs = trainer.ref_model(input_ids=ids).logits[0, -len(completion) - 1 : -1].log_softmax(-1)
        right = logprobs.gather(-1, completion[:, None])[:, 0]
        gaps.append(float((right - inputs["ref_per_token_logps"][row])[mask].abs().max()))
    assert gaps[0] > 0.1 and gaps[1] < 1e-4
