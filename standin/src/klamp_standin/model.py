"""The model of the stand-in: a base model, LoRA weights as dictionaries, autograd, AdamW, sampling."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

ALPHA = 32
"""The scale of the adapters (LoRA's alpha)."""
BATCH = 64
"""How many datums are computed in one forward pass."""


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """Everything that the shapes of an adapter's tensors follow from."""

    rank: int = 32
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(kw_only=True)
class Weights:
    """The LoRA weights of an adapter by parameter name; None stands for the base model."""

    shape: LoraShape
    tensors: dict[str, Tensor]

    def frozen(self) -> Weights:
        """A copy that later training does not change."""
        return Weights(shape=self.shape, tensors={k: v.detach().clone() for k, v in self.tensors.items()})


@dataclass(kw_only=True)
class Trained:
    """A training run: its weights and their optimizer."""

    weights: Weights
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        for tensor in self.weights.tensors.values():
            tensor.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(list(self.weights.tensors.values()))

    def step(self, params: Mapping[str, Any]) -> float:
        """Do one AdamW step with the settings of the request; returns the gradient's norm before clipping."""
        group = self.optimizer.param_groups[0]
        group |= {"lr": params["learning_rate"], "betas": (params["beta1"], params["beta2"]), "eps": params["eps"]}
        group["weight_decay"] = params.get("weight_decay", 0.0)
        bound = params.get("grad_clip_norm", 0.0)
        norm = nn.utils.clip_grad_norm_(self.weights.tensors.values(), bound if bound > 0 else float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class BaseModel:
    """A causal language model that any number of adapters share; one thread at a time may use it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])  # pyright: ignore
        self.longest: int | None = getattr(model.config, "max_position_embeddings", None)
        self._templates: dict[LoraShape, PeftModel] = {}

    def template(self, shape: LoraShape) -> PeftModel:
        """The base model with an adapter of this shape; the adapter's weights are put in at every use."""
        if shape not in self._templates:
            lora = LoraConfig(r=shape.rank, lora_alpha=ALPHA, target_modules=self._targets(shape))
            with warnings.catch_warnings():
                # peft warns of adapters on a head that is tied to the embedding: they are never merged here.
                warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
                made = get_peft_model(copy.deepcopy(self.model), lora).eval()
            self._templates[shape] = made  # pyright: ignore[reportArgumentType]
        return self._templates[shape]

    def _targets(self, shape: LoraShape) -> list[str]:
        head = self.model.get_output_embeddings()
        found = []
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                kind = "unembed" if module is head else "attn" if "attn" in name else "mlp"
                found += [name] if getattr(shape, f"train_{kind}") else []
        return found

    def fresh(self, shape: LoraShape, seed: int) -> Weights:
        """A new adapter, which changes nothing yet: A is random (from the seed), B is zero."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        tensors = {}
        for name, parameter in self.template(shape).named_parameters():
            if "lora_" in name:
                tensors[name] = torch.zeros_like(parameter)
                if "lora_A" in name:
                    nn.init.kaiming_uniform_(tensors[name], a=5**0.5, generator=generator)
        return Weights(shape=shape, tensors=tensors)

    def logprobs(self, weights: Weights, tokens: Sequence[list[int]], targets: Sequence[Tensor]) -> list[Tensor]:
        """Per datum, the log-probability of each target, [N] or [N, K]; differentiable in the adapter's tensors."""
        found: list[Tensor] = []
        template = self.template(weights.shape)
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            width = max(map(len, part))
            # Padding stands on the right, where a causal model does not look back at it.
            ids = torch.tensor([row + [0] * (width - len(row)) for row in part])
            out = functional_call(template, weights.tensors, (), {"input_ids": ids, "use_cache": False})
            for row, goal in zip(out.logits, targets[start : start + BATCH], strict=True):
                chosen = row[: len(goal)].log_softmax(-1).gather(-1, goal.view(len(goal), -1))
                found.append(chosen.view(goal.shape))
        return found

    @contextmanager
    def sampler(self, weights: Weights | None) -> Iterator[nn.Module]:
        """The model to sample from: the base model, with these weights if there are any."""
        if weights is None:
            yield self.model
            return
        template = self.template(weights.shape)
        with torch.no_grad():
            for name, parameter in template.named_parameters():
                if name in weights.tensors:
                    parameter.copy_(weights.tensors[name])
        yield template
