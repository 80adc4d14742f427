"""Where the reference comes from: passed, loaded, copied in memory, following the policy."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hosts.trl.hosts import LORA, arguments, dataset, klamp_trainer, model, noisy, saved, stock_trainer, tokenizer
from tests.hosts.trl.losses import trained
from transformers import AutoModelForCausalLM

from klamp.config import KLConfig
from klamp.errors import ConfigError, KLWarning, ModelError
from klamp.hosts.trl.reference import frozen_copy
from klamp.trl import DistillationConfig, DistillationTrainer, attach, effective


def test_the_reference_may_be_passed(base: Any, tmp_path: Path) -> None:
    other = noisy(base)
    path = saved(other, tmp_path / "other")
    for given in (other, path):
        trainer = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.1, trainer={"ref_model": given})
        assert all(map(torch.equal, trainer.ref_model.parameters(), other.parameters()))
        assert not any(x.requires_grad for x in trainer.ref_model.parameters())
    adapter = trained(base, tmp_path, beta=0.1, trainer={"ref_model": noisy(base), **LORA})
    assert adapter.ref_model is not None and adapter.state.log_history[0]["kl"] > 0.01


def distilled(policy: Any, folder: Path, *, trainer: dict[str, Any], **more: Any) -> Any:
    args = arguments(DistillationConfig, folder, teacher_coef=0.5, **more)
    options = {"train_dataset": dataset(), "processing_class": tokenizer(), **trainer}
    return DistillationTrainer(policy, args=args, **options)


def attached(policy: Any, folder: Path, *, trainer: dict[str, Any], beta: float) -> Any:
    return attach(stock_trainer(policy, folder), KLConfig(beta=beta), **trainer)


DOORS = [
    (klamp_trainer, "ref_model", {"beta": 0.1}),
    (attached, "ref_model", {"beta": 0.1}),
    (klamp_trainer, "teacher_model", {"teacher_coef": 0.5, "beta": 0.0}),
    (distilled, "teacher_model", {}),
]
"""A trainer, the anchor that is passed to it as a model, and what it needs for that."""


@pytest.mark.parametrize(("make", "name", "options"), DOORS)
def test_an_anchor_with_weights_of_the_policy_is_refused(make: Any, name: str, options: Any, tmp_path: Path) -> None:
    policy, half, stored, frozen = model(tie_word_embeddings=False), *(model(tie_word_embeddings=False) for _ in "123")
    half.model.layers[0] = policy.model.layers[0]
    stored.load_state_dict(policy.state_dict(keep_vars=True), assign=True)  # other parameters on the same storage
    who = {"ref_model": "reference", "teacher_model": "teacher"}[name]
    for words, anchor in (("is the policy itself", policy), ("shares weights", half), ("is", stored)):
        with pytest.raises(ModelError, match=f"the {who} {words}"):
            make(policy, tmp_path, trainer={name: anchor}, **options)
    assert all(x.requires_grad for x in policy.parameters())
    frozen.model.layers[0] = policy.model.layers[0].requires_grad_(False)
    with pytest.warns(KLWarning, match=f"parameters of the {who} are the policy's own, and frozen in both"):
        make(policy, tmp_path, trainer={name: frozen}, **options)


@pytest.mark.parametrize(("make", "name", "options"), DOORS)
def test_the_tokenizer_beside_a_model_that_is_passed_is_asked(
    make: Any, name: str, options: Any, tmp_path: Path
) -> None:
    folder = saved(noisy(model()), tmp_path / "anchor")
    anchor = AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings(action="error", category=KLWarning):
        make(model(), tmp_path, trainer={name: copy.deepcopy(anchor)}, **options)
    tokenizer().train_new_from_iterator(["other words, other ids"] * 9, len(tokenizer())).save_pretrained(folder)
    with pytest.raises(ModelError, match="another tokenizer than the policy"):
        make(model(), tmp_path, trainer={name: anchor}, **options)
    if name == "ref_model":
        return
    chat, own = copy.deepcopy(tokenizer()), copy.deepcopy(tokenizer())
    own.chat_template = "{{ messages[0]['content'] }}"
    chat.chat_template = own.chat_template + "{% if thinks is false %}<none>{% endif %}"
    chat.save_pretrained(folder)
    more = {"processing_class": own, "teacher_model": anchor}
    with pytest.warns(KLWarning, match="The chat templates write the prompt differently"):
        make(model(), tmp_path, trainer=more, chat_template_kwargs={"thinks": False}, **options)


def test_a_folder_that_lacks_a_tensor_is_refused_before_trl_loads_it(tmp_path: Path) -> None:
    folder = saved(model(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if "down_proj" in name)
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = model()
    loaded.config._name_or_path = folder  # whose weights TRL's reference would have
    for given, trainer in ((folder, {}), (model(), {"ref_model": folder}), (loaded, {})):
        with pytest.raises(ModelError, match=f"missing: {lost}"):
            klamp_trainer(given, tmp_path, beta=0.1, trainer=trainer)


def test_a_model_in_memory_is_copied(tmp_path: Path) -> None:
    base = model()
    base.config._name_or_path = str(tmp_path / "gone" / "away")
    trainer = klamp_trainer(base, tmp_path, beta=0.1)
    trainer.train()
    first, second, *_ = trainer.state.log_history
    assert first["kl/k3"] == 0.0 and second["kl/k3"] > 1e-3
    assert effective(trainer).reference == "a frozen copy in memory"


def test_a_moving_reference_follows_the_policy(base: Any, tmp_path: Path) -> None:
    """`ema` is TRL's own callback on whichever reference there is: here a copy in memory, and one that attach makes."""
    options = {"reference": "ema", "reference_decay": 0.5, "max_steps": 1}
    built = klamp_trainer(copy.deepcopy(base), tmp_path, beta=0.1, **options)
    stock = stock_trainer(copy.deepcopy(base), tmp_path, max_steps=1)
    attached = attach(stock, KLConfig(beta=0.1, reference="ema", reference_decay=0.5))
    for trainer in (built, attached):
        trainer.train()
        start, moved, ref = (next(m.parameters()) for m in (base, trainer.model, trainer.ref_model))
        assert not torch.equal(start, moved)
        assert torch.allclose(ref, (start + moved) / 2, atol=1e-6)
        assert "moved by a share of 0.5" in effective(trainer).reference


