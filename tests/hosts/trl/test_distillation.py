"""TRL's distillation with klamp's KL to the teacher: its loss, its limits, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from tests.batches import flat_batch
from tests.hosts.teachers import HEAD, KINDS, at_prefixes
from tests.hosts.trl.hosts import PROMPTS, arguments, dataset, distiller, model, saved, tokenizer
from tests.hosts.trl.losses import gradient_of, loss_of, plain_logits, plain_logprobs
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM
from trl.experimental.server_distillation import ServerDistillationTrainer

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import exact_kl
from klamp.core.penalty import token_penalty
from klamp.core.term import prepare
from klamp.doctor.readers import read_record
from klamp.errors import ConfigError, ModelError, NonFiniteError, UnsupportedVersion
from klamp.hosts.trl import teacher as taught
from klamp.hosts.trl.callbacks import settings_of_arguments
from klamp.hosts.trl.distillation import join
from klamp.trl import DistillationConfig, DistillationTrainer, DoctorCallback, attach, effective

pytestmark = pytest.mark.filterwarnings("ignore::klamp.KLWarning")

COEF = 0.6
EXACT, TOPK = {"teacher_estimator": "exact"}, {"teacher_estimator": "topk", "teacher_top_k": 3}
OTHERWISE = {"teacher_placement", "teacher_off_policy"}
CHOICES = {name: fields for name, fields in KINDS.items() if not OTHERWISE & fields.keys()}
CHOICES |= {f"the student's head, {way}": HEAD | {"teacher_direction": way} for way in ("forward", "js")}
CHOICES |= {"both heads": HEAD | {"teacher_head": "union"}}


@pytest.fixture(scope="module")
def shared(base: Any, teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One trainer in float64; `with_teacher` gives it another KL to its teacher."""
    pair = (copy.deepcopy(each).double() for each in (base, teacher))
    return distiller(*pair, tmp_path_factory.mktemp("shared"), teacher_estimator="k1")


@pytest.fixture(scope="module")
def shared_inputs(shared: Any) -> dict[str, Any]:
    return batch_of(shared)


def with_teacher(trainer: Any, options: dict[str, Any]) -> Any:
    join(trainer, TeacherConfig(teacher_model="given", **options), trainer.teacher_model)
    trainer._metrics["train"].clear()
    return trainer


def batch_of(trainer: Any, rows: int = 3, seed: int = 5) -> dict[str, Any]:
    torch.manual_seed(seed)
    inputs = trainer._generate_and_score_completions([{"prompt": text} for text in PROMPTS[:rows]])
    inputs["completion_mask"][0, 3:] = 0
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def own_penalty(trainer: Any, student: Any, teacher: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
    """klamp's penalty from the logits of the two models alone: nothing that the adapter computed. [B, T]"""
    config = TeacherConfig(teacher_model="given", **options)
    policy, other = (plain_logits(each, inputs).double() / trainer.temperature for each in (student, teacher))
    batch = flat_batch(
        policy_logprobs=plain_logprobs(policy, inputs),
        teacher_logprobs=plain_logprobs(other, inputs).detach(),
        mask=inputs["completion_mask"].bool(),
        advantages=torch.zeros(len(policy)),
        teacher_kl=at_prefixes(config, policy, other, inputs["completion_ids"]),
    )
    return config.teacher_coef * token_penalty(prepare(batch, config.build_term()))


def check_loss(trainer: Any, pair: Any, inputs: Any, options: dict[str, Any], *, close: float = 1e-6) -> None:
    """One loss and its gradient against klamp's own, from the student and the teacher."""
    student, teacher = pair
    expected = own_penalty(trainer, student, teacher, inputs, options).sum() / inputs["completion_mask"].sum()
    gradient = torch.autograd.grad(expected, [p for p in student.parameters() if p.requires_grad])
    loss = trainer.compute_loss(trainer.model, inputs)
    found = gradient_of(trainer, loss)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=close, atol=close)
    whole = torch.cat([part.flatten() for part in gradient]).double()
    # A float32 gradient is a sum over tokens: its entries are right to some eps of the largest one.
    scale = 1.0 if found.dtype == torch.float64 else max(1.0, float(whole.abs().max()))
    torch.testing.assert_close(found.double(), whole, rtol=close, atol=close * scale)
    assert float(found.norm()) > 1e-3


