"""What both trainers of the `step` measurements are given: a random Qwen2, a tokenizer of words, prompts, a reward.

No completion ends early, so that every run processes the same number of tokens: the first coordinate of the residual
stream is held at a constant, and the row of the head that belongs to the end token answers to nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    "3M": {"vocab_size": 8192, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4},
    "27M": {"vocab_size": 32_768, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
    "wide": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 2},
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
"""Name -> the sizes of a Qwen2 with tied embeddings; where none are named, heads of 32 dimensions (tiny: 16)."""

TOKENIZER = "tokenizer"
"""A folder of its own inside the model's, for in that one transformers would take Qwen2's tokenizer instead."""

END, PAD = "<end>", "<pad>"
HELD, AGAINST = 0.5, -1000.0


def make_tokenizer(vocab_size: int) -> Any:
    """A tokenizer whose tokens are the words w0, w1, ... between spaces, after the end token and the padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate([END, PAD, *(f"w{i}" for i in range(vocab_size - 2))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, padding_side="left")


def make_model(folder: Path, size: str, *, max_length: int = 1024, dtype: str = "float32") -> int:
    """Write a model that never ends a completion, and its tokenizer, to a folder; returns its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    sizes = SIZES[size]
    tokenizer = make_tokenizer(sizes["vocab_size"])
    heads = sizes["hidden_size"] // (16 if size == "tiny" else 32)
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"num_attention_heads": heads, "num_key_value_heads": heads // 2, **sizes},
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("cuda" if size == "0.5B" and torch.cuda.is_available() else "cpu"):  # draws it in a second
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0.0  # nothing is added to the first coordinate
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = HELD
        for word in (END, PAD):
            embedding[tokenizer.convert_tokens_to_ids(word)] = 0.0
            embedding[tokenizer.convert_tokens_to_ids(word), 0] = AGAINST
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder / TOKENIZER)
    return sum(p.numel() for p in model.parameters())


def write_prompts(file: Path, *, count: int, length: int, vocab_size: int) -> None:
    """`count` prompts of `length` tokens each, one JSON line per prompt."""
    import torch

    drawn = torch.randint(vocab_size - 2, (count, length), generator=torch.Generator().manual_seed(1))
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) for row in drawn.tolist()]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def mean_word(completions: Sequence[str], **_: object) -> list[float]:
    """The reward of both trainers: the mean number of a completion's words, in thousands; no two are alike."""
    numbers = [[int(word) for word in text.replace(" ", "").split("w") if word] for text in completions]
    return [sum(row) / max(1, len(row)) / 1000 for row in numbers]
