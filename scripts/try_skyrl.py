"""klamp.tinker through the real SDK against an independent server, skyrl: what holds there, in numbers.

scripts/try_skyrl.sh makes the environment and runs this. A tiny Qwen3 with random weights and a tokenizer trained on
one line go into a temporary folder, skyrl's API and its JAX engine start on the loopback interface, and every check
prints one line: holds, does not hold, or not reached. What it should be is computed here, with transformers, peft and
autograd on the LoRA weights that the server saves. Exit status 1: the server did not start, or a check was not reached.

klamp's own check of the SDK's version is lowered for this process: skyrl reads JSON, which the SDK spoke up to 0.24.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from skyrl_server import make_model, server

WAIT = 120.0
"""Seconds for one answer."""
RANK, SEED = 4, 7
CLOSE = 1e-4
"""Relative difference below which two numbers of float32 are called the same."""
PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
RESPONSES = [[10, 11, 12], [13], [14, 15, 16, 17], [18, 19]]
ADVANTAGES = [1.0, -0.5, 0.7, -1.2]
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def ready(client: Any) -> Any:
    """A client; newer SDKs hand out a future of it."""
    return client.result(timeout=WAIT) if hasattr(client, "result") else client


class Trial:
    """A training client, the reference, the datums, and the same model at home."""

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        import tinker

        from klamp.tinker.testing import tiny_model
        from klamp_standin.model import BaseModel

        self.tinker, self.folder = tinker, folder
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-dummy")
        self.client = ready(self.service.create_lora_training_client(str(model), rank=RANK, seed=SEED))
        self.reference = ready(self.service.create_sampling_client(base_model=str(model)))
        self.home = BaseModel(tiny_model())
        self.ref = self.reference_at_home()
        self.data = self.datums()
        self.paths: dict[str, str] = {}
        self.weights = self.save("start")

    def reference_at_home(self) -> list[list[float]]:
        """Log-probabilities of the responses under the base model, by transformers."""
        import torch

        found = []
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
            with torch.no_grad():
                logits = self.home.model(input_ids=torch.tensor([prompt + response])).logits[0]
            rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
            found.append(rows.gather(-1, torch.tensor(response)[:, None]).squeeze(-1).tolist())
        return found

    def datums(self) -> list[Any]:
        """Datums whose sampler is a little away from the reference, so that ratios and KL are not trivial."""
        import torch

        from klamp.tinker import build_datum

        generator = torch.Generator().manual_seed(0)
        away = [[x + 0.3 * (float(torch.rand((), generator=generator)) - 0.5) for x in row] for row in self.ref]
        return [build_datum(*row) for row in zip(PROMPTS, RESPONSES, ADVANTAGES, away, self.ref, strict=True)]

    def save(self, name: str) -> Any:
        """Save a snapshot at the server and read its LoRA weights from the file."""
        from safetensors.torch import load

        from klamp_standin.model import LoraShape, Weights

        self.paths[name] = self.client.save_weights_for_sampler(name).result(timeout=WAIT).path
        (file,) = self.folder.glob(f"checkpoints/*/sampler_weights/{name}.tar.gz")
        with tarfile.open(file) as packed:
            (member,) = [m for m in packed.getmembers() if m.name.endswith("adapter_model.safetensors")]
            stored = load(packed.extractfile(member).read())  # pyright: ignore[reportOptionalMemberAccess]
        leaves: dict[str, Any] = {}
        tensors = {}
        for key, tensor in stored.items():
            # skyrl trains one A for q, k and v, and one for gate and up, and saves it under each name.
            shared = re.sub(r"(q|k|v|gate|up)_proj\.lora_A", lambda m: f"{FUSED[m[1]]}.lora_A", key)
            leaf = leaves.setdefault(shared, tensor.float().requires_grad_(True))
            assert leaf.equal(tensor), f"{key} is not shared"
            tensors[key.replace(".weight", ".default.weight")] = leaf
        return Weights(shape=LoraShape(rank=RANK, train_unembed=False), tensors=tensors)

    def leaves(self) -> list[Any]:
        """The LoRA weights, each shared one once."""
        return list({id(tensor): tensor for tensor in self.weights.tensors.values()}.values())

    def logprobs(self) -> list[Any]:
        """Log-probabilities of the targets under the policy as last saved, with gradient, at home."""
        return self.home.logprobs(
            self.weights, [d.model_input.to_ints() for d in self.data], self.rows("target_tokens")
        )

    def rows(self, name: str) -> list[Any]:
        """One row of every datum."""
        return [datum.loss_fn_inputs[name].to_torch() for datum in self.data]

    def forward(self) -> list[Any]:
        """Log-probabilities of the targets under the policy, from the server."""
        bare = [self.bare(datum) for datum in self.data]
        outputs = self.client.forward(bare, "cross_entropy").result(timeout=WAIT).loss_fn_outputs
        return [output["logprobs"].to_torch() for output in outputs]

    def bare(self, datum: Any, **rows: Any) -> Any:
        """The datum with its targets and these rows only."""
        inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"]}
        inputs |= {name: self.tinker.TensorData.from_torch(row.float()) for name, row in rows.items()}
        return self.tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)

    def gradient_norm(self) -> float:
        """The norm of the gradient that the server has gathered; a step of size 0 tells it and clears it."""
        step = self.client.optim_step(self.tinker.AdamParams(learning_rate=0.0)).result(timeout=WAIT)
        return float(step.metrics["skyrl.ai/grad_norm"])

    def norm_of(self, loss: Any) -> float:
        """The norm of a loss's gradient in the LoRA weights, by autograd at home."""
        import torch

        found = torch.autograd.grad(loss, self.leaves(), retain_graph=True)
        return float(torch.stack([g.norm() for g in found]).norm())

    def builtin(self, data: Sequence[Any]) -> tuple[list[Any], float]:
        """Losses per token and gradient norm of the server's ppo, trained tokens marked by `weights`."""
        import klamp.tinker

        marked = []
        for datum, mask in zip(klamp.tinker.strip_for_builtin(data), self.rows("mask"), strict=True):
            rows = {name: datum.loss_fn_inputs[name].to_torch() for name in ("advantages", "logprobs")}
            marked.append(self.bare(datum, weights=mask, **rows))
        answer = self.client.forward_backward(marked, "ppo", loss_fn_config=BOUNDS).result(timeout=WAIT)
        return [output["elementwise_loss"].to_torch() for output in answer.loss_fn_outputs], self.gradient_norm()


