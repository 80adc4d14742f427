"""A teacher of a run through the service: what it says, whole runs with it, and how they go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tests.standin import ready
from tests.training.answering import VLLMServer, answering
from tests.training.conftest import StopAfter, disturb, rows_of, steps_of, tiny_llama
from tests.training.test_teachers import ALONE, ROWS, prompts_file

from klamp.errors import ConfigError, KLWarning, ModelError
from klamp.tasks import arithmetic_tokenizer
from klamp.training.backends import train_run
from klamp.training.references import FrozenReference
from klamp.training.service import calls
from klamp.training.service.run import _reference, _teacher

SHORT = {"max_steps": 2, "eval_every": 0, "save_every": 0, "eval_size": 1, "prompts_per_step": 2}
HEAD = {"teacher_estimator": "topk", "teacher_head": "teacher", "teacher_top_k": 3}


def test_it_tells_its_likeliest_tokens_behind_its_own_prompt(connection, client, context):
    base = calls.TinkerReference(connection, client, "the base model")
    completions = calls.collect(context, base, context.task.train[:3], step=1)
    mask = completions.mask
    teacher = calls.TinkerReference(connection, client, "the teacher", top_k=3, vocabulary=12)
    found = teacher.score(completions, temperature=1.0)
    every = torch.ones(len(mask), dtype=torch.bool)
    local = FrozenReference(tiny_llama()).score(completions, temperature=1.0, keep=every)
    expected = local.predictions.logits()[mask].log_softmax(-1).topk(3)
    told = found.predictions.values[mask]
    torch.testing.assert_close(found.logprobs[mask], local.logprobs[mask], rtol=1e-5, atol=1e-5)
    known = expected.indices < 12
    assert not known.all() and known.any()
    assert torch.equal(told[:, :-1, 0].long(), torch.where(known, expected.indices, -1))
    torch.testing.assert_close(told[:, :-1, 1], torch.where(known, expected.values, 0.0), rtol=1e-5, atol=1e-5)
    assert torch.equal(told[:, -1, 0].long(), completions.ids[mask])
    plain = base.score(completions, temperature=1.0)
    assert plain.predictions is None
    torch.testing.assert_close(plain.logprobs[mask], found.logprobs[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_a_teacher_of_another_base_model_has_to_have_the_policy_s_tokens(run_of, known):
    tokenizer, other = arithmetic_tokenizer(), arithmetic_tokenizer()
    other.add_tokens(["!"])

    def answer(what, call):
        if "tokenizer" in what and not known:
            raise ModelError("the service names none")
        return call()

    client = SimpleNamespace(get_base_model=lambda: "klamp/other", get_tokenizer=lambda: tokenizer)
    service = SimpleNamespace(create_sampling_client=lambda **source: client)
    connection, config = SimpleNamespace(ask=answer, service=service), run_of(teacher_model="tinker://a/b/c", **ALONE)
    if not known:
        with pytest.warns(KLWarning, match="whether its token ids are the policy's is not known"):
            _teacher(connection, config, other, "tinker://a/b/c")
        return
    assert (
        _teacher(connection, config, tokenizer, "tinker://a/b/c").describe() == "tinker://a/b/c at the service, frozen"
    )
    with pytest.raises(ModelError, match="another tokenizer than the policy"):
        _teacher(connection, config, other, "tinker://a/b/c")
    with pytest.raises(ModelError, match="the reference has another tokenizer than the policy"):
        _reference(connection, run_of(ref_model="tinker://a/b/c", beta=0.1), other)


class Snapshot(NamedTuple):
    """Weights at the service that are a teacher's, and whose they are."""

    path: str
    client: Any
    name: str
    tensors: dict[str, torch.Tensor]


