"""Which settings reach the optimum that they claim: the fixed points of klamp's own terms, listed and checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from klamp.config import KLConfig, KLWarning, LossConfig
from klamp.config.price import configured_price
from klamp.verify.answers import Answer, TextTable
from klamp.verify.convergence import BETA, REACHED, End, follow, worlds
from klamp.verify.proofs.check import Check, is_equal, is_true


def terms() -> Mapping[str, KLConfig]:
    """The KL terms, by what they are: placement, value, horizon, gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # k1 as a loss is here to be shown
        return {
            "loss, k3, sequence": KLConfig(beta=BETA, kl_horizon="sequence"),
            "loss, k1, sequence": KLConfig(beta=BETA, kl_estimator="k1", kl_horizon="sequence"),
            "loss, exact, sequence": KLConfig(beta=BETA, kl_estimator="exact", kl_horizon="sequence"),
            "advantage, k1, sequence": KLConfig(
                beta=BETA, kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence"
            ),
            "reward, k1": KLConfig(beta=BETA, kl_estimator="k1", kl_placement="reward", kl_horizon="sequence"),
            "loss, k3, token": KLConfig(beta=BETA),
            "loss, exact, token": KLConfig(beta=BETA, kl_estimator="exact"),
            "advantage, k1, token": KLConfig(beta=BETA, kl_estimator="k1", kl_placement="advantage"),
            "loss, k3, gradient own": KLConfig(beta=BETA, kl_gradient="own"),
            "loss, k1, gradient own": KLConfig(beta=BETA, kl_estimator="k1", kl_gradient="own"),
        }


LOSSES: Mapping[str, LossConfig] = {
    "fixed length": LossConfig(loss_type="dr_grpo", scale_rewards="none", advantage_baseline="leave_one_out"),
    "token mean": LossConfig(loss_type="dapo", scale_rewards="none", advantage_baseline="leave_one_out"),
    "sequence mean": LossConfig(loss_type="grpo", scale_rewards="none", advantage_baseline="leave_one_out"),
    "sequence mean, std": LossConfig(loss_type="grpo", scale_rewards="std", advantage_baseline="mean"),
}
"""The policy losses around them; the baseline is leave-one-out but where TRL's default is shown."""


def claims_exact(kl: KLConfig, loss: LossConfig) -> bool:
    """Whether klamp says that this configuration ends at the optimum of E[reward] - price KL(policy||ref).

    In the reward: under every reduction and baseline. In the loss or the advantage: over the sequence, where a
    completion's own length divides nothing. Never where advantages are divided by the group's standard deviation.
    """
    if loss.scale == "std" or kl.kl_clip_method != "none" or kl.excludes:
        return False
    if kl.kl_placement == "reward":
        return True
    own_length = loss.loss_type == "grpo" if kl.kl_normalizer is None else kl.kl_normalizer == "sequence_mean"
    return kl.kl_gradient == "reverse" and kl.kl_horizon == "sequence" and not own_length


@cache
def ends(term: str, loss: str) -> tuple[End, ...]:
    """Where a configuration of the table ends, in every world."""
    return tuple(follow(terms()[term], LOSSES[loss], world) for world in worlds())


def answer_convergence() -> Answer:
    """Which settings reach the optimum that they claim, and where do the others end?"""
    pairs = [(term, loss) for term in terms() for loss in LOSSES if _possible(term, loss)]
    return Answer(
        question="Where does each configuration end, and is that the optimum ref exp(reward / price)?",
        tables=(_distances(), *(_longest(loss) for loss in LOSSES)),
        checks=tuple(check for term, loss in pairs for check in _checks(term, loss)) + tuple(_baselines()),
        words=(
            "The expected update of the whole system (term, reduction, baseline, scaling of advantages) is followed "
            "until it is zero. Where a configuration claims to be exact it ends at the optimum of E[reward] - price "
            "KL(policy||ref); the distances of the others are what they are.",
            "A KL in the reward, without division by the standard deviation, ends there under every reduction. A KL in "
            "the loss or the advantage does so over the sequence, where no completion is divided by its own length. "
            "The token horizon leaves out what a token does to the KL of later ones, and ends further away than it was "
            "told; k1 as a loss never stands still.",
        ),
    )


