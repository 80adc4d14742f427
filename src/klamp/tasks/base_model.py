"""The small base model of the built-in task: a Llama that is trained from scratch once, and cached.

It is the starting point that RL needs and a download would otherwise provide: good at addition but not finished, and
near perfect at the skills that RL does not see, so that what a KL term keeps (or fails to keep) shows up.

Its training rows are of all skills, with additions in which carries are sometimes forgotten. The model learns additions
thoroughly from that corpus and ends up with its habits: a known share of its samples is wrong, and where the corpus is
wrong more often than right, so is the model's best guess. RL has something to correct. (A model that has seen too few
additions would be a fragile starting point: whether it can carry would turn on the seed and the machine.)
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.core.arguments import AT_LEAST_1, check_fields
from klamp.errors import ModelError
from klamp.tasks.arithmetic import (
    EOS_TOKEN,
    MAX_COMPLETION_LENGTH,
    MAX_MODEL_LENGTH,
    MAX_PROMPT_LENGTH,
    PAD_TOKEN,
    arithmetic_tokenizer,
    pairs,
)
from klamp.tasks.cache import Progress, cache_root, stored, without_bars

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

IGNORED = -100
"""The label of a token that the loss leaves out."""

HEAVY_COLUMN = 14
"""From this sum of two digits on, a carry is forgotten more often than remembered."""

TEACHING = "teaching the built-in base model"
"""What this work is called while it goes on."""

CARELESSNESS = 0.6
"""How often the training rows forget the carry of a heavy column in an addition; what RL has to gain."""

MIXTURE = {"addition": 0.46, "subtraction": 0.41, "reversal": 0.13}
"""The share of each skill in the training rows."""

INITIALIZER_RANGE = 0.08
"""The spread of the first weights; at a Llama's usual 0.02 so narrow a model learns to carry far later."""

LEARNING_RATE = 2e-3
"""The highest learning rate, after the warm-up; it falls to a hundredth along a cosine."""

SEED = 0
"""The seed of the weights and of the training rows."""

RECIPE = 1
"""Part of the cache key: raise it whenever the code below would give other weights."""

_FINGERPRINT_ROWS = 64
"""How many training rows are part of the key: a change of the data then needs no new recipe number."""


@dataclass(frozen=True, kw_only=True)
class BaseModelConfig:
    """The size and training of the base model; equal configurations share one cached model.

    Raises:
        ConfigError: a size below 1.
    """

    hidden_size: int = 128
    """The width; a multiple of twice `heads`."""

    layers: int = 3
    """How many transformer blocks."""

    heads: int = 4
    """Attention heads per block."""

    steps: int = 1000
    """Optimizer steps of supervised training."""

    batch_size: int = 96
    """Rows per step."""

    def __post_init__(self) -> None:
        check_fields(self, dict.fromkeys(("hidden_size", "layers", "heads", "steps", "batch_size"), AT_LEAST_1))


def careless_sum(left: int, right: int, rng: random.Random) -> int:
    """A sum of two two-digit numbers in which each carry is forgotten now and then, of a light column half as often."""
    carry, total = 0, 0
    for place in (1, 10):
        column = left // place % 10 + right // place % 10 + carry
        forgotten = rng.random() < CARELESSNESS * (1.0 if column >= HEAVY_COLUMN else 0.5)
        carry = int(column > 9 and not forgotten)
        total += column % 10 * place
    return total + 100 * carry


def corpus(count: int, *, seed: int = SEED) -> Iterator[tuple[str, str]]:
    """Draw `count` (prompt, completion) pairs for training, of all skills."""
    rng = random.Random(f"corpus/{seed}")
    sources = {skill: pairs(skill, rng, held_out=False) for skill in MIXTURE}
    for skill in rng.choices(list(MIXTURE), weights=list(MIXTURE.values()), k=count):
        prompt, answer = next(sources[skill])
        if skill == "addition":
            left, right = prompt.rstrip("=").split("+")
            answer = str(careless_sum(int(left), int(right), rng))
        yield prompt, answer


