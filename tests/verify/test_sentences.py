"""Every sentence of `klamp explain`, over drawn configurations: what it says is enumerated in worlds of other seeds,
lengths and spreads than those that it was measured in; a sentence that no check knows fails too."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from klamp.config import KLConfig, LossConfig
from klamp.config.teacher import TeacherConfig
from klamp.errors import ConfigError
from klamp.verify import explain
from klamp.verify.config_facts import JS, NO_KL, bare_teacher, bare_term
from klamp.verify.explain import Explanation, Setting, explain_config
from klamp.verify.one_step import Scene, StepReport, examine_config
from klamp.verify.oracle import cosine, forward_kl, gradient_of, local_kl, reverse_kl
from klamp.verify.worlds import Chain, Sampler, enumerate_outcomes, prefix_probs, random_chain

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked"),  # checked in tests/core; here they would cost minutes
    pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning"),
]
NEAR, WIDE = 0.1, 2.5
Seen = tuple[Chain, StepReport]


def draws(**choices: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})


TERMS = draws(
    kl_estimator=("k1", "k2", "k3", "abs", "exact"),
    kl_gradient=("reverse", "forward", "own", "none"),
    kl_horizon=("token", "sequence"),
    kl_placement=("loss", "loss", "reward", "advantage"),
    kl_off_policy=("none", "token", "sequence"),
    kl_normalizer=(None, "token_mean", "sequence_mean", "sequence_sum", "fixed_length"),
    kl_max_log_ratio=(None, None, 0.3, 4.0),
    kl_max_weight=(None, 1.5),
    kl_clip_method=("none", "none", "hard", "soft"),
    kl_clip_threshold=(0.0, 0.5),
    beta=(0.0, 0.1),
    kl_monitor=(True, False),
    target_kl=(None, None, 0.1),
    kl_schedule=("constant", "constant", "cosine"),
    reference=("auto", "auto", "ema", "sampler"),
    kl_exclude_tokens=((), (), (1,)),
)
TEACHERS = draws(
    direction=("reverse", "forward", "js"),
    estimator=("k1", "k3", "exact", "topk"),
    horizon=("token", "sequence"),
    placement=("loss", "advantage", "reward"),
    off_policy=("none", "token", "sequence"),
    head=("student", "teacher", "union"),
    tail=("sampled", "none", "generalised"),
    max_log_ratio=(None, 0.3, 4.0),
)
LOSSES = draws(
    loss_type=("dr_grpo", "grpo", "dapo"), scale_rewards=("none", "std"), advantage_baseline=("mean", "leave_one_out")
)
SETTINGS = draws(rewarded=(True, False), updates=(1, 2), length=(2, 1000))


@dataclass(frozen=True)
class Told:
    """An explanation of one anchor, and what is enumerated of its term in fresh worlds."""

    kl: KLConfig
    loss: LossConfig
    teacher: TeacherConfig | None
    setting: Setting
    said: Explanation
    memory: dict[Any, Any]

    @functools.cached_property
    def term(self) -> Any:
        return (self.kl if self.teacher is None else self.teacher).build_term()

    @property
    def direction(self) -> Any:
        return "reverse" if self.teacher is None else self.teacher.teacher_direction

    @property
    def who(self) -> str:
        return {"reference": "ref"}.get(self.term.anchor, self.term.anchor)

    def examine(self, chain: Chain, loss: LossConfig | None = None, **changes: Any) -> Seen:
        scene = Scene(chain=chain, group_size=1, denominators="expected")
        if self.teacher is not None:
            taught = replace(bare_teacher(self.teacher), **changes)
            return chain.towards("teacher"), examine_config(NO_KL, loss, scene=scene, teacher=taught)
        found = examine_config(replace(bare_term(self.kl), **changes), loss, scene=scene)
        return chain.towards("sampler") if self.term.anchor == "sampler" else chain, found

    def seen(self, length: int, *, off: bool = False, wide: bool = False, within: float | None = None) -> list[Seen]:
        """What is enumerated in fresh worlds; with `within` those alone in which no log-ratio is larger."""
        who: Sampler = "other" if off or self.who == "sampler" else "policy"
        chains = [
            random_chain(seed, vocab=3, length=length, spread=spread, sampler=who)
            for seed, spread in ((21, WIDE if wide else 1.0), (23, NEAR))
        ]
        kept = [i for i, chain in enumerate(chains) if within is None or largest(chain, self.who) < within]
        key = (length, off, wide)
        for i in kept:
            if (*key, i) not in self.memory:
                self.memory[*key, i] = self.examine(chains[i], UNBOUNDED if off else None)
        return [self.memory[*key, i] for i in kept]

    def reduced(self) -> list[tuple[Seen, Seen]]:
        if "reduced" not in self.memory:
            chain = random_chain(22, vocab=3, length=3)
            self.memory["reduced"] = [(self.examine(chain), self.examine(chain, self.loss))]
        return self.memory["reduced"]


UNBOUNDED = LossConfig(epsilon=1.0, epsilon_high=1e9, scale_rewards="none")


def largest(chain: Chain, who: Any) -> float:
    """The largest |log policy - log anchor|, and as large a log-ratio to the sampler."""
    own = chain.logprobs("policy").detach()
    return max((own - chain.logprobs(each)).abs().max().item() for each in (who, "sampler"))


def truth(name: str, chain: Chain, *, whole: bool) -> Tensor:
    """The gradient of a divergence by its printed name, of whole completions or of single positions."""
    if name.startswith("JS"):
        return gradient_of(local_kl(chain, direction="js"), chain)
    reverse = name.startswith("KL(policy||")
    if whole:
        return gradient_of((reverse_kl if reverse else forward_kl)(chain), chain)
    return gradient_of(local_kl(chain, direction="reverse" if reverse else "forward"), chain)


def along(seen: list[Seen], name: str, *, whole: bool = True) -> bool:
    factor, divergence = re.fullmatch(r"(?:([\d.e-]+) x )?(.*)", name).groups()
    for chain, found in seen:
        exact = truth(divergence, chain, whole=whole)
        if (found.kl.gradient - float(factor or 1) * exact).norm() > 1e-6 * exact.norm():
            return False
    return True


def zero(seen: list[Seen]) -> bool:
    return all(found.kl.gradient.norm() < 1e-9 for _, found in seen)


def still(seen: list[Seen]) -> bool:
    return zero(seen) and all(found.kl.gradient_variance < 1e-12 for _, found in seen)


def neither(seen: list[Seen]) -> bool:
    """Not along the gradient of either KL in all worlds at once, with one factor above 0."""
    return not any(
        all(cosine(found.kl.gradient, truth(name, chain, whole=True)) > 1 - 1e-7 for chain, found in seen)
        for name in ("KL(policy||ref)", "KL(ref||policy)")
    )


def arrived(told: Told) -> list[Seen]:
    chain = random_chain(24, vocab=3, length=2)
    return [told.examine(replace(chain, policy_logits=chain.logits(told.who)))]


def bends(told: Told) -> bool:
    """Whether the reduction turns the gradient of some world."""
    return any(cosine(one[1].kl.gradient, other[1].kl.gradient) < 1 - 1e-5 for one, other in told.reduced())


def on_length_alone(told: Told) -> bool:
    """Whether what the reduction leaves of a zero is the gradient of a mean of something of the length."""
    for _, (chain, found) in told.reduced():
        y = enumerate_outcomes(chain)
        lengths = (y.policy_logprobs.sum(-1).exp() / y.mask.sum(-1)).sum()
        if abs(abs(cosine(found.kl.gradient, gradient_of(lengths, chain))) - 1) > 1e-6:
            return False
    return True


def has_no_effect(told: Told, name: str) -> bool:
    default = KLConfig.__dataclass_fields__[name].default
    if name not in KLConfig.__dataclass_fields__ or name not in vars(bare_term(told.kl)):
        return True
    for off in (False, True):
        chain = random_chain(25, vocab=3, length=2, spread=WIDE, sampler="other" if off else "policy")
        loss = UNBOUNDED if off else None
        one, other = (told.examine(chain, loss, **changes)[1].kl for changes in ({}, {name: default}))
        if (one.gradient - other.gradient).norm() > 1e-9 or abs(one.value - other.value) > 1e-9:
            return False
    return True


def advice_cures(told: Told, weights: str) -> bool:
    who = "kl" if told.teacher is None else "teacher"
    if told.teacher is None:
        better = replace(told, kl=replace(told.kl, kl_off_policy=weights), memory={})
    else:
        better = replace(told, teacher=replace(told.teacher, teacher_off_policy=weights), memory={})
    assert getattr(better.kl if told.teacher is None else better.teacher, f"{who}_off_policy") == weights
    weight = better.term.max_weight
    cured = better.seen(1, off=True, within=limit(better.term.max_log_ratio, weight))
    return neither(told.seen(1, off=True, wide=True)) and not neither(cured)


KLS = r"((?:[\d.e-]+ x )?(?:minus )?(?:KL\(\w+\|\|\w+\)|JS\(policy, \w+\)))"
COS = r"cosine -?[\d.]+(?: to -?[\d.]+)? with KL\(policy\|\|\w+\) in the worlds measured"
WHILE = r"(?:, while no log-ratio passes ([\d.]+) nats)?"
Check = Callable[..., bool]


def bound(text: str | None) -> float | None:
    return None if text is None else float(text)


VERDICTS: dict[str, Check] = {
    f"Pulls the policy along the gradient of {KLS}, token by token(, bent by .*?)?\\.": lambda t, name, bent: (
        along(t.seen(1, within=t.term.max_log_ratio), name)
        and along(t.seen(3, within=t.term.max_log_ratio), name, whole=False)
        and bool(bent) == bends(t)
    ),
    f"Pulls the policy along the gradient of {KLS}, over whole completions(, bent by .*?)?\\.": lambda t, name, bent: (
        along(t.seen(3, within=t.term.max_log_ratio), name) and bool(bent) == bends(t)
    ),
    r"Regularises nothing: its expected gradient, summed over tokens, is zero(; under \w+ what is left pulls on "
    r"the length of completions alone)?\.": lambda t, left: (
        zero(t.seen(1)) and zero(t.seen(3)) and (on_length_alone(t) if left else zero([o for _, o in t.reduced()]))
    ),
    f"Follows neither KL: {COS}\\.": lambda t: neither(t.seen(1, wide=True)),
    r"No pull: beta is 0; the KL is only measured and logged\.": lambda t: t.kl.beta == 0,
    r"Does nothing: with one update per batch .* its gradient is exactly 0 at any beta\.": lambda t: (
        still(arrived(t)) and t.setting.updates == 1
    ),
    r"A proximal term that follows neither KL to the sampler\.": lambda t: neither(t.seen(1, wide=True)),
    r"A proximal term: holds the later updates of a batch near who drew it, and the run to nothing\.": lambda t: (
        not neither(t.seen(1, within=t.term.max_log_ratio)) and still(arrived(t))
    ),
}
LINES: dict[str, dict[str, Check]] = {
    "value": {
        f"\\w+, in nats: unbiased for {KLS}, tokens of the policy{WHILE}": lambda t, name, most: all(
            abs(found.kl.value - local_kl(chain, direction=t.direction).item()) < 1e-9
            for chain, found in t.seen(2, within=bound(most))
        ),
        f"\\w+, in nats: [-+][\\d.]+ % off, in the worlds measured, {KLS}, tokens of the policy": lambda t, name: any(
            abs(found.kl.value - local_kl(chain, direction=t.direction).item()) > 1e-9
            for chain, found in t.seen(2, wide=True)
        ),
        f"k1, an unbiased sample of {KLS}{WHILE}; it stands in the (reward|advantage), not in the loss": (
            lambda t, name, most, where: t.term.placement == where
        ),
    },
    "pull": {
        f"at one position exactly the gradient of {KLS}{WHILE}": lambda t, name, most: along(
            t.seen(1, within=bound(most)), name
        ),
        f"at one position the gradient of neither KL: {COS}": lambda t: neither(t.seen(1, wide=True)),
        "none: the expected gradient is exactly zero, tokens of the policy": lambda t: zero(t.seen(1)),
        "first update of a batch: (not 0|exactly 0) in every sample, at any beta": lambda t, how: (
            still(arrived(t)) == (how == "exactly 0")
        ),
    },
    "sequence": {
        f"exactly the gradient of {KLS} over whole completions{WHILE}": lambda t, name, most: along(
            t.seen(3, within=bound(most)), name
        ),
        f"over whole completions, of up to 3 tokens, {COS}(; left out: .*)?": lambda t, left: (
            not along(t.seen(3), "KL(policy||ref)")
            and (not left or along(t.seen(3, within=t.term.max_log_ratio), "KL(policy||ref)", whole=False))
        ),
        r"nothing of the gradient of KL\(policy\|\|ref\) over whole completions": lambda t: zero(t.seen(3)),
    },
    "in the loss": {
        r"(\w+): [^;]*; zero": lambda t, name: zero([other for _, other in t.reduced()]),
        r"(\w+): [^;]*; that division alone leaves a gradient": lambda t, name: (
            zero(t.seen(3)) and not zero([other for _, other in t.reduced()])
        ),
        r"(\w+): [^;]*; it points where the sum over tokens does": lambda t, name: not bends(t),
        r"(\w+): [^;]*; cosine [\d.-]+ to [\d.-]+ with the sum over tokens, by world": lambda t, name: bends(t),
    },
    "off-policy": {
        f"tokens of an older policy [^:]*: still exactly the gradient of {KLS} at one position"
        r"(?:, while (?:no log-ratio passes ([\d.]+) nats)?(?: and )?(?:no weight passes ([\d.]+))?)?": (
            lambda t, name, most, weight: along(t.seen(1, off=True, within=limit(most, weight)), name)
        ),
        "tokens of an older policy [^:]*: zero": lambda t: zero(t.seen(1, off=True)),
        f"tokens of an older policy [^:]*: neither KL, {COS}"
        r"(?:; (?:\w+_off_policy='(\w+)' corrects that(?:, while no weight passes [\d.]+)?|the KL in it .*))?": (
            lambda t, weights: neither(t.seen(1, off=True, wide=True)) and (weights is None or advice_cures(t, weights))
        ),
    },
    "noise": {
        "none: no completion has a gradient": lambda t: still(t.seen(3)),
        "all of its gradient is noise: the mean is zero": lambda t: zero(t.seen(3)) and not still(t.seen(3)),
        r"the gradient of one completion scatters by \S+ times its mean, in the worlds measured": lambda t: (
            not zero(t.seen(3))
        ),
    },
    "at teacher": {
        "the gradient is (not 0|exactly 0) in every sample where the policy is the teacher": lambda t, how: (
            still(arrived(t)) == (how == "exactly 0")
        )
    },
    "price": {
        r".* reward per nat of a whole completion.*|.*standard deviation.*|none: without a reward .*": lambda t: (
            along_some(t.seen(1, within=t.term.max_log_ratio))
        )
    },
    "limits": {".*": lambda t: limits_are_those_that_bind(t)},  # noqa: PLW0108  (it stands below)
    "at 30 nats": {".*": lambda t: True},  # the probes themselves, tests/verify/test_judge.py
    "ends": {
        ".*": lambda t: ("not known" in dict(t.said.lines)["ends"]) == (explain.moves(t.kl) and t.who != "sampler")
    },
}
OTHERS = ("equation", "", "control", "reference", "teacher", "mix", "toll", "success", "trust", "monitor", "paper")
"""Labels whose lines have tests of their own, or repeat the configuration."""
CAUTIONS: dict[str, Check] = {
    r"(\w+)=.* has no effect: it needs .*": has_no_effect,
    "kl_estimator='k1' with kl_gradient='own' has an expected gradient of exactly zero.*": lambda t: (
        zero(t.seen(1)) and zero(t.seen(3))
    ),
    "kl_estimator='k3' with kl_gradient='own' follows .*at each position.*": lambda t: (
        along(t.seen(1, within=t.term.max_log_ratio), "KL(ref||policy)")
        and along(t.seen(3, within=t.term.max_log_ratio), "KL(ref||policy)", whole=False)
    ),
    "kl_estimator='abs' with kl_gradient='own' pulls down the L1 distance.*": lambda t: all(
        cosine(found.kl.gradient, gradient_of(l1(chain), chain)) > 1 - 1e-9 for chain, found in t.seen(2)
    ),
    "kl_gradient='none' with a beta above 0 adds a number .*": lambda t: still(t.seen(3)),
    "reference='sampler' is a proximal term.*its gradient is 0\\.": lambda t: still(arrived(t)),
    "target_kl=.* lies within the clip's free budget .*": lambda t: t.kl.kl_clip_method != "none",
    "kl_clip_temperature=.* is wide against .*": lambda t: t.kl.kl_clip_method == "soft",  # tests/config/test_rules.py
    "kl_exclude_tokens: in a run .*": lambda t: t.kl.excludes,
}


def limit(most: Any, weight: Any) -> float | None:
    """The log-ratio up to which neither bound binds; that of the weight is of a ratio."""
    bounds = [float(most)] if most else []
    bounds += [torch.tensor(float(weight)).log().item()] if weight else []
    return min(bounds, default=None)


def along_some(seen: list[Seen]) -> bool:
    """Along the gradient of one of the divergences, with whatever factor above 0."""
    return any(
        all(cosine(found.kl.gradient, truth(name, chain, whole=False)) > 1 - 1e-9 for chain, found in seen)
        for name in ("KL(policy||ref)", "KL(ref||policy)", JS)
    )


def l1(chain: Chain) -> Tensor:
    """E sum |policy - ref| of single positions, prefixes held fixed."""
    distance = (chain.logprobs("policy").exp() - chain.logprobs("ref").exp()).abs().sum(-1)
    return (prefix_probs(chain, "policy").detach() * distance).sum()


def limits_are_those_that_bind(told: Told) -> bool:
    text, kl = dict(told.said.lines)["limits"], told.kl
    fields = {"log-ratio bounded": "kl_max_log_ratio", "weight cut": "kl_max_weight"}
    there = {words: getattr(kl, name) is not None and not has_no_effect(told, name) for words, name in fields.items()}
    there |= {" clip at ": kl.kl_clip_method != "none", "carry no KL": kl.excludes}
    said = {words: words in text for words in there}
    return said == there and text.startswith("none") == (not any(there.values()))


def check(checks: dict[str, Check], told: Told, text: str) -> None:
    """Every sentence is known, and true where it is enumerated."""
    for pattern, holds in checks.items():
        if found := re.fullmatch(pattern, text.replace("teacher)", "ref)").replace("sampler)", "ref)")):
            assert holds(told, *found.groups()), f"false: {text}"
            return
    raise AssertionError(f"no check knows this sentence: {text}")


def all_of(told: Told) -> None:
    verdict = told.said.verdict.removesuffix(" Clipped: see limits.")
    assert (verdict != told.said.verdict) == (
        told.teacher is None and told.kl.kl_clip_method != "none" and "No pull" not in verdict
    )
    check(VERDICTS, told, verdict)
    for label, text in told.said.lines:
        if label not in OTHERS:
            check(LINES[label], told, text)
    for caution in told.said.cautions:
        if told.teacher is None:
            check(CAUTIONS, told, caution)


@pytest.fixture(autouse=True)
def not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a configuration ends is for test_explain_anchors.py and test_convergence.py."""
    monkeypatch.setattr(explain, "where_it_ends", lambda *_, **__: "(not followed)")
    monkeypatch.setattr(explain, "sampler_end", lambda *_: "(not followed)")
    monkeypatch.setattr("klamp.verify.explain_anchors.where_it_ends", lambda *_, **__: "(not followed)")


