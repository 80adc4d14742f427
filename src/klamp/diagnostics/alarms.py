"""The table of all alarms: rule, what a record must hold, thresholds with their source. What each finds, what causes
that and what to do stands in `alarms.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import yaml

from klamp.diagnostics import alarms_kl as kl
from klamp.diagnostics import alarms_run as run
from klamp.diagnostics import alarms_teacher as teacher
from klamp.diagnostics import alarms_tokens as tokens
from klamp.diagnostics import causes
from klamp.diagnostics.alarm import Alarm
from klamp.errors import check_name

KL = "kl/k3|kl/exact|kl/k1"

WORDS: dict[str, dict[str, str]] = yaml.safe_load(files("klamp.diagnostics").joinpath("alarms.yaml").read_bytes())
"""Name of an alarm -> its text, what it means, the next step."""


def _alarm(name: str, **rule: Any) -> Alarm:
    """An alarm: its rule, and its words out of `alarms.yaml`."""
    return Alarm(name=name, **WORDS[name], **rule)


ALARMS: dict[str, Alarm] = {
    alarm.name: alarm
    for alarm in (
        _alarm("step-zero-kl", rule=kl.step_zero, needs=(KL,), limits=(kl.STEP_ZERO, kl.STEP_ZERO_OTHERS)),
        _alarm(
            "reference-differs", rule=kl.reference_differs, needs=("kl/k3|kl/exact",), limits=(kl.REFERENCE_DIFFERS,)
        ),
        _alarm(
            "negative-k1",
            rule=kl.negative_k1,
            needs=("kl/k1|kl/k1_sequence|kl/k3|completions",),
            limits=(kl.NEGATIVE_STEPS, kl.NEGATIVE_FEW, kl.NEGATIVE_K1, kl.NEGATIVE_AT_ONCE, tokens.SURPRISE),
        ),
        _alarm(
            "k3-far-above-k1", rule=kl.k3_far_above_k1, needs=("kl/k1", "kl/k3"), limits=(kl.K3_FAR, kl.FAR_AT_ONCE)
        ),
        _alarm("kl-spike", rule=kl.kl_spike, needs=(KL,), limits=(kl.SPIKE, kl.SPIKE_FLOOR), later=kl.after_spike),
        _alarm("reward-collapse", rule=run.reward_collapse, needs=("reward",), limits=(run.COLLAPSE,)),
        _alarm("kl-far", rule=kl.kl_far, needs=(KL, "length/mean"), limits=(kl.FAR, kl.FAR_COMPLETION)),
        _alarm("kl-growing", rule=kl.kl_growing, needs=(KL, "reward"), limits=(kl.GROWING,)),
        _alarm(
            "length-exploited",
            rule=run.length_exploited,
            needs=("length/mean", "length/reward_correlation"),
            limits=(run.LONGER, causes.PAYS),
        ),
        _alarm(
            "repetition", rule=run.repetition, needs=("length/repeated",), limits=(causes.REPEATED, run.MORE_REPEATED)
        ),
        _alarm("saturated", rule=run.saturated, needs=("groups/saturated",), limits=(run.SATURATED,)),
        _alarm("dilution", rule=kl.dilution, needs=(KL, "length/mean"), limits=(kl.DILUTION, kl.DILUTION_KEPT)),
        _alarm("detached-reference", rule=kl.detached_reference, needs=(KL,), limits=(kl.DETACHED, kl.STILL, kl.FELL)),
        _alarm(
            "not-trained",
            rule=run.not_trained,
            needs=("train/grad_norm|train/learning_rate|completions",),
            limits=(run.IDLE,),
        ),
        _alarm(
            "advantage-scale",
            rule=run.advantage_scale,
            needs=("reward_std|advantage/max|completions",),
            limits=(run.ADVANTAGE, run.NOISE),
        ),
        _alarm(
            "mask-on-prompt",
            rule=tokens.mask_on_prompt,
            needs=("completions", "sampler_logprobs"),
            limits=(tokens.PROMPT,),
        ),
        _alarm("end-token-lost", rule=tokens.end_token_lost, needs=("completions",), limits=(tokens.END_TOKEN,)),
        _alarm(
            "truncated", rule=run.truncated, needs=("length/truncated",), limits=(run.TRUNCATED, run.MORE_TRUNCATED)
        ),
        _alarm(
            "sampler-mismatch",
            rule=tokens.sampler_mismatch,
            needs=("sampler/k3|sampler/k1|sampler/abs",),
            limits=(causes.MISMATCH, tokens.OTHER_KERNELS, tokens.UNSEEN),
        ),
        _alarm(
            "beta-runaway",
            rule=kl.beta_runaway,
            needs=("beta", "beta/price", "kl/k3_sequence", "reward"),
            limits=(kl.RUNAWAY,),
        ),
        _alarm("kl-dominates", rule=kl.kl_dominates, needs=("beta/price", "reward_std"), limits=(kl.DOMINATES,)),
        _alarm(
            "kl-inert",
            rule=kl.kl_inert,
            needs=("beta/price|kl/over_budget", "reward_std|kl/over_budget"),
            limits=(kl.INERT,),
        ),
        _alarm(
            "huge-values", rule=run.huge_values, needs=("|".join((*run.WATCHED, "completions")),), limits=(run.HUGE,)
        ),
        _alarm(
            "dr-grpo-with-kl", rule=run.dr_grpo_with_kl, needs=("settings.loss_type", "settings.verifier"), limits=()
        ),
        _alarm("retention", rule=run.retention, needs=("evaluations",), limits=(run.DROPPED,)),
        _alarm(
            "teacher-silent",
            rule=teacher.silent,
            needs=("teacher/unscored",),
            limits=(teacher.UNSCORED, teacher.CONSTANT),
        ),
        _alarm(
            "teacher-not-reached",
            rule=teacher.not_reached,
            needs=(teacher.KL, "teacher/coef"),
            limits=(teacher.REACHED,),
        ),
        _alarm(
            "teacher-outside-head",
            rule=teacher.head_misses,
            needs=("teacher/teacher_mass",),
            limits=(teacher.INSIDE, teacher.OVERLAP),
        ),
        _alarm(
            "teacher-inert",
            rule=teacher.inert,
            needs=(f"{teacher.KL}|settings.teacher_coef",),
            limits=(teacher.SAME, teacher.STILL, kl.INERT),
        ),
        _alarm(
            "teacher-drowns-reward",
            rule=teacher.drowns_reward,
            needs=("teacher/coef", "reward_std"),
            limits=(kl.DOMINATES,),
        ),
        _alarm(
            "teacher-prefers-wrong",
            rule=teacher.prefers_wrong,
            needs=("teacher/reward_correlation",),
            limits=(teacher.WRONG,),
        ),
        _alarm("teacher-ends-elsewhere", rule=teacher.ends_elsewhere, needs=("teacher/end",), limits=(teacher.ENDS,)),
        _alarm("kl-high", rule=kl.kl_high, needs=(KL,), limits=(kl.HIGH,), level="note"),
        _alarm("kl-low", rule=kl.kl_low, needs=(KL,), limits=(kl.LOW,), level="note"),
    )
}
"""Name of an alarm -> the alarm."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no alarm has.

    Raises:
        UnknownNameError: names the nearest alarm.
    """
    for name in names:
        check_name("alarm", name, ALARMS)
