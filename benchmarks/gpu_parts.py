"""What `benchmarks.gpu` measures: each part yields one dictionary for each number, as soon as it has the number.

A case that fails is a line that says so, and the next case follows. `small`: the smallest sizes, for a trial on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import check
from benchmarks.head_cases import (
    FLOORS,
    FROZEN_CASES,
    KL_RIVALS,
    RIVALS,
    TOP_K_CASES,
    VALUES,
    exact_gradients,
    make_inputs,
    missing,
    one,
    unavailable,
)
from benchmarks.measure import isolated, middle, spread
from benchmarks.step import NAMES
from benchmarks.step_runs import BETA, Seen, Setting, run_klamp, write_setting

Line = dict[str, Any]

DTYPES = ("bfloat16", "float32")
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Type -> the largest difference to float64 that counts as rounding, as a share of the largest entry."""
KL_BOUNDS = {"float32": 3e-5, "bfloat16": 0.2}
"""The same for the gradient of a small KL, which is a difference of near-equal terms."""
ESTIMATORS = ("k1", "k2", "k3")
CHECKED = ("linear_logprobs", "linear_logprobs, frozen head", "linear_kl", "linear_kl, frozen head", TOP_K_CASES[1])
CHECKED_SIZE = {True: (32, 32, 1000), False: (256, 2048, 151_936)}
"""Rows, width and vocabulary of the heads that are compared with float64 on the CPU."""
TIMED = (
    *("naive", "linear_logprobs", *RIVALS[:-1]),
    *("naive kl", "linear_kl", *KL_RIVALS),
    *TOP_K_CASES,
    *(*FLOORS, *FROZEN_CASES),
)
LAST = RIVALS[-1]
"""A head whose kernels are compiled and tuned for a while, after all others in both types."""
REPEATS = {"bfloat16": 5, "float32": 3}
TIMED_SIZE = {True: (32, 32, 1000), False: (8192, 2048, 0)}
"""Rows, width and vocabulary of the heads that are timed; each part has a vocabulary of its own."""
STEP_SIZES = {
    True: {"model": "tiny", "prompt": 8, "completion": 4, "prompts_per_step": 1, "steps": 2},
    False: {"model": "0.5B", "prompt": 512, "completion": 256, "prompts_per_step": 4, "steps": 4},
}
COMPARED = ("reward", "policy/entropy", "kl/k3", "train/loss", "train/grad_norm")
"""Metrics of a run that are compared between the devices: klamp draws the same tokens on both, up to rounding."""


def _tried(case: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Line:
    """A case with its numbers, or with the reason why it has none."""
    try:
        return {**case, **measure()}
    except Exception as error:  # whatever it is, the other cases are still to be measured
        cause = f"{type(error).__name__}: {error}"
        return {**case, "error": cause if len(cause) < 600 else f"{cause[:200]} ... {cause[-400:]}"}


def agreement(*, small: bool) -> Iterator[Line]:
    """Loss and gradient of `grpo_loss` and of klamp's heads on this device, against float64 on the CPU."""
    for dtype in DTYPES:
        for estimator in ESTIMATORS:
            case = {"case": f"grpo_loss, {estimator}", "dtype": dtype, "bound": BOUNDS[dtype]}
            yield _tried(case, lambda e=estimator, d=dtype: _loss_difference(e, d, small=small))
        for head in CHECKED:
            bound = (KL_BOUNDS if "kl" in head else BOUNDS)[dtype]
            case = {"case": head, "dtype": dtype, "bound": bound}
            yield _tried(case, lambda h=head, d=dtype: _head_difference(h, d, CHECKED_SIZE[small]))


def _loss_difference(estimator: str, dtype: str, *, small: bool) -> Line:
    """`grpo_loss` of random log-probabilities, two bounds of the ratio met, against its equation in float64."""
    import torch

    from klamp import Batch, KLTerm, Objective, Weighted, grpo_loss

    rows, tokens = (4, 16) if small else (64, 512)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    policy, old, ref = (x.to(getattr(torch, dtype)) for x in _random_logprobs(rows, tokens))
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1))
    advantages = torch.randn(rows)
    term: Any = KLTerm(value=estimator)  # pyright: ignore[reportArgumentType]
    objective = Objective(terms=(Weighted(BETA, term),))
    here = policy.detach().to(device).requires_grad_()
    data = {"mask": mask, "advantages": advantages, "old_logprobs": old, "ref_logprobs": ref}
    batch = Batch(policy_logprobs=here, **{name: x.to(device) for name, x in data.items()})
    loss = grpo_loss(batch, objective).loss
    loss.backward()
    exact = policy.detach().double().requires_grad_()
    expected = _exact_loss(estimator, exact, old.double(), ref.double(), mask, advantages.double())
    expected.backward()
    difference = abs(loss.item() - expected.item())
    errors = {"loss": difference / max(1.0, abs(expected.item()))}
    return {"errors": errors | {"policy_logprobs": _share(here.grad, exact.grad)}, "device": device}