@dataclass(frozen=True)
class Result:
    """What a check found."""

    holds: bool
    numbers: str


def same(found: float, expected: float, what: str) -> Result:
    """Two numbers, and whether they are the same."""
    difference = abs(found - expected) / max(abs(expected), 1e-12)
    return Result(
        difference < CLOSE, f"{what} {found:.6g}, should be {expected:.6g} (relative difference {difference:.1e})"
    )


def furthest(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest absolute difference of two lists of rows."""
    import torch

    pairs = zip(found, expected, strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)


def check_reference(trial: Trial) -> Result:
    """compute_reference_logprobs of the base model: transformers' log-probabilities"""
    from klamp.tinker import compute_reference_logprobs

    found = asyncio.run(compute_reference_logprobs(trial.reference, PROMPTS, RESPONSES, timeout=WAIT))
    away = furthest(found, trial.ref)
    return Result(away < CLOSE, f"furthest apart {away:.1e} nats")


def check_sample(trial: Trial) -> Result:
    """log-probabilities of a sample of the base model: transformers'"""
    import torch

    params = trial.tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=1)
    prompt = trial.tinker.ModelInput.from_ints(PROMPTS[0])
    (row,) = trial.reference.sample(prompt, 1, params).result(timeout=WAIT).sequences
    with torch.no_grad():
        logits = trial.home.model(input_ids=torch.tensor([PROMPTS[0] + row.tokens])).logits[0]
    scores = logits[len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    away = furthest([row.logprobs], [scores.gather(-1, torch.tensor(row.tokens)[:, None]).squeeze(-1)])
    return Result(away < CLOSE, f"{len(row.tokens)} tokens, furthest apart {away:.1e} nats")


def check_step(trial: Trial) -> Result:
    """cross_entropy and two optim_steps: AdamW on the mean over datums of each datum's mean"""
    import torch

    masks, tensors = trial.rows("mask"), trial.weights.tensors
    marked = [trial.bare(datum, weights=mask) for datum, mask in zip(trial.data, masks, strict=True)]
    optimizer = torch.optim.AdamW(trial.leaves(), lr=0.2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.0)
    params = trial.tinker.AdamParams(learning_rate=0.2, beta1=0.9, beta2=0.95, eps=0.1)
    for _ in range(2):
        loss: Any = sum(-(x * m).sum() / m.sum() for x, m in zip(trial.logprobs(), masks, strict=True)) / len(masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.client.forward_backward(marked, "cross_entropy").result(timeout=WAIT)
        trial.client.optim_step(params).result(timeout=WAIT)
    trial.weights = trial.save("moved")
    away = furthest([trial.weights.tensors[k].detach() for k in tensors], [x.detach() for x in tensors.values()])
    return Result(away < CLOSE, f"weights furthest apart {away:.1e}")


def check_forward(trial: Trial) -> Result:
    """forward under the moved policy: transformers with peft and the saved weights"""
    at_home = [x.detach() for x in trial.logprobs()]
    away, moved = furthest(trial.forward(), at_home), furthest([x[-1:] for x in at_home], [x[-1:] for x in trial.ref])
    return Result(away < CLOSE, f"furthest apart {away:.1e} nats ({moved:.2f} from the reference)")


def check_ppo_value(trial: Trial) -> Result:
    """built-in ppo: the sum of its losses is klamp's at kl_coef 0, token_sum"""
    from klamp.tinker import compute_grpo_kl_loss

    expected, _ = compute_grpo_kl_loss(trial.data, trial.logprobs(), kl_coef=0.0, normalizer="token_sum")
    found, _ = trial.builtin(trial.data)
    return same(sum(float(row.sum()) for row in found), float(expected.detach()), "loss")


def check_ppo_gradient(trial: Trial) -> Result:
    """built-in ppo with `weights`: the gradient of klamp's at kl_coef 0, loss_type grpo"""
    from klamp import LossConfig
    from klamp.tinker import compute_grpo_kl_loss

    loss = LossConfig(loss_type="grpo")
    expected, _ = compute_grpo_kl_loss(trial.data, trial.logprobs(), kl_coef=0.0, loss=loss)
    return same(trial.builtin(trial.data)[1], trial.norm_of(expected), "gradient norm")


def check_ppo_sum(trial: Trial) -> Result:
    """built-in ppo: the gradient of a plain sum, as the service documents it"""
    from klamp.tinker import compute_grpo_kl_loss

    expected, _ = compute_grpo_kl_loss(trial.data, trial.logprobs(), kl_coef=0.0, normalizer="token_sum")
    return same(trial.builtin(trial.data)[1], trial.norm_of(expected), "gradient norm")


def check_shift(trial: Trial) -> Result:
    """KL as a shift of the advantages and built-in ppo: the gradient of klamp's kl_placement advantage"""
    from klamp import KLConfig, LossConfig
    from klamp.tinker import compute_grpo_kl_loss

    kl, loss = KLConfig(beta=0.5, kl_estimator="k1", kl_placement="advantage"), LossConfig(loss_type="grpo")
    expected, _ = compute_grpo_kl_loss(trial.data, trial.logprobs(), kl=kl, loss=loss)
    names = ("advantages", "logprobs", "ref_logprobs", "mask")
    shifted = [
        trial.bare(datum, advantages=a - kl.beta * (sampler - ref), logprobs=sampler, mask=mask)
        for datum, a, sampler, ref, mask in zip(trial.data, *map(trial.rows, names), strict=True)
    ]
    return same(trial.builtin(shifted)[1], trial.norm_of(expected), "gradient norm")


def custom(trial: Trial, kl_coef: float) -> tuple[Any, list[Any], float, float]:
    """klamp's loss at home, its slopes in the log-probabilities, and value and gradient norm from the server."""
    import torch

    from klamp.tinker import compute_grpo_kl_loss, forward_backward_kl

    rows = trial.logprobs()
    expected, _ = compute_grpo_kl_loss(trial.data, rows, kl_coef=kl_coef)
    slopes = list(torch.autograd.grad(expected, rows, retain_graph=True))
    metrics = forward_backward_kl(trial.client, trial.data, kl_coef=kl_coef).result(timeout=WAIT).metrics
    return expected, slopes, metrics["train/loss"], trial.gradient_norm()


def check_custom_value(trial: Trial) -> Result:
    """forward_backward_kl, kl_coef 0.5: klamp's loss"""
    expected, _, value, _ = custom(trial, 0.5)
    return same(value, float(expected.detach()), "loss")


def check_custom_plain(trial: Trial) -> Result:
    """forward_backward_kl, kl_coef 0: klamp's gradient"""
    expected, _, _, norm = custom(trial, 0.0)
    return same(norm, trial.norm_of(expected), "gradient norm")


def check_custom_kl(trial: Trial) -> Result:
    """forward_backward_kl, kl_coef 0.5: klamp's gradient"""
    expected, _, _, norm = custom(trial, 0.5)
    return same(norm, trial.norm_of(expected), "gradient norm")


def check_custom_why(trial: Trial) -> Result:
    """the reason: each datum divided by max(sum of its weights, 1e-9), then the mean over datums"""
    _, slopes, _, norm = custom(trial, 0.5)
    sums = [float(-slope.sum()) for slope in slopes]
    pairs = zip(trial.logprobs(), slopes, sums, strict=True)
    wrong: Any = sum((x * s).sum() / max(total, 1e-9) for x, s, total in pairs) / len(sums)
    result = same(norm, trial.norm_of(wrong), "gradient norm")
    return Result(result.holds, f"{result.numbers}; sums {', '.join(f'{x:.3g}' for x in sums)}")


def check_detour(trial: Trial) -> Result:
    """a way round: klamp's slopes as advantages of importance_sampling, times datums and tokens"""
    import torch

    from klamp.tinker import compute_grpo_kl_loss

    rows = [row.requires_grad_(True) for row in trial.forward()]
    value, _ = compute_grpo_kl_loss(trial.data, rows, kl_coef=0.5)
    slopes = torch.autograd.grad(value, rows)
    data = []
    for datum, row, slope, mask in zip(trial.data, rows, slopes, trial.rows("mask"), strict=True):
        advantages = -slope * float(mask.sum()) * len(rows)
        data.append(trial.bare(datum, logprobs=row.detach(), advantages=advantages, weights=mask))
    trial.client.forward_backward(data, "importance_sampling").result(timeout=WAIT)
    expected, _ = compute_grpo_kl_loss(trial.data, trial.logprobs(), kl_coef=0.5)
    return same(trial.gradient_norm(), trial.norm_of(expected), "gradient norm")


def check_snapshot(trial: Trial) -> Result:
    """scoring with an older snapshot leaves the weights in training alone (last: it may not)"""
    marked = [trial.bare(datum, weights=mask) for datum, mask in zip(trial.data, trial.rows("mask"), strict=True)]
    trial.client.forward_backward(marked, "cross_entropy").result(timeout=WAIT)
    trial.client.optim_step(trial.tinker.AdamParams(learning_rate=0.03)).result(timeout=WAIT)
    before = trial.forward()
    older = ready(trial.service.create_sampling_client(model_path=trial.paths["start"]))
    older.compute_logprobs(trial.data[0].model_input).result(timeout=WAIT)
    after = trial.forward()
    trained = furthest([x[-len(r) :] for x, r in zip(before, trial.ref, strict=True)], trial.ref)
    start = furthest([x[-len(r) :] for x, r in zip(after, trial.ref, strict=True)], trial.ref)
    moved = furthest(before, after)
    return Result(
        moved < CLOSE, f"policy moved {moved:.2f} nats; from its start {trained:.2f} before, {start:.1e} after"
    )


CHECKS: tuple[Callable[[Trial], Result], ...] = (
    check_reference,
    check_sample,
    check_step,
    check_forward,
    check_ppo_value,
    check_ppo_gradient,
    check_ppo_sum,
    check_shift,
    check_custom_value,
    check_custom_plain,
    check_custom_kl,
    check_custom_why,
    check_detour,
    check_snapshot,
)


def run_checks(trial: Trial) -> int:
    """Run all checks, print a line of each, and return how many could not be run."""
    missed = 0
    for check in CHECKS:
        try:
            result = check(trial)
            word, numbers = ("holds" if result.holds else "DOES NOT HOLD"), result.numbers
        except Exception as error:
            traceback.print_exc()
            missed += 1
            word, numbers = "NOT REACHED", f"{type(error).__name__}: {error}"[:200]
        print(f"{word:<14} {check.__doc__}\n{'':<15}{numbers}", flush=True)
    return missed


def main() -> int:
    """Start the server, run the checks, end the server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside, or out of time"))
    from klamp.hosts.common import versions

    tried = versions.TRIED["tinker"]
    versions.TRIED = {**versions.TRIED, "tinker": tried._replace(needed="tinker>=0.24")}
    names = ("skyrl", "jax", "flax", "optax", "tinker", "torch", "transformers", "peft")
    print(f"Python {sys.version.split()[0]}", *(f"{name} {version(name)}" for name in names), sep=", ")
    with tempfile.TemporaryDirectory(prefix="klamp-skyrl-") as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model")
        started = time.monotonic()
        with server(model, folder) as url:
            trial = Trial(url, model, folder)
            print(f"server and training client up after {time.monotonic() - started:.0f} s", flush=True)
            missed = run_checks(trial)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
