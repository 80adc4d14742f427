"""Formulas that are passed around as a KL, as they are printed, and explained in words by what was measured of them.

>>> explain_form("k1-as-loss").verdict
'k1 as a loss: the value is right, the expected gradient is zero, so it regularises nothing.'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.config.presets import OLD_NAMES, speaking_name
from klamp.errors import unknown_name
from klamp.verify.explain import Explanation, Line
from klamp.verify.judge import Judgement, KLFunction, Use, judge
from klamp.verify.oracle import (
    TOLERANCE,
    Followed,
    Loss,
    cosine,
    expected,
    expected_gradient,
    forward_kl,
    name_gradient,
    reverse_kl,
    share,
    truths,
)
from klamp.verify.worlds import Chain, Outcomes, one_position, random_chain


@dataclass(frozen=True, kw_only=True)
class Form:
    """A formula that is passed around as a KL, and how it is used."""

    name: str
    """Its name on the command line."""
    found: str
    """Where it is printed; see docs/sources.md."""
    prints: str
    """What is printed there."""
    value: Loss
    """The formula, token by token, over the oracle's outcomes."""
    use: Use
    """Whether it is differentiated there as a loss, or taken from the reward."""
    called: str
    """What the formula is called; what it does is measured."""
    instead: str
    """How to have in klamp what is wanted there."""
    config: str
    """The fields of `KLConfig` that are this formula; empty where klamp has no such term."""


def _delta(y: Outcomes) -> Tensor:
    return y.policy_logprobs - y.ref_logprobs


def _exact(y: Outcomes) -> Tensor:
    log_policy, log_ref = y.policy_logits.log_softmax(-1), y.ref_logits.log_softmax(-1)
    return torch.where(y.mask, (log_policy.exp() * (log_policy - log_ref)).sum(-1), 0.0)


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form(
            name="k1-as-loss",
            found="the from-scratch guide",
            prints="log policy - log ref, its mean times kl_coef is added to the loss",
            value=_delta,
            use="loss",
            called="k1 as a loss",
            instead="kl_estimator='k1' with kl_gradient='reverse': the same value, with the gradient that it lacks",
            config="kl_estimator='k1', kl_gradient='own'",
        ),
        Form(
            name="minus-k1",
            found="the Tinker guide",
            prints="kl_coef * (log ref - log policy) is added to the loss",
            value=lambda y: -_delta(y),
            use="loss",
            called="minus k1 as a loss",
            instead="kl_estimator='k1' with kl_gradient='reverse' (the value with the right sign, and its gradient)",
            config="",
        ),
        Form(
            name="ratio-weighted",
            found="the GRPO tutorial",
            prints="exp(log policy - log ref) * (log policy - log ref), summed over tokens, is taken from the reward",
            value=lambda y: _delta(y).exp() * _delta(y),
            use="reward",
            called="k1 weighted by policy/ref, in the reward",
            instead="kl_estimator='k1' with kl_placement='reward' and kl_horizon='sequence', or kl_estimator='exact' "
            "in the loss, as in the tutorial's hands-on example (klamp explain exact-kl)",
            config="",
        ),
        Form(
            name="exact-kl",
            found="the hands-on example of the GRPO tutorial",
            prints="sum over the vocabulary of policy * (log policy - log ref), at each position, as the KL",
            value=_exact,
            use="loss",
            called="the exact KL of each position",
            instead="nothing: this is kl_estimator='exact'",
            config="kl_estimator='exact'",
        ),
        Form(
            name="k3-as-loss",
            found="the k3 bug report, from TRL",
            prints="exp(log ref - log policy) - (log ref - log policy) - 1, times beta, is added to the loss",
            value=lambda y: (-_delta(y)).exp() + _delta(y) - 1,
            use="loss",
            called="k3 as a loss",
            instead="kl_estimator='k3' with kl_gradient='reverse': the same value and the gradient to it",
            config="kl_estimator='k3', kl_gradient='own'",
        ),
    )
}
"""Name of a formula -> the formula."""


def find_form(name: str) -> Form:
    """The printed formula of this name, or of this old name.

    Raises:
        UnknownNameError: there is no such formula; names the nearest.
    """
    if speaking_name(name) not in FORMS:
        raise unknown_name("printed formula", name, {*FORMS, *OLD_NAMES})
    return FORMS[speaking_name(name)]