def _possible(term: str, loss: str) -> bool:
    """The KL in the reward is refused where advantages are divided by the standard deviation."""
    return not (terms()[term].kl_placement == "reward" and LOSSES[loss].scale == "std")


def _distances() -> TextTable:
    rows = tuple(
        (term, *(_cell(term, loss) if _possible(term, loss) else "refused" for loss in LOSSES)) for term in terms()
    )
    return TextTable(
        title="distance to the optimum, KL(policy||optimum) in nats, the largest of 1, 3 and 6 tokens (with std: "
        "to that of the price that fits best)",
        columns=("KL, beta 0.2", *LOSSES),
        rows=rows,
    )


def _cell(term: str, loss: str) -> str:
    if not all(end.stands for end in ends(term, loss)):
        return "runs away"
    worst = _worst(term, loss)
    return "exact" if worst < REACHED else f"{worst:.2g}"


def _worst(term: str, loss: str) -> float:
    """The largest distance to the optimum, in nats; to that of the best price where no single number is the price."""
    scaled = LOSSES[loss].scale == "std"
    return max(end.nearest if scaled else end.distance for end in ends(term, loss))


def _longest(loss: str) -> TextTable:
    rows: list[tuple[str, ...]] = []
    scaled = LOSSES[loss].scale == "std"
    for term in terms():
        if not _possible(term, loss):
            continue
        end = ends(term, loss)[-1]
        rows.append(
            (
                term,
                f"{end.price:.3g}" if end.stands else "-",
                f"{end.kl:.3f}",
                "-" if scaled else f"{end.kl / end.optimal_kl:.2f}",
                f"{end.length:.2f}",
                f"{end.reward:.3f}",
            )
        )
    best = ends("loss, k3, sequence", loss)[-1]
    numbers = (f"{best.optimal_kl:.3f}", "1.00", f"{best.optimal_length:.2f}", f"{best.optimal_reward:.3f}")
    if not scaled:
        rows.append(("the optimum", f"{BETA:g}", *numbers))
    return TextTable(
        title=f"6 tokens, {loss}: where it stands, or was given up",
        columns=("KL", "best price", "KL to ref", "/ optimal", "length", "reward"),
        rows=tuple(rows),
    )


def _checks(term: str, loss: str) -> Iterator[Check]:
    kl, around = terms()[term], LOSSES[loss]
    found, claimed = ends(term, loss), claims_exact(kl, around)
    worst = _worst(term, loss)
    if claimed:
        yield is_true(
            f"{term}; {loss}: ends at the optimum",
            all(end.exact for end in found),
            f"at most {worst:.0e} nats away",
            expected=f"below {REACHED:g} nats",
        )
        yield is_equal(f"{term}; {loss}: at the price that is printed", found[-1].price, BETA, tolerance=1e-6)
    else:
        yield is_true(
            f"{term}; {loss}: does not, and klamp does not say so",
            not all(end.exact for end in found),
            "does not stand still" if not all(end.stands for end in found) else f"{worst:.2g} nats away",
            expected=f"above {REACHED:g} nats",
        )


def _baselines() -> Iterator[Check]:
    """The group's mean as a baseline makes the price G / (G - 1) times beta, but for a KL in the reward."""
    world = worlds()[-1]
    loss = replace(LOSSES["fixed length"], advantage_baseline="mean")
    for term in ("loss, k3, sequence", "advantage, k1, sequence", "reward, k1"):
        kl = terms()[term]
        end = follow(kl, loss, world)
        price = configured_price(kl, loss, group_size=world.group_size, mean_length=1.0, max_length=world.chain.length)
        times = price.per_completion / BETA
        claim = f"{term}; against the group's mean of {world.group_size}: the price is {times:g} beta"
        yield is_equal(claim, end.price, price.per_completion, tolerance=1e-6)
