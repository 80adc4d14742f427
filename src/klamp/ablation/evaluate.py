"""Evaluates a policy that is there already: every skill's score, and the exact KL to the model that it started from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator

from klamp.ablation.measure import Pair, numbers_of, pair_from, with_fewer
from klamp.ablation.outcome import Outcome
from klamp.ablation.plan import KL_PROMPTS
from klamp.config import build_objective
from klamp.scoring.scorer import Scorer
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.evaluation import evaluate as scores_in
from klamp.training.models import output_size
from klamp.training.setup import on_cpu


def evaluate(
    config: TrainConfig,
    weights: str | Path | None,
    *,
    start: bool = True,
    prompts: int = KL_PROMPTS,
    told: Callable[[], None] = lambda: None,
) -> Outcome:
    """Score and measure a policy as the run that it comes from did.

    Args:
        config: of that run, or as if there had been one: its model is what the policy started from.
        weights: of the policy, or its adapter; None: the policy is the configuration's model.
        start: whether the configuration's model is what the policy started from; without it, no KL and no `before`.
        prompts: held-out prompts of each skill that the KL is measured on, at most.
        told: called between batches of that; may raise to stop.

    Returns:
        `before` and `after` are greedy scores by skill, over all held-out prompts; `numbers` as of an ablation's run.

    Raises:
        ModelError: a model that cannot be loaded, or two that do not share a vocabulary.
        DataError, RewardError, UnknownNameError: a task that cannot be used with it.
    """
    pair = pair_from(config, weights)
    before: dict[str, float] = {}
    numbers: dict[str, float] = {}
    after = _scores(config, pair, pair.policy)
    if start:
        with pair.start.sampling_model():  # switches an adapter off
            before = _scores(config, pair, pair.start.scorer)
        numbers = numbers_of(with_fewer(pair, prompts), told)
    name = str(weights or config.model.model)
    return Outcome(
        run=name,
        arm=name,
        seed=config.run.seed,
        rl_skill=pair.task.rl_skill,
        before=before,
        after=after,
        numbers=numbers,
    )


def _scores(config: TrainConfig, pair: Pair, scorer: Scorer) -> dict[str, float]:
    """Every skill's greedy score, by the trainer's own evaluation."""
    context = Context(
        config=config,
        output_dir=Path(),
        accelerator=Accelerator(cpu=on_cpu(config)),
        policy=scorer.model,
        wrapped=scorer,
        scorer=scorer,
        reference=None,
        original=None,
        excluded=[],
        tokenizer=pair.tokenizer,
        task=pair.task,
        objective=build_objective(config.kl, config.loss, max_length=config.rollout.max_completion_length),
        stop=list(pair.stop),
        vocabulary=output_size(scorer.model),
    )
    return scores_in(context).scores
