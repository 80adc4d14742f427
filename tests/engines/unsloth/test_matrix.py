"""Against the stock trainer, micro-batch for micro-batch: the same KL through klamp is the same loss and gradient."""

from pathlib import Path
from typing import Any

import pytest
from tests.engines.unsloth.hosts import CASES, TWICE, UNWEIGHTED, assert_same, attached, compared, model, move, saved

from benchmarks.unsloth_cpu import with_switches
from klamp.config import KLConfig

pytestmark = pytest.mark.gate
BETA = 0.3


def own(**options: Any) -> KLConfig:
    """Unsloth's own KL in klamp's words."""
    with pytest.warns(UserWarning, match="follows the gradient of"):
        return KLConfig(beta=BETA, kl_gradient="own", **options)


@pytest.mark.parametrize("case", CASES)
def test_unsloths_own_kl(case: str, tmp_path: Path) -> None:
    host = attached(tmp_path, own(), **UNWEIGHTED, **CASES[case])
    move(host.model)
    assert_same(compared(host), steps=host.args.max_steps)


@pytest.mark.parametrize("case", ["grpo", "dapo", "luspo", "cispo"])
def test_the_default_of_trl_the_kl_times_the_policy_ratio(case: str, tmp_path: Path) -> None:
    """The ratio is not detached there; klamp's reverse gradient with token weights is what that comes to."""
    kl = KLConfig(beta=BETA, kl_off_policy="token")
    host = attached(tmp_path, kl, **{**CASES[case], "use_bias_correction_kl": True})
    move(host.model)
    assert_same(compared(host), steps=4)


def test_a_lora_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    made = with_switches(get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))
    host = attached(tmp_path, own(), made, **UNWEIGHTED, **TWICE)
    assert host.ref_model is None
    move(host.model, 0.3)
    assert_same(compared(host), steps=4)


def test_a_reference_that_unsloth_has_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = with_switches(AutoModelForCausalLM.from_pretrained(saved(model(), tmp_path)))
    host = attached(tmp_path, own(), made, beta=0.5, **UNWEIGHTED)
    loaded = host.ref_model
    assert loaded is not None and loaded is not made
    move(host.model)
    assert_same(compared(host), steps=2)
    assert host.ref_model is loaded


EXCLUDED, BY_PROMPT = {"UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE": "1"}, {"UNSLOTH_GRPO_LOSS_AGGREGATION": "prompt"}


@pytest.mark.parametrize("environment", [EXCLUDED, BY_PROMPT, EXCLUDED | BY_PROMPT])
def test_weights_of_completions(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An average of Unsloth's that TRL does not have; asked for in the environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    host = attached(tmp_path, own(), **UNWEIGHTED, gradient_accumulation_steps=2, loss_type="dapo")
    move(host.model)
    pairs = compared(host)
    assert all(stock.call.extra_kwargs.get("sample_weight") is not None for _, stock in pairs)
    assert_same(pairs, steps=2)