@pytest.fixture
def snapshot(connection, tiny, request):
    """Other weights than the base model's."""
    client = ready(connection.service.create_lora_training_client(tiny.base_model, rank=4))
    tensors = tiny.weights()
    with torch.no_grad():
        for i, tensor in enumerate(tensors.values()):
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)))
    name = f"teacher-{abs(hash(request.node.name))}"
    path = connection.ask("save", lambda: client.save_weights_for_sampler(name)).path
    return Snapshot(path, client, name, tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {**HEAD, **ALONE, "num_generations": 1},
        {**HEAD, "teacher_coef": 0.3, "teacher_off_policy": "token", "num_iterations": 2, "beta": 0.1},
        {"teacher_placement": "advantage", "teacher_schedule": "linear", "beta": 0.0},
    ],
    ids=["a head alone", "three anchors", "an advantage, scheduled"],
)
def test_a_killed_run_goes_on_with_the_same_numbers(tiny, run_of, connection, snapshot, tmp_path, changes):
    given = SHORT | {"max_steps": 4, "teacher_model": snapshot.path} | changes
    train_run(run_of(output_dir=str(tmp_path / "whole"), **given))
    parts = {"output_dir": str(tmp_path / "parts"), **given}
    with pytest.raises(Exception, match="training was stopped after step 2"):
        train_run(run_of(**parts), [StopAfter(2)])
    train_run(run_of(**parts, resume=True))
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    rows = steps_of(tmp_path / "whole")
    seen = {"teacher/kl", "teacher/k1", "teacher/coef", "teacher/unscored"}
    seen |= (
        {"teacher/student_mass", "teacher/teacher_mass", "train/teacher_penalty"}
        if HEAD.keys() <= changes.keys()
        else set()
    )
    assert all(row.keys() >= seen and row["teacher/unscored"] == 0 for row in rows)
    assert rows[0]["teacher/kl"] > 1e-3
    if "teacher_schedule" in changes:
        assert [row["teacher/coef"] for row in rows] == [1.0, 0.75, 0.5, 0.25]
    with pytest.raises(ConfigError, match="a resume cannot change teacher_model"):
        train_run(run_of(**parts | {"teacher_model": tiny.base_model, "max_steps": 5}, resume=True))
    with torch.no_grad():
        for tensor in snapshot.tensors.values():
            tensor.mul_(-2)
    connection.ask("save", lambda: snapshot.client.save_weights_for_sampler(snapshot.name))
    with pytest.raises(ConfigError, match="the teacher is another model than it was"):
        train_run(run_of(**parts | {"max_steps": 5}, resume=True))


@pytest.mark.slow
def test_each_of_several_teachers_sees_its_prompt(tiny, run_of, snapshot, tmp_path):
    """One of them is the start of the run: behind the same prompt its KL is 0 in the first step, behind a hint not."""
    given = SHORT | HEAD | ALONE | {"max_steps": 1, "train_size": 0, "prompts_per_step": 4, "teacher_key": "who"}
    given |= prompts_file(tmp_path, ROWS) | {"teacher_models": (f"a={snapshot.path}", f"b={tiny.base_model}")}
    seen = []
    for name, more in (("same", {}), ("hint", {"teacher_prompt": "hint"})):
        folder = tmp_path / name
        train_run(run_of(output_dir=str(folder), gradient_accumulation_steps=2, **given | more))
        seen += steps_of(folder)
    assert abs(seen[0]["teacher/kl.b"]) < 1e-5 < 1e-3 < seen[0]["teacher/kl.a"]
    assert seen[1]["teacher/kl.b"] > 1e-3


@pytest.mark.slow
def test_a_vllm_server_may_be_the_teacher(tiny, run_of, tmp_path):
    model = tiny_llama()
    disturb(model, size=0.1)
    with answering(VLLMServer(model, arithmetic_tokenizer()).answer) as url:
        train_run(run_of(**SHORT | HEAD | ALONE, teacher_url=url))
    assert all(row["teacher/kl"] > 1e-3 and row["teacher/teacher_mass"] < 1 for row in steps_of(tmp_path / "run"))
