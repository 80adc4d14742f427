"""A teacher's head through a sampling client: asked for, put into datums, and the KL over it with a sampled tail."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
import torch
from tests.batches import flat_batch, objective_of
from tests.hosts.teachers import HAVE, KINDS, SAMPLED
from tests.hosts.tinker import wire
from tests.hosts.tinker.fakes import FakeSampler, score, skipping
from tests.hosts.tinker.wire import ADVANTAGES, PROMPTS, RESPONSES, datums, move
from tests.standin import ready

from klamp import TeacherConfig, topk_kl
from klamp import tinker as door
from klamp.core.objective import grpo_loss
from klamp.core.term import Weighted
from klamp.errors import DataError, ModelError, NonFiniteError, ShapeError
from klamp.tinker import build_datum, compute_grpo_kl_loss, compute_teacher_head, forward_backward_kl
from klamp_standin.model import LoraShape, Weights

SEEN = [[1, 2, 3], [4, 5], [6]]
ANSWERED = [[10], [11, 12], [13, 14, 15]]


def teacher(**fields: Any) -> TeacherConfig:
    head = {"teacher_estimator": "topk", "teacher_head": "teacher", "teacher_top_k": 3}
    return TeacherConfig(teacher_model="a snapshot", teacher_coef=0.7, **head | fields)


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


def test_the_token_that_is_told_besides_is_no_part_of_the_head():
    client = FakeTeacher()
    client.more = True
    assert ask(client, 3) == expected(3)


def test_a_refusal_is_the_teachers():
    with pytest.raises(ModelError, match=r"sequence 0: the teacher gave fewer .*\n  got: 3 of 4"):
        ask(FakeTeacher(), 4)
    with pytest.raises(ModelError, match="the teacher refuses to score"):
        ask(FakeTeacher(faults={10: [RuntimeError("no")]}), 3)
    with pytest.raises(NonFiniteError, match="the teacher has no log-probability"):
        ask(FakeTeacher(faults={12: [[None, -1.0, None, -1.0]]}), 3)


def datum(places, *, response=(10, 11), **changes):
    return build_datum([1, 2, 3], list(response), 0.5, [-1.0] * len(response), teacher_head=places, **changes)


PLACES = [[(7, -0.5), (8, -1.5), (10, -2.0)], [(11, -0.25), (-1, 0.0), (11, -0.25)]]


def test_a_datum_holds_the_head_at_the_place_of_its_token():
    inputs = {name: data.to_torch().tolist() for name, data in datum(PLACES).loss_fn_inputs.items()}
    assert (inputs["target_tokens"], inputs["teacher_logprobs"]) == ([2, 3, 10, 11], [0, 0, -2.0, -0.25])
    assert inputs["teacher_head_tokens"] == [[-1, -1], [-1, -1], [7, 8], [11, -1]]
    assert inputs["teacher_head_logprobs"] == [[0, 0], [0, 0], [-0.5, -1.5], [-0.25, 0]]
    assert door.strip_for_builtin([datum(PLACES)])[0].loss_fn_inputs.keys() == {
        "target_tokens",
        "logprobs",
        "advantages",
    }
    assert door.count_tokens([datum(PLACES)]).tokens == 2
    alone = datum([[(10, -2.0)], [(11, -0.25)]]).loss_fn_inputs
    assert alone["teacher_logprobs"].to_torch().tolist() == [0, 0, -2.0, -0.25]


OTHERS = {
    "too short": (PLACES[:1], {}),
    "other tokens": (PLACES, {"response": (11, 10)}),
    "twice": (PLACES, {"teacher_logprobs": [-1.0, -1.0]}),
    "ragged": ([PLACES[0], PLACES[1][1:]], {}),
    "no pairs": ([[1.0, 2.0]] * 2, {}),
}


@pytest.mark.parametrize(("places", "changes"), OTHERS.values(), ids=OTHERS)
def test_what_is_not_told_of_this_response_is_refused(places, changes):
    with pytest.raises(DataError, match="teacher_head"):
        datum(places, **changes)


def test_a_head_that_does_not_fit_is_refused_before_anything_is_sent():
    without = build_datum([1, 2, 3], [10, 11], 0.5, [-1.0] * 2, teacher_logprobs=[-1.0] * 2)
    broken = datum([[(7, float("nan")), *place[1:]] for place in PLACES])
    for made, error, words in (
        (without, DataError, "has no 'teacher_head_tokens'"),
        (datum(PLACES), ShapeError, "does not fit"),
        (broken, NonFiniteError, "datum 0: teacher_head_logprobs"),
    ):
        with pytest.raises(error, match=words):
            forward_backward_kl(None, [made], kl_coef=0.0, teacher=teacher(teacher_top_k=2 if made is broken else 3))
    given = [torch.full((4,), -1.0, requires_grad=True)]
    with pytest.raises(ShapeError, match="does not have one number per token") as caught:
        compute_grpo_kl_loss([datum(PLACES)], given, kl_coef=0.0, teacher=teacher(teacher_top_k=2))
    assert "tokens (4, 3)" in caught.value.got


@pytest.fixture(scope="module")
def taught(service, reference, shared_standin):
    """A teacher that was trained a little, as a client and with its tensors, and a student of another training."""
    data, base_model = datums(reference), shared_standin.base_model
    trainer = ready(service.create_lora_training_client(base_model=base_model, rank=4, seed=1))
    move(trainer, data)
    tensors = {name: x.detach().clone() for name, x in shared_standin.weights().items()}
    client = ready(trainer.save_weights_and_get_sampling_client())
    student = ready(service.create_lora_training_client(base_model=base_model, rank=4, seed=2))
    move(student, data[2:])
    return client, tensors, student


FIELDS = [KINDS[name] for name in sorted(HAVE["Tinker"] - SAMPLED)]
FIELDS += [
    {"teacher_direction": "js", "teacher_off_policy": "token"},
    {"teacher_horizon": "sequence", "teacher_off_policy": "sequence"},
]


@pytest.mark.filterwarnings("ignore:teacher_tail:klamp.errors.KLWarning")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_gradient_is_that_of_a_local_teacher_with_the_same_head(taught, standin, fields):
    (client, tensors, student), config = taught, teacher(**fields)
    for tensor in standin.weights().values():
        tensor.grad = None
    told = asyncio.run(compute_teacher_head(client, PROMPTS, RESPONSES, config.teacher_top_k))
    generator = torch.Generator().manual_seed(0)
    sampled = [[-1 - 2 * float(torch.rand((), generator=generator)) for _ in row] for row in RESPONSES]
    made = zip(PROMPTS, RESPONSES, ADVANTAGES, sampled, told, strict=True)
    data = [build_datum(p, r, a, s, teacher_head=t) for p, r, a, s, t in made]
    result = forward_backward_kl(student, data, kl_coef=0.0, teacher=config).result()

    whole = [torch.arange(64).expand(len(datum.model_input.to_ints()), -1) for datum in data]
    tokens = [datum.model_input.to_ints() for datum in data]
    other = Weights(shape=LoraShape(rank=4), tensors=tensors)
    with torch.no_grad():
        theirs = [wire.base_model().logprobs(other, [row], [goal])[0] for row, goal in zip(tokens, whole, strict=True)]

    def local(_, ours):
        columns = {name: [] for name in ("policy_logprobs", "teacher_logprobs", "teacher_kl")}
        rows = {name: [d.loss_fn_inputs[name].to_torch() for d in data] for name in data[0].loss_fn_inputs}
        for p, q, y, mu in zip(ours, theirs, rows["target_tokens"], rows["logprobs"], strict=True):
            ids = q.topk(config.teacher_top_k).indices
            pair = [x.gather(-1, y[:, None])[:, 0] for x in (p, q)]
            weight = None if config.teacher_off_policy == "none" else pair[0].detach() - mu
            heads, outside = (x.gather(-1, ids) for x in (p, q)), (ids != y[:, None]).all(-1)
            tail = config.teacher_tail if config.teacher_estimator == "topk" else "bucket"
            options = {"direction": config.teacher_direction, "tail": tail, "log_weight": weight}
            for rows_of, x in zip(columns.values(), [*pair, topk_kl(*heads, *pair, outside, **options)], strict=True):
                rows_of.append(x)
        padded = {name: torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for name, x in (rows | columns).items()}
        sampler = dict.fromkeys(("old_logprobs", "sampler_logprobs"), padded["logprobs"])
        terms = {name: padded[name] for name in (*columns, "advantages")}
        batch = flat_batch(mask=padded["mask"] != 0, **sampler, **terms)
        others = (Weighted(0.7, config.build_term()),)
        return grpo_loss(batch, objective_of(reduction="token_mean", others=others)).loss, {}

    wide = [
        SimpleNamespace(model_input=d.model_input, loss_fn_inputs={"target_tokens": tinker.TensorData.from_torch(ids)})
        for d, ids in zip(data, whole, strict=True)
    ]
    value, gradient = wire.by_autograd(standin, wide, local)
    wire.assert_same_gradient(
        wire.over_the_wire(standin), gradient, within=2e-6
    )  # exactly 0 here, 1.6e-6 with torch 2.6
    assert result.metrics["train/loss"] == pytest.approx(value, abs=1e-6)
    assert result.metrics["teacher/kl"] > 1e-3
