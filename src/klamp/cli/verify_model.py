"""`klamp verify --model DIR`: a real model, its reference, prompts; what the proofs need of them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from klamp.cli.options import VerifyOptions
from klamp.errors import DataError, ModelError
from klamp.scoring.scores import score
from klamp.tasks.files import json_of
from klamp.training.config import RolloutConfig
from klamp.training.models import BUILTIN, end_tokens, load_model, load_tokenizer
from klamp.training.sampling import Completions, encode_prompts, generate, uniform_numbers
from klamp.verify.answers import Answer, verify_logits

PROMPTS = (
    "The capital of France is",
    "Question: what is 17 + 25? Answer:",
    "def fibonacci(n):\n",
    "Once upon a time",
)
ARITHMETIC = ("47+85=", "71-38=", "rev abcd=", "9+86=")
"""Prompts that the built-in model can read."""
MAX_PROMPTS = 8


def answer_model(options: VerifyOptions) -> Answer:
    """Measure each estimator's value and gradient on this model's distributions, against its reference.

    Raises:
        ModelError: a model that cannot be loaded, or two that do not share a vocabulary.
        DataError: a file of prompts that cannot be used.
    """
    assert options.model is not None
    tokenizer = load_tokenizer(options.model)
    policy = load_model(options.model)
    completions = _complete(policy, tokenizer, _prompts(options), options)
    reference = perturbed(policy, options.noise, options.seed)
    name = f"a copy with {options.noise:g} noise"
    if options.ref_model is not None:
        reference, name = load_model(options.ref_model), options.ref_model
    with torch.no_grad():
        rows = [_rows(model, completions) for model in (policy, reference)]
    if rows[0].shape != rows[1].shape:
        raise ModelError(
            "the reference has another vocabulary than the model",
            got=f"{rows[0].shape[-1]} and {rows[1].shape[-1]} tokens",
            why="a KL is summed over one common vocabulary",
            fix="use a checkpoint of the same model as the reference",
        )
    return verify_logits(rows[0], rows[1], completions.ids[completions.mask], names=(options.model, name))


def _prompts(options: VerifyOptions) -> list[str]:
    return list(ARITHMETIC) if options.model == BUILTIN and options.prompts is None else read_prompts(options.prompts)


def read_prompts(path: str | None) -> list[str]:
    """The first prompts of a file: a prompt per line, or JSONL with a field `prompt`; None: the built-in ones.

    Raises:
        DataError: no such file, a line that is no prompt, or none at all.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("the prompts cannot be read", got=path, why=str(error), fix="give a text file") from error
    is_json = path.endswith((".jsonl", ".json"))
    prompts = [_from_json(line, path) if is_json else line for line in lines if line.strip()]
    if not prompts:
        raise DataError("the file holds no prompts", got=path, fix="write a prompt per line")
    return prompts[:MAX_PROMPTS]


def perturbed(model: nn.Module, noise: float, seed: int) -> nn.Module:
    """A copy of the model with Gaussian noise on every weight matrix, relative to the spread of that matrix."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim < 2:
                continue
            size = noise * float(weight.float().std())
            drawn = torch.randn(weight.shape, generator=generator) * size
            weight.add_(drawn.to(weight))
    return other


def _from_json(line: str, path: str) -> str:
    try:
        prompt = json_of(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise DataError(
            "a line without a prompt", got=f"{path}: {line[:80]}", fix='write {"prompt": "..."} in each line'
        )
    return prompt


def _complete(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[str], options: VerifyOptions
) -> Completions:
    """One completion of each prompt, drawn from the whole distribution at temperature 1."""
    try:
        ids, mask = encode_prompts(prompts, tokenizer, next(model.parameters()).device)
    except Exception as error:  # tokenizers raises bare exceptions
        raise DataError(
            "the tokenizer cannot read the prompts",
            got=prompts[0],
            why=str(error).partition("\n")[0],
            fix="--prompts FILE with prompts that the model knows",
        ) from error
    stop = end_tokens(model, tokenizer)
    return generate(
        model,
        ids,
        mask,
        rollout=RolloutConfig(max_completion_length=options.tokens),
        stop=stop,
        pad=int(tokenizer.pad_token_id or stop[0]),  # pyright: ignore[reportArgumentType]
        uniforms=uniform_numbers(options.seed, 0, len(prompts), options.tokens),
    )


def _rows(model: nn.Module, completions: Completions) -> Tensor:
    """The logits at every sampled prefix, [prefixes, V]."""
    logits = score(model, completions, temperature=1.0).logits
    assert logits is not None, "a model on this machine has logits"
    return logits[completions.mask]
