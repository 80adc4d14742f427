"""Models and references: every weight comes from its files, dropout is off, a frozen copy stays as it is."""

import gc
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.training.conftest import disturb, refused, rollout_of, sample, tiny_llama
from torch.optim import SGD
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from klamp.errors import ModelError
from klamp.lab import models
from klamp.lab.anchors import LocalReference
from klamp.lab.config import ModelConfig
from klamp.lab.loop import Trainer
from klamp.lab.models import check_weights, load_model, load_tokenizer, with_adapter
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer
from klamp.lab.updates import update
from klamp.scoring.scorer import score

SMALL = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DROPPING = {
    "opt": {"dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 16, "word_embed_proj_dim": 16, **SMALL},  # numbers of a layer
    "bloom": {"hidden_dropout": 0.5, **SMALL},
    "falcon": {"hidden_dropout": 0.5, "attention_dropout": 0.5, **SMALL},  # read from the settings
    "mixtral": {"router_jitter_noise": 0.5, "num_key_value_heads": 2, "intermediate_size": 16, **SMALL},
}


@pytest.mark.parametrize("kind", DROPPING)
def test_dropout_is_off_wherever_an_architecture_keeps_it(kind, tmp_path):
    torch.manual_seed(0)
    raw = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **DROPPING[kind]))
    ids = torch.arange(2, 30)[None]
    assert not torch.equal(raw.train()(ids).logits, raw(ids).logits)
    raw.save_pretrained(tmp_path)
    with torch.no_grad():
        model = load_model(str(tmp_path))
        calm = model(ids).logits
        model.train()
        assert all(torch.equal(model(ids).logits, calm) for _ in range(3))


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("pattern", "change"), [("*.safetensors", Path.unlink), ("config.json", Path.unlink), ("*.safetensors", halve)]
)
def test_a_folder_without_a_model_is_refused(llama, tmp_path, pattern, change):
    folder = shutil.copytree(llama, tmp_path / "model")
    for file in folder.glob(pattern):
        change(file)
    with refused(ModelError, "causal language model") as caught:
        load_model(str(folder))
    assert caught.value.got == str(folder)


def retensored(folder: str | Path, target: Path, names: Callable[[str], str], **more: torch.Tensor) -> str:
    """A copy of a folder of weights with other names of its tensors, without those that have none, and with more."""
    shutil.copytree(folder, target)
    (file,) = target.glob("*.safetensors")
    tensors = {new: tensor for name, tensor in load_file(file).items() if (new := names(name))}
    save_file(tensors | more, file, metadata={"format": "pt"})
    return str(target)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_whose_weights_are_not_all_in_its_files_is_refused_by_their_names(kind, request, tmp_path):
    whole, layer = request.getfixturevalue(kind), {"llama": "layers.{}.", "gpt2": "h.{}."}[kind]
    lacking = retensored(
        whole,
        tmp_path / "lacking",
        lambda name: "" if ("1.mlp" in name and "down_proj" in name) or "c_fc.bias" in name else name,
    )
    renamed = retensored(whole, tmp_path / "renamed", lambda name: name.replace(layer.format(1), layer.format(7)))
    for load in (load_model, check_weights):
        for folder, named in (
            (lacking, r"missing: \S*(1.mlp.down_proj.weight|mlp.c_fc.bias)"),
            (renamed, r"missing: .*; .* place in the model: \S*7"),
        ):
            with refused(ModelError, "do not belong to the model") as caught:
                load(folder)
            assert folder in caught.value.got and re.search(named, caught.value.got)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_head_that_is_tied_may_be_absent_and_one_that_is_not_used_may_be_there(kind, request, tmp_path):
    whole = request.getfixturevalue(kind)
    assert "lm_head.weight" not in load_file(next(Path(whole).glob("*.safetensors")))
    folder = retensored(whole, tmp_path / "model", str, v_head=torch.ones(3))
    check_weights(folder)
    for mine, theirs in zip(load_model(folder).parameters(), load_model(whole).parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_adapter_of_which_a_part_is_not_there_or_would_be_left_out_is_refused(tmp_path):
    whole, config = tmp_path / "whole", ModelConfig(lora_r=2)
    with_adapter(tiny_llama(), config).save_pretrained(str(whole))
    with_adapter(tiny_llama(), config, whole)
    retensored(whole, tmp_path / "a", lambda name: "" if "1.mlp.up_proj.lora_A" in name else name)
    retensored(whole, tmp_path / "b", lambda name: name.replace("layers.1.", "layers.7."))
    settings = json.loads((whole / "adapter_config.json").read_text())
    (whole / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["q_proj"]}))
    left_out = r"(?s)without a place in the model: \S*down_proj"
    for folder, said in (("a", r"missing: \S*1.mlp.up_proj.lora_A"), ("b", r"missing: .*place"), ("whole", left_out)):
        with refused(ModelError, said):
            with_adapter(tiny_llama(), config, tmp_path / folder)


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2", "GPTNeoX", "OPT", "Cohere", "Llama"])
def test_a_folder_without_a_tokenizer_is_told_so_before_its_prompts_are_blamed(kind, tmp_path):
    """Of most kinds transformers 5 makes a tokenizer of special tokens alone."""
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with refused(ModelError, "(?s)(the tokenizer is missing|cannot load a tokenizer).*--tokenizer FOLDER"):
        load_tokenizer(str(tmp_path))
    arithmetic_tokenizer().save_pretrained(tmp_path)
    assert set(arithmetic_tokenizer().get_vocab()) <= set(load_tokenizer(str(tmp_path)).get_vocab())


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = arithmetic_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with refused(ModelError, "no end token"):
        load_tokenizer(str(tmp_path))


