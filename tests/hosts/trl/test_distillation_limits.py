"""What klamp's distillation in TRL refuses, what it says of itself, and that it never holds a matrix of logits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from tests.hosts.trl.hosts import dataset, gradient_of, tokenizer
from tests.hosts.trl.test_distillation import CHOICES, EXACT, TOPK, batch_of, check_loss, made, settings
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM
from trl.experimental.server_distillation import ServerDistillationTrainer

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import exact_kl
from klamp.errors import ConfigError, ModelError, NonFiniteError, UnsupportedVersion
from klamp.hosts.trl import teacher as taught
from klamp.hosts.trl.callbacks import settings_of_arguments
from klamp.trl import DistillationConfig, DistillationTrainer, attach, effective

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
def test_what_trl_cannot_do_is_refused_before_a_model_is_loaded(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, TypeError)) as caught:
        settings(DistillationConfig, tmp_path, **options)
    assert words in str(caught.value)


def test_another_trainer_with_klamps_fields_stops_before_a_step(base: Any, teacher: Any, tmp_path: Path) -> None:
    args, models = settings(DistillationConfig, tmp_path, **EXACT), [copy.deepcopy(each) for each in (base, teacher)]
    trainer = trl.DistillationTrainer(*models, args, train_dataset=dataset(), processing_class=tokenizer())
    for step in (trainer.train, lambda: trainer.evaluate(dataset())):
        with pytest.raises(ConfigError, match=r"the trainer is not klamp's[\s\S]*klamp.trl import DistillationTrainer"):
            step()


def test_models_that_do_not_fit_are_refused(base: Any, teacher: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no teacher is named"):
        made(base, None, tmp_path, **EXACT)
    head = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="cannot be had for these models"):
        made(base, teacher, tmp_path, trainer={"peft_config": head}, **EXACT)
    same = copy.deepcopy(base)
    with pytest.raises(ModelError, match="is the policy itself"):
        DistillationTrainer(same, same, settings(DistillationConfig, tmp_path, **EXACT), train_dataset=dataset())


@pytest.mark.parametrize("options", [EXACT, {"teacher_estimator": "k3"}])
def test_a_kl_that_is_not_finite_ends_the_run(base: Any, teacher: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = made(base, teacher, tmp_path, **options)
    inputs = batch_of(trainer)
    with torch.no_grad():
        trainer.teacher_model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        trainer.compute_loss(trainer.model, inputs)


def test_a_loss_that_goes_another_way_is_an_error(base: Any, teacher: Any, tmp_path: Path) -> None:
    class Elsewhere(DistillationTrainer):
        def _compute_loss(self, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
            return trl.DistillationTrainer._compute_loss(self, unwrapped_student, inputs, num_items_in_batch)

    trainer = made(base, teacher, tmp_path, kind=Elsewhere, **EXACT)
    with pytest.raises(UnsupportedVersion, match="TRL's loss does not take the KL"):
        trainer.compute_loss(trainer.model, batch_of(trainer))


def test_attach_gives_a_trainer_that_is_built_the_same_loss(base: Any, teacher: Any, tmp_path: Path) -> None:
    class Own(trl.DistillationTrainer):
        """Somebody's subclass."""

    config = TeacherConfig(teacher_model="the trainer's", **TOPK)
    stock = made(base, teacher, tmp_path, kind=Own)
    assert attach(stock, config) is stock and isinstance(stock, Own)
    check_loss(stock, copy.deepcopy(base), teacher, TOPK, close=1e-5)
    assert effective(stock).terms[0].term == "klamp's, to the teacher: the trainer's"
    for wrong in (stock, made(base, teacher, tmp_path), object.__new__(ServerDistillationTrainer)):
        with pytest.raises(ConfigError, match="attach takes a trl.DistillationTrainer with a teacher"):
            attach(wrong, config)
    with pytest.raises(ConfigError, match="kl must be a TeacherConfig"):
        attach(made(base, teacher, tmp_path, kind=Own), KLConfig(beta=0.1))
    with pytest.raises(ConfigError, match="two divergences"):
        attach(made(base, teacher, tmp_path, kind=Own, beta=0.5), config)