def _random_logprobs(rows: int, tokens: int) -> tuple[Any, Any, Any]:
    import torch

    old = -4 * torch.rand(rows, tokens) - 0.1
    policy, ref = (old + scale * torch.randn(rows, tokens) for scale in (0.2, 0.5))
    return policy.clamp(max=0), old, ref.clamp(max=0)


def _exact_loss(estimator: str, policy: Any, old: Any, ref: Any, mask: Any, advantages: Any) -> Any:
    """The equation of PPO's clipped loss plus the KL of each token, with the KL's own gradient, over sequences."""
    ratio, sign = (policy - old).exp(), advantages[:, None]
    surrogate = -(ratio * sign).minimum(ratio.clamp(0.8, 1.2) * sign)
    log_ratio = (policy - ref).detach()
    value = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}[estimator]
    penalty = value + log_ratio * (policy - policy.detach())
    tokens = (surrogate + BETA * penalty) * mask
    return (tokens.sum(-1) / mask.sum(-1)).mean()


def _head_difference(case: str, dtype: str, size: tuple[int, int, int]) -> Line:
    """A head's weighted sum and its gradients, less those of whole matrices of logits in float64."""
    inputs = make_inputs(size, dtype, reference="kl" in case)
    weighted, *exact = exact_gradients(case, inputs)
    inputs.hidden.requires_grad_()
    inputs.weight.requires_grad_("frozen" not in case)
    loss = (VALUES[case](inputs) * inputs.factor).sum()
    loss.backward()
    errors = {"loss": float((loss.cpu().double() - weighted.sum()).abs() / weighted.abs().sum())}
    for name, expected in zip(("hidden", "weight"), exact, strict=True):
        if (gradient := getattr(inputs, name).grad) is not None:
            errors[name] = _share(gradient, expected)
    return {"errors": errors, "device": inputs.hidden.device.type}


def _share(gradient: Any, expected: Any) -> float:
    """The largest difference as a share of the largest entry."""
    return float((gradient.cpu().double() - expected).abs().max() / expected.abs().max())


def heads(vocab: int, *, small: bool) -> Iterator[Line]:
    """Seconds and peak memory of the heads, forward and backward, klamp's and others'."""
    import torch

    rows, width, tiny = TIMED_SIZE[small]
    size = (rows, width, tiny or vocab)
    for dtype, case in [*product(DTYPES, TIMED), *product(DTYPES, (LAST,))]:
        line = {"case": case, "dtype": dtype, "size": list(size)}
        if why := unavailable(case):
            yield line | {"skipped": why}
            continue
        yield _tried(line, lambda c=case, d=dtype: one(c, d, size, 2 if small else REPEATS[d]))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def heads_qwen2(*, small: bool) -> Iterator[Line]:
    """The heads with the vocabulary of Qwen2 and Qwen3."""
    return heads(151_936, small=small)


def heads_large(*, small: bool) -> Iterator[Line]:
    """The heads with the vocabulary of today's open models."""
    return heads(248_320, small=small)