@dataclass(frozen=True, kw_only=True)
class FormFacts:
    """The measurements of a printed formula; nats per token at one position, mean over the worlds."""

    form: Form
    """The formula."""
    value: float
    """Expected value for tokens of the policy."""
    reverse_kl: float
    """KL(policy||ref)."""
    forward_kl: float
    """KL(ref||policy)."""
    value_under_ref: float
    """Expected value for tokens of the reference."""
    follows: Followed
    """The known gradient that the expected gradient, for tokens of the policy, is a multiple of."""
    cosine_reverse: float
    """Its cosine with the gradient of KL(policy||ref)."""
    cosine_forward: float
    """Its cosine with the gradient of KL(ref||policy)."""
    size: float
    """The norm of the expected gradient, in units of that of the gradient of KL(policy||ref)."""
    towards_sampler: float
    """Tokens of an older policy, as a loss: the multiple of the gradient of KL(sampler||policy) that lies closest."""
    stray: float
    """The rest of that gradient, relative to its norm; 0 where the sampler is all that it pulls towards."""
    sequence_cosine: float
    """Over completions of up to three tokens: cosine with the gradient of KL(policy||ref) of the whole completion."""
    sequence_share: float
    """The multiple of that gradient which is nearest to the measured one: 1 is all of it."""
    judged: Judgement | None
    """The judgement on it as a function of log-probabilities; None where it needs the whole vocabulary."""

    @property
    def bias(self) -> float:
        """The expected value minus KL(policy||ref), divided by KL(policy||ref)."""
        return self.value / self.reverse_kl - 1


def measure_form(name: str) -> FormFacts:
    """Measures a printed formula by enumeration.

    Args:
        name: `k1-as-loss`, `minus-k1`, `ratio-weighted`, `exact-kl` or `k3-as-loss`; or an old name of it.

    Raises:
        UnknownNameError: there is no such formula.
    """
    form = find_form(name)
    loss = used(form)
    worlds = [random_chain(seed, vocab=5, length=1, eos=None) for seed in range(3)]
    gradients = [expected_gradient(world, loss) for world in worlds]
    known = [truths(world) for world in worlds]
    follows = name_gradient(gradients, known)
    right = 0.0 if follows.name == "zero" else 1.0
    reverse = [each["reverse"] for each in known]
    towards, stray = _towards_sampler(loss)
    sequence_cosine, sequence_share = _over_sequences(form)
    return FormFacts(
        form=form,
        value=_mean([expected(world, form.value).item() for world in worlds]),
        reverse_kl=_mean([reverse_kl(world).item() for world in worlds]),
        forward_kl=_mean([forward_kl(world).item() for world in worlds]),
        value_under_ref=_mean([expected(_sampled_by_ref(world), form.value).item() for world in worlds]),
        follows=follows,
        cosine_reverse=right * cosine(gradients, reverse),
        cosine_forward=right * cosine(gradients, [each["forward"] for each in known]),
        size=(_norm(gradients) / _norm(reverse)),
        towards_sampler=towards,
        stray=stray,
        sequence_cosine=sequence_cosine,
        sequence_share=sequence_share,
        judged=None if form.value is _exact else judge(as_function(form), name=form.name, use=form.use),
    )


def used(form: Form) -> Loss:
    """The formula as a loss: itself, or (taken from the reward) its sum times the log-probability of each token."""
    if form.use == "loss":
        return form.value

    def in_reward(y: Outcomes) -> Tensor:
        spent = torch.where(y.mask, form.value(y), 0.0).sum(-1, keepdim=True).detach()
        return spent * y.policy_logprobs

    return in_reward


