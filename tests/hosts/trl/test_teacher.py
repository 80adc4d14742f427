"""A teacher in TRL: the same completions through TRL's loss and through klamp's own, with and without a reference."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from tests.batches import flat_batch, objective_of
from tests.hosts.teachers import HAVE, KINDS, SAMPLED, at_prefixes
from tests.hosts.trl.hosts import (
    LENGTH,
    PROMPTS,
    arguments,
    build,
    dataset,
    klamp_trainer,
    model,
    move,
    noisy,
    saved,
    stock_trainer,
    tokenizer,
)
from tests.hosts.trl.losses import generated, gradient_of, loss_of, plain_logits, plain_logprobs, rows_of, trained
from tests.training.answering import VLLMServer, answering

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import exact_kl
from klamp.core.objective import grpo_loss
from klamp.core.term import Weighted
from klamp.errors import ConfigError, DataError, ModelError, NonFiniteError, UnknownNameError
from klamp.trl import effective

COEF = 0.6
REDUCTIONS = {"grpo": "sequence_mean", "dr_grpo": "fixed_length", "dapo": "token_mean"}


def made(base: Any, teacher: Any, folder: Path, **options: Any) -> Any:
    given = {"teacher_coef": COEF, "scale_rewards": "none", "max_steps": 4, **options}
    ref = {"ref_model": copy.deepcopy(base)} if given.get("beta") else {}
    extra = {**given.pop("trainer", {}), **ref, **({"teacher_model": copy.deepcopy(teacher)} if teacher else {})}
    return klamp_trainer(noisy(base), folder, trainer=extra, **given)


def pull_on(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The gradient of the teacher alone: no completion has an advantage."""
    return gradient_of(trainer, loss_of(trainer, inputs | {"advantages": torch.zeros_like(inputs["advantages"])}))


