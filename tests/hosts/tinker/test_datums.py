"""Datums, built and read as padded tensors: everything stands where its token stands, or is refused with its datum."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.hosts.tinker.fakes import FakeDatum, fake_batch

from klamp.errors import DataError, EmptyMaskError, KlampError, NonFiniteError, ShapeError, TensorError
from klamp.hosts.tinker.datums import read_rows, token_ids
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
    dtypes = {name: "int64" if name == "target_tokens" else "float32" for name in datum.loss_fn_inputs}
    assert {name: value.dtype for name, value in datum.loss_fn_inputs.items()} == dtypes


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arrays_of_other_libraries(make):
    given = build_datum(make(PROMPT), make(RESPONSE), make(2.0), make(LOGPROBS), make(REF))
    assert rows(given) == rows(build_datum(PROMPT, RESPONSE, 2.0, LOGPROBS, REF))
    assert given.model_input.to_ints() == [5, 6, 7, 8]


def test_tokens_that_are_not_trained_on_have_no_advantage_and_numbers_are_per_token():
    datum = build_datum([5], RESPONSE, [2.0, -1.0], torch.tensor(LOGPROBS), mask=[1, 0], kl_mask=[1, 0])
    assert datum.model_input.to_ints() == [5, 8]
    assert rows(datum) == {
        "target_tokens": [8, 9],
        "advantages": [2, 0],
        "logprobs": [-0.5, -0.25],
        "mask": [1, 0],
        "kl_mask": [1, 0],
    }
    assert datum.loss_fn_inputs["kl_mask"].dtype == "float32"


def test_stripping_leaves_what_a_built_in_loss_takes_and_the_datum_as_it_was():
    datum = build_datum(PROMPT, RESPONSE, 2.0, LOGPROBS, REF, kl_mask=[1, 0])
    before = rows(datum)
    (stripped,) = strip_for_builtin([datum])
    assert rows(stripped) == {name: before[name] for name in ("target_tokens", "advantages", "logprobs")}
    assert stripped.model_input.to_ints() == datum.model_input.to_ints()
    assert rows(datum) == before


def test_stripping_a_mask_takes_the_advantages_that_it_hid():
    values = {"advantages": [1.0, 1.0], "mask": [0.0, 1.0], "logprobs": [-1.0, -1.0], "weights": [1.0, 1.0]}
    inputs = {name: torch.tensor(row) for name, row in values.items()} | {"target_tokens": torch.tensor([2, 3])}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    (stripped,) = strip_for_builtin([datum])
    assert rows(stripped) == {"target_tokens": [2, 3], "advantages": [0, 1], "logprobs": [-1, -1], "weights": [1, 1]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": []}, DataError, "at least one token of prompt"),
        ({"response": [], "logprobs": []}, DataError, "at least one token of prompt"),
        ({"logprobs": [-0.5]}, ShapeError, "logprobs does not have one number per token"),
        ({"ref_logprobs": [0.0, *REF]}, ShapeError, "ref_logprobs does not have one number per token"),
        ({"advantages": [1.0]}, ShapeError, "advantages does not have one number per token"),
        ({"mask": [1]}, ShapeError, "mask does not have one number per token"),
        ({"logprobs": [-0.5, None]}, DataError, "logprobs is not a row of numbers"),
        ({"prompt": [5, 1.5, 7]}, DataError, r"^prompt must hold token ids\n  got: 1.5 \(float\) at position 1"),
        ({"response": torch.tensor([8.0, 9.0])}, DataError, r"^response must hold token ids\n  got: 8.0"),
        ({"response": [8, -100]}, DataError, "got: -100"),
        ({"response": [True, 9]}, DataError, "got: True"),
        ({"prompt": "text"}, DataError, "got: 't'"),
        ({"response": None}, DataError, "got: None"),
    ],
)
def test_refusals(changes, error, message):
    given = {"prompt": PROMPT, "response": RESPONSE, "advantages": 1.0, "logprobs": LOGPROBS, "ref_logprobs": REF}
    with pytest.raises(error, match=message):
        build_datum(**given | changes)


def datum(**changes: Any) -> FakeDatum:
    rows = {
        "target_tokens": torch.tensor([7, 8, 9]),
        "advantages": torch.tensor([0.0, 2.0, 2.0]),
        "logprobs": torch.tensor([0.0, -0.5, -0.25]),
        "ref_logprobs": torch.tensor([0.0, -1.5, -0.75]),
        "mask": torch.tensor([0.0, 1.0, 1.0]),
    }
    return FakeDatum({name: row for name, row in (rows | changes).items() if row is not None})


def test_rows_are_padded_on_the_right_and_count_nothing_there() -> None:
    data, policies = fake_batch(sizes=((2, 1), (3, 4)))
    rows = read_rows(data)
    assert rows.lengths == (2, 6) and rows.mask.shape == (2, 6)
    assert rows.mask.tolist() == [[False, True, *[False] * 4], [False, False, *[True] * 4]]
    assert rows.ref_logprobs is not None and rows.kl_mask is None
    for column in (rows.advantages, rows.logprobs, rows.ref_logprobs, rows.policy(policies)[..., -1]):
        assert column[0, 2:].tolist() == [0.0] * 4
    assert rows.totals == (2.0, 5.0, 5.0)


def test_without_a_mask_every_position_counts_that_says_something() -> None:
    says_little = {"advantages": torch.tensor([0.0, 0.0, 2.0]), "logprobs": torch.zeros(3), "ref_logprobs": None}
    assert read_rows([datum(mask=None, **says_little)]).mask.tolist() == [[False, False, True]]
    assert read_rows([datum(mask=None)], reference=True).mask.tolist() == [[False, True, True]]


def test_a_reference_is_read_where_all_have_one_and_exclusions_where_one_has() -> None:
    bare = datum(ref_logprobs=None)
    assert read_rows([datum(), bare]).ref_logprobs is None
    with pytest.raises(DataError, match="datum 1 has no 'ref_logprobs'"):
        read_rows([datum(), bare], reference=True)
    with pytest.raises(DataError, match="datum 0 has no 'kl_mask'"):
        read_rows([datum(), datum(kl_mask=torch.ones(3))])
    rows = read_rows([datum(kl_mask=torch.tensor([0.0, 1.0, 0.0]))], exclusions=True)
    assert rows.totals == (1.0, 2.0, 1.0)


@pytest.mark.parametrize("data", [None, [], {"loss_fn_inputs": {}}, "text", datum()], ids=str)
def test_what_is_no_list_of_datums_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match="there are no datums|datum 0 has no loss_fn_inputs"):
        read_rows(data)
    with pytest.raises(DataError, match="^datum 1 has no loss_fn_inputs"):
        read_rows([datum(), FakeDatum([])])  # pyright: ignore


BAD = [
    *(({name: None}, DataError, f"datum 0 has no '{name}'") for name in ("target_tokens", "advantages", "logprobs")),
    *(
        ({name: torch.ones(2)}, ShapeError, f"datum 0: {name} does not have one number per token")
        for name in ("advantages", "logprobs", "ref_logprobs", "mask")
    ),
    ({"target_tokens": torch.zeros(1, 3)}, ShapeError, "datum 0: target_tokens does not have one number"),
    ({"logprobs": [0.0, None, -1.0]}, DataError, "datum 0: logprobs is not a row of numbers"),
    ({"logprobs": torch.tensor([0.0, float("nan"), -1.0])}, NonFiniteError, "datum 0: logprobs holds"),
    ({"ref_logprobs": torch.tensor([0.0, 0.5, -1.0])}, DataError, "datum 0: ref_logprobs holds"),
    ({"advantages": torch.tensor([0.0, float("inf"), 1.0])}, NonFiniteError, "datum 0: an advantage is"),
    ({"mask": torch.zeros(3)}, EmptyMaskError, "no datum has a token to train on"),
    ({"policy": []}, ShapeError, "logprobs_list does not hold one row"),
    ({"policy": None}, ShapeError, "logprobs_list does not hold one row"),
    ({"policy": [[-1.0, -1.0, -1.0]]}, TensorError, r"logprobs_list\[0\] must be a torch.Tensor"),
    ({"policy": [torch.tensor([7, 8, 9])]}, TensorError, r"logprobs_list\[0\] must hold floating-point numbers"),
    ({"policy": [torch.zeros(4)]}, ShapeError, "datum 0: the policy's row does not have one number"),
    ({"policy": [torch.tensor([0.0, float("nan"), 0.0])]}, NonFiniteError, "datum 0: the policy's row"),
    ({"policy": [torch.ones(3)]}, DataError, "datum 0: the policy's row"),
]


@pytest.mark.parametrize(("changes", "error", "words"), BAD)
def test_a_bad_row_is_refused_with_its_datum(changes: dict[str, Any], error: type[KlampError], words: str) -> None:
    of_datum = {name: row for name, row in changes.items() if name != "policy"}
    with pytest.raises(error, match=f"^{words}") as caught:
        read_rows([datum(**of_datum)]).policy(changes.get("policy", [torch.full((3,), -1.0)]))
    assert caught.value.got and caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    "tokens", [range(5, 7), np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), torch.tensor(6)]], ids=str
)
def test_token_ids_come_in_many_forms(tokens: Any) -> None:
    found = token_ids("prompt", tokens)
    assert found == [5, 6] and {type(token) for token in found} == {int}
