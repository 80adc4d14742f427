"""Refusals of options that a backend cannot honour, before any work is done."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from klamp.config import KLConfig, LossConfig
from klamp.errors import ConfigError, KLWarning, Refusal, refuse
from klamp.hosts.common.policy_folder import policy_folder
from klamp.training.sections import ModelConfig, OptimConfig, RolloutConfig, RunConfig
from klamp.training.trl_refusals import trl_refusals
from klamp.training.verl_refusals import OF_VERL, verl_refusals

USER = re.compile(r"[A-Za-z][\w+.-]*://[^/?#\s]*@")
"""The beginning of a URL that names a user."""

_Refused = partial(Refusal, what="backend='tinker' cannot do this")


def check_backend(
    kl: KLConfig, loss: LossConfig, model: ModelConfig, rollout: RolloutConfig, optim: OptimConfig, run: RunConfig
) -> None:
    """Refuse options that the backend cannot honour, or would ignore.

    Raises:
        ConfigError: the first field that has no meaning there.
    """
    if run.backend == "tinker":
        refuse([*_model(kl, model), *_sampling(rollout), *_kl(kl, run)])
    if run.backend != "verl":
        refuse(_of_verl(rollout, run))
    if run.backend == "trl":
        refuse(trl_refusals(kl, loss, model, rollout, optim, run))
    elif run.backend == "verl":
        refuse(verl_refusals(kl, loss, model, rollout, optim, run))
    else:
        refuse(_sampler(rollout, run))


def check_texts(values: Mapping[str, Any]) -> None:
    """Refuse URLs with a user or a password in fields whose text klamp writes and passes on as it stands.

    Args:
        values: of all fields.

    Raises:
        ConfigError: there is one.
    """
    for field, value in values.items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and USER.search(text) for text in texts):
            raise ConfigError(
                f"{field} holds a URL with a user or a password",
                got=" ".join(map(str, texts)),
                why="it would be shown, and written into the run's folder",
                fix="leave them out; what reads the URL takes them from its own environment variables or files",
            )


def _of_verl(rollout: RolloutConfig, run: RunConfig) -> list[Refusal]:
    """The refusals of fields that say how verl is started."""
    given = {**vars(rollout), **vars(run)}
    defaults = {**vars(RolloutConfig()), **vars(RunConfig())}
    return [
        Refusal(
            given[field] != defaults[field],
            what=f"backend={run.backend!r} cannot do this",
            got=f"{field}={given[field]!r}",
            why="it says how verl is started, and verl is not who trains",
            fix=f"leave {field} out, or set backend to verl",
        )
        for field in OF_VERL
    ]


def _sampler(rollout: RolloutConfig, run: RunConfig) -> list[Refusal]:
    """The refusals of another sampler than the backend's own."""
    asked = (("sampler", rollout.sampler, "own"), ("sampler_url", rollout.sampler_url, None))
    return [
        Refusal(
            value != own,
            what=f"backend={run.backend!r} cannot do this",
            got=f"{field}={value!r}",
            why="it writes the completions itself",
            fix=f"leave {field} out, or set backend to trl",
        )
        for field, value, own in asked
    ]


def check_precision(model: ModelConfig) -> None:
    """Refuse to train all weights of a float16 model; warn of master_weights where there are none.

    Raises:
        ConfigError: dtype `float16` without an adapter.
    """
    if model.dtype == "float16" and not model.lora_r:
        raise ConfigError(
            "dtype='float16' cannot train all weights",
            got="dtype='float16', lora_r=0",
            why="its range is too small for gradients and moments, and klamp scales no loss: four steps ruin a model",
            fix="use dtype='bfloat16', which takes the same memory, or lora_r=16: an adapter is float32 in any case",
        )
    if model.master_weights == "none" and (model.dtype == "float32" or model.lora_r):
        warnings.warn(
            "master_weights='none' has no effect: float32 weights, which all LoRA adapters are, have no copies.",
            KLWarning,
            stacklevel=4,
        )


def _model(kl: KLConfig, model: ModelConfig) -> list[Refusal]:
    """The refusals of options about a model's weights, which are at the service."""
    decided = (
        ("dtype", model.dtype, "float32"),
        ("master_weights", model.master_weights, "float32"),
        ("lora_alpha", model.lora_alpha, 32),
        ("lora_target_modules", model.lora_target_modules, ("all-linear",)),
        ("gradient_checkpointing", model.gradient_checkpointing, False),
        ("reference_device", kl.reference_device, None),
        ("reference_dtype", kl.reference_dtype, None),
    )
    return [
        _Refused(
            model.model == "builtin",
            got="model='builtin'",
            why="the weights are the service's, and it has no model of that name",
            fix="set model to a base model of the service, such as Qwen/Qwen3-8B",
        ),
        _Refused(
            policy_folder(model.model) != model.model,
            got=f"model={model.model!r}",
            why="that is a checkpoint on this machine, and the weights are the service's",
            fix="set model to a base model of the service; a run of klamp's goes on with --resume and its --output_dir",
        ),
        *(
            _Refused(value != default, got=f"{field}={value!r}", why="the service decides it", fix=f"leave {field} out")
            for field, value, default in decided
        ),
    ]


def _sampling(rollout: RolloutConfig) -> list[Refusal]:
    neutral = (("temperature", rollout.temperature, 1.0), ("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0))
    return [
        _Refused(
            value != at,
            got=f"{field}={value!r}",
            why="the service gives log-probabilities of the model itself: ratios and KL would be those of another "
            "policy",
            fix=f"leave {field} at {at}",
        )
        for field, value, at in neutral
    ]


def _kl(kl: KLConfig, run: RunConfig) -> list[Refusal]:
    no_rows = "the service gives log-probabilities of tokens, not of the whole vocabulary"
    return [
        _Refused(
            kl.reference_share != 1,
            got=f"reference_share={kl.reference_share:g}",
            why="the service scores whole batches of completions",
            fix="leave reference_share out",
        ),
        _Refused(
            kl.kl_estimator == "exact",
            got="kl_estimator='exact'",
            why=no_rows,
            fix="use k3, or k1 with kl_horizon='sequence'",
        ),
        _Refused(
            bool(run.exact_kl_completions),
            got=f"exact_kl_completions={run.exact_kl_completions}",
            why=no_rows,
            fix="leave exact_kl_completions out",
        ),
        _Refused(
            kl.reference in ("ema", "periodic", "remote"),
            got=f"reference={kl.reference!r}",
            why="the reference is a sampling client of the service: its base model, or a snapshot",
            fix="use reference='frozen'; ref_model names another base model or a tinker:// path",
        ),
        _Refused(
            kl.kl_early_stop is not None,
            got=f"kl_early_stop={kl.kl_early_stop}",
            why="the service has added the gradient up before the KL of the update is known, and cannot drop it",
            fix="use kl_lr_guard, or fewer num_iterations",
        ),
    ]
