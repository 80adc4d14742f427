"""A GGUF file of a very small Llama with a byte-level tokenizer, as packages carry real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

WIDTH, HEADS, INNER, LAYERS = 32, 2, 48, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
MERGES = ("Ġ c", "Ġc a", "Ġca t")


def tokens() -> list[str]:
    """Special tokens, the 256 bytes, and what the merges make."""
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def write_gguf(file: Path, *, seed: int = 0) -> None:
    """Write the file; weights are random."""
    vocabulary = tokens()
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(vocabulary) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    draws = np.random.default_rng(seed)
    shapes = {"token_embd": (len(vocabulary), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{part}": (INNER, WIDTH) for part in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (WIDTH, INNER)}
        shapes |= {f"blk.{layer}.{norm}_norm": (WIDTH,) for norm in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draws.normal(0.0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
