"""A tokenizer with the ids of Qwen's that TRL's tests write out by hand; every other id is a word of its own.

Some of TRL's tests feed a mocked generation with ids and expect the text behind them (a tool call, an end of turn). At
the full length those ids stand where Qwen's tokenizer has them. Any id that a model with random weights samples must
decode to some text and come back as the same id: the rewards of the tests are models too, and equal texts would have
equal rewards.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from string import ascii_lowercase

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FULL = 151669  # as long as Qwen's own
SPECIAL = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
MARKS = {
    151657: "<tool_call>",
    151658: "</tool_call>",
    151665: "<tool_response>",
    151666: "</tool_response>",
    151667: "<think>",
    151668: "</think>",
}
WORDS = {
    293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "out", 450: "dec", 497: '",', 522: "</", 606: "name", 788: '":',
    894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"',
    5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n", 13477: "rement",
    14172: "tool", 16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment",
    64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
}  # fmt: skip
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the bytes that byte-level BPE writes as themselves


def letters() -> list[str]:
    """The 256 bytes as byte-level BPE writes them, in the order of their ids."""
    return [chr(byte) for byte in PRINTED] + [chr(256 + place) for place in range(256 - len(PRINTED))]


def vocabulary(length: int) -> dict[str, int]:
    """Every id below the length, under a text of its own; the special ones as far from the end as at full length."""
    alphabet = letters()
    hidden = [byte for byte in range(256) if byte not in PRINTED]
    written = {**{byte: chr(byte) for byte in PRINTED}, **dict(zip(hidden, alphabet[len(PRINTED) :], strict=True))}
    texts = dict(enumerate(alphabet))
    texts |= {place: "".join(written[byte] for byte in word.encode()) for place, word in WORDS.items()}
    texts = {place: text for place, text in texts.items() if place < length}
    texts |= {place - FULL + length: text for place, text in (SPECIAL | MARKS).items()}
    taken = set(texts.values())
    fillers = (written[ord(" ")] + "".join(word) for word in product(ascii_lowercase, repeat=4))
    for place in range(length):
        if place not in texts:
            texts[place] = next(word for word in fillers if word not in taken)
    return {text: place for place, text in texts.items()}


def tokenizer(template: str, length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with one of the chat templates that the installed TRL ships."""
    made = Tokenizer(models.BPE(vocab=vocabulary(length), merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL.values()])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKS.values()])
    chat = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
        chat_template=chat.read_text(),
        model_max_length=4096,
    )
