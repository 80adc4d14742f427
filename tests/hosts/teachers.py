"""The KLs to a teacher that are the same in every trainer, or refused there: one list for the tests of all of them."""

from typing import Any

import torch
from torch import Tensor

from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import exact_kl
from klamp.core.topk import topk_kl

ADVANTAGE = {"teacher_placement": "advantage"}
SEQUENCE = {"teacher_horizon": "sequence"}
HEAD = {"teacher_estimator": "topk", "teacher_top_k": 5}
OF_TEACHER = HEAD | {"teacher_head": "teacher"}
BUCKET = {"teacher_estimator": "k1", "teacher_baseline": "bucket", "teacher_top_k": 5}
FORWARD = {"teacher_direction": "forward"}

KINDS: dict[str, dict[str, Any]] = {
    "k1": {},
    "k1, sequence": SEQUENCE,
    "k1, weighed": {"teacher_off_policy": "token"},
    "k1, bounded": {"teacher_max_log_ratio": 0.2},
    "k1 in the advantage": ADVANTAGE,
    "k1 in the advantage, sequence": ADVANTAGE | SEQUENCE,
    "k1 in the reward, sequence": {"teacher_placement": "reward", **SEQUENCE},
    "k3": {"teacher_estimator": "k3"},
    "exact": {"teacher_estimator": "exact"},
    "exact, sequence": {"teacher_estimator": "exact", **SEQUENCE},
    "exact, forward": {"teacher_estimator": "exact", **FORWARD},
    "exact, js": {"teacher_estimator": "exact", "teacher_direction": "js"},
    "the student's head": HEAD,
    "both heads, weighed": HEAD | {"teacher_head": "union", "teacher_off_policy": "token"},
    "the teacher's head": OF_TEACHER,
    "the teacher's head, forward": OF_TEACHER | FORWARD,
    "the teacher's head, forward, bucket": OF_TEACHER | FORWARD | {"teacher_tail": "bucket"},
    "k1 less the exact baseline": {"teacher_estimator": "k1", "teacher_baseline": "exact"},
    "k1 less the student's bucket": BUCKET,
    "the teacher's bucket, in the advantage": BUCKET | ADVANTAGE | {"teacher_head": "teacher"},
    "the student's head, centered": HEAD | {"teacher_tail": "centered"},
    "the tail alone": {"teacher_estimator": "topk", "teacher_top_k": 0},
    "the tail alone, forward": {"teacher_estimator": "topk", "teacher_top_k": 0, **FORWARD},
}
"""Name -> the fields of `TeacherConfig`."""
SAMPLED = {name for name, fields in KINDS.items() if "teacher_estimator" not in fields} | {"k3"}
IN_REWARD = {"k1 in the reward, sequence"}
HAVE: dict[str, set[str]] = {
    "klamp": set(KINDS),
    "TRL": set(KINDS) - IN_REWARD,
    "Tinker": SAMPLED | {name for name in KINDS if name.startswith(("the teacher's", "the tail"))},
    "verl": {
        *("k1", "k1, sequence", "k1, weighed", "k3"),
        *("the teacher's head, forward, bucket", "the tail alone", "the tail alone, forward"),
    },
}
"""Who has which; the others are refused there."""


def config_of(name: str, **options: Any) -> TeacherConfig:
    return TeacherConfig(**{"teacher_model": "given", **KINDS[name], **options})


def at_prefixes(
    config: TeacherConfig, logits: Tensor, taught: Tensor, ids: Tensor, log_weight: Tensor | None = None
) -> Tensor | None:
    """The KL at each prefix from whole rows of logits, [B, T]; without `log_weight` the policy has sampled.

    Only the shared part of a teacher with more entries counts.
    """
    exact, size = "exact" in (config.teacher_estimator, config.teacher_baseline), logits.shape[-1]
    if exact and taught.shape == logits.shape:
        return exact_kl(logits, taught, direction=config.teacher_direction)
    if not exact and config.head_size is None:
        return None
    p, q, k = logits.log_softmax(-1), taught.log_softmax(-1), size if exact else config.teacher_top_k
    own, theirs = p.topk(k).indices, q.topk(k).indices
    head = {"student": own, "teacher": theirs, "union": torch.cat([own, theirs], -1)}[config.teacher_head]
    kept = head < size
    if config.teacher_head == "union":
        kept[..., k:] &= (theirs[..., :, None] != own[..., None, :]).all(-1)
    head = torch.where(kept, head, 0)
    outside = ~((head == ids[..., None]) & kept).any(-1)
    of_head, of_token = ([x.gather(-1, at) for x in (p, q)] for at in (head, ids[..., None]))
    tail = "bucket" if config.teacher_estimator == "k1" else config.teacher_tail
    options: dict[str, Any] = {"direction": config.teacher_direction, "tail": tail, "kept": kept}
    if config.teacher_off_policy != "none":
        options["log_weight"] = log_weight
    return topk_kl(*of_head, *[x[..., 0] for x in of_token], outside, **options)
