"""Tokens without a KL, by name or id."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from klamp.errors import ConfigError
from klamp.hosts.common.rollout import excluded_ids, kl_tokens
from klamp.tasks.arithmetic import arithmetic_tokenizer

TOKENIZER = arithmetic_tokenizer()


def carried(texts: list[str], *names: int | str) -> list[str]:
    """Per completion, the characters that carry the KL."""
    ids = torch.tensor([TOKENIZER.convert_tokens_to_ids(list(text)) for text in texts])
    mask = torch.ones(ids.shape, dtype=torch.bool)
    kept = kl_tokens(ids, mask, excluded_ids(names, TOKENIZER))
    return ["".join(c for c, k in zip(text, row, strict=True) if k) for text, row in zip(texts, kept, strict=True)]


def test_tokens_are_named_by_string_or_id():
    plus = TOKENIZER.convert_tokens_to_ids("+")
    assert carried(["12+3", "=rev"]) == ["12+3", "=rev"]
    for name in ("+", plus):
        assert carried(["12+3"], name) == ["123"]
    assert carried(["12+3"], "2") == ["1+3"], "a digit that is a token, and no id"
    found = set(excluded_ids(("special", "+"), TOKENIZER))
    assert found == {*excluded_ids(("special",), TOKENIZER), plus} >= {TOKENIZER.eos_token_id, TOKENIZER.pad_token_id}


def test_an_unknown_token_is_refused_and_named():
    with pytest.raises(ConfigError, match="<nowhere>"):
        excluded_ids(("<nowhere>",), TOKENIZER)
    with pytest.raises(ConfigError, match="999999"):
        excluded_ids((999999,), TOKENIZER)
    with pytest.raises(ConfigError, match=f"use an id below {len(TOKENIZER)}"):
        excluded_ids((len(TOKENIZER),), TOKENIZER)


class WithUnknown(SimpleNamespace):
    """A tokenizer that turns what it does not know into a token of its own, as most do."""

    unk_token, unk_token_id, words = "<unk>", 0, ("<unk>", "a")

    def __len__(self):
        return len(self.words)

    def convert_tokens_to_ids(self, name):
        return self.words.index(name) if name in self.words else self.unk_token_id


def test_the_unknown_token_is_excluded_by_its_name_or_id_and_not_by_an_unknown_word():
    tokenizer = WithUnknown()
    assert excluded_ids(("<unk>",), tokenizer) == excluded_ids((0,), tokenizer) == [0]
    assert excluded_ids(("a",), tokenizer) == excluded_ids(("1",), tokenizer) == [1]
    for kind in (WithUnknown, type("Without", (WithUnknown,), {"unk_token": None, "unk_token_id": None})):
        assert excluded_ids(("1",), kind()) == [1], "a text, as every id of a command line"
        with pytest.raises(ConfigError, match="nowhere"):
            excluded_ids(("nowhere",), kind())
