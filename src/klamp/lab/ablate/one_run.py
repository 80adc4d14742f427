"""One run of an ablation: train (or continue), measure, write the outcome; a program of its own.

A policy is measured by its exact KLs to the model that training started from, with the same draws in every run.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_model as load_weights

from klamp.core.estimators import kl_estimate
from klamp.core.masking import masked_sum
from klamp.core.types import Direction
from klamp.errors import KlampError, KLWarning, TrainingStopped
from klamp.lab.ablate.plan import KL_PROMPTS, Run, run_folder
from klamp.lab.ablate.results import Outcome, failed, write_outcome
from klamp.lab.anchors import LocalReference, load_teachers
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.evaluation import evaluate as scores_in
from klamp.lab.folders import newest_policy, row_of
from klamp.lab.models import device_of, load_model, load_tokenizer, max_length, saved_policy
from klamp.lab.rollouts import completed
from klamp.lab.sampling import uniform_numbers
from klamp.lab.setup import Context, load_prompts
from klamp.lab.tasks.arithmetic import without_bars
from klamp.lab.tasks.base import Example
from klamp.names import CONFIG, SUMMARY
from klamp.scoring.completions import select
from klamp.scoring.model_parts import check_same_vocabulary
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Ask, ExactKL, Scorer

log = logging.getLogger(__name__)

COMPLETIONS = 2  # completions per held-out prompt and direction
SEED = 20_240_213  # seed of the draws, for every seed of the run


def perform(run: Run, folder: Path) -> Outcome:
    """Train a run (from its newest checkpoint), measure it, write its outcome; an error makes the outcome `failed`."""
    own = run_folder(folder, run)
    own.mkdir(parents=True, exist_ok=True)
    try:
        settings = replace(run.config.run, output_dir=str(own), resume=(own / CONFIG).exists())
        summary = finished(own, settings.max_steps) or vars(train_run(replace(run.config, run=settings)))
        gc.collect()  # the optimizer and the graph are in cycles; the second model needs their memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        outcome = outcome_of(run, own, summary)
    except Exception as error:
        if isinstance(error, TrainingStopped) and error.interrupted:
            raise
        log.exception("the run failed")
        text = str(error) if isinstance(error, KlampError) else f"{type(error).__name__}: {error}"
        outcome = failed(run, "\n".join((text, *getattr(error, "__notes__", ()))))
    return write_outcome(own, outcome)


def outcome_of(run: Run, own: Path, summary: Mapping[str, Any]) -> Outcome:
    """Measure a finished run in its folder; `summary` is the content of its summary.json."""
    numbers = numbers_of(measured(run.config, newest_policy(own)), prompts=run.kl_prompts)
    numbers |= {name: value for name, value in summary["final_metrics"].items() if name == "beta"}
    scores = {name: summary[name] for name in ("rl_skill", "before", "after")}
    return Outcome(run=run.name, arm=run.arm.name, seed=run.seed, values=run.arm.values, numbers=numbers, **scores)


def finished(own: Path, steps: int) -> Mapping[str, Any] | None:
    """The summary of the run in a folder if its training has all its steps, else None."""
    file = own / SUMMARY
    if not file.exists() or newest_policy(own) is None:
        return None
    summary = row_of(file.read_text(encoding="utf-8"))
    return summary if summary is not None and summary["steps"] >= steps else None


@torch.no_grad()
def numbers_of(context: Context, *, prompts: int | None = None) -> dict[str, float]:
    """The exact KL in both directions, per token and per completion, with reward, length and entropy of the policy.

    Equation, with d_t the exact KL over the vocabulary at the t-th prefix (source: arXiv:2504.10637)::

        reverse   per sequence E_{y ~ policy} sum_t d_t(policy || start), per token that over E_{y ~ policy} |y|
        forward   per sequence E_{y ~ start}  sum_t d_t(start || policy), per token that over E_{y ~ start}  |y|

    Unbiased per sequence, on at most `prompts` held-out prompts of the trained skill (None: all). To teachers: k3.
    """
    held_out = context.task.evaluation[context.task.rl_skill][:prompts]
    reverse, forward = (_sums(context, held_out, direction) for direction in ("reverse", "forward"))
    return {
        "reward": reverse["reward"] / reverse["sequences"],
        "length": reverse["tokens"] / reverse["sequences"],
        "entropy": reverse["entropy"] / reverse["tokens"],
        **({} if context.teachers is None else {"teacher/kl": reverse["teacher"] / reverse["tokens"]}),
        "kl/reverse": reverse["kl"] / reverse["tokens"],
        "kl/reverse_sequence": reverse["kl"] / reverse["sequences"],
        "kl/forward": forward["kl"] / forward["tokens"],
        "kl/forward_sequence": forward["kl"] / forward["sequences"],
    }


def _sums(context: Context, prompts: Sequence[Example], direction: Direction) -> Mapping[str, float]:
    """Sums over the completions of some prompts, in batches of the size of training; KL and entropy in nats."""
    start, rollout = cast(LocalReference, context.reference), context.config.rollout
    examples = [example for example in prompts for _ in range(COMPLETIONS)]
    uniforms = uniform_numbers(SEED, int(direction == "forward"), len(examples), rollout.max_completion_length)
    size = rollout.prompts_per_step * rollout.num_generations // context.config.optim.gradient_accumulation_steps
    sampler, temperature = None if direction == "reverse" else start, rollout.temperature
    sums: defaultdict[str, float] = defaultdict(float)
    for first in range(0, len(examples), max(1, size)):
        rows = slice(first, first + max(1, size))
        texts = [example.prompt for example in examples[rows]]
        completions = select(completed(context, texts, uniforms=uniforms[rows], reference=sampler), slice(None))
        keep = torch.ones(len(texts), dtype=torch.bool, device=context.device)
        theirs = start.score(completions, temperature=temperature, keep=keep).predictions
        assert theirs is not None, "it was asked to keep them"
        exact = ExactKL(rows=keep, ref=theirs, directions=(direction,))
        ours = context.scorer(completions, Ask(temperature=temperature, entropy=True, exact=exact))
        sums["sequences"] += len(texts)
        sums["tokens"] += int(completions.mask.sum())
        for name, nats in (("kl", ours.exact), ("kl", ours.exact_forward), ("entropy", ours.entropy)):
            sums[name] += 0.0 if nats is None else float(masked_sum(nats.double(), completions.mask))
        if direction == "reverse":
            answers = zip(examples[rows], completions.texts(context.tokenizer), strict=True)
            sums["reward"] += sum(context.task.score(example, text) for example, text in answers)
            if context.teachers is not None:
                options: Any = {"temperature": temperature, "parts": context.parts(len(texts))}
                teacher = context.teachers.score(examples[rows], completions, **options).logprobs
                nats = kl_estimate(ours.logprobs.double(), teacher.double())
                sums["teacher"] += float(masked_sum(nats, completions.mask))
    return sums


def measured(config: TrainConfig, weights: str | Path | None) -> Context:
    """A context whose policy is a trained one, and whose reference is the model that its training started from.

    Top-p and top-k are off. `weights` are the policy's or its adapter's; None: the policy is the starting model.
    """
    device, model = device_of(config), config.model
    start: Any = load_model(model.model, model.dtype).to(device)  # pyright: ignore[reportArgumentType]
    policy = saved_policy(model, start, None if weights is None else Path(weights)).to(device).eval()
    check_same_vocabulary(start, policy, larger=True)  # padding that a run cut
    traits, tokenizer = probe(policy), load_tokenizer(model.tokenizer or model.model)
    return Context(
        config=replace(config, rollout=replace(config.rollout, top_p=1.0, top_k=0)),
        scorer=Scorer(policy, traits),
        reference=LocalReference(policy, traits=traits, adapter_off=True) if model.lora_r else LocalReference(start),
        tokenizer=tokenizer,
        task=load_prompts(config, tokenizer, longest=max_length(start.config)),
    )


@without_bars()
def evaluate(
    config: TrainConfig, weights: str | Path | None, *, start: bool = True, prompts: int = KL_PROMPTS
) -> Outcome:
    """Score and measure a policy; without a `start` (the configuration's model) there is no KL and no `before`."""
    context = measured(config, weights)
    before, numbers = dict[str, float](), dict[str, float]()
    after, _ = scores_in(context)
    if start:
        held_out = replace(context.task, train=context.task.evaluation[context.task.rl_skill])  # has to fit teachers
        try:
            context.teachers = load_teachers(context.config, context.scorer, held_out, context.tokenizer)
            for who, model in context.moving.items():
                load_weights(model.average, Path(str(weights)).parent / f"{who}.safetensors")
        except (KlampError, OSError) as error:
            context.teachers = None
            warnings.warn(f"The KL to the run's teacher is not measured: {error}", KLWarning, stacklevel=2)
        reference = cast(LocalReference, context.reference)
        with reference.sampling_model():  # switches an adapter off
            before, _ = scores_in(replace(context, scorer=reference.scorer))
        numbers = numbers_of(context, prompts=prompts)
    name, skill, seed = str(weights or config.model.model), context.task.rl_skill, config.run.seed
    return Outcome(run=name, arm=name, seed=seed, rl_skill=skill, before=before, after=after, numbers=numbers)


@without_bars()
def main(own: Path) -> int:
    """Do the run that stdin holds in its folder, until stdin is closed; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    run = pickle.load(sys.stdin.buffer)

    def stop_with_the_command() -> None:
        """When the command dies, stdin is closed."""
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop_with_the_command, daemon=True).start()
    try:
        return int(perform(run, own.parent.parent).state == "failed")
    except (KeyboardInterrupt, TrainingStopped) as stopped:
        log.warning("%s", stopped)
        return 130


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))  # noqa: TID251  (started by klamp.lab.ablate.execute)
