"""A language model that is a table, one row of logits for each prefix of a completion, and its exact optimum.

It trains like any other: a decoder whose hidden state is the prefix as a one-hot vector, a head that is the table, a
cache that holds the tokens. What the prompt is does not matter to it.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

WORDS = ("<end>", "a", "b", "c")
LONGEST = 3


class TabularConfig(PreTrainedConfig):
    """How many tokens there are, and how long completions may be."""

    model_type = "klamp_tabular"

    def __init__(self, vocab_size: int = len(WORDS), longest: int = LONGEST, **kwargs: Any) -> None:
        self.vocab_size, self.longest = vocab_size, longest
        self.hidden_size = sum(vocab_size**n for n in range(longest + 1))
        self.num_hidden_layers = 1
        super().__init__(**kwargs)


class TabularDecoder(PreTrainedModel):
    """Hidden states that name the prefix."""

    config_class = TabularConfig

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, 1).requires_grad_(False)  # only asked for its size
        self.post_init()

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False, **_: Any) -> Any:
        ids = input_ids.double()[:, None, :, None]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if past_key_values is not None:
            ids, _ = past_key_values.update(ids, ids, 0)  # the keys are the tokens so far
        tokens, size = ids[:, 0, :, 0].long(), self.config.vocab_size
        rows = [torch.zeros_like(tokens[:, 0])]
        for t in range(1, tokens.shape[1]):  # the prompt is one token
            rows.append((rows[-1] * size + tokens[:, t] + 1).clamp(max=self.config.hidden_size - 1))
        prefix = torch.stack(rows, 1)[:, -input_ids.shape[1] :]
        hidden = nn.functional.one_hot(prefix, self.config.hidden_size).to(self.embed_tokens.weight.dtype)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


class TabularModel(PreTrainedModel, GenerationMixin):
    """The decoder with the table as its head."""

    config_class = TabularConfig
    base_model_prefix = "model"

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.model = TabularDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **options: Any) -> Any:
        out = self.model(input_ids, **options)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


AutoConfig.register(TabularConfig.model_type, TabularConfig)
AutoModel.register(TabularConfig, TabularDecoder)
AutoModelForCausalLM.register(TabularConfig, TabularModel)


def reward(completion: str, **_: Any) -> float:
    """A number in [0, 1) that belongs to the text."""
    return int(sha256(completion.encode()).hexdigest()[:8], 16) / 2**32


def make(folder: Path) -> str:
    """Write a table of random logits with its tokenizer; returns the folder."""
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=WORDS[0], pad_token=WORDS[0]).save_pretrained(folder)
    torch.manual_seed(0)
    model = TabularModel(TabularConfig(eos_token_id=0, pad_token_id=0))
    with torch.no_grad():
        model.lm_head.weight.copy_(0.7 * torch.randn_like(model.lm_head.weight))
        model.lm_head.weight[0] -= 0.5
    model.save_pretrained(folder)
    return str(folder)


def prompts(file: Path) -> str:
    """Write rows of prompts that differ, of one token each; returns the file."""
    rows = ({"prompt": "abc"[i % 3], "answer": ""} for i in range(300))
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(file)


def completions() -> Iterator[tuple[int, ...]]:
    """Every completion: ended by the first token, or cut."""
    words = range(1, len(WORDS))
    for n in range(LONGEST):
        yield from ((*text, 0) for text in itertools.product(words, repeat=n))
    yield from itertools.product(words, repeat=LONGEST)


def logprobs(folder: str | Path) -> Tensor:
    """The log-probability of every completion. [completions]"""
    model = AutoModelForCausalLM.from_pretrained(folder)
    table = model.lm_head.weight.detach().double().T.log_softmax(-1)
    found: list[Tensor] = []
    for completion in completions():
        row, total = 0, table.new_zeros(())
        for token in completion:
            total = total + table[row, token]
            row = row * len(WORDS) + token + 1
        found.append(total)
    return torch.stack(found)


@dataclass(frozen=True, kw_only=True)
class Ended:
    distance: float  # KL(policy||optimum)
    kl: float  # KL(policy||ref)
    optimal_kl: float  # KL(optimum||ref)


def compare(policy: Tensor, ref: Tensor, *, price: float) -> Ended:
    """Against ref exp(reward / price), normalised."""
    texts = (" ".join(WORDS[token] for token in each if token) for each in completions())
    best = (ref + torch.tensor([reward(text) for text in texts], dtype=torch.float64) / price).log_softmax(-1)
    return Ended(
        distance=float((policy.exp() * (policy - best)).sum()),
        kl=float((policy.exp() * (policy - ref)).sum()),
        optimal_kl=float((best.exp() * (best - ref)).sum()),
    )
