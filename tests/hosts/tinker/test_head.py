"""A KL to a teacher at Tinker: over the head that its sampler returns, and of the sampled tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hosts.teachers import HAVE, KINDS, SAMPLED
from tests.hosts.tinker.fakes import FakeDatum, FakeSampler, fake_batch, score, skipping

from klamp import KLConfig, TeacherConfig
from klamp.errors import ConfigError, DataError, ModelError, NonFiniteError, ShapeError
from klamp.tinker import (
    build_datum,
    compute_grpo_kl_loss,
    compute_teacher_head,
    count_tokens,
    forward_backward_kl,
    strip_for_builtin,
)

SEEN = [[1, 2, 3], [4, 5], [6]]
ANSWERED = [[10], [11, 12], [13, 14, 15]]


def teacher(**fields: Any) -> TeacherConfig:
    given = {"teacher_model": "a snapshot", "teacher_coef": 0.7, "teacher_estimator": "topk", "teacher_head": "teacher"}
    return TeacherConfig(**given | {"teacher_top_k": 3} | fields)


class FakeTeacher(FakeSampler):
    """Says of every place that tokens 0, 1, ... are its likeliest; `more` also names the token that is there."""

    more = False
    given = 3

    async def sample_async(self, prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs):
        assert (num_samples, sampling_params.max_tokens, include_prompt_logprobs) == (1, 1, True)
        scores, tokens = await self.answer(prompt), prompt.to_ints()
        count = min(topk_prompt_logprobs, self.given)
        told = [[(token, -0.5 - token) for token in range(count)] for _ in tokens]
        if self.more:
            told = [[(token, x), *best] for token, x, best in zip(tokens, scores, told, strict=True)]
        return SimpleNamespace(prompt_logprobs=scores, topk_prompt_logprobs=[None, *told[1:]])


def ask(client, top_k, **options):
    return skipping(compute_teacher_head(client, SEEN, ANSWERED, top_k, **options))


def expected(k):
    scores = [score([*p, *r])[len(p) :] for p, r in zip(SEEN, ANSWERED, strict=True)]
    head = [(token, -0.5 - token) for token in range(k)]
    return [[[*head, pair] for pair in zip(r, row, strict=True)] for r, row in zip(ANSWERED, scores, strict=True)]


def test_each_token_has_the_likeliest_of_its_place_and_itself_last():
    client = FakeTeacher(delays={10: 0.03, 12: 0.01})
    assert ask(client, 3) == expected(3)
    assert client.asked == [[*p, *r] for p, r in zip(SEEN, ANSWERED, strict=True)]
    assert ask(FakeTeacher(), 0) == expected(0)
    assert skipping(compute_teacher_head(FakeTeacher(), [[1]], [[]], 3)) == [[]]


def test_the_token_that_is_told_besides_is_no_part_of_the_head_and_a_shorter_answer_is_refused():
    client = FakeTeacher()
    client.more = True
    assert ask(client, 3) == expected(3)
    with pytest.raises(ModelError, match=r"sequence 0: the teacher gave fewer") as caught:
        ask(FakeTeacher(), 4)
    assert caught.value.got == "3 of 4"


def test_a_refusal_is_the_teachers():
    with pytest.raises(ModelError, match="the teacher refuses to score"):
        ask(FakeTeacher(faults={10: [RuntimeError("no")]}), 3)
    with pytest.raises(NonFiniteError, match="the teacher has no log-probability"):
        ask(FakeTeacher(faults={12: [[None, -1.0, None, -1.0]]}), 3)


def datum(places, *, response=(10, 11), **changes):
    return build_datum([1, 2, 3], list(response), 0.5, [-1.0] * len(response), teacher_head=places, **changes)


PLACES = [[(7, -0.5), (8, -1.5), (10, -2.0)], [(11, -0.25), (-1, 0.0), (11, -0.25)]]


def test_a_datum_holds_the_head_at_the_place_of_its_token():
    inputs = {name: data.to_torch().tolist() for name, data in datum(PLACES).loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [2, 3, 10, 11]
    assert inputs["teacher_logprobs"] == [0, 0, -2.0, -0.25]
    assert inputs["teacher_head_tokens"] == [[-1, -1], [-1, -1], [7, 8], [11, -1]]
    assert inputs["teacher_head_logprobs"] == [[0, 0], [0, 0], [-0.5, -1.5], [-0.25, 0]]
    assert strip_for_builtin([datum(PLACES)])[0].loss_fn_inputs.keys() == {"target_tokens", "logprobs", "advantages"}
    assert count_tokens([datum(PLACES)]).tokens == 2
    alone = datum([[(10, -2.0)], [(11, -0.25)]]).loss_fn_inputs
    assert alone["teacher_logprobs"].to_torch().tolist() == [0, 0, -2.0, -0.25]


@pytest.mark.parametrize(
    ("places", "changes"),
    [
        (PLACES[:1], {}),
        (PLACES, {"response": (11, 10)}),
        (PLACES, {"teacher_logprobs": [-1.0, -1.0]}),
        ([PLACES[0], PLACES[1][1:]], {}),
        ([[1.0, 2.0]] * 2, {}),
    ],
    ids=["too short", "other tokens", "twice", "ragged", "no pairs"],
)
def test_what_is_not_told_of_this_response_is_refused(places, changes):
    with pytest.raises(DataError, match="teacher_head"):
        datum(places, **changes)


def test_a_head_that_does_not_fit_is_refused_before_anything_is_sent():
    wrong = {
        "has no 'teacher_head_tokens'": {"teacher_head": None, "teacher_logprobs": [-1.0, -1.0]},
        "does not fit": {"teacher_head": PLACES},
    }
    for words, changes in wrong.items():
        made = build_datum([1, 2, 3], [10, 11], 0.5, [-1.0, -1.0], **changes)
        with pytest.raises((DataError, ShapeError), match=words):
            forward_backward_kl(None, [made], kl_coef=0.0, teacher=teacher())
    broken = datum([[(7, float("nan")), *place[1:]] for place in PLACES])
    with pytest.raises(NonFiniteError, match="datum 0: teacher_head_logprobs"):
        forward_backward_kl(None, [broken], kl_coef=0.0, teacher=teacher(teacher_top_k=2))
    given = [torch.full((4,), -1.0, requires_grad=True)]
    with pytest.raises(ShapeError, match="does not have one number per token") as caught:
        compute_grpo_kl_loss([datum(PLACES)], given, kl_coef=0.0, teacher=teacher(teacher_top_k=2))
    assert "tokens (4, 3)" in caught.value.got


FIELDS = [KINDS[name] for name in sorted(HAVE["Tinker"] - SAMPLED)]
FIELDS += [
    {"teacher_direction": "js", "teacher_off_policy": "token"},
    {"teacher_horizon": "sequence", "teacher_off_policy": "sequence"},
]


def other_teacher(**fields: Any) -> TeacherConfig:
    return TeacherConfig(teacher_model="its name at the service", **{"teacher_coef": 0.7, **fields})


def from_teacher() -> tuple[list[FakeDatum], list[torch.Tensor]]:
    data, policies = fake_batch()
    others, _ = fake_batch(seed=5)
    rows = [other.loss_fn_inputs["ref_logprobs"] for other in others]
    return [
        FakeDatum({**datum.loss_fn_inputs, "teacher_logprobs": row}) for datum, row in zip(data, rows, strict=True)
    ], policies


@pytest.mark.parametrize("name", sorted(set(KINDS) - HAVE["Tinker"]))
def test_the_others_of_the_list_are_refused(name: str) -> None:
    data, policies = from_teacher()
    with pytest.raises(ConfigError):
        compute_grpo_kl_loss(data, policies, kl=KLConfig(beta=0.0), teacher=other_teacher(**KINDS[name]))


def test_what_a_datum_cannot_tell_is_refused_in_words() -> None:
    data, policies = fake_batch()
    with pytest.raises(DataError, match="datum 0 has no 'teacher_logprobs'"):
        compute_grpo_kl_loss(data, policies, teacher=other_teacher())
    for estimator, head in (("exact", "student"), ("topk", "student"), ("topk", "union")):
        words = f"teacher_estimator='{estimator}' with teacher_head='{head}' cannot use a sampling client"
        with pytest.raises(ConfigError, match=words):
            compute_grpo_kl_loss(data, policies, teacher=other_teacher(teacher_estimator=estimator, teacher_head=head))
