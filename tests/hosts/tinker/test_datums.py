"""build_datum and strip_for_builtin: everything stands where the token that it speaks of stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from klamp.errors import DataError, ShapeError
from klamp.tinker import build_datum, strip_for_builtin

tinker = pytest.importorskip("tinker")

PROMPT, RESPONSE, LOGPROBS, REF = [5, 6, 7], [8, 9], [-0.5, -0.25], [-1.5, -0.75]


def rows(datum):
    return {name: value.to_torch().tolist() for name, value in datum.loss_fn_inputs.items()}


def test_alignment():
    datum = build_datum(PROMPT, RESPONSE, 2.0, LOGPROBS, REF)
    assert datum.model_input.to_ints() == [5, 6, 7, 8]
    assert rows(datum) == {
        "target_tokens": [6, 7, 8, 9],
        "advantages": [0, 0, 2, 2],
        "logprobs": [0, 0, -0.5, -0.25],
        "mask": [0, 0, 1, 1],
        "ref_logprobs": [0, 0, -1.5, -0.75],
    }
    assert {value.dtype for name, value in datum.loss_fn_inputs.items() if name != "target_tokens"} == {"float32"}
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"


def test_a_prompt_of_one_token_and_numbers_per_token():
    datum = build_datum([5], RESPONSE, [2.0, -1.0], torch.tensor(LOGPROBS), kl_mask=[1, 0])
    assert datum.model_input.to_ints() == [5, 8]
    assert rows(datum) == {
        "target_tokens": [8, 9],
        "advantages": [2, -1],
        "logprobs": [-0.5, -0.25],
        "mask": [1, 1],
        "kl_mask": [1, 0],
    }


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arrays_of_other_libraries(make):
    given = build_datum(make(PROMPT), make(RESPONSE), make(2.0), make(LOGPROBS), make(REF))
    assert rows(given) == rows(build_datum(PROMPT, RESPONSE, 2.0, LOGPROBS, REF))
    assert given.model_input.to_ints() == [5, 6, 7, 8]


def test_tokens_that_are_not_trained_on_have_no_advantage():
    datum = build_datum(PROMPT, RESPONSE, 2.0, LOGPROBS, REF, mask=[1, 0])
    assert rows(datum)["advantages"] == [0, 0, 2, 0]
    assert rows(datum)["mask"] == [0, 0, 1, 0]


def test_stripping_leaves_what_a_built_in_loss_takes_and_the_datum_as_it_was():
    datum = build_datum(PROMPT, RESPONSE, 2.0, LOGPROBS, REF, kl_mask=[1, 0])
    before = rows(datum)
    (stripped,) = strip_for_builtin([datum])
    assert rows(stripped) == {name: before[name] for name in ("target_tokens", "advantages", "logprobs")}
    assert stripped.model_input.to_ints() == datum.model_input.to_ints()
    assert rows(datum) == before


def test_stripping_a_mask_takes_the_advantages_that_it_hid():
    inputs = {"advantages": [1.0, 1.0], "mask": [0.0, 1.0], "logprobs": [-1.0, -1.0], "weights": [1.0, 1.0]}
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            "target_tokens": torch.tensor([2, 3]),
            **{name: torch.tensor(values) for name, values in inputs.items()},
        },
    )
    (stripped,) = strip_for_builtin([datum])
    assert rows(stripped) == {
        "target_tokens": [2, 3],
        "advantages": [0, 1],
        "logprobs": [-1, -1],
        "weights": [1, 1],
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": []}, DataError, "at least one token of prompt"),
        ({"response": [], "logprobs": []}, DataError, "at least one token of prompt"),
        ({"logprobs": [-0.5]}, ShapeError, "logprobs does not have one number per token"),
        ({"ref_logprobs": [0.0, 0.0, *REF]}, ShapeError, "ref_logprobs does not have one number per token"),
        ({"advantages": [1.0]}, ShapeError, "advantages does not have one number per token"),
        ({"mask": [1]}, ShapeError, "mask does not have one number per token"),
        ({"logprobs": [-0.5, None]}, DataError, "logprobs is no row of numbers"),
        ({"prompt": [5, 1.5, 7]}, DataError, r"^prompt must hold token ids\n  got: 1.5 \(float\) at position 1"),
        ({"response": torch.tensor([8.0, 9.0])}, DataError, r"^response must hold token ids\n  got: 8.0"),
        ({"response": [8, -100]}, DataError, "got: -100"),
        ({"response": [True, 9]}, DataError, "got: True"),
        ({"prompt": "text"}, DataError, "got: 't'"),
        ({"prompt": 5}, DataError, r"got: 5 \(int\)"),
        ({"response": None}, DataError, "got: None"),
    ],
)
def test_refusals(changes, error, message):
    given = {"prompt": PROMPT, "response": RESPONSE, "advantages": 1.0, "logprobs": LOGPROBS, "ref_logprobs": REF}
    with pytest.raises(error, match=message):
        build_datum(**given | changes)
