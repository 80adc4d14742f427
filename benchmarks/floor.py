"""The least that a GRPO step can take: its matrix products, its attention, and the weights that decoding reads.

Each phase is timed with the model's own weights, one after the other as in a step, so that weights come from memory and
not from a cache. Nothing else is counted: no norm, no activation, no softmax over the vocabulary, no optimizer, no
sampling, no logits that are formed again in a backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PHASES = ("prompts", "decoding", "forward", "backward", "reference")
"""The phases of a step on one rollout with one update."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a step."""

    prompts: int
    """Distinct prompts."""
    prompt: int
    """Tokens of a prompt."""
    group: int
    """Completions per prompt."""
    completion: int
    """Tokens of a completion."""

    @property
    def rows(self) -> int:
        """Completions."""
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Tokens of all completions."""
        return self.rows * self.completion


def one(
    model: str, shape: dict[str, int], *, lora_r: int = 0, reference: bool = True, repeats: int = 2
) -> dict[str, Any]:
    """Seconds of every phase, `repeats` times, on a model in a folder; a prompt is run once for its completions.

    Args:
        model: its folder; Llama's or Qwen2's names of layers.
        shape: see `Shape`.
        lora_r: rank of an adapter on every linear layer, which alone gets gradients of weights; 0: all weights do.
        reference: whether a reference scores the completions.
        repeats: how often each phase is timed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    sizes = Shape(**shape)
    products = _Products(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), sizes, lora_r)
    found: dict[str, list[float]] = {name: [] for name in PHASES if name != "reference" or reference}
    cpu: list[float] = []
    with torch.no_grad():
        for _ in range(repeats):
            began = time.process_time()
            for name, seconds in found.items():
                seconds.append(_seconds(getattr(products, name)))
            cpu.append(time.process_time() - began)
    return {
        "tokens": sizes.tokens,
        "seconds": [sum(values) for values in zip(*found.values(), strict=True)],
        "cpu_seconds": cpu,
        "phases": found,
        "shape": asdict(sizes),
        "lora_r": lora_r,
    }


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class _Products:
    """The products of each phase, on random inputs."""

    def __init__(self, model: Any, shape: Shape, lora_r: int) -> None:
        import torch

        self.shape, self.config = shape, model.config
        linear = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        self.weights = [module.weight for module in linear]
        self.head = model.get_output_embeddings().weight
        self.adapters = [
            (torch.randn(lora_r, w.shape[1]), torch.randn(w.shape[0], lora_r)) for w in self.weights * bool(lora_r)
        ]
        self.full = not lora_r
        most = max(shape.tokens + shape.prompts * shape.prompt, shape.rows)
        self.narrow = torch.randn(most, lora_r)
        self.inputs = {width: torch.randn(most, width) for w in (*self.weights, self.head) for width in w.shape}
        heads, longest = self.config.num_attention_heads, shape.prompt + shape.completion
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        self.attended = torch.randn(3, max(shape.prompts, shape.rows), heads, longest, width)

    def prompts(self) -> None:
        """Run the distinct prompts once, before decoding."""
        self._layers(self.shape.prompts * self.shape.prompt)
        self._attention(self.shape.prompts, self.shape.prompt, self.shape.prompt)
        self._head(self.shape.prompts)

    def decoding(self) -> None:
        """Run one token of each completion, as often as there are tokens; the last one is not run."""
        for t in range(1, self.shape.completion):
            self._layers(self.shape.rows)
            self._attention(self.shape.rows, 1, self.shape.prompt + t)
            self._head(self.shape.rows)

    def forward(self) -> None:
        """Score the completions, with the policy."""
        self._layers(self.shape.prompts * self.shape.prompt + self.shape.tokens)
        self._scoring_attention()
        self._head(self.shape.tokens)

    reference = forward

    def backward(self) -> None:
        """Give gradients to inputs, and to the weights that are trained."""
        tokens = self.shape.prompts * self.shape.prompt + self.shape.tokens
        self._head_backward()
        self._scoring_attention(backward=True)
        for i, weight in enumerate(self.weights):
            out, x = self.inputs[weight.shape[0]][:tokens], self.inputs[weight.shape[1]][:tokens]
            out @ weight
            if self.full:
                out.T @ x
            else:
                down, up = self.adapters[i]
                between = out @ up
                out.T @ self.narrow[:tokens]  # what the forward pass kept
                between.T @ x
                between @ down

    def _layers(self, tokens: int) -> None:
        for i, weight in enumerate(self.weights):
            x = self.inputs[weight.shape[1]][:tokens]
            x @ weight.T
            if self.adapters:
                (x @ self.adapters[i][0].T) @ self.adapters[i][1].T

    def _head(self, tokens: int) -> None:
        self.inputs[self.head.shape[1]][:tokens] @ self.head.T

    def _head_backward(self) -> None:
        import torch

        x = self.inputs[self.head.shape[1]][: self.shape.tokens]
        logits = torch.ones(self.shape.tokens, self.head.shape[0])
        logits @ self.head
        if self.full:
            logits.T @ x

    def _scoring_attention(self, *, backward: bool = False) -> None:
        shape = self.shape
        self._attention(shape.prompts, shape.prompt, shape.prompt, backward=backward)
        self._attention(shape.rows, shape.completion, shape.prompt + shape.completion, backward=backward)

    def _attention(self, rows: int, queries: int, keys: int, *, backward: bool = False) -> None:
        import torch
        from torch.nn.functional import scaled_dot_product_attention as attend

        sizes: Sequence[int] = (queries, keys, keys)
        q, k, v = (x[:rows, :, :size].detach() for x, size in zip(self.attended, sizes, strict=True))
        for x in (q, k, v):
            x.requires_grad_(backward)
        for _ in range(self.config.num_hidden_layers):
            if backward:
                with torch.enable_grad():
                    made = attend(q, k, v)
                torch.autograd.grad(made, (q, k, v), made.detach())
            else:
                attend(q, k, v)