def told_of(kl: dict, teacher: dict | None, loss: dict, setting: dict) -> Told | None:
    """The explanation; None for a combination that is refused, or has nothing to explain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one, around = KLConfig(**kl), LossConfig(**loss)
            two = (
                None
                if teacher is None
                else TeacherConfig(teacher_model="t", **{f"teacher_{name}": value for name, value in teacher.items()})
            )
            given = Setting(**setting)
            said = explain_config(one, around, name="mine", setting=given, teacher=two)
        except ConfigError:
            return None
    return Told(one, around, two, given, said, {}) if one.needs_reference or two else None


@settings(max_examples=20, phases=[Phase.generate])  # shrinking takes minutes, and the sentence is in the message
@given(kl=TERMS, loss=LOSSES, setting=SETTINGS)
def test_every_sentence_on_a_reference_or_the_sampler_is_true(kl: dict, loss: dict, setting: dict) -> None:
    if told := told_of(kl, None, loss, setting):
        all_of(told)


@settings(max_examples=20, phases=[Phase.generate])  # shrinking takes minutes, and the sentence is in the message
@given(teacher=TEACHERS, loss=LOSSES, setting=SETTINGS)
def test_every_sentence_on_a_teacher_is_true(teacher: dict, loss: dict, setting: dict) -> None:
    if told := told_of({"beta": 0.0}, teacher, loss, setting):
        all_of(told)