@pytest.mark.parametrize("name", CHOICES)
def test_the_loss_and_its_gradient_are_klamps_own(shared: Any, shared_inputs: dict[str, Any], name: str) -> None:
    options, inputs = CHOICES[name] | {"teacher_coef": COEF}, shared_inputs
    trainer = with_teacher(shared, options)
    check_loss(trainer, (trainer.model, trainer.teacher_model), inputs, options)
    metrics = trainer._metrics["train"]
    logits = plain_logits(trainer.model, inputs) / trainer.temperature
    entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()[inputs["completion_mask"].bool()].mean()
    assert metrics["entropy"] == [pytest.approx(float(entropy), rel=1e-5)], "TRL's own metric stays"
    assert metrics["teacher/coef"] == [COEF] and "teacher/k1" in metrics
    assert ("teacher/student_mass" in metrics) == bool(options.get("teacher_top_k"))


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_a_run_has_trls_numbers_where_its_divergence_is(base: Any, teacher: Any, tmp_path: Path, beta: float) -> None:
    options = {"beta": beta, "gradient_accumulation_steps": 2}
    runs = [run(trl.DistillationTrainer, base, teacher, tmp_path, **options)]
    runs += [run(DistillationTrainer, base, teacher, tmp_path, **options, **more) for more in ({}, EXACT)]
    (stock, rows), (untouched, same), (exact, ours) = runs
    assert all(map(torch.equal, stock, untouched))
    for row, other, own in zip(rows, same, ours, strict=True):
        assert {**row, "step_time": 0} == {**other, "step_time": 0}
        assert own["loss"] == pytest.approx(row["loss"], abs=1e-4)
        assert own["entropy"] == pytest.approx(row["entropy"], abs=1e-5)
        assert own["teacher/kl"] == pytest.approx(row["loss"], abs=1e-4), "the mean over the tokens of the step"
    for one, another in zip(stock, exact, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-4)


