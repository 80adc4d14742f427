"""GRPO with a KL through the Tinker SDK: the loop of the Tinker guide (docs/sources.md), as a whole run.

    python examples/tinker_grpo_kl.py --local [--kl-coef 0.05] [--steps 8]     # offline, against klamp's stand-in
    TINKER_API_KEY=tml-... python examples/tinker_grpo_kl.py --model Qwen/Qwen3-8B --out runs/tinker

Each step: sample a group of responses per prompt, score them, normalise the rewards within each group, ask the
reference (the base model) for its log-probabilities, put everything into datums, and take one optimizer step on the
clipped surrogate plus the KL. With --kl-coef 0 the built-in PPO loss does it, in one pass and without a reference.
Held-out prompts are answered greedily before the first step and after the last one. With --out each step is a line of
metrics.jsonl (`klamp doctor` and `klamp report` read it), and every --save-every steps the service saves weights and
optimizer; the same command with more --steps continues from there.
Offline (`pip install ./standin` in a clone) it trains the built-in arithmetic model, which the first use teaches in
about a minute, and counts at the end what the service was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinker
import torch
from tinker import types

from klamp import KLConfig, group_advantages
from klamp.lab.tasks import Example, Task, TaskConfig, arithmetic_task, load_base_model
from klamp.tinker import build_datum, compute_reference_logprobs, forward_backward_kl, strip_for_builtin

if TYPE_CHECKING:
    from klamp.tinker.testing import Standin


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of the Tinker guide, with its names."""

    model_name: str = "Qwen/Qwen3-8B"
    kl_coef: float = 0.05
    cliprange: float = 0.2
    group_size: int = 8
    prompts: int = 8
    steps: int = 8
    max_tokens: int = 8
    learning_rate: float = 2e-3
    rank: int = 8
    held_out: int = 32
    save_every: int = 4


def ready(client: Any) -> Any:
    """A client; newer SDKs hand out a future of it."""
    return client.result() if hasattr(client, "result") else client


class Trainer:
    """A training client, the reference, and what one step does with them.

    Args:
        config: the settings.
        service: the SDK's entry point.
        saved: the `tinker://` path of weights and optimizer to continue from; None: a fresh adapter.
    """

    def __init__(self, config: Config, service: Any, saved: str | None = None) -> None:
        self.config, self.kl = config, KLConfig(beta=config.kl_coef)
        if saved is None:
            self.client = ready(service.create_lora_training_client(config.model_name, rank=config.rank, seed=0))
        else:
            self.client = ready(service.create_training_client_from_state_with_optimizer(saved))
        self.tokenizer = self.client.get_tokenizer()
        self.ref_client = None
        if config.kl_coef > 0:  # once, at the start
            self.ref_client = ready(service.create_sampling_client(base_model=config.model_name))

    def sample(self, examples: Sequence[Example]) -> tuple[list[list[int]], list[Any]]:
        """A group of responses per prompt, from a snapshot of the weights as they are."""
        sampler = ready(self.client.save_weights_and_get_sampling_client())
        prompts = [self.tokenizer.encode(e.prompt, add_special_tokens=False) for e in examples]
        params = types.SamplingParams(max_tokens=self.config.max_tokens, temperature=1.0)
        size = self.config.group_size
        futures = [sampler.sample(types.ModelInput.from_ints(p), size, params) for p in prompts]
        groups = [future.result(timeout=300).sequences for future in futures]
        return [p for p in prompts for _ in range(size)], [row for group in groups for row in group]

    def step(self, examples: Sequence[Example], task: Task) -> dict[str, float]:
        """Sample, score, compare with the reference, update."""
        config = self.config
        prompts, rows = self.sample(examples)
        texts = self.tokenizer.batch_decode([row.tokens for row in rows], skip_special_tokens=True)
        asked = [e for e in examples for _ in range(config.group_size)]
        rewards = torch.tensor([task.score(e, text) for e, text in zip(asked, texts, strict=True)])
        advantages = group_advantages(rewards, config.group_size).tolist()
        responses = [row.tokens for row in rows]
        ref: list[Any] = [None] * len(rows)
        if self.ref_client is not None:
            ref = asyncio.run(compute_reference_logprobs(self.ref_client, prompts, responses))
        logprobs = [row.logprobs for row in rows]
        datums = [build_datum(*row) for row in zip(prompts, responses, advantages, logprobs, ref, strict=True)]
        update = self.forward_backward(datums)
        step = self.client.optim_step(types.AdamParams(learning_rate=config.learning_rate))
        metrics = update.result(timeout=300).metrics
        step.result(timeout=300)
        return {"reward": float(rewards.mean())} | {
            name: metrics[name] for name in ("kl/k1", "kl/k3") if name in metrics
        }

    def evaluate(self, examples: Sequence[Example], task: Task) -> float:
        """The mean reward of greedy answers to held-out prompts."""
        sampler = ready(self.client.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=self.config.max_tokens, temperature=0.0)
        prompts = [
            types.ModelInput.from_ints(self.tokenizer.encode(e.prompt, add_special_tokens=False)) for e in examples
        ]
        futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
        answers = [future.result(timeout=300).sequences[0].tokens for future in futures]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return sum(task.score(e, text) for e, text in zip(examples, texts, strict=True)) / len(texts)

    def save(self, name: str) -> str:
        """Save weights and optimizer at the service; returns their `tinker://` path."""
        return self.client.save_state(name).result(timeout=300).path

    def forward_backward(self, datums: list[Any]) -> Any:
        """The loss with its KL, or the built-in one where there is none."""
        if self.config.kl_coef > 0:
            return forward_backward_kl(
                self.client, datums, cliprange=self.config.cliprange, kl=self.kl, group_size=self.config.group_size
            )
        bounds = {
            "clip_low_threshold": 1 - self.config.cliprange,
            "clip_high_threshold": 1 + self.config.cliprange,
        }
        return self.client.forward_backward(strip_for_builtin(datums), "ppo", loss_fn_config=bounds)