@pytest.fixture(scope="module")
def stock_inputs(base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the stock trainer generates, and its advantages without a teacher."""
    folder = tmp_path_factory.mktemp("stock")
    return generated(stock_trainer(noisy(base), folder, scale_rewards="none", loss_type="dapo"))


def test_a_teacher_of_few_positions_or_of_nan_is_refused_with_what_helps(base: Any, tmp_path: Path) -> None:
    for kind in ("qwen2", "gpt2"):  # a GPT-2 learned its positions
        short = model(kind)
        short.config.max_position_embeddings = 9
        with pytest.raises(DataError, match="a prompt is too long for the teacher"):
            generated(made(base, short, tmp_path))
        trainer = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.1, trainer={"ref_model": short})
        with pytest.raises(DataError, match="a prompt is too long for the reference"):
            generated(trainer)
    broken = noisy(model())
    broken.get_input_embeddings().weight.data[:] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        generated(made(base, broken, tmp_path))
    assert "NaN among the weights" in caught.value.fix and "teacher_max_log_ratio" not in caught.value.fix


def own_loss(trainer: Any, base: Any, teacher: Any, inputs: dict[str, Any], advantages: Any, options: dict[str, Any]):
    """klamp's loss from the models, the completions and the policy that sampled, with none of the adapter's numbers."""
    fields = {"beta": 0.0, "teacher_model": "given", "teacher_coef": COEF, **options}
    kl, config = (
        kind(**{name: value for name, value in fields.items() if name in kind.__dataclass_fields__})
        for kind in (KLConfig, TeacherConfig)
    )
    with torch.no_grad():
        ref, taught = (plain_logits(each, inputs) for each in (base, teacher))
    logits = plain_logits(trainer.model, inputs)
    ref, other, own = (plain_logprobs(each, inputs) for each in (ref, taught, logits))
    sampler = own.detach() if inputs["old_per_token_logps"] is None else inputs["old_per_token_logps"]
    batch = flat_batch(
        policy_logprobs=own,
        mask=inputs["completion_mask"].bool(),
        advantages=advantages,
        ref_logprobs=ref,
        teacher_logprobs=other,
        old_logprobs=inputs["old_per_token_logps"],  # None: the policy itself
        sampler_logprobs=sampler,
        teacher_kl=at_prefixes(config, logits, taught, inputs["completion_ids"], own.detach() - sampler),
    )
    objective = objective_of(
        reduction=REDUCTIONS[trainer.loss_type],  # type: ignore[arg-type]
        max_length=LENGTH,
        beta=kl.beta,
        kl=kl.build_term(),
        others=(Weighted(COEF, config.build_term()), *kl.beside()),
    )
    return grpo_loss(batch, objective)


BESIDE: list[dict[str, Any]] = [
    {"beta": -0.25},  # beyond the teacher
    {"beta": -0.25, "kl_estimator": "k1", "kl_placement": "advantage"},
    {"beta": -0.25, "kl_max_teacher_log_ratio": 0.05},
    {"beta": 0.4, "sampler_coef": 0.3},
]


@pytest.mark.filterwarnings("ignore:teacher_tail:klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("place", "kl"),
    [
        *((place, {"beta": 0.4}) for place in sorted(HAVE["TRL"])),
        *((place, {"beta": 0.0}) for place in ("k1", "k1 in the advantage", "exact", "the teacher's head")),
        *(("k1", kl) for kl in BESIDE),
    ],
)
def test_the_loss_and_its_gradient_are_klamps_own(
    base: Any, teacher: Any, stock_inputs: dict[str, Any], tmp_path: Path, place: str, kl: dict[str, Any]
) -> None:
    beta, options = kl["beta"], {**KINDS[place], **kl, "loss_type": "dapo"}
    trainer = made(base, teacher, tmp_path, **options)
    assert (trainer.ref_model is None) == (beta == 0)
    inputs = {"old_per_token_logps": None, **generated(trainer)}
    assert torch.equal(stock_inputs["completion_ids"], inputs["completion_ids"]), "the same completions"
    metrics = trainer._metrics["train"]
    for update in (1, 2) if place in {*SAMPLED, "both heads, weighed"} else (1,):
        expected = own_loss(trainer, base, teacher, inputs, stock_inputs["advantages"], options)
        exact = gradient_of(trainer, expected.loss)
        loss = loss_of(trainer, inputs)
        assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-6, rel=1e-6), update
        assert (gradient_of(trainer, loss) - exact).abs().max() <= 1e-6 * max(1.0, float(exact.norm())), update
        beside = expected.metrics.keys() & {"kl/mix", "kl/teacher_clamped", "sampler/kl"}
        for name in ("teacher/k1", "teacher/kl", *beside):
            assert metrics[name][-1] == pytest.approx(float(expected.metrics[name]), rel=1e-4)
        inputs["old_per_token_logps"] = plain_logprobs(plain_logits(trainer.model, inputs), inputs).detach()
        move(trainer.model)
    assert {*metrics["teacher/coef"]} == {COEF}
    assert ("teacher/student_mass" in metrics) == bool(options.get("teacher_top_k"))
    assert bool(metrics["kl"]) == (beta != 0), "TRL's own name is for a reference"


@pytest.mark.parametrize("name", sorted(set(KINDS) - HAVE["TRL"]))
def test_the_others_of_the_list_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be honoured by TRL"):
        arguments(teacher_model="x", **KINDS[name])


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_it_is_divided_as_the_loss_type_divides(base: Any, teacher: Any, tmp_path: Path, loss_type: str) -> None:
    options = {"teacher_estimator": "k3", "loss_type": loss_type}
    trainer = made(base, teacher, tmp_path, **options)
    inputs = {"old_per_token_logps": None, **generated(trainer)}
    expected = own_loss(trainer, base, teacher, inputs, inputs["advantages"], options)
    loss = loss_of(trainer, inputs)
    torch.testing.assert_close(loss.detach(), expected.loss.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement", ["loss", "advantage"])
def test_its_warm_up_is_in_the_loss(base: Any, teacher: Any, tmp_path: Path, placement: str) -> None:
    """A quarter of the pull after one of four steps, and all of it after four."""
    options: dict[str, Any] = {"teacher_warmup_steps": 4, "teacher_placement": placement, "teacher_estimator": "k1"}
    trainer, gradients = made(base, teacher, tmp_path, **options), []
    inputs = generated(trainer)
    for trainer.state.global_step in (0, 1, 4):
        gradients.append(pull_on(trainer, inputs))
    assert not gradients[0].any() and gradients[2].norm() > 1e-3
    assert_same_gradient(4 * gradients[1], gradients[2])


def assert_same_gradient(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To 1e-5 of the largest entry: a float32 sum over tokens is right to some eps of that, not of each entry."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("place", ["k3", "the teacher's head, forward"])
def test_fast_scoring_has_the_same_numbers(base: Any, teacher: Any, tmp_path: Path, place: str) -> None:
    options = KINDS[place]
    plain, fast = (made(base, teacher, tmp_path, fast_scoring=each, **options) for each in (False, True))
    assert len(fast._klamp.fast.traits) == 2, "policy and teacher"
    ours, theirs = (generated(each) for each in (fast, plain))
    mask = theirs["completion_mask"].bool()
    scores = (each["klamp_teacher_logprobs"][mask] for each in (ours, theirs))
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-6)
    gradients = [pull_on(fast, ours), pull_on(plain, theirs)]
    assert float(gradients[1].norm()) > 0
    assert_same_gradient(*gradients)


def test_a_teacher_behind_another_prompt_scores_the_same_completions(base: Any, teacher: Any, tmp_path: Path) -> None:
    trainer = made(base, teacher, tmp_path, teacher_prompt="hint")
    rows = rows_of(hint=[f"{text} the days are seven" for text in PROMPTS])
    inputs = generated(trainer, rows=rows)
    for row, found in enumerate(inputs["klamp_teacher_logprobs"]):
        ids = tokenizer()(rows[row]["hint"])["input_ids"]
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        whole = torch.cat([torch.tensor(ids), completion])[None]
        with torch.no_grad():
            logits = teacher(input_ids=whole).logits[0, len(ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(found[: len(completion)], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="a prompt has no 'hint' for the teacher"):
        generated(trainer)


@pytest.mark.parametrize("column", ["", "hint"])
def test_a_teacher_at_a_server_has_a_local_ones_numbers(base: Any, teacher: Any, tmp_path: Path, column: str) -> None:
    hints = [f"{text} the days" for text in PROMPTS]
    options: dict[str, Any] = {**KINDS["the teacher's head, forward"], "teacher_prompt": column or None}
    here = made(base, teacher, tmp_path, trainer={"train_dataset": dataset(hint=hints)}, **options)
    server = VLLMServer(teacher, tokenizer(), names=("teacher",), longest=64)
    with answering(server.answer) as url:
        away = made(base, None, tmp_path, trainer={"train_dataset": dataset(hint=hints)}, teacher_url=url, **options)
        losses = [loss_of(each, generated(each, rows=rows_of(hint=hints))) for each in (away, here)]
    torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=1e-5, atol=1e-6)
    assert_same_gradient(*(gradient_of(each, loss) for each, loss in zip((away, here), losses, strict=True)))
    assert f"teacher on the server at {url}" in effective(away).terms[0].term
    texts = [each["prompt"] for each in server.asked if isinstance(each["prompt"][0], str)]
    assert texts and ("the days" in texts[0][1]) == bool(column)


@pytest.mark.parametrize("where", ["a server", "memory"])
def test_another_teacher_is_noticed_at_a_resume(base: Any, teacher: Any, tmp_path: Path, where: str) -> None:
    """At the same address, or passed as the same argument; with a KL field of the reference or without."""
    server = VLLMServer(teacher, tokenizer(), names=("teacher",), longest=64)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "teacher_estimator": "k3", "max_steps": 2}
    with answering(server.answer) as url:
        place, model = ({"teacher_url": url}, None) if where == "a server" else ({}, teacher)
        made(base, model, tmp_path, **options | place | {"max_steps": 1}).train()
        newest = str(tmp_path / "checkpoint-1")
        made(base, model, tmp_path, **options | place).train(resume_from_checkpoint=newest)
        server.model = other = noisy(teacher)
        again = made(base, model and other, tmp_path, **options | place)
        with pytest.raises(ConfigError, match="the teacher is another one than it was"):
            again.train(resume_from_checkpoint=newest)


class Forbidding(VLLMServer):
    """Gives no token but the end of a text a probability, and writes that as vLLM does."""

    def entry(self, row: torch.Tensor, token: int, top: int) -> dict[str, dict[str, Any]]:
        entry = super().entry(row, token, top)
        return entry if token == tokenizer().eos_token_id else {**entry, str(token): {"logprob": -9999.0, "rank": 96}}


def test_a_token_that_the_server_rules_out_is_refused_or_bounded(base: Any, teacher: Any, tmp_path: Path) -> None:
    with answering(Forbidding(teacher, tokenizer(), names=("teacher",), longest=64).answer) as url:
        with pytest.raises(NonFiniteError, match="teacher_max_log_ratio bounds its pull"):
            generated(made(base, None, tmp_path, teacher_url=url))
        bounded = made(base, None, tmp_path, teacher_url=url, teacher_max_log_ratio=5.0)
        inputs = generated(bounded)
        loss = loss_of(bounded, inputs)
    assert (inputs["klamp_teacher_logprobs"] == -torch.inf).any() and bool(loss.isfinite())
    metrics = bounded._metrics["train"]
    assert metrics["teacher/log_ratio_clamped"][0] > 0.8 and metrics["teacher/kl"][0] < 6


def test_a_server_that_does_not_fit_is_refused_before_a_step(base: Any, teacher: Any, tmp_path: Path) -> None:
    with answering(VLLMServer(teacher, tokenizer(), names=("teacher",), longest=6).answer) as url:
        with pytest.raises(ModelError, match="maximum context length is 6"):
            made(base, None, tmp_path, teacher_url=url)
        with pytest.raises(ConfigError, match="temperature 1 only"):
            made(base, None, tmp_path, teacher_url=url, temperature=0.7)


def test_an_adapter_is_taught_by_a_model_and_by_the_policy_without_it(base: Any, teacher: Any, tmp_path: Path) -> None:
    """Of a policy with an adapter the hidden states and head are those below it; off, it is the base model."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=8)
    for taught, given in ((base, {"teacher_kind": "adapter_off"}), (teacher, {})):
        own = {"peft_config": adapter} | ({} if given else {"teacher_model": copy.deepcopy(teacher)})
        options = {"teacher_coef": COEF, "teacher_estimator": "exact", **given}
        trainer = klamp_trainer(copy.deepcopy(base), tmp_path, trainer=own, scale_rewards="none", **options)
        inputs = generated(trainer)
        kl = exact_kl(plain_logits(trainer.model, inputs), plain_logits(taught, inputs)).detach()
        mean = float(kl[inputs["completion_mask"].bool()].mean())
        inputs["advantages"] = torch.zeros_like(inputs["advantages"])
        assert loss_of(trainer, inputs).item() == pytest.approx(COEF * mean, rel=1e-4, abs=1e-6)
        assert trainer._metrics["train"]["teacher/kl"] == [pytest.approx(mean, rel=1e-4)] and mean > 0.01


def test_a_run_has_a_folder_as_its_teacher_and_needs_no_reward(base: Any, teacher: Any, tmp_path: Path) -> None:
    """Rewards that are all equal have no gradient: what moves the weights is the teacher."""
    options = {"teacher_model": saved(teacher, tmp_path / "teacher"), "teacher_coef": 1.0, "max_steps": 2}
    extra = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    trainer = trained(base, tmp_path / "run", trainer=extra, **options)
    course = [row["teacher/k1"] for row in trainer.state.log_history if "teacher/k1" in row]
    assert len(course) == 2 and all(course)
    assert not torch.equal(trainer.model.lm_head.weight, base.lm_head.weight)
    told = effective(trainer)
    assert [term.beta for term in told.terms] == [1.0] and str(tmp_path / "teacher") in told.terms[0].term


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher_url": "http://h:1", "teacher_estimator": "exact"}, "cannot use a server"),
        ({"teacher_kind": "live", "teacher_estimator": "topk"}, "output head moves between"),
        ({"teacher_models": ["a=x", "b=y"], "teacher_key": "k"}, "klamp scores a whole batch with one teacher"),
        ({"teacher_model": "x", "teacher_placement": "advantage", "loss_type": "vespo"}, "with loss_type='vespo'"),
    ],
)
def test_what_trl_cannot_do_is_refused_before_a_model_is_loaded(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=words):
        arguments(**options)


