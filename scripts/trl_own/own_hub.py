"""Hub caches that hold the names TRL's own tests ask for: tiny models with random weights, made from configurations.

python own_hub.py makes small/ and full/ in the folder KLAMP_OWN_HUBS, laid out as huggingface_hub lays out its cache,
to be used with HF_HUB_OFFLINE=1. It runs in the environment under test. full has a vocabulary as
long as Qwen's, which takes a hundred times longer; it is for the tests that write Qwen's ids out. Models that need a
processor of their own (images) are not made.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from own_tokenizer import FULL, tokenizer

OWNER = "trl-internal-testing"
REVISION = "0" * 40  # what a commit's name looks like; there is one of each repository
LAYERS = 2
LENGTHS = {"small": 512, "full": FULL}

# name on the hub -> (class, configuration class, what the configuration says besides the sizes, chat template of TRL)
SIZES = {"hidden_size": 8, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "layers_block_type": ["mamba", "attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 32,
    "use_mamba_kernels": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # short contexts need none of GPT-OSS's stretching
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", "Qwen2Config", {}, "qwen2_5"),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2ForSequenceClassification", "Qwen2Config", {}, "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}, "qwen3"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3ForSequenceClassification", "Qwen3Config", {"head_dim": 8}, "qwen3"),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 4, **EXPERTS}, "qwen3"),
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", "LlamaConfig", {}, "llama3_2"),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", "LlamaConfig", {}, "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", "MistralConfig", {"head_dim": 2}, "qwen2_5"),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 4}, "gemma"),
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", "Cohere2Config", {"logit_scale": 0.125}, "cohere2"),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 4, **EXPERTS},
        "glm4moe",
    ),
    "tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "rope_parameters": ROPE},
        "gptoss",
    ),
    "tiny-NemotronHForCausalLM-nano": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {**EXPERTS, **HYBRID, "hidden_size": 16},
        "nemotron_3_nano",
    ),
}
REMOTE = "tiny-RemoteForCausalLM"
REMOTE_CODE = """from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "klamp_remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def build(name: str, words: Any) -> Any:
    """The model of a name, with weights so large that a learning rate of 0.1 does not leave any of them as it was."""
    kind, config, options, _ = MODELS[name]
    shared = {"vocab_size": len(words), "num_hidden_layers": LAYERS, "max_position_embeddings": 4096}
    ids = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": None}
    if kind.endswith("SequenceClassification"):
        ids["num_labels"] = 1
    settings = {**shared, **SIZES, **ids, **options}
    if "layers_block_type" in settings:
        del settings["num_hidden_layers"]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


def folder_of(hub: Path, name: str) -> Path:
    """Where the cache keeps the files of a repository, its main branch among its references."""
    repository = hub / f"models--{OWNER}--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    return repository / "snapshots" / REVISION


def fill(hub: Path, length: int) -> dict[str, str]:
    """Make every model; the names that this version of transformers cannot make, and why."""
    failed = {}
    for name, (_, _, _, template) in MODELS.items():
        words = tokenizer(template, length)
        try:
            model = build(name, words)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        folder = folder_of(hub, name)
        model.save_pretrained(folder)
        words.save_pretrained(folder)
    remote(folder_of(hub, REMOTE), tokenizer("llama3_2", length))
    return failed


def remote(folder: Path, words: Any) -> None:
    """A repository whose model class is in a file of its own."""
    model = build("tiny-LlamaForCausalLM-3.2", words)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "klamp_remote", "architectures": ["RemoteForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "remote.py").write_text(REMOTE_CODE)
    words.save_pretrained(folder)


if __name__ == "__main__":
    for kind, vocabulary_length in LENGTHS.items():
        for missing, why in fill(Path(os.environ["KLAMP_OWN_HUBS"]) / kind, vocabulary_length).items():
            print(f"not made ({kind}): {missing}: {why}")
