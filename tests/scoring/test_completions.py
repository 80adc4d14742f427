"""Completions as tensors: rows out of them, without padding that nobody needs, and their text."""

from __future__ import annotations

import torch

from klamp.scoring.completions import Completions, select
from klamp.tasks import arithmetic_tokenizer


def three() -> Completions:
    """Prompts of 1, 3 and 2 tokens, completions of 2, 4 and 1 tokens; the second one was cut."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    return Completions(
        prompt_ids=torch.tensor([[0, 0, 5], [6, 7, 8], [0, 3, 4]]),
        prompt_mask=torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]),
        ids=torch.arange(12).view(3, 4),
        mask=mask,
        sampler_logprobs=-torch.arange(12.0).view(3, 4) * mask,
        ended=torch.tensor([True, False, True]),
    )


def test_rows_without_long_neighbours_lose_the_padding_of_all_of_them() -> None:
    found = select(three(), torch.tensor([0, 2]))
    assert found.prompt_ids.tolist() == [[0, 5], [3, 4]]
    assert found.prompt_mask.tolist() == [[0, 1], [1, 1]]
    assert found.ids.tolist() == [[0, 1], [8, 9]]
    assert found.mask.tolist() == [[True, True], [True, False]]
    assert found.sampler_logprobs.tolist() == [[0, -1], [-8, 0]]
    assert found.ended.tolist() == [True, True]


def test_rows_may_be_a_slice_a_mask_or_in_another_order() -> None:
    every = three()
    assert torch.equal(select(every, slice(0, 2)).ids, every.ids[:2])
    assert select(every, torch.tensor([2, 1, 1])).ids[:, 0].tolist() == [8, 4, 4]
    assert select(every, every.ended).ids.shape == (2, 2)


def test_a_completion_without_a_token_keeps_one_column() -> None:
    every = three()
    nothing = Completions(**{**vars(every), "mask": torch.zeros(3, 4, dtype=torch.bool)})
    assert select(nothing, slice(None)).ids.shape == (3, 1)


def test_text_is_that_of_unmasked_tokens_without_the_special_ones() -> None:
    tokenizer = arithmetic_tokenizer()
    end = tokenizer.eos_token_id
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("42", "7"))
    ids = torch.tensor([[*first, end], [*second, end, first[0]]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    every = three()
    chosen = Completions(
        prompt_ids=every.prompt_ids[:2],
        prompt_mask=every.prompt_mask[:2],
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros(2, 3),
        ended=mask.any(-1),
    )
    assert chosen.texts(tokenizer) == ["42", "7"]


def test_every_tensor_goes_to_the_device() -> None:
    moved = three().to(torch.device("meta"))
    assert {name: x.device.type for name, x in vars(moved).items()} == dict.fromkeys(vars(moved), "meta")
