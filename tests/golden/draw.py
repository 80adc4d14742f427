"""Draws the configuration dictionaries of the golden cases, and says which of them are left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.golden.worlds import SETS

KL: dict[str, tuple[float, tuple[Any, ...]]] = {
    "kl_estimator": (0.8, ("k1", "k2", "k3", "abs", "exact", "k1", "exact")),
    "kl_gradient": (0.5, ("reverse", "forward", "own", "none")),
    "kl_horizon": (0.35, ("sequence",)),
    "kl_placement": (0.35, ("advantage", "reward")),
    "kl_off_policy": (0.35, ("token", "sequence")),
    "kl_max_weight": (0.3, (1.05, 1.4, 3.0)),
    "kl_max_log_ratio": (0.25, (0.2, 0.7, 2.5)),
    "kl_clip_method": (0.35, ("hard", "soft")),
    "kl_clip_threshold": (0.9, (0.02, 0.1, 0.3, 0.6)),
    "kl_clip_temperature": (0.5, (0.05, 0.3)),
    "kl_clip_level": (0.4, ("sequence", "group", "batch")),
    "use_per_token_kl_threshold": (0.3, (False,)),
    "kl_normalizer": (0.3, ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")),
    "kl_exclude_tokens": (0.25, ([4, 7, 11], [1], [2, 5, 15])),
    "reference": (0.12, ("sampler",)),
}
LOSS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "loss_type": (0.8, ("dr_grpo", "grpo", "bnpo", "dapo")),
    "surrogate": (0.4, ("ppo_clip", "cispo", "score_function")),
    "epsilon": (0.4, (0.05, 0.1, 0.3)),
    "epsilon_high": (0.4, (0.08, 0.28, 0.5)),
    "scale_rewards": (0.6, ("std", "none")),
    "vllm_importance_sampling_mode": (0.3, ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    "vllm_importance_sampling_clip_max": (0.5, (1.1, 1.3, 2.0)),
    "vllm_importance_sampling_clip_min": (0.4, (0.7, 0.9)),
    "off_policy_mask_threshold": (0.2, (0.01, 0.05, 0.2)),
    "advantage_baseline": (0.5, ("mean", "leave_one_out")),
}
TEACHER: dict[str, tuple[float, tuple[Any, ...]]] = {
    "teacher_coef": (1.0, (0.05, 0.3, 1.0)),
    "teacher_direction": (0.4, ("reverse", "forward", "js")),
    "teacher_estimator": (0.8, ("k1", "k3", "exact", "topk", "topk")),
    "teacher_top_k": (1.0, (0, 1, 3, 5)),
    "teacher_head": (0.6, ("student", "teacher", "union")),
    "teacher_tail": (0.35, ("sampled", "bucket", "generalised", "none")),
    "teacher_horizon": (0.3, ("sequence",)),
    "teacher_placement": (0.35, ("advantage", "reward")),
    "teacher_off_policy": (0.35, ("token", "sequence")),
    "teacher_max_log_ratio": (0.25, (0.3, 1.5)),
}
CLIP = ("kl_clip_threshold", "kl_clip_temperature", "kl_clip_level", "use_per_token_kl_threshold")


def _fields(r: random.Random, table: dict[str, tuple[float, tuple[Any, ...]]]) -> dict[str, Any]:
    return {name: r.choice(values) for name, (share, values) in table.items() if r.random() < share}


def _teacher(r: random.Random) -> dict[str, Any]:
    fields = _fields(r, TEACHER)
    if fields.get("teacher_placement"):
        fields |= {"teacher_estimator": "k1"}
        fields |= {"teacher_horizon": "sequence"} if fields["teacher_placement"] == "reward" else {}
    of_token = fields.get("teacher_estimator", "k1") in ("k1", "k3")
    lost = {"teacher_direction"} if of_token or "teacher_horizon" in fields else set()
    lost |= {"teacher_top_k", "teacher_head", "teacher_tail"} if fields.get("teacher_estimator") != "topk" else set()
    lost |= set() if of_token else {"teacher_max_log_ratio"}
    return {name: x for name, x in fields.items() if name not in lost}


def draw(r: random.Random) -> dict[str, Any]:
    """One case, which klamp may refuse."""
    kl = {"beta": r.choice((0.04, 0.3, 1.0)), **_fields(r, KL)}
    if r.random() < 0.06:
        kl["beta"] = 0.0
    if kl.get("kl_placement"):
        kl |= {"kl_estimator": "k1", "kl_gradient": "reverse"}
        kl |= {"kl_horizon": "sequence"} if kl["kl_placement"] == "reward" else {}
        kl = {name: x for name, x in kl.items() if name not in ("kl_off_policy", "kl_normalizer", "kl_max_weight")}
    if "kl_clip_method" not in kl:
        kl = {name: x for name, x in kl.items() if name not in CLIP}
    elif kl.get("use_per_token_kl_threshold", True):
        kl["kl_reference_length"] = r.choice((3, 5))
    if "kl_off_policy" not in kl:
        kl.pop("kl_max_weight", None)
    case = {"set": r.randrange(len(SETS)), "seed": r.randrange(10**6), "kl": kl, "policy": _fields(r, LOSS)}
    if r.random() < 0.55:
        case["teacher"] = _teacher(r)
    case |= {"on_policy": r.random() < 0.3, "totals": r.random() < 0.25}
    return case


def left_out(case: dict[str, Any], kind: str) -> bool:
    """What a later change corrects, so that today's number is not kept; see README.md."""
    kl, teacher, policy = case["kl"], case.get("teacher", {}), case["policy"]
    places = [kl.get("kl_placement", "loss"), teacher.get("teacher_placement", "loss")]
    trust = "vllm_importance_sampling_mode" in policy or "off_policy_mask_threshold" in policy
    late = places[0] == "advantage" or (places[1] == "advantage" and kind != "grpo_loss")
    several = places.count("reward") > 1 or (places[0] == "reward" and "teacher" in case and places[1] != "loss")
    return (trust and places != ["loss", "loss"]) or (late and not case["on_policy"]) or several


