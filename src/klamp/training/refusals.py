"""What a backend cannot do: refused by name, before any work."""

from __future__ import annotations

from collections.abc import Iterator

from klamp.config import KLConfig
from klamp.errors import ConfigError
from klamp.training.sections import ModelConfig, RolloutConfig, RunConfig

Rule = tuple[bool, str, str, str]
"""Whether it is broken, the field with its value, why, fix."""


def check_backend(kl: KLConfig, model: ModelConfig, rollout: RolloutConfig, run: RunConfig) -> None:
    """Refuse what `backend='tinker'` cannot do, or would pass over in silence.

    Raises:
        ConfigError: the first field that has no meaning there.
    """
    if run.backend == "local":
        return
    for broken, field, why, fix in _rules(kl, model, rollout, run):
        if broken:
            raise ConfigError("backend='tinker' cannot do this", got=field, why=why, fix=fix)


def _rules(kl: KLConfig, model: ModelConfig, rollout: RolloutConfig, run: RunConfig) -> Iterator[Rule]:
    yield (
        model.model == "builtin",
        "model='builtin'",
        "the weights are the service's, and it has no model of that name",
        "set model to a base model of the service, such as Qwen/Qwen3-8B",
    )
    for field, value, default in (
        ("dtype", model.dtype, "float32"),
        ("lora_alpha", model.lora_alpha, 32),
        ("lora_target_modules", model.lora_target_modules, ("all-linear",)),
        ("gradient_checkpointing", model.gradient_checkpointing, False),
        ("reference_device", kl.reference_device, None),
        ("reference_dtype", kl.reference_dtype, None),
    ):
        yield value != default, f"{field}={value!r}", "the service decides it", f"leave {field} out"
    for field, value, neutral in (
        ("temperature", rollout.temperature, 1.0),
        ("top_p", rollout.top_p, 1.0),
        ("top_k", rollout.top_k, 0),
    ):
        why = "the service gives log-probabilities of the model itself: ratios and KL would be those of another policy"
        yield value != neutral, f"{field}={value!r}", why, f"leave {field} at {neutral}"
    yield (
        kl.reference_share != 1,
        f"reference_share={kl.reference_share:g}",
        "the service scores whole batches of completions",
        "leave reference_share out",
    )
    exact = "the service gives log-probabilities of tokens, not of the whole vocabulary"
    yield kl.kl_estimator == "exact", "kl_estimator='exact'", exact, "use k3, or k1 with kl_horizon='sequence'"
    asked = run.exact_kl_completions
    yield bool(asked), f"exact_kl_completions={asked}", exact, "leave exact_kl_completions out"
    yield (
        kl.reference in ("ema", "periodic", "remote"),
        f"reference={kl.reference!r}",
        "the reference is a sampling client of the service: its base model, or a snapshot",
        "use reference='frozen'; ref_model names another base model or a tinker:// path",
    )
    yield (
        kl.kl_early_stop is not None,
        f"kl_early_stop={kl.kl_early_stop}",
        "the service has added the gradient up before the KL of the update is known, and cannot drop it",
        "use kl_lr_guard, or fewer num_iterations",
    )