def step(*, small: bool) -> Iterator[Line]:
    """A step of `klamp.trl` with fast scoring and one of TRL's own trainer on a random model, in bfloat16."""
    sizes = dict(STEP_SIZES[small])
    model, prompt = str(sizes.pop("model")), int(sizes.pop("prompt"))  # pyright: ignore[reportArgumentType]
    with tempfile.TemporaryDirectory() as folder:
        path, prompts = write_setting(Path(folder), model, prompt, dtype="bfloat16")
        common: dict[str, Any] = {"model": path, "prompts": prompts, "dtype": "bfloat16", "warmup": 1, **sizes}
        for trainer in ("fast", "trl"):
            setting = Setting(trainer=trainer, accumulate=1 if small else 2, **common)
            line = {"case": NAMES[trainer], "dtype": "bfloat16", "model": model, "prompt": prompt, **sizes}
            why = missing("trl") or missing("datasets")
            call = {"setting": setting.to_dict()}
            yield (
                line | {"skipped": why} if why else _tried(line, lambda c=call: isolated("benchmarks.step_runs:one", c))
            )


def cost_of_check(*, small: bool) -> Iterator[Line]:
    """Seconds of `klamp.check` beside a step, for each form of the call."""
    results = check.run(small)
    for form, numbers in results["forms"].items():
        sizes = {"parameters": results["parameters"], "shape": results["shape"]}
        yield {"case": form, "dtype": results["dtype"], **sizes, **numbers}


def run(*, small: bool) -> Iterator[Line]:
    """The metrics of a short run of `klamp train` on this device and on the CPU, which draw the same tokens."""
    rows: dict[str, list[Mapping[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, prompts = write_setting(Path(folder), "tiny", 8)
        common: dict[str, Any] = {"trainer": "klamp", "model": model, "prompts": prompts, "warmup": 0}
        for place in ("here", "on the CPU"):
            setting = Setting(cpu=place == "on the CPU", steps=1 if small else 3, **common)
            rows[place] = isolated("benchmarks.gpu_parts:metrics", {"setting": setting.to_dict()})["rows"]
    for number, (here, cpu) in enumerate(zip(*rows.values(), strict=True), start=1):
        for name in COMPARED:
            yield {"case": f"step {number}, {name}", "dtype": "float32", "here": here[name], "cpu": cpu[name]}


def metrics(setting: dict[str, Any]) -> dict[str, Any]:
    """The metrics of every step of a run of klamp's trainer in this process."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        run_klamp(Setting(**setting), folder, seen)
    return {"rows": [{name: row[name] for name in COMPARED} for row in seen.metrics]}


def result_of(line: Mapping[str, Any]) -> str:
    """What a line of any part says, as a cell of the table."""
    if "skipped" in line:
        return f"skipped: {line['skipped']}"
    if "error" in line:
        return f"failed: {line['error']}"
    if "errors" in line:
        differences = ", ".join(f"{name} {value:.1e}" for name, value in line["errors"].items())
        met = "met" if max(line["errors"].values()) <= line["bound"] else "**missed**"
        return f"difference to float64: {differences} (at most {line['bound']:.0e}: {met})"
    if "check_s" in line:
        share = middle(line["check_s"]) / middle(line["step_s"])
        differ = "**differ**" if line["repeatable"] else "differ, as those of two steps without a check do"
        same = "equal" if line["equal_gradients"] else differ
        return f"check {spread(line['check_s'], 4)} s, {share:.1%} of a step; gradients {same}"
    if "here" in line:
        return f"{line['here']:.6g} here, {line['cpu']:.6g} on the CPU"
    return f"{spread(line['seconds'], 4)} s, peak {line['extra_mib']:,.0f} MiB{_more(line)}"


def _more(line: Mapping[str, Any]) -> str:
    """Of a step the seconds of sampling."""
    return f"; {spread(line['sampling_seconds'])} s of it sampling" if line.get("sampling_seconds") else ""