def narrowed(case: dict[str, Any], kind: str, r: random.Random) -> dict[str, Any]:
    """The case without what a host has no place for, so that more of the drawn cases are accepted."""
    if kind == "grpo_loss":
        return case
    kl, policy, teacher = dict(case["kl"]), dict(case["policy"]), dict(case.get("teacher", {}))
    kept = {"tinker": set(LOSS)}.get(kind, {"loss_type", "epsilon", "epsilon_high", "scale_rewards"})
    if kind in ("verl", "unsloth"):
        kept = {"loss_type", "scale_rewards", "advantage_baseline"}
    policy = {name: x for name, x in policy.items() if name in kept and not name.startswith(("vllm", "off_policy"))}
    if kind != "tinker":
        kl.pop("kl_normalizer", None)
        case = case | {"totals": False}
    if kind != "trl" and kl.get("kl_estimator") == "exact":
        kl.pop("kl_estimator")
    kl.pop("reference", None)
    if kind == "trl":
        scale = {"scale_rewards": r.choice(("group", "batch", "none"))}
        policy |= {"loss_type": r.choice(("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo"))} | scale
    if kind in ("tinker", "verl") and teacher.get("teacher_estimator") == "topk":
        teacher["teacher_head"] = "teacher"
        if kind == "verl" and teacher.get("teacher_top_k"):
            teacher |= {"teacher_direction": "forward", "teacher_tail": r.choice(("bucket", "generalised", "none"))}
    if kind == "verl":
        teacher.pop("teacher_max_log_ratio", None)
    if kind == "unsloth":
        teacher = {}
    case = {**case, "kl": kl, "policy": policy} | ({"sum": True} if kind == "tinker" and r.random() < 0.2 else {})
    case.pop("teacher", None)
    return case | ({"teacher": teacher} if teacher else {})


def accepted(kind: str, number: int, run: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """The first `number` drawn cases that klamp does not refuse, each with its numbers."""
    from klamp.errors import KlampError

    r, found = random.Random(kind), list[dict[str, Any]]()
    for _ in range(100 * number):
        case = narrowed(draw(r), kind, r)
        if left_out(case, kind):
            continue
        try:
            found.append(case | {"is": run(case)})
        except KlampError:
            continue
        if len(found) == number:
            return found
    raise RuntimeError(f"only {len(found)} of {number} cases of {kind} were accepted")
