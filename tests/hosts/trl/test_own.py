"""What TRL's own tests are served in the place of the hub (scripts/trl_own_tests.py)."""

from __future__ import annotations

import random

import datasets
import pytest
from tests.hosts.trl.own.own_plugin import ZEN, hub_for, serve_dataset
from tests.hosts.trl.own.own_tokenizer import FULL, tokenizer, vocabulary


def with_ids_of_qwen() -> list[int]:
    return [17453, 0, 151645]


def without() -> list[int]:
    return [1516450, 9, 15164]


def test_every_id_has_one_text_and_every_text_one_id() -> None:
    for length in (512, FULL):
        assert sorted(vocabulary(length).values()) == list(range(length))


def test_the_ids_that_the_tests_write_out_are_qwens_texts() -> None:
    words = tokenizer("qwen3", FULL)
    call = [151657, 198, 4913, 606, 788, 330, 64648, 22785, 497, 330, 16370, 788, 5212, 64, 788, 220, 18, 11, 330, 65]
    call += [788, 220, 19, 11248, 151658, 151645]
    text = '<tool_call>\n{"name": "multiply_tool", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
    assert words.decode(call) == text
    assert (words.pad_token_id, words.eos_token_id, len(words)) == (151643, 151645, FULL)


def test_sampled_ids_survive_the_way_through_text() -> None:
    words = tokenizer("qwen2_5", 512)
    sampled = random.Random(0).sample(range(460, 512 - 26), 20)  # past the bytes and Qwen's words: fillers only
    text = words.decode(sampled)
    assert words(text)["input_ids"] == sampled
    assert (words.pad_token, words.eos_token, words.eos_token_id) == ("<|endoftext|>", "<|im_end|>", 512 - 24)


def test_a_test_that_writes_ids_out_gets_the_full_vocabulary() -> None:
    assert (hub_for(with_ids_of_qwen), hub_for(without)) == ("full", "small")


def test_only_the_one_dataset_is_served_from_here() -> None:
    load = serve_dataset(lambda path, *names, **options: (path, names, options))
    train = load(ZEN, "standard_prompt_only", split="train")
    assert train["prompt"][:4] == ["Beautiful is better than", "Explicit is", "Simple is better", "Complex"]
    assert len(train) == 12
    streamed = load(ZEN, "conversational_prompt_only", split="test", streaming=True)
    assert isinstance(streamed, datasets.IterableDataset)
    assert next(iter(streamed)) == {"prompt": [{"content": "There should", "role": "user"}]}
    assert load("another", "x", split="train") == ("another", ("x",), {"split": "train", "streaming": False})
    with pytest.raises(ValueError, match="prompts only"):
        load(ZEN, "standard_preference")