def run(kind: type, base: Any, teacher: Any, folder: Path, **options: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    trainer = distiller(base, teacher, folder, kind=kind, **options)
    torch.manual_seed(11)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [p.detach().clone() for p in trainer.model.parameters()], rows


def test_a_step_is_divided_by_all_of_its_tokens_however_it_is_cut(shared: Any) -> None:
    trainer = with_teacher(shared, EXACT)
    whole = batch_of(trainer, rows=4)
    cut = [{name: x if x.ndim == 0 else x[part] for name, x in whole.items()} for part in (slice(1), slice(1, 4))]
    at_once = gradient_of(trainer, loss_of(trainer, whole))
    parts = [gradient_of(trainer, loss_of(trainer, each)) for each in cut]
    torch.testing.assert_close(sum(parts), at_once, rtol=1e-5, atol=1e-6)
    nothing = loss_of(trainer, {**cut[0], "completion_mask": torch.zeros_like(cut[0]["completion_mask"])})
    assert float(nothing) == 0 and not gradient_of(trainer, nothing).any()
    assert all(p.grad is not None for p in trainer.model.parameters()), "processes wait for every weight's gradient"


def test_tokens_of_tools_carry_no_loss(shared: Any, shared_inputs: dict[str, Any]) -> None:
    mask = shared_inputs["completion_mask"]
    tools = torch.ones_like(mask)
    tools[:, -2:] = 0  # the last tokens: nobody sees them
    changes = {"completion_mask": mask * tools}, {"tool_mask": tools}
    losses = [loss_of(with_teacher(shared, EXACT), shared_inputs | change) for change in changes]
    torch.testing.assert_close(*losses)


def test_a_teacher_teaches_without_its_dropout(shared: Any, shared_inputs: Any, monkeypatch: Any) -> None:
    with_teacher(shared, EXACT)
    for layer in shared.teacher_model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
    shared.teacher_model.train()
    torch.testing.assert_close(*(loss_of(shared, shared_inputs).detach() for _ in range(2)))


@pytest.fixture(scope="module")
def larger() -> Any:
    """A teacher with five more entries in its vocabulary."""
    teacher = model(seed=3)
    teacher.resize_token_embeddings(len(tokenizer()) + 5, mean_resizing=False)
    return teacher.double()


@pytest.fixture(scope="module")
def of_larger(base: Any, larger: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return distiller(copy.deepcopy(base).double(), larger, tmp_path_factory.mktemp("larger"), teacher_estimator="k1")


@pytest.mark.parametrize(
    "name", ["k1", "exact, forward", "the student's head", "the student's head, js", "the teacher's head, forward"]
)
def test_of_a_larger_teacher_the_shared_part_counts(of_larger: Any, name: str) -> None:
    trainer = with_teacher(of_larger, CHOICES[name])
    check_loss(trainer, (trainer.model, trainer.teacher_model), batch_of(trainer), CHOICES[name])
    assert "k1" in name or trainer._metrics["train"]["teacher/cut_mass"][0] > 0


@pytest.fixture(scope="module")
def adapted(base: Any, teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(7)
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapted")
    return distiller(base, teacher, folder, trainer={"peft_config": lora}, teacher_estimator="k1")


@pytest.mark.parametrize("name", ["exact", "the student's head", "k3"])
def test_an_adapter_learns_and_nothing_else(adapted: Any, teacher: Any, name: str) -> None:
    trainer = with_teacher(adapted, CHOICES[name])
    check_loss(trainer, (trainer.model, teacher), batch_of(trainer), CHOICES[name], close=1e-5)
    assert {name for name, p in trainer.model.named_parameters() if p.grad is not None} == {
        name for name, p in trainer.model.named_parameters() if "lora" in name
    }


def test_evaluation_and_a_named_teacher(base: Any, teacher: Any, tmp_path: Path) -> None:
    name = saved(teacher, tmp_path / "teacher")
    given = {"eval_dataset": dataset(), "callbacks": [DoctorCallback()]}
    options = TOPK | {"teacher_model": name, "teacher_warmup_steps": 2, "teacher_coef": 2.0}
    trainer = distiller(base, None, tmp_path, trainer=given, eval_strategy="steps", eval_steps=1, **options)
    trainer.train()
    rows = trainer.state.log_history
    assert [row["teacher/coef"] for row in rows if "teacher/coef" in row] == [0.0, 1.0]
    assert all(row["eval_teacher/kl"] > 0 for row in rows if "eval_loss" in row)
    assert str(tmp_path / "teacher") in effective(trainer).terms[0].term
    history = read_record(tmp_path)
    assert history.completions[1][0].teacher is not None and "to the teacher" in history.details.words[2]
    tokenizer().train_new_from_iterator(["other words, other ids"] * 9, 96).save_pretrained(name)
    with pytest.raises(ModelError, match="another tokenizer"):
        distiller(base, None, tmp_path, **options)
    assert not any(found.alarm.level == "alarm" for found in given["callbacks"][0].findings)


@pytest.mark.parametrize("asked", [{}, {"dtype": "float16"}])
def test_a_named_teacher_is_loaded_as_trl_loads_it(base: Any, teacher: Any, tmp_path: Path, asked: Any) -> None:
    name = saved(copy.deepcopy(teacher).to(torch.bfloat16), tmp_path / "teacher")
    kinds = {trl.DistillationTrainer: {}, DistillationTrainer: EXACT}
    stock, ours = (
        distiller(base, name, tmp_path, kind=kind, teacher_model_init_kwargs=asked, **more).teacher_model
        for kind, more in kinds.items()
    )
    assert ours.dtype == stock.dtype and type(ours) is type(stock)


ENTRIES = 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher_url": "http://h:1"}, "one frozen teacher"),
        ({"teacher_coef": 0.0}, "teacher_coef above 0"),
        ({"teacher_estimator": "k1", "teacher_placement": "advantage"}, "in its loss"),
        ({"teacher_estimator": "k1", "teacher_off_policy": "token"}, "no log-probabilities of the sampler"),
        ({"teacher_estimator": "exact", "teacher_direction": "js", "beta": 0.0}, "name two divergences"),
        ({"teacher_estimator": "k3", "beta": 0.0}, "teacher_direction='forward' is not what k3"),
        ({"teacher_estimator": "k3", "top_p": 0.9}, "cannot be combined with top_p"),
        (TOPK | {"generation_kwargs": {"temperature": 0.2, "top_k": 5}}, "cannot be combined with top_k, temperature"),
    ],
)
def test_what_trl_cannot_do_is_refused_before_a_model_is_loaded(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TypeError)) as caught:
        arguments(DistillationConfig, temperature=0.7, **options)
    assert words in str(caught.value)