def training_tensors(rows: Iterator[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [rows, width]: labels[t] is the token after tokens[t], or `IGNORED`.

    Args:
        rows: (prompt, completion) pairs; each completion gets an end token.
    """
    import torch

    vocabulary = arithmetic_tokenizer().get_vocab()
    pad, end = vocabulary[PAD_TOKEN], vocabulary[EOS_TOKEN]
    held = list(rows)
    longest = max((len(prompt) + len(completion) + 1 for prompt, completion in held), default=0)
    width = max(MAX_PROMPT_LENGTH + MAX_COMPLETION_LENGTH, longest)
    tokens, labels = [], []
    for prompt, completion in held:
        row = [*(vocabulary[character] for character in prompt + completion), end]
        padding = width - len(row)
        tokens.append(row[:-1] + [pad] * padding)
        labels.append([IGNORED] * (len(prompt) - 1) + row[len(prompt) :] + [IGNORED] * padding)
    return torch.tensor(tokens), torch.tensor(labels)


def base_model_folder(config: BaseModelConfig) -> Path:
    """The folder of a cached model, named after its configuration, the recipe's version and the first training rows."""
    key = json.dumps({"recipe": RECIPE, "rows": list(corpus(_FINGERPRINT_ROWS)), **taught(config)}, sort_keys=True)
    return cache_root() / f"base-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def taught(config: BaseModelConfig) -> dict[str, float]:
    """All that the weights depend on besides the rows and the code."""
    how = {"initializer_range": INITIALIZER_RANGE, "learning_rate": LEARNING_RATE, "seed": SEED}
    return {**asdict(config), **how, **MIXTURE, "carelessness": CARELESSNESS}


def load_base_model(
    config: BaseModelConfig, *, progress: Progress | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the base model and its tokenizer; see `cached_base_model`.

    Raises:
        ModelError: the cached folder is damaged, or the cache cannot be written.
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from klamp.scoring.model_parts import check_whole

    folder = cached_base_model(config, progress=progress)
    try:
        load: Any = LlamaForCausalLM.from_pretrained
        with without_bars():
            model, found = load(folder, local_files_only=True, output_loading_info=True)
        check_whole(found, folder=str(folder))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(
            "the cached base model cannot be read",
            got=str(folder),
            why=f"{type(error).__name__}: {' '.join(str(error).split())}",
            fix="delete this folder; the next run trains the model again",
        ) from error
    return model.eval(), tokenizer


def cached_base_model(config: BaseModelConfig, *, progress: Progress | None = None) -> Path:
    """The folder of the base model; the first call trains it, which takes a minute.

    Args:
        config: the model and how it is taught.
        progress: called once per training step.

    Raises:
        ModelError: the cache cannot be written.
    """

    def write(empty: Path) -> None:
        model = train_base_model(config, progress=progress)
        with without_bars():
            model.save_pretrained(empty)
        arithmetic_tokenizer().save_pretrained(empty)
        (empty / "base_model.json").write_text(json.dumps(taught(config), indent=2) + "\n")

    return stored(base_model_folder(config), write)


def train_base_model(config: BaseModelConfig, *, progress: Progress | None = None) -> LlamaForCausalLM:
    """Train a new base model on all skills, with a loss on completions only; the caller's random state stays as it was.

    Padding is on the right, so no attention mask is needed.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = _new_model(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
        rows = training_tensors(corpus(config.steps * config.batch_size))
        batches = zip(*(each.split(config.batch_size) for each in rows), strict=True)
        for step, (tokens, labels) in enumerate(batches, start=1):
            hidden, kept = model.model(input_ids=tokens, use_cache=False).last_hidden_state, labels != IGNORED
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), labels[kept])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(TEACHING, step, config.steps, float(loss.detach()))
    return model.eval()


def _new_model(config: BaseModelConfig) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = arithmetic_tokenizer().get_vocab()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=MAX_MODEL_LENGTH,
            initializer_range=INITIALIZER_RANGE,
            tie_word_embeddings=True,
            attention_dropout=0.0,
            bos_token_id=None,
            eos_token_id=vocabulary[EOS_TOKEN],
            pad_token_id=vocabulary[PAD_TOKEN],
        )
    ).train()


def _rate(step: int, steps: int) -> float:
    """The factor on the learning rate: a short linear warm-up, then a cosine down to a hundredth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
