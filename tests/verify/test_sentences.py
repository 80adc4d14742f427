"""What `klamp explain` says of drawn configurations, enumerated in worlds of other seeds, lengths and spreads than
those of the measurement: which divergence a gradient or a value is, and the advice that goes with it."""

import functools
import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from klamp.config import KLConfig, LossConfig
from klamp.config.teacher import TeacherConfig
from klamp.errors import ConfigError
from klamp.verify import explain
from klamp.verify.explain import bare_teacher, bare_term, explain_config
from klamp.verify.judge import Explanation
from klamp.verify.one_step import NO_KL, Scene, StepReport, examine_config
from klamp.verify.oracle import cosine, forward_kl, gradient_of, local_kl, reverse_kl
from klamp.verify.worlds import Chain, Sampler, random_chain

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
NEAR, WIDE = 0.1, 2.5
UNBOUNDED = LossConfig(epsilon=1.0, epsilon_high=1e9, scale_rewards="none")
Seen = tuple[Chain, StepReport]


def draws(**choices: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})


TERMS = draws(
    kl_estimator=("k1", "k2", "k3", "abs", "exact"),
    kl_gradient=("reverse", "forward", "own", "none"),
    kl_horizon=("token", "sequence"),
    kl_placement=("loss", "loss", "reward", "advantage"),
    kl_off_policy=("none", "token", "sequence"),
    kl_normalizer=(None, "token_mean", "sequence_mean"),
    kl_max_log_ratio=(None, None, 0.3, 4.0),
    kl_max_weight=(None, 1.5),
    reference=("auto", "auto", "sampler"),
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
LOSSES = draws(loss_type=("dr_grpo", "grpo", "dapo"), scale_rewards=("none",))


@dataclass(frozen=True)
class Told:
    """An explanation of one anchor, and what is enumerated of its term in fresh worlds."""

    config: KLConfig | TeacherConfig
    loss: LossConfig
    said: Explanation

    @functools.cached_property
    def term(self) -> Any:
        return self.config.build_term()

    @property
    def who(self) -> Any:
        return {"reference": "ref"}.get(self.term.anchor, self.term.anchor)

    def line(self, label: str) -> str:
        return re.sub(r"(teacher|sampler)(?=[)|])", "ref", dict(self.said.lines)[label])

    def examine(self, chain: Chain, loss: LossConfig | None = None) -> Seen:
        scene = Scene(chain=chain, group_size=1)
        if isinstance(self.config, TeacherConfig):
            taught = bare_teacher(self.config)
            return chain.towards("teacher"), examine_config(NO_KL, loss, scene=scene, teacher=taught)
        found = examine_config(bare_term(self.config), loss, scene=scene)
        return chain.towards("sampler") if self.term.anchor == "sampler" else chain, found

    def seen(self, length: int, *, off: bool = False, wide: bool = False, within: bool = False) -> list[Seen]:
        """What is enumerated in fresh worlds; with `within` those alone in which no bound binds."""
        who: Sampler = "other" if off or self.who == "sampler" else "policy"
        spreads = ((21, WIDE if wide else 1.0), (23, NEAR))
        chains = [random_chain(seed, vocab=3, length=length, spread=spread, sampler=who) for seed, spread in spreads]
        bounds = [self.term.max_log_ratio or 99.0, 0.4 if off and self.term.max_weight else 99.0]  # log 1.5
        kept = [chain for chain in chains if not within or largest(chain, self.who) < min(bounds)]
        return [self.examine(chain, UNBOUNDED if off else None) for chain in kept]


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
    minus, factor, divergence = re.fullmatch(r"(minus )?(?:(-?[\d.e-]+) x )?(.*)", name).groups()
    for chain, found in seen:
        exact = truth(divergence, chain, whole=whole) * (-1 if minus else float(factor or 1))
        if (found.kl.gradient - exact).norm() > 1e-6 * exact.norm():
            return False
    return True


def zero(seen: list[Seen]) -> bool:
    return all(found.kl.gradient.norm() < 1e-9 for _, found in seen)


def neither(seen: list[Seen], *others: str) -> bool:
    """Not along the gradient of either KL, or of `others`, in all worlds at once, with one factor above 0."""
    return not any(
        all(cosine(found.kl.gradient, truth(name, chain, whole=True)) > 1 - 1e-7 for chain, found in seen)
        for name in ("KL(policy||ref)", "KL(ref||policy)", *others)
    )


def check_gradient(told: Told, label: str, length: int, *, off: bool = False) -> None:
    """A line names a divergence, zero or neither; it is that in fresh worlds."""
    text = told.line(label)
    name = re.search(r"exactly the gradient of ([^,;]*(?:\(policy, \w+\))?)", text)
    if name:
        seen = told.seen(length, off=off, wide=True, within="while no" in text)
        assert along(seen, name[1].strip(), whole="prefixes held fixed" not in text), text
    elif "exactly zero" in text:
        assert zero(told.seen(length, off=off)), text
    else:
        assert neither(told.seen(length, off=off, wide=True)), text


def check_all(told: Told) -> None:
    check_gradient(told, "off-policy", 1, off=True)
    if advised := re.search(r"(kl|teacher)_off_policy='(\w+)' corrects", told.line("off-policy")):
        better = replace(told, config=replace(told.config, **{f"{advised[1]}_off_policy": advised[2]}))
        assert not neither(better.seen(1, off=True, within=True), "JS")
    chain = random_chain(24, vocab=3, length=2)
    _, there = told.examine(replace(chain, policy_logits=chain.logits(told.who)))
    still = there.kl.gradient.norm() < 1e-9 and there.kl.gradient_variance < 1e-12
    if told.who == "sampler":
        assert ("exactly 0 in every sample" in told.line("pull")) == still
        return
    check_gradient(told, "pull", 1)
    if told.who == "ref":
        check_gradient(told, "sequence", 3)
    else:
        assert ("exactly 0 in every sample" in told.line("at teacher")) == still
    direction = told.config.teacher_direction if isinstance(told.config, TeacherConfig) else "reverse"
    seen = told.seen(2, wide=True, within="while no" in told.line("value"))
    errors = [abs(found.kl.value - local_kl(chain, direction=direction).item()) for chain, found in seen]
    if told.term.placement == "loss":
        assert ("unbiased" in told.line("value")) == all(error < 1e-9 for error in errors) or not errors
    if told.said.verdict.startswith("Pulls"):
        chain = random_chain(22, vocab=3, length=3)
        summed, reduced = (told.examine(chain, loss)[1].kl.gradient for loss in (None, told.loss))
        assert ("bent by" in told.said.verdict) == (cosine(summed, reduced) < 1 - 1e-5)


def told_of(kl: dict, teacher: dict | None, loss: dict) -> Told | None:
    """The explanation; None for a combination that is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one, around = KLConfig(**kl), LossConfig(**loss)
            fields = {f"teacher_{name}": value for name, value in (teacher or {}).items()}
            two = TeacherConfig(teacher_model="t", **fields) if fields else None
            return Told(two or one, around, explain_config(one, around, name="mine", teacher=two))
        except ConfigError:
            return None


@pytest.fixture(autouse=True)
def not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a configuration ends is for test_explain_anchors.py and test_convergence.py."""
    monkeypatch.setattr(explain, "where_it_ends", lambda *_, **__: "(not followed)")


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(kl=TERMS, loss=LOSSES)
@example(kl={"kl_max_log_ratio": 4.0}, loss={})
@example(kl={"kl_off_policy": "token", "kl_max_weight": 1.5}, loss={"loss_type": "grpo"})
def test_what_is_said_of_a_reference_or_the_sampler_is_true(kl: dict, loss: dict) -> None:
    if told := told_of(kl, None, loss):
        check_all(told)


@settings(max_examples=12, phases=[Phase.generate])
@given(teacher=TEACHERS, loss=LOSSES)
def test_what_is_said_of_a_teacher_is_true(teacher: dict, loss: dict) -> None:
    if told := told_of({"beta": 0.0}, teacher, loss):
        check_all(told)
