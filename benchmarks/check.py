"""What `klamp.check` costs beside a step of a 27M-parameter model, and whether the gradients stay equal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import klamp
from benchmarks.measure import middle, spread
from benchmarks.records import Benchmark, table

SHAPE, QUICK_SHAPE = (8, 128), (4, 64)
FORMS = ("no check", "bare", "watched", "near the reference")


def run(quick: bool) -> dict[str, Any]:
    """Steps with each form of the check and without one, in turns."""
    model = _model(quick)
    rounds = 2 if quick else 3
    results: dict[str, Any] = {"parameters": sum(x.numel() for x in model.parameters()), "forms": {}}
    results["shape"] = list(QUICK_SHAPE if quick else SHAPE)
    steps = [{form: _step(model, form, results["shape"]) for form in FORMS} for _ in range(rounds + 1)][1:]
    for form in FORMS:
        each = [step[form] for step in steps]
        plain = _step(model, form, results["shape"], checked=False)["grads"]
        equal = all(torch.equal(x, y) for x, y in zip(each[0]["grads"], plain, strict=True))
        timed = {name: [x[name] for x in each] for name in ("step_s", "check_s")}
        results["forms"][form] = {**timed, "equal_gradients": equal}
    return results


def _model(quick: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} if quick else {}
    whole = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = Qwen2Config(vocab_size=8000, num_key_value_heads=8, **(whole | size))
    return Qwen2ForCausalLM(config)


def _step(model: Any, form: str, shape: list[int], *, checked: bool = True) -> dict[str, Any]:
    """One forward pass, loss, check and backward pass; the weights stay as they are."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8000, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.bool)[:, 1:]
    advantages = torch.randn(shape[0], generator=generator)
    start = time.perf_counter()
    logp = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    noise = torch.randn(logp.shape, generator=generator)
    ref = logp.detach() if form == "near the reference" else logp.detach() + 0.1 * noise
    watched = klamp.watch(ref_logprobs=ref, advantages=advantages) if form == "watched" else None
    loss = _loss(logp, watched.ref_logprobs if watched else ref, watched.advantages if watched else advantages)
    spent = time.perf_counter()
    if form != "no check" and checked:
        numbers = {"ref_logprobs": ref, "old_logprobs": logp.detach(), "advantages": advantages, "beta": 0.05}
        klamp.check(loss, policy_logprobs=logp, mask=mask, watched=watched, once=False, **numbers)
    check_s = time.perf_counter() - spent
    loss.backward()
    total = time.perf_counter() - start
    grads = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    return {"step_s": total, "check_s": check_s, "grads": grads}


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
