"""What takes two parts of a configuration to judge: a negative beta beside a teacher, and a baseline.

With s = beta + teacher_coef > 0 and lambda = teacher_coef / s > 1 a negative beta ends at the mix log policy = lambda
log teacher + (1 - lambda) log ref + const, a nat away from which costs s. -|beta| KL(policy||ref) has no minimum.

Source: G-OPD arXiv:2602.12125 (negative beta), vOPD arXiv:2605.07865 (baseline)
"""

from __future__ import annotations

from collections.abc import Iterator

from klamp.config.kl import KLConfig, check_beta
from klamp.config.teacher import UNBIASED, TeacherConfig
from klamp.core.term import KLTerm
from klamp.core.types import Reduction
from klamp.errors import Refusal, refuse

NO_PRICE = "none of its own: beta + teacher_coef is the price of a nat away from the mix"
BESIDE_A_TEACHER = "name a teacher (teacher_model) with a teacher_coef above -beta, or use beta=0 to train without KL"


def check_beyond(kl: KLConfig, teacher: TeacherConfig | None, *, host: str = "") -> None:
    """Refuse a negative beta that no teacher bounds at each token; `host`: one that has no place for it."""
    if kl.beta < 0 and (host or teacher is None or not teacher.there):
        check_beta(kl.beta, fix=f"use klamp train or klamp.trl, not {host}" if host else BESIDE_A_TEACHER)
    if kl.beta >= 0 or (c := teacher) is None:
        return
    weights = {kl.kl_off_policy, c.teacher_off_policy} if kl.kl_estimator in ("k1", "k2", "k3", "abs") else {""}
    moves = c.teacher_schedule, c.teacher_warmup_steps
    rows = {
        "teacher_coef above -beta": kl.beta + c.teacher_coef <= 0,
        "teacher_direction='reverse'": c.teacher_direction != "reverse",
        "teacher_tail='sampled'": c.teacher_estimator == "topk" and c.teacher_tail not in UNBIASED,
        "kl_horizon and teacher_horizon alike": kl.kl_horizon != c.teacher_horizon,
        "kl_off_policy and teacher_off_policy alike": c.teacher_estimator in ("k1", "k3") and len(weights) > 1,
        "one schedule for both": moves not in [("constant", 0), (kl.kl_schedule, kl.kl_warmup_steps)],
    }
    why = "the KL to the teacher has to outweigh what beta rewards, at each token and step"
    got = f"beta={kl.beta:g}, teacher_coef={c.teacher_coef:g}"
    refuse(Refusal(bad, f"a negative beta needs {need}", why, f"set {need}", got) for need, bad in rows.items())


def beyond_cautions(kl: KLConfig, teacher: TeacherConfig | None) -> Iterator[str]:
    """Where the optimum of a negative beta is far, or may not exist."""
    lam = 1.0 if kl.beta >= 0 or teacher is None else teacher.teacher_coef / (kl.beta + teacher.teacher_coef)
    if lam >= 2:
        yield (
            f"beta={kl.beta:g} beside the teacher makes lambda = {lam:.3g}: rare tokens of the teacher win if they "
            "are rarer still in the reference (.001 against 1e-6). Use a smaller -beta, or kl_max_teacher_log_ratio."
        )
    if lam > 1 and kl.kl_horizon == "sequence":
        yield (
            "A negative beta with kl_horizon='sequence' may have no optimum if lengths are open: the policy then "
            "lengthens up to the cap. Watch length/mean, or use horizon 'token'."
        )


def baseline_refusal(prefix: str, term: KLTerm, reduction: Reduction | None, weights: str | None) -> Refusal:
    """A baseline beside a length or a bounded weight, which look at the sampled token too; `weights`: TRL's mode."""
    bounded = term.placement == "advantage" and "truncate" in (weights or "")
    return Refusal(
        term.baseline != "none" and (bounded or (term.normalizer or reduction) == "sequence_mean"),
        f"{prefix}_baseline goes with no mean over a completion's own length, and in the advantage no truncated weight",
        why="both depend on the sampled token, so that the baseline moves the mean of the gradient (by 8 to 13 %)",
        fix=f"use loss_type='dr_grpo' and a mask of weights, or leave {prefix}_baseline out",
    )


def baseline_cautions(term: KLTerm, *, later: bool, cut: bool) -> Iterator[str]:
    """A baseline after a rollout's first update (`later`), and under a truncated sampler (`cut`)."""
    who = f"The baseline of the KL to the {term.anchor}"
    if term.baseline != "none" and later and term.placement == "advantage":
        yield f"{who} turns the sign of 9 to 27 % of the advantages, by which PPO's clip goes. Put that KL in the loss."
    if term.baseline != "none" and later and (term.placement, term.off_policy) == ("loss", "none"):
        yield f"{who} needs its token's weight in later updates (else 17 % off). Set the off_policy of that KL."
    if term.baseline != "none" and cut:
        yield f"{who} ends farther away if top_p or top_k cut the sampler (KL .235 for .057). Sample the whole policy."
