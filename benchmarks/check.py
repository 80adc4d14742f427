"""What `klamp.check` costs beside a step, and whether the gradients stay equal.

The step is one of a 27M-parameter model in float32 on a CPU, and of one with 0.5B in bfloat16 on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import klamp
from benchmarks.measure import middle, spread, wait_for_gpu
from benchmarks.records import Benchmark, table

FORMS = ("no check", "bare", "watched", "near the reference")
VOCAB = 8000
SIZES: dict[str, dict[str, Any]] = {
    "quick": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "cpu": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6},
    "gpu": {"hidden_size": 1024, "intermediate_size": 4864, "num_hidden_layers": 24},
}
SHAPES = {"quick": (4, 64), "cpu": (8, 128), "gpu": (16, 512)}
"""Completions and their tokens."""


def run(quick: bool) -> dict[str, Any]:
    """Steps with each form of the check and without one, in turns."""
    size = "quick" if quick else "gpu" if torch.cuda.is_available() else "cpu"
    model, shape = _model(size), SHAPES[size]
    forms = {form: _gradients(model, form, shape) for form in FORMS}
    steps = [{form: _step(model, form, shape)[0] for form in FORMS} for _ in range(2 if quick else 3)]
    for form, numbers in forms.items():
        numbers |= {name: [step[form][name] for step in steps] for name in ("step_s", "check_s")}
    parameters = sum(x.numel() for x in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    return {"parameters": parameters, "dtype": dtype, "shape": list(shape), "forms": forms}


def _model(size: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=8, **SIZES[size])
    model: Any = Qwen2ForCausalLM(config)
    return model.to("cuda", torch.bfloat16) if torch.cuda.is_available() else model


def _gradients(model: Any, form: str, shape: Sequence[int]) -> dict[str, Any]:
    """Whether a check leaves the gradients as they are, and whether two steps without one have equal ones."""
    plain = _step(model, form, shape, checked=False)[1]
    pairs = {"repeatable": _step(model, form, shape, checked=False)[1], "equal_gradients": _step(model, form, shape)[1]}
    return {name: all(map(torch.equal, plain, gradients)) for name, gradients in pairs.items()}


def _step(
    model: Any, form: str, shape: Sequence[int], *, checked: bool = True
) -> tuple[dict[str, float], list[Tensor]]:
    """The seconds and gradients of one forward pass, loss, check and backward pass; the weights stay as they are."""
    generator, device = torch.Generator().manual_seed(0), model.device
    ids = torch.randint(VOCAB, shape, generator=generator).to(device)
    mask = torch.ones(shape, dtype=torch.bool, device=device)[:, 1:]
    advantages = torch.randn(shape[0], generator=generator).to(device)
    noise = torch.randn(mask.shape, generator=generator).to(device)
    wait_for_gpu()
    start = time.perf_counter()
    logp = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ref = logp.detach() if form == "near the reference" else logp.detach() + 0.1 * noise
    watched = klamp.watch(ref_logprobs=ref, advantages=advantages) if form == "watched" else None
    loss = _loss(logp, watched.ref_logprobs if watched else ref, watched.advantages if watched else advantages)
    wait_for_gpu()
    spent = time.perf_counter()
    if form != "no check" and checked:
        data = {"ref_logprobs": ref, "old_logprobs": logp.detach(), "advantages": advantages, "beta": 0.05}
        klamp.check(loss, policy_logprobs=logp, mask=mask, watched=watched, once=False, **data)
    wait_for_gpu()
    check_s = time.perf_counter() - spent
    loss.backward()
    wait_for_gpu()
    seconds = {"step_s": time.perf_counter() - start, "check_s": check_s}
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    return seconds, gradients


def _loss(logp: Tensor, ref: Any, advantages: Any) -> Tensor:
    ratio = (logp - logp.detach()).exp()
    k3 = (ref - logp).exp() - (ref - logp) - 1
    return (-ratio * advantages[:, None] + 0.05 * ratio * k3).mean()


def text(results: Mapping[str, Any]) -> str:
    """The table of forms."""
    plain = middle(results["forms"]["no check"]["step_s"])
    rows = [
        (
            form,
            spread(x["step_s"]),
            spread(x["check_s"], 3),
            f"{middle(x['check_s']) / plain:.1%}",
            str(x["equal_gradients"]),
        )
        for form, x in results["forms"].items()
    ]
    b, t = results["shape"]
    head = f"{results['parameters'] / 1e6:.0f}M parameters, {b} completions of {t} tokens, no optimizer step.\n\n"
    return head + table(("form", "step, s", "check, s", "share of a step", "gradients equal"), rows)


BENCHMARK = Benchmark(
    name="check",
    title="What a check costs",
    about="A training step on random tokens with each form of `klamp.check` and without one, in turns; medians and "
    "ranges. A run checks each call site once.",
    run=run,
    text=text,
)