def as_function(form: Form) -> KLFunction:
    """The formula as a function of the log-probabilities under policy and reference."""

    def function(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        blank = torch.zeros_like(policy_logprobs)
        return form.value(
            Outcomes(
                probs=blank,
                tokens=blank.long(),
                mask=torch.ones_like(blank, dtype=torch.bool),
                policy_logprobs=policy_logprobs,
                ref_logprobs=ref_logprobs,
                sampler_logprobs=blank,
                policy_logits=blank,
                ref_logits=blank,
            )
        )

    return function


def _towards_sampler(loss: Loss) -> tuple[float, float]:
    """The share of the gradient that is that of KL(sampler||policy), and the relative size of the rest."""
    worlds = [random_chain(seed, vocab=5, length=1, eos=None, sampler="other") for seed in range(3)]
    gradients = [expected_gradient(world, loss) for world in worlds]
    towards = [_sampler_gradient(world) for world in worlds]
    factor = share(gradients, towards)
    rest = _norm([g - factor * t for g, t in zip(gradients, towards, strict=True)])
    return factor, rest / _norm(gradients)


def _sampler_gradient(world: Chain) -> Tensor:
    log_sampler, log_policy = world.logprobs("sampler"), world.logprobs("policy")
    divergence = (log_sampler.exp() * (log_sampler - log_policy)).sum()
    return torch.autograd.grad(divergence, world.policy_logits)[0]


def _over_sequences(form: Form) -> tuple[float, float]:
    """Cosine and share of the gradient over whole completions; both 0 where the gradient is zero."""
    worlds = [random_chain(seed, vocab=3, length=3) for seed in range(4)]
    gradients = [expected_gradient(world, used(form)) for world in worlds]
    reverse = [truths(world)["reverse"] for world in worlds]
    if _norm(gradients) < TOLERANCE * _norm(reverse):
        return 0.0, 0.0
    return cosine(gradients, reverse), share(gradients, reverse)


def _sampled_by_ref(world: Chain) -> Chain:
    ref = world.ref_logits[0]
    return one_position(world.policy_logits.detach()[0], ref, ref)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _norm(tensors: list[Tensor]) -> float:
    return torch.cat([each.flatten() for each in tensors]).norm().item()


def explain_form(name: str) -> Explanation:
    """Explains what a printed formula is and does; every number is measured by enumeration.

    Args:
        name: `k1-as-loss`, `minus-k1`, `ratio-weighted`, `exact-kl` or `k3-as-loss`; or an old name of it.

    Raises:
        UnknownNameError: there is no such formula.
    """
    facts = measure_form(name)
    form = facts.form
    lines: list[Line] = [
        ("prints", form.prints),
        ("found in", f"{form.found} (docs/sources.md)"),
        ("value", _value(facts)),
        ("", _under_ref(facts)),
        ("pull", _pull(facts)),
        *_off_policy(facts),
        ("sequence", _sequence(facts)),
        *_faults(facts),
        ("in klamp", form.config or "no such term: preset() refuses it, with the reason"),
        ("instead", form.instead),
    ]
    verdict = f"{form.called}: {_value_verdict(facts)}; {_gradient_verdict(facts)}."
    return Explanation(name=form.name, verdict=verdict, lines=tuple(lines), cautions=())


def _value_verdict(facts: FormFacts) -> str:
    if abs(facts.bias) < TOLERANCE:
        return "the value is right"
    if abs(facts.bias + 2) < TOLERANCE:
        return "the sign is wrong, a reward for leaving the reference"
    if abs(facts.value_under_ref - facts.reverse_kl) < TOLERANCE:
        return "for tokens of the policy it is not KL(policy||ref), only for tokens of the reference it would be"
    return "it is not KL(policy||ref)"


def _gradient_verdict(facts: FormFacts) -> str:
    if facts.follows.name == "zero":
        return "the expected gradient is zero, so it regularises nothing"
    if facts.follows.factor:
        return f"it follows the gradient of {facts.follows.in_words}"
    return "it follows the gradient of neither KL"


def _value(facts: FormFacts) -> str:
    text = f"{facts.value:+.4f} nats per token where KL(policy||ref) is {facts.reverse_kl:+.4f}"
    if abs(facts.bias) < TOLERANCE:
        return f"{text}: right and unbiased, tokens of the policy"
    if abs(facts.bias + 2) < TOLERANCE:
        return f"{text}: minus the KL; the further the policy leaves, the lower the loss"
    return f"{text}: {100 * facts.bias:+.0f} %, tokens of the policy"


def _under_ref(facts: FormFacts) -> str:
    text = f"tokens of the reference instead: {facts.value_under_ref:+.4f}"
    if abs(facts.value_under_ref - facts.reverse_kl) < TOLERANCE and abs(facts.bias) > TOLERANCE:
        return f"{text}, which is KL(policy||ref): the formula belongs to the other sampler"
    return text


def _pull(facts: FormFacts) -> str:
    if facts.follows.name == "zero":
        return f"none: the expected gradient is zero (norm {facts.size:.0e} of that of KL(policy||ref)), on-policy"
    cosines = f"cosine {facts.cosine_reverse:.3f} with KL(policy||ref), {facts.cosine_forward:.3f} with KL(ref||policy)"
    if facts.follows.factor:
        return f"exactly the gradient of {facts.follows.in_words}, one position ({cosines})"
    return f"the gradient of neither KL: {cosines}, {facts.size:.3g} times the size of KL(policy||ref)'s, one position"


def _sequence(facts: FormFacts) -> str:
    if facts.sequence_cosine == 0:
        return "nothing of the gradient of KL(policy||ref) over whole completions"
    return (
        f"cosine {facts.sequence_cosine:.3f} with the gradient of KL(policy||ref) over whole completions, "
        f"{100 * facts.sequence_share:.0f} % of its length (measured at up to 3 tokens)"
    )


def _off_policy(facts: FormFacts) -> list[Line]:
    """The sentence on tokens of an older policy, where the formula pulls towards or away from that policy alone."""
    if facts.form.use == "reward" or facts.stray > TOLERANCE:
        return []
    if facts.towards_sampler > 0:
        text = "raises the probability of every sampled token: it pulls towards that older policy"
    else:
        text = "lowers the probability of every sampled token: it pushes away from that older policy"
    return [("off-policy", f"tokens of an older policy: {text}, wherever the reference is")]


def _faults(facts: FormFacts) -> list[Line]:
    if facts.judged is None:
        return []
    found = [fault for fault in facts.judged.faults if fault.startswith("at ") and "pushes away" not in fault]
    return [("at 30 nats", "; ".join(found))] if found else []
