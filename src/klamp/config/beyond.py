"""A negative beta beside a teacher: the run extrapolates from the reference through the teacher, and beyond it.

With s = beta + teacher_coef > 0 and lambda = teacher_coef / s > 1 the run ends at the mix

    log policy = lambda log teacher + (1 - lambda) log ref + const

and s is the price of a nat away from the mix, as for two positive coefficients. -|beta| KL(policy||ref) has no minimum
of its own: each rule below keeps the sum of both KLs bounded, token by token.

Source: G-OPD arXiv:2602.12125
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from klamp.config.kl import KLConfig, check_beta
from klamp.config.teacher import TeacherConfig
from klamp.errors import KLWarning, Refusal, refuse

NO_PRICE = "none of its own: beta + teacher_coef is the price of a nat away from the mix"
BESIDE_A_TEACHER = "name a teacher (teacher_model) with a teacher_coef above -beta, or use beta=0 to train without KL"


def refuse_beyond(kl: KLConfig, teacher: TeacherConfig | None, *, host: str = "") -> None:
    """Refuse a negative beta that no teacher bounds; `host`: one that has no place for it."""
    if kl.beta >= 0:
        return
    if host or teacher is None or not teacher.there:
        check_beta(kl.beta, fix=f"use klamp train or klamp.trl, not {host}" if host else BESIDE_A_TEACHER)
        return
    c, fades = teacher, (teacher.teacher_schedule, teacher.teacher_warmup_steps)
    sampled = kl.kl_estimator != "exact" and c.teacher_estimator in ("k1", "k3")
    unbounded = "at some tokens the teacher does not outweigh what beta rewards"
    another = "the KL to the teacher is then another divergence, which does not bound what a negative beta rewards"
    rows = {
        "teacher_coef above -beta": (kl.beta + c.teacher_coef <= 0, "only single completions attract the policy"),
        "teacher_direction='reverse'": (c.teacher_direction != "reverse", another),
        "teacher_tail='sampled'": (c.teacher_estimator == "topk" and c.teacher_tail != "sampled", another),
        "kl_horizon and teacher_horizon alike": (kl.kl_horizon != c.teacher_horizon, unbounded),
        "kl_off_policy and teacher_off_policy alike": (sampled and kl.kl_off_policy != c.teacher_off_policy, unbounded),
        "the same schedule and warm-up of beta and teacher_coef": (
            fades not in [("constant", 0), (kl.kl_schedule, kl.kl_warmup_steps)],
            "beta outweighs a teacher_coef that starts or ends at 0",
        ),
    }
    got = f"beta={kl.beta:g}, teacher_coef={c.teacher_coef:g}"
    refuse(Refusal(bad, f"a negative beta needs {x}", why, f"set {x}", got) for x, (bad, why) in rows.items())


def check_beyond(kl: KLConfig, teacher: TeacherConfig | None) -> None:
    """Refuse a negative beta that no teacher bounds, and warn where its optimum is far or may not exist."""
    refuse_beyond(kl, teacher)
    for text in beyond_cautions(kl, teacher):
        warnings.warn(text, KLWarning, stacklevel=4)


def beyond_cautions(kl: KLConfig, teacher: TeacherConfig | None) -> Iterator[str]:
    """Where the optimum of a negative beta is far, or may not exist."""
    if kl.beta >= 0 or teacher is None:
        return
    if (lam := teacher.teacher_coef / (kl.beta + teacher.teacher_coef)) >= 2:
        yield (
            f"beta={kl.beta:g} and teacher_coef={teacher.teacher_coef:g} make lambda = {lam:.3g}: tokens win that the "
            "teacher hardly has and the reference has even less (at lambda 2 one of .001 against 1e-6 gets half of the "
            "probability). Use lambda below 2, or kl_max_teacher_log_ratio."
        )
    if kl.kl_horizon == "sequence":
        yield (
            "A negative beta over whole completions may have no optimum if their length is open: the policy then "
            "lengthens up to the cap. Watch length/mean, or use kl_horizon and teacher_horizon 'token'."
        )
