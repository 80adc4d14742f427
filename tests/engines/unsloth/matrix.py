"""The configurations in which klamp's KL has to be Unsloth's own, where that one is within its clamps."""

from __future__ import annotations

from typing import Any

from tests.engines.unsloth.hosts import LENGTH, Seen

UNWEIGHTED: dict[str, Any] = {"use_bias_correction_kl": False}
TWICE: dict[str, Any] = {"num_iterations": 2, "max_steps": 4}
"""The second pass over a batch is off-policy."""

CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name, "gradient_accumulation_steps": 2, **TWICE}
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
    },
    "sequence ratio": {"importance_sampling_level": "sequence", **TWICE},
    "sequence ratio, luspo": {"importance_sampling_level": "sequence", "loss_type": "luspo", **TWICE},
    "truncated rows masked": {"mask_truncated_completions": True, "loss_type": "dapo"},
    "truncated rows masked, grpo": {"mask_truncated_completions": True},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, **TWICE},
    "delta": {"delta": 1.5, **TWICE},
    "in halves": {"unsloth_grpo_mini_batch": 2},
    "several batches per generation": {"loss_type": "dapo", "steps_per_generation": 4},
    "temperature": {"temperature": 0.7},
}  # fmt: skip


def assert_same(pairs: list[tuple[Seen, Seen]], *, steps: int, weights: float = 1e-6) -> None:
    """Loss and gradients of every micro-batch, klamp's and stock; and that the KL was there at all."""
    assert len(pairs) >= steps
    for mine, stock in pairs:
        assert mine.call.beta == 0.0 < stock.call.beta
        scale = max(1.0, float(stock.loss.abs()))
        assert abs(float(mine.loss - stock.loss)) <= 1e-6 * scale
        assert (mine.by_logprobs - stock.by_logprobs).abs().max() <= 1e-6 * max(
            1.0, float(stock.by_logprobs.abs().max())
        )
        assert (mine.by_weights - stock.by_weights).abs().max() <= weights * max(
            1.0, float(stock.by_weights.abs().max())
        )
        assert abs(mine.logged_kl - stock.logged_kl) <= 1e-6 or stock.call.extra_kwargs["use_bias_correction_kl"]
        assert mine.call.new.shape[1] >= LENGTH
    assert max(stock.logged_kl for _, stock in pairs) > 1e-3