def test_another_trainer_with_klamps_fields_stops_before_a_step(base: Any, teacher: Any, tmp_path: Path) -> None:
    args, models = arguments(DistillationConfig, tmp_path, **EXACT), [copy.deepcopy(each) for each in (base, teacher)]
    trainer = trl.DistillationTrainer(*models, args, train_dataset=dataset(), processing_class=tokenizer())
    for step in (trainer.train, lambda: trainer.evaluate(dataset())):
        with pytest.raises(ConfigError, match=r"the trainer is not klamp's[\s\S]*klamp.trl import DistillationTrainer"):
            step()


def test_models_that_do_not_fit_are_refused(base: Any, teacher: Any, larger: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shared vocabulary"):
        distiller(base, larger, tmp_path, kind=trl.DistillationTrainer)
    with pytest.raises(ModelError, match="the teacher has another vocabulary"):
        distiller(larger, base, tmp_path, **EXACT)
    with pytest.raises(ConfigError, match="no teacher is named"):
        distiller(base, None, tmp_path, **EXACT)
    head = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="cannot be had for these models"):
        distiller(base, teacher, tmp_path, trainer={"peft_config": head}, **EXACT)


@pytest.mark.parametrize("options", [EXACT, {"teacher_estimator": "k3"}])
def test_a_kl_that_is_not_finite_ends_the_run(
    shared: Any, shared_inputs: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_teacher(shared, options)
    weight = shared.teacher_model.model.norm.weight
    monkeypatch.setattr(weight, "data", torch.full_like(weight, torch.nan))
    with pytest.raises(NonFiniteError):
        loss_of(shared, shared_inputs)


def test_a_loss_that_goes_another_way_is_an_error(base: Any, teacher: Any, tmp_path: Path) -> None:
    class Elsewhere(DistillationTrainer):
        def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
            return trl.DistillationTrainer._compute_loss(self, unwrapped_student, inputs, num_items_in_batch)

    trainer = distiller(base, teacher, tmp_path, kind=Elsewhere, **EXACT)
    with pytest.raises(UnsupportedVersion, match="TRL's loss does not take the KL"):
        loss_of(trainer, batch_of(trainer))


def test_attach_gives_a_trainer_that_is_built_the_same_loss(base: Any, teacher: Any, tmp_path: Path) -> None:
    class Own(trl.DistillationTrainer):
        """Somebody's subclass."""

    config = TeacherConfig(teacher_model="the trainer's", **TOPK)
    stock = distiller(base, teacher, tmp_path, kind=Own)
    assert attach(stock, config) is stock and isinstance(stock, Own)
    check_loss(stock, (copy.deepcopy(base), teacher), batch_of(stock), TOPK, close=1e-5)
    assert effective(stock).terms[0].term == "klamp's, to the teacher: the trainer's"
    for wrong in (stock, distiller(base, teacher, tmp_path), object.__new__(ServerDistillationTrainer)):
        with pytest.raises(ConfigError, match="attach takes a trl.DistillationTrainer with a teacher"):
            attach(wrong, config)
    with pytest.raises(ConfigError, match="kl must be a TeacherConfig"):
        attach(distiller(base, teacher, tmp_path, kind=Own), KLConfig(beta=0.1))
    with pytest.raises(ConfigError, match="two divergences"):
        attach(distiller(base, teacher, tmp_path, kind=Own, beta=0.5), config)


def test_effective_says_what_is_really_computed(base: Any, teacher: Any, tmp_path: Path) -> None:
    mixed = "0.25 KL(teacher||m) + 0.75 KL(policy||m)"
    gradients = {0.0: "KL(teacher||policy)", 0.5: "JS(policy, teacher)", 0.25: mixed}
    for kind in (trl.DistillationTrainer, DistillationTrainer):
        trainer = distiller(base, teacher, tmp_path, kind=kind)
        for trainer.beta, words in gradients.items():
            (term,) = effective(trainer).terms
            assert term.term.startswith("TRL's own") and words in term.gradient and term.value == "exact"
    options = TOPK | {"teacher_direction": "js", "teacher_head": "union", "teacher_coef": 0.5}
    found = effective(distiller(base, teacher, tmp_path, **options))
    (term,) = found.terms
    assert (term.beta, term.value) == (0.5, "topk of the union's 3 likeliest and a sampled tail")
    assert term.gradient == "own, per token: JS(policy, teacher)" and "no reward" in term.price
    assert found.normalizer == "mean over the tokens of the optimizer step, all processes (TRL's own)"
    server = distiller(base, teacher, tmp_path, kind=trl.DistillationTrainer)
    server.__class__ = ServerDistillationTrainer
    assert "a loss of its own" in effective(server).terms[0].gradient


def test_trls_beta_is_no_coefficient_for_the_alarms(tmp_path: Path) -> None:
    for kind, options in ((trl.DistillationConfig, {}), (DistillationConfig, EXACT)):
        assert settings_of_arguments(arguments(kind, tmp_path, **options)).beta is None


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3}
SIZES |= {"vocab_size": ENTRIES, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def capped(cap: float, seed: int) -> Any:
    torch.manual_seed(seed)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=cap, attn_implementation="eager"))