@pytest.mark.skipif(not hasattr(peft.LoraConfig(), "target_parameters"), reason="TRL asks a PeftModel of older peft")
@pytest.mark.filterwarnings("error::klamp.errors.KLWarning")
def test_without_a_trained_adapter_means_without_it(base: Any, tmp_path: Path) -> None:
    """TRL keeps a frozen copy of an adapter that is there already; `adapter_off` is the model below, as it says."""

    def adapted() -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(copy.deepcopy(base), LORA["peft_config"])

    def first_kl(trainer: Any) -> float:
        trainer.train()
        return trainer.state.log_history[0]["kl/k3"]

    kept = klamp_trainer(adapted(), tmp_path, beta=0.1, kl_estimator="k3")
    stock = stock_trainer(adapted(), tmp_path, beta=0.1)
    assert effective(kept).reference == effective(stock).reference == "a frozen copy of the starting adapter"
    assert first_kl(kept) < 1e-6
    with pytest.raises(ConfigError, match="a policy with an adapter named 'ref'"):
        attach(stock, KLConfig(beta=0.1, reference="adapter_off"))
    without = klamp_trainer(adapted(), tmp_path, beta=0.1, reference="adapter_off")
    later = stock_trainer(adapted(), tmp_path)
    for trainer in (without, attach(later, KLConfig(beta=0.1, reference="adapter_off"))):
        assert effective(trainer).reference == "the policy with its adapter off"
        assert first_kl(trainer) > 0.01


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_reference_of_another_vocabulary_is_taken_only_if_it_is_padded_further(tmp_path: Path) -> None:
    other = model()
    other.resize_token_embeddings(len(tokenizer()) - 8)
    with pytest.raises(ModelError, match="another vocabulary than the policy"):
        klamp_trainer(model(), tmp_path, beta=0.1, trainer={"ref_model": other})
    other.resize_token_embeddings(len(tokenizer()) + 8)
    with pytest.warns(KLWarning, match="has no tokenizer beside it: whether its token ids are the policy's"):
        trainer = trained(model(), tmp_path, beta=0.1, trainer={"ref_model": other})
    assert trainer.state.log_history[0]["kl"] > 1e-6, "it has mass where the policy has none"


def test_a_passed_reference_is_looked_at_before_the_first_update(base: Any, tmp_path: Path) -> None:
    with pytest.warns(KLWarning, match="before the first update(?s:.*)the model passed as ref_model is another one"):
        trained(base, tmp_path, beta=0.1, max_steps=1, trainer={"ref_model": noisy(base)})
    with warnings.catch_warnings(action="error", category=KLWarning):
        trained(base, tmp_path, beta=0.1, max_steps=1, trainer={"ref_model": copy.deepcopy(base)})


def test_a_reference_without_a_beta_is_said_to_be_unused(tmp_path: Path) -> None:
    with pytest.warns(KLWarning, match="it is not used"):
        klamp_trainer(model(), tmp_path, trainer={"ref_model": model(seed=3)})


def test_a_copy_has_the_weights_alone_and_moves_nobodys_seeds() -> None:
    base = noisy(model()).to(torch.bfloat16)
    base.forward = lambda *_, **__: None  # as TRL's fused head does, by a closure over the original
    state = torch.get_rng_state()
    made = frozen_copy(base)
    assert torch.equal(torch.get_rng_state(), state)
    assert {x.dtype for x in made.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), base.parameters(), strict=True))
    assert made.forward.__func__ is type(base).forward