def test_a_teacher_that_does_not_fit_is_refused(base: Any, teacher: Any, tmp_path: Path) -> None:
    passed: dict[str, Any] = {"trainer": {"teacher_model": teacher}}
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "have no teacher", passed),
        (ConfigError, "the arguments name one", {**passed, "teacher_model": "x"}),
        (ModelError, "there is no model at this path", {"teacher_model": "./no-such-folder"}),
        (ModelError, "there is no model at this path", {"teacher_model": "runs/no-such/checkpoint"}),
        (UnknownNameError, r"(?s)unknown field of GRPOConfig.*did you mean 'teacher_coef'", {"teacher_coeff": 1.0}),
        (ConfigError, "fields of a teacher are set and none is named", {"teacher_coef": 1.0}),
        (ConfigError, "needs a model with a PEFT adapter", {"teacher_kind": "adapter_off"}),
    ]
    for kind, words, options in refused:
        with pytest.raises(kind, match=words):
            klamp_trainer(copy.deepcopy(base), tmp_path, **options)
    other = model()
    other.resize_token_embeddings(20)
    with pytest.raises(ModelError, match="the teacher has another vocabulary"):
        made(base, other, tmp_path)
    stock = build(trl.GRPOTrainer, copy.deepcopy(base), arguments(folder=tmp_path, teacher_model="x"))
    with pytest.raises(ConfigError, match="the trainer is not klamp's"):
        stock.train()