class Folder:
    """The folder of a run: a line of metrics for each step, and where the service keeps the newest checkpoint.

    Args:
        path: the folder; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)

    def newest(self) -> tuple[int, str | None]:
        """The step of the newest checkpoint and its `tinker://` path."""
        if self.path is None or not (self.path / "state.json").exists():
            return 0, None
        state = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
        return state["step"], state["tinker_path"]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append the metrics of a step."""
        if self.path is not None:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")

    def saved(self, step: int, tinker_path: str) -> None:
        """Note a checkpoint."""
        if self.path is not None:
            text = json.dumps({"step": step, "tinker_path": tinker_path})
            (self.path / "state.json").write_text(text, encoding="utf-8")


@contextmanager
def service_of(local: bool, folder: Path | None) -> Iterator[tuple[Any, Standin | None]]:
    """The service that the environment names, or one of klamp's stand-in, which keeps saved weights in the folder."""
    if not local:
        yield tinker.ServiceClient(), None
        return
    from klamp.tinker.testing import serve

    model, tokenizer = load_base_model()
    kept = None if folder is None else folder / "service"
    with serve(model, tokenizer, name="klamp/arithmetic", folder=kept) as standin:
        yield tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key), standin


class Price:
    """What the steps of a run ask of a stand-in, evaluations aside."""

    def __init__(self, standin: Standin | None) -> None:
        self.standin = standin
        if standin is not None:
            self.requests, self.tokens = standin.requests.copy(), Counter(standin.tokens)

    def show(self, steps: int) -> None:
        """Print requests and tokens per step; a forward pass costs a token 1, forward and backward together 3."""
        if self.standin is None or not steps:
            return
        counts = self.standin.requests - self.requests
        asked = {route: count / steps for route, count in sorted(counts.items()) if count >= steps}
        tokens = {name: count / steps for name, count in sorted((self.standin.tokens - self.tokens).items())}
        training = tokens.get("forward", 0) + 3 * tokens["forward_backward"]
        requests, read = (", ".join(f"{name} {count:g}" for name, count in each.items()) for each in (asked, tokens))
        print(f"per step: requests {requests}\n          tokens {read}\n          passes of training {training:g}")


def train(
    trainer: Trainer, task: Task, folder: Folder, *, done: int, standin: Standin | None
) -> list[dict[str, float]]:
    """Take the steps that are left; print, log and save them."""
    config, found = trainer.config, []
    held_out = task.evaluation["addition"][: config.held_out]
    print(f"held out  {trainer.evaluate(held_out, task):.4f} after step {done}")
    price = Price(standin)
    for step in range(done + 1, config.steps + 1):
        first = (step - 1) * config.prompts
        metrics = trainer.step(task.train[first : first + config.prompts], task)
        print(f"step {step:>3}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        folder.log(step, metrics)
        found.append(metrics)
        if folder.path is not None and (step % config.save_every == 0 or step == config.steps):
            folder.saved(step, trainer.save(f"step-{step:06d}"))
    price.show(len(found))
    print(f"held out  {trainer.evaluate(held_out, task):.4f} after step {config.steps}")
    return found


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Train for a few steps and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="run offline, against klamp's stand-in")
    parser.add_argument("--model", default=Config.model_name)
    parser.add_argument("--kl-coef", type=float, default=Config.kl_coef)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--prompts", type=int, default=Config.prompts)
    parser.add_argument("--save-every", type=int, default=Config.save_every)
    parser.add_argument("--out", type=Path, help="folder for metrics and checkpoints; continues what is there")
    args = parser.parse_args(argv)
    task, folder = arithmetic_task(TaskConfig()), Folder(args.out)
    with service_of(args.local, args.out) as (service, standin):
        name = args.model if standin is None else standin.base_model
        config = Config(
            model_name=name, kl_coef=args.kl_coef, steps=args.steps, prompts=args.prompts, save_every=args.save_every
        )
        done, saved = folder.newest()
        trainer = Trainer(config, service, saved)
        return train(trainer, task, folder, done=done, standin=standin)


if __name__ == "__main__":
    main()