def test_an_adapter_starts_as_nothing_and_trains_only_itself():
    base = tiny_llama()
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        before = base(ids).logits.clone()
        policy = with_adapter(base, ModelConfig(lora_r=3, lora_alpha=6))
        assert torch.equal(policy(ids).logits, before)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert {p.shape[0] for name, p in policy.named_parameters() if "lora_A" in name} == {3}


def test_an_adapter_goes_where_it_is_told():
    policy = with_adapter(tiny_llama(), ModelConfig(lora_r=2, lora_target_modules=("q_proj", "v_proj")))
    assert {n.split(".")[-4] for n, p in policy.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}


def test_end_tokens_are_the_tokenizers_and_the_models():
    tokenizer, model = arithmetic_tokenizer(), tiny_llama()
    for given, expected in ((None, [1]), (7, [1, 7]), ([9, 1, 4], [1, 4, 9])):
        model.generation_config.eos_token_id = given
        assert models.end_tokens(model, tokenizer) == expected


def test_a_checkpoint_of_klamps_is_a_model(llama: str, tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    shutil.copytree(llama, step / "policy")
    assert models.weights_folder(str(step)) == models.weights_folder(str(step / "policy")) == str(step / "policy")
    assert (models.weights_folder(llama), models.weights_folder("owner/name")) == (llama, "owner/name"), "as they are"
    assert load_model(str(step)).config.model_type == "llama"
    assert load_tokenizer(str(step)).eos_token_id is not None
    assert models.max_length(models.configuration(str(step))) == models.max_length(models.configuration(llama)) == 64


def test_a_run_names_its_newest_checkpoint(llama: str, tmp_path: Path) -> None:
    for step in (2, 10):
        shutil.copytree(llama, tmp_path / "checkpoints" / f"step-{step:06d}" / "policy")
    with refused(ModelError, "(?s)holds a run.*step-000010"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("inside", [".", "policy"])
def test_an_adapter_is_no_model(tmp_path: Path, inside: str) -> None:
    (tmp_path / inside).mkdir(exist_ok=True)
    (tmp_path / inside / "adapter_config.json").write_text("{}", encoding="utf-8")
    with refused(ModelError, "(?s)LoRA adapter.*--resume.*merge_and_unload"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", __file__])
def test_what_is_no_id_of_the_hub_is_a_path(name: str) -> None:
    with refused(ModelError, "(?s)cannot load a causal.*OWNER/NAME") as caught:
        load_model(name)
    assert caught.value.got == name


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(context) -> None:
    optimizer = SGD([p for p in context.policy.parameters() if p.requires_grad], lr=0.5)
    for step in range(2):
        update(context, optimizer, rollout_of(context, step=step, beta=0.1), context.objective)


def test_a_frozen_copy_stays_bit_identical_while_the_policy_trains(context_of):
    context = context_of()
    start = copied(context.policy)
    assert same(start, copied(context.reference.model)), "it starts as the policy"
    trained(context)
    assert same(start, copied(context.reference.model))
    assert not same(start, copied(context.policy))
    assert not any(p.requires_grad or p.grad is not None for p in context.reference.model.parameters())
    with context.reference.sampling_model() as model:
        assert model is context.reference.model


def test_a_frozen_reference_scores_as_its_model_does_and_without_gradient(context_of):
    context = context_of()
    model = context.reference.model
    completions = sample(model)
    keep = torch.tensor([False, True, True, False, False, False, False, True])
    scores = context.reference.score(completions, temperature=0.7, keep=keep)
    assert not scores.logprobs.requires_grad and not scores.predictions.values.requires_grad
    expected, mask = score(model, completions, temperature=0.7), completions.mask
    torch.testing.assert_close(scores.logprobs[mask], expected.logprobs[mask], rtol=0, atol=1e-5)
    logprobs = (scores.predictions.logits() / 0.7).log_softmax(-1)
    torch.testing.assert_close(
        logprobs[mask[keep]], expected.logits.log_softmax(-1)[keep][mask[keep]], rtol=0, atol=1e-5
    )


def test_with_the_adapter_off_the_policy_is_its_base_model(context_of):
    context = context_of(lora_r=4)
    assert context.reference.adapter_off
    trained(context)
    disturb(context.policy, size=0.1)
    base = context_of().policy  # the model's folder, loaded anew
    completions = sample(base)
    before = copied(context.policy)
    scores = context.reference.score(completions, temperature=1.0)
    with torch.no_grad():
        expected = LocalReference(base).score(completions, temperature=1.0)
        policy = score(context.policy, completions, temperature=1.0)
    assert torch.equal(scores.logprobs, expected.logprobs)
    assert (policy.logprobs - expected.logprobs)[completions.mask].abs().max() > 0.1, "the adapter is on again"
    assert not scores.logprobs.requires_grad
    assert same(before, copied(context.policy))


def models_in_memory() -> int:
    return sum(type(thing) is LlamaForCausalLM for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("changes", "count"), [({"beta": 0.0}, 1), ({"beta": 0.02}, 2), ({"beta": 0.02, "lora_r": 2}, 1)]
)
def test_a_reference_is_held_only_where_it_is_needed(context_of, changes, count):
    gc.collect()
    before = models_in_memory()
    trainer = Trainer(context_of(**changes), [])
    row, is_held = trainer.train_step(), changes["beta"] > 0
    assert models_in_memory() - before == count
    about_kl = [name for name in row if name.startswith(("kl/", "ref/"))]
    assert bool(about_kl) == is_held, "without a reference there is no KL to report"
    assert row["train/kl_penalty"] == 0.0 or is_held