def scaled(scale: float, seed: int) -> Any:
    torch.manual_seed(seed)
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=scale))


CAPS = [
    (capped, "exact, forward", 2.0),
    (capped, "the student's head, js", 4.0),
    (capped, "k3", 4.0),
    (scaled, "exact, forward", 4.0),
]


@pytest.mark.parametrize(("make", "name", "other"), CAPS)
def test_soft_caps_and_scales_of_either_model_count(tmp_path: Path, make: Any, name: str, other: float) -> None:
    student, teacher = make(2.0, 1), make(other, 2)
    trainer = distiller(student, teacher, tmp_path, **CHOICES[name])
    check_loss(trainer, (student, teacher), batch_of(trainer), CHOICES[name], close=1e-5)


@pytest.mark.parametrize("options", [{"teacher_estimator": "k1"}, {"teacher_estimator": "k3"}, TOPK, EXACT])
def test_over_all_tokens_that_can_be_drawn_the_gradient_is_that_of_the_exact_kl(
    shared: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt, one token: each of the vocabulary once, with the student's probability of it as its weight."""
    trainer = with_teacher(shared, options)
    student, other = trainer.model, trainer.teacher_model
    prompt, ids = torch.tensor([[5, 9, 7]]).repeat(ENTRIES, 1), torch.arange(ENTRIES)[:, None]
    inputs = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": ids}
    inputs["completion_mask"] = torch.ones_like(ids)
    policy, anchor = (each(input_ids=prompt[:1]).logits[0, -1] / trainer.temperature for each in (student, other))
    kl = exact_kl(policy, anchor)
    expected = torch.autograd.grad(kl, list(student.parameters()))
    penalty, weights = taught.penalty, policy.detach().softmax(-1)
    monkeypatch.setattr(taught, "penalty", lambda *given: weights[:, None] * penalty(*given))
    mean, *_ = trainer._compute_loss(trainer.model, inputs, 1)
    found = gradient_of(trainer, mean)
    torch.testing.assert_close(float(mean.detach()), float(kl.detach()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in expected]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["k3", "exact", "exact, js", "the student's head"])
def test_no_matrix_of_logits_is_kept_for_the_gradient(shared: Any, name: str) -> None:
    trainer = with_teacher(shared, CHOICES[name])
    inputs = batch_of(trainer, rows=10)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        loss_of(trainer, inputs)
    rows = int(inputs["completion_mask"].sum())
    assert rows > ENTRIES / 2
    assert not [shape for shape in kept if shape[-1:] == (ENTRIES,) and shape.numel() >= rows * ENTRIES]