def test_effective_says_what_is_really_computed(base: Any, teacher: Any, tmp_path: Path) -> None:
    gradients = {
        0.0: "KL(teacher||policy)",
        0.5: "JS(policy, teacher)",
        0.25: "0.25 KL(teacher||m) + 0.75 KL(policy||m)",
    }
    for beta, words in gradients.items():
        for kind in (trl.DistillationTrainer, DistillationTrainer):
            (term,) = effective(made(base, teacher, tmp_path, kind=kind, beta=beta)).terms
            assert term.term.startswith("TRL's own") and words in term.gradient and term.value == "exact"
    options = TOPK | {"teacher_direction": "js", "teacher_head": "union", "teacher_coef": 0.5}
    found = effective(made(base, teacher, tmp_path, **options))
    (term,) = found.terms
    assert (term.beta, term.value) == (0.5, "topk of the union's 3 likeliest and a sampled tail")
    assert term.gradient == "own, per token: JS(policy, teacher)" and "no reward" in term.price
    assert found.normalizer == "mean over the tokens of the optimizer step, all processes (TRL's own)"
    server = made(base, teacher, tmp_path, kind=trl.DistillationTrainer)
    server.__class__ = ServerDistillationTrainer
    assert "a loss of its own" in effective(server).terms[0].gradient


def test_trls_beta_is_no_coefficient_for_the_alarms(tmp_path: Path) -> None:
    for kind, options in ((trl.DistillationConfig, {}), (DistillationConfig, EXACT)):
        assert settings_of_arguments(settings(kind, tmp_path, **options)).beta is None


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3}
SIZES |= {"vocab_size": ENTRIES, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def capped(cap: float, seed: int) -> Any:
    torch.manual_seed(seed)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=cap, attn_implementation="eager"))


def scaled(scale: float, seed: int) -> Any:
    torch.manual_seed(seed)
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=scale))


CAPS = [("exact forward", 2.0), ("exact forward", 4.0), ("topk js", 4.0), ("k3", 4.0)]


@pytest.mark.parametrize(("name", "other"), CAPS)
@pytest.mark.parametrize("make", [capped, scaled])
def test_soft_caps_and_scales_of_either_model_count(tmp_path: Path, name: str, make: Any, other: float) -> None:
    student, teacher = make(2.0, 1), make(other, 2)
    trainer = made(student, teacher, tmp_path, **CHOICES[name])
    check_loss(trainer, student, teacher, CHOICES[name], close=1e-5)


@pytest.mark.parametrize("options", [{"teacher_estimator": "k1"}, {"teacher_estimator": "k3"}, TOPK, EXACT])
def test_over_all_tokens_that_can_be_drawn_the_gradient_is_that_of_the_exact_kl(
    base: Any, teacher: Any, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt, one token: each of the vocabulary once, with the student's probability of it as its weight."""
    student, other = copy.deepcopy(base).double(), copy.deepcopy(teacher).double()
    trainer = made(student, other, tmp_path, **options)
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


@pytest.mark.parametrize("name", ["k3", "exact reverse", "exact js", "topk reverse"])
def test_no_matrix_of_logits_is_kept_for_the_gradient(base: Any, teacher: Any, tmp_path: Path, name: str) -> None:
    trainer = made(base, teacher, tmp_path, **CHOICES[name])
    inputs = batch_of(trainer, rows=10)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        trainer.compute_loss(trainer.model, inputs)
    rows = int(inputs["completion_mask"].sum())
    assert rows > ENTRIES / 2
    assert not [shape for shape in kept if shape[-1:] == (ENTRIES,) and shape.numel() >= rows * ENTRIES]
