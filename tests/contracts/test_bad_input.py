"""Whatever is handed to a public function, the answer is a result or a KlampError that one can act on.

CALLS has a good call of every public function, and says of each argument what kind of thing it is. WRONG has, for each
kind, things that people pass by mistake: each of them in each place must be refused with what, got, why and fix, never
by an error from inside torch or Python, or be listed in ACCEPTED.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import klamp
from klamp.errors import KlampError

P = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]])
MASK = torch.tensor([[True, True, False], [True, True, True]])
CHOSEN = torch.tensor([0, 3, 1])
HIDDEN, WEIGHT = torch.ones(3, 4), torch.ones(5, 4)


def batch(**changes: Any) -> Any:
    columns = {"policy_logprobs": P, "ref_logprobs": P - 0.1, "mask": MASK, "advantages": torch.tensor([1.0, -1.0])}
    return klamp.Batch(**(columns | changes))


OBJECTIVE = klamp.build_objective(klamp.KLConfig(), klamp.LossConfig(), max_length=3)
ALL_OF_THE_BATCH = partial(
    lambda **columns: klamp.grpo_loss(batch(**columns), OBJECTIVE),
    old_logprobs=P,
    sampler_logprobs=P,
    reference_length=5.0,
    group_size=2,
)


def on_meta(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, device="meta")


NOT_A_TENSOR = {
    "a list": [[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]], "an array": P.numpy(), "a number": -1.0, "text": "-1.0",
    "a dict": {},
}  # fmt: skip
NOT_A_NUMBER = {
    "text": "0.1", "a word": "much", "True": True, "NaN": math.nan, "infinity": math.inf, "past every tensor": 2**70,
    "a list": [0.1], "a dict": {}, "a tensor": torch.tensor(0.1), "an array": np.zeros(2),
}  # fmt: skip
NOT_A_NAME = {
    "a typo": "k33", "empty": "", "a number": 3, "True": True, "a list": ["k3"], "a tensor": P,
    "an array": NOT_A_TENSOR["an array"],
}  # fmt: skip
NOTHING = {"None": None}
NOT_A_CONFIG = {"a dict": {"beta": 0.1}, "text": "k3", "a number": 0.1, "the class": klamp.KLConfig}

WRONG: Mapping[str, Mapping[str, Any]] = {
    "logprobs": NOT_A_TENSOR | {
        "ids": P.long(), "booleans": MASK, "complex": P + 0j, "another shape": P[:, :2], "one number": P[0, 0],
        "another device": on_meta(P),
    },
    "mask": NOT_A_TENSOR | {
        "ints": MASK.long(), "floats": MASK.float(), "another shape": MASK[:, :2], "another device": on_meta(MASK),
    },
    "per sequence": NOT_A_TENSOR | {
        "another shape": torch.ones(3), "booleans": MASK[:, 0], "another device": on_meta(P[:, 0]),
        "a gradient": torch.ones(2, requires_grad=True), "complex": torch.ones(2) + 0j,
    },
    "hidden": NOT_A_TENSOR | {
        "ids": HIDDEN.long(), "another shape": HIDDEN[:, :2], "one row": HIDDEN[0], "another device": on_meta(HIDDEN),
        "half the precision": HIDDEN.bfloat16(), "one number": P[0, 0],
    },
    "ids": NOT_A_TENSOR | {
        "floats": CHOSEN.float(), "booleans": CHOSEN.bool(), "another shape": CHOSEN[:2],
        "another device": on_meta(CHOSEN), "outside": CHOSEN + 2, "negative": CHOSEN - 1,
    },
    "share": NOT_A_NUMBER | {"negative": -0.1},
    "positive": NOT_A_NUMBER | {"negative": -0.1, "zero": 0},
    "whole": NOT_A_NUMBER | {"negative": -1, "zero": 0, "a fraction": 1.5},
    "flag": {"text": "yes", "a number": 1, "a list": []} | NOTHING,
    "name": NOT_A_NAME,
    "config": NOT_A_CONFIG,
}  # fmt: skip
WRONG |= {"number": NOT_A_NUMBER}
WRONG |= {f"{kind}!": wrong | NOTHING for kind, wrong in WRONG.items()}
"""Kind -> what looks like it; with an exclamation mark, the argument must be there, and None is wrong too."""


@dataclass(frozen=True)
class Call:
    """A good call of a function, and its arguments by their kind."""

    function: Callable[..., Any]
    good: Mapping[str, Any]
    kinds: Mapping[str, str]

    def __call__(self, **changes: Any) -> Any:
        return self.function(**{**self.good, **changes})


HEAD = {"hidden": HIDDEN, "weight": WEIGHT}
HEADS = {"policy_hidden": HIDDEN, "policy_weight": WEIGHT, "ref_hidden": HIDDEN, "ref_weight": WEIGHT}

CALLS: Mapping[str, Call] = {
    "kl_estimate": Call(klamp.kl_estimate, {"policy_logprobs": P, "ref_logprobs": P},
        {"logprobs!": "policy_logprobs ref_logprobs", "name!": "estimator"}),
    "exact_kl": Call(klamp.exact_kl, {"policy_logits": P, "ref_logits": P},
        {"logprobs!": "policy_logits ref_logits", "name!": "direction"}),
    "kl_penalty": Call(klamp.kl_penalty,
        {"policy_logprobs": P, "ref_logprobs": P, "mask": MASK, "behavior_logprobs": P},
        {"logprobs!": "policy_logprobs ref_logprobs", "mask!": "mask", "logprobs": "behavior_logprobs",
         "name!": "value gradient horizon", "positive": "max_weight max_log_ratio"}),
    "linear_logprobs": Call(klamp.linear_logprobs, HEAD | {"targets": CHOSEN, "bias": torch.ones(5)},
        {"hidden!": "hidden weight", "ids!": "targets", "hidden": "bias", "positive!": "temperature",
         "positive": "softcap", "flag": "return_entropy"}),
    "linear_kl": Call(klamp.linear_kl, HEADS | {"policy_bias": torch.ones(5), "ref_bias": torch.ones(5)},
        {"hidden!": "policy_hidden policy_weight ref_hidden ref_weight", "hidden": "policy_bias ref_bias",
         "name!": "direction", "positive!": "temperature", "positive": "softcap"}),
    "topk_kl": Call(klamp.topk_kl,
        {"policy_head": P, "anchor_head": P, "policy_target": P[:, 0], "anchor_target": P[:, 0]}
        | {"outside": MASK[:, 0], "log_weight": P[:, 0], "kept": MASK},
        {"logprobs!": "policy_head anchor_head policy_target anchor_target", "mask!": "outside",
         "logprobs": "log_weight", "mask": "kept", "name!": "direction tail"}),
    "linear_kl of a head": Call(klamp.linear_kl, HEADS | {"targets": CHOSEN, "top_k": 2, "log_weight": CHOSEN.float()},
        {"ids!": "targets", "whole": "top_k", "name!": "tail", "logprobs": "log_weight"}),
    "linear_topk": Call(klamp.linear_topk, HEAD | {"k": 2, "targets": CHOSEN}, {"whole!": "k", "ids": "targets"}),
    "linear_head_kl": Call(klamp.linear_head_kl,
        {"policy_hidden": HIDDEN, "policy_weight": WEIGHT, "head_ids": CHOSEN[:, None], "top_k": 1}
        | {"head_logprobs": -CHOSEN[:, None].float(), "targets": CHOSEN, "target_logprobs": -CHOSEN.float()},
        {"ids!": "head_ids targets", "logprobs!": "head_logprobs target_logprobs", "whole!": "top_k"}),
    "clip_kl": Call(klamp.clip_kl, {"kl": P.abs(), "threshold": 0.5, "method": "soft"},
        {"logprobs!": "kl", "number!": "threshold", "name!": "method", "positive!": "temperature"}),
    "clip_kl with a threshold for each": Call(klamp.clip_kl, {"kl": P.abs(), "threshold": P.abs(), "method": "soft"},
        {"logprobs!": "threshold"}),
    "kl_budget": Call(klamp.kl_budget, {"threshold": 0.5, "per_token": True, "reference_length": 50},
        {"share!": "threshold", "flag": "per_token", "positive!": "reference_length"}),
    "group_advantages": Call(klamp.group_advantages, {"rewards": torch.tensor([1.0, 0.0]), "group_size": 2},
        {"per sequence!": "rewards", "whole!": "group_size", "share!": "eps", "name!": "scale baseline"}),
    "grpo_loss": Call(klamp.grpo_loss, {"batch": batch(), "objective": OBJECTIVE, "totals": klamp.Totals(2, 5, 5)},
        {"config!": "batch objective", "config": "totals"}),
    "grpo_loss of a batch": Call(ALL_OF_THE_BATCH,
        {"policy_logprobs": P, "mask": MASK, "advantages": torch.tensor([1.0, -1.0])},
        {"logprobs!": "policy_logprobs ref_logprobs", "mask!": "mask", "per sequence!": "advantages",
         "logprobs": "old_logprobs sampler_logprobs", "positive": "reference_length", "whole": "group_size",
         "config!": "anchors"}),
    "grpo_loss of an anchor": Call(
        lambda **fields: klamp.grpo_loss(batch(anchors={"another": klamp.Scored(**fields)}), OBJECTIVE),
        {"logprobs": P - 0.1},
        {"logprobs!": "logprobs", "logprobs": "kl forward_kl", "mask": "mask", "per sequence": "gate weight"}),
    "a term of an objective": Call(lambda **fields: klamp.Objective(terms=(klamp.Weighted(**fields),)),
        {"coefficient": 0.1, "term": klamp.KLTerm()}, {"share!": "coefficient", "config!": "term"}),
    "grpo_loss with totals": Call(lambda **sizes: klamp.grpo_loss(batch(), OBJECTIVE, totals=klamp.Totals(**sizes)),
        {"sequences": 2, "tokens": 5, "kl_tokens": 5}, {"positive!": "sequences tokens kl_tokens"}),
    "build_objective": Call(klamp.build_objective,
        {"kl": klamp.KLConfig(), "loss": klamp.LossConfig(), "max_length": 8},
        {"config!": "kl loss", "whole!": "max_length"}),
    "preset": Call(klamp.preset, {"name": "grpo"}, {"name!": "name"}),
    "KLTerm": Call(klamp.KLTerm, {},
        {"positive": "max_weight max_log_ratio", "share!": "clip_threshold", "positive!": "clip_temperature",
         "name": "normalizer", "name!": "value gradient horizon placement off_policy clip_method clip_level"}),
    "Objective": Call(klamp.Objective, {},
        {"name!": "surrogate reduction", "whole": "max_length", "share!": "clip_low clip_high"}),
    "FixedController": Call(klamp.FixedController, {"value": 0.1}, {"share!": "value min_value", "share": "max_value"}),
    "HoldController": Call(klamp.HoldController, {"value": 0.1, "target": 0.05},
        {"share!": "value min_value lead", "share": "max_value landing", "positive!": "target gain"}),
    "StepController": Call(klamp.StepController, {"value": 0.1, "target": 0.05},
        {"share!": "value min_value", "share": "max_value", "positive!": "target up down high low"}),
    "ProportionalController": Call(klamp.ProportionalController, {"value": 0.1, "target": 0.05, "horizon": 10},
        {"share!": "value min_value", "share": "max_value", "positive!": "target clip", "whole!": "horizon"}),
    "update": Call(lambda kl, n_steps: klamp.ProportionalController(0.1, target=0.05, horizon=10).update(kl, n_steps),
        {"kl": 0.1, "n_steps": 1}, {"share!": "kl", "whole!": "n_steps"}),
    "load_state_dict": Call(klamp.FixedController(0.1).load_state_dict, {"state": {"value": 0.2}},
        {"config!": "state"}),
    "load_state_dict of a value": Call(lambda value: klamp.FixedController(0.1).load_state_dict({"value": value}),
        {"value": 0.2}, {"number!": "value"}),
}  # fmt: skip

TOP_K = {"linear_kl of a head": "top_k", "linear_topk": "k", "linear_head_kl": "top_k"}
ACCEPTED: Mapping[tuple[str, str, str], str] = {
    ("clip_kl", "kl", "another shape"): "a KL of any shape is clipped",
    ("clip_kl", "kl", "one number"): "a KL of any shape is clipped",
    ("clip_kl", "kl", "another device"): "the threshold is a number, so that one device is all there is",
    **{(name, k, "zero"): "a head of none" for name, k in TOP_K.items()},
    ("clip_kl", "threshold", "a tensor"): "a threshold for each KL",
    ("clip_kl with a threshold for each", "threshold", "a number"): "one threshold for all",
    ("clip_kl with a threshold for each", "threshold", "one number"): "one threshold for all",
    ("load_state_dict of a value", "value", "past every tensor"): "a controller computes with Python's floats",
    ("kl_budget", "reference_length", "a tensor"): "a reference length for each completion",
    ("grpo_loss of a batch", "reference_length", "a tensor"): "a reference length for each completion, or one for all",
    **{
        ("grpo_loss with totals", size, "a tensor"): "counts may stay on their device"
        for size in ("sequences", "tokens", "kl_tokens")
    },
}
"""(call, argument, what looks wrong) -> why it works all the same."""


def is_refused(call: Call, argument: str, value: Any) -> bool:
    """Whether the call is refused with a what, a got, a why and a fix; any other error passes through."""
    try:
        call(**{argument: value})
    except KlampError as error:
        return bool(error.what and error.got is not None and error.why and error.fix and len(str(error)) < 600)
    return False


@pytest.mark.parametrize("name", CALLS)
def test_a_good_call_is_good_and_each_bad_argument_is_refused_in_words(name: str) -> None:
    call = CALLS[name]
    call()
    for kind, arguments in call.kinds.items():
        for argument in arguments.split():
            refused = {wrong for wrong, value in WRONG[kind].items() if is_refused(call, argument, value)}
            accepted = {wrong for wrong in WRONG[kind] if (name, argument, wrong) in ACCEPTED}
            assert refused == WRONG[kind].keys() - accepted, argument
