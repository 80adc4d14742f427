"""The gradients that policy losses and KLs give a token: the candidates that `klamp.audit.fit` explains a loss with.

Notation: d = log policy - log ref, r = policy / old, p = the token's probability, A = advantage. A policy loss gives a
token the gradient -A s, a KL gives it c. One row per form; a form that a batch cannot tell from an earlier one is
dropped, and its name is kept as an alias. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from klamp.audit.capture import Array, Tokens

FARTHEST = 3.0  # tokens whose policy moved farther from the old policy, in nats, are left out of the fit


class Form(NamedTuple):
    """One candidate."""

    name: str  # what is printed
    kind: str  # the class of a KL's gradient; of a policy loss, its base name
    factor: Array  # the gradient of each token, per unit of coefficient and weight, and of `push`
    coupled: bool = False  # whether a token's gradient depends on other tokens of its completion
    aliases: tuple[str, ...] = ()  # names of forms that give the same numbers on this batch, up to a factor
    kinds: tuple[str, ...] = ()  # the classes of the form and of its aliases
    scaled: bool = False  # whether an alias has another size, so that no coefficient is known
    push: Array | None = None  # of a policy loss: -A, which the factor s multiplies; shared by all forms

    @property
    def values(self) -> Array:
        """The gradient of each token, per unit of coefficient and weight."""
        return self.factor if self.push is None else self.factor * self.push

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def k3(d: Array) -> Array:
    """exp(-d) - 1 + d."""
    return np.expm1(-d) + d


KL: dict[str, tuple[str, Callable[[Tokens], Array], bool]] = {
    "log-ratio (k2, or the reverse gradient)": ("reverse", lambda t: t.d, False),
    "ratio x log-ratio (ratio x k3, or k1 in the advantage)": ("reverse", lambda t: t.r * t.d, False),
    "ratio x (old - ref) (k1 of the old policy in the advantage)": ("reverse", lambda t: t.r * t.d_old, False),
    "constant (k1)": ("zero", lambda t: np.ones_like(t.d), False),
    "ratio (detached ratio x k1)": ("zero", lambda t: t.r, False),
    "1 - exp(-log-ratio) (k3)": ("forward", lambda t: -np.expm1(-t.d), False),
    "ratio x (1 - exp(-log-ratio)) (detached ratio x k3)": ("forward", lambda t: -t.r * np.expm1(-t.d), False),
    "exp(log-ratio) - 1 (k3, policy and reference swapped)": ("swapped", lambda t: np.expm1(t.d), False),
    "ratio x (exp(log-ratio) - 1)": ("swapped", lambda t: t.r * np.expm1(t.d), False),
    "sign of the log-ratio (abs)": ("sign", lambda t: np.sign(t.d), False),
    "ratio x sign of the log-ratio": ("sign", lambda t: t.r * np.sign(t.d), False),
    "1 if the log-ratio is positive (k1 cut at 0)": ("step", lambda t: (t.d > 0).astype(float), False),
    "1 + log-ratio (live weight x k1)": ("reverse", lambda t: 1 + t.d, False),
    "log-ratio + log-ratio^2 / 2 (live weight x k2)": ("squared", lambda t: t.d + t.d**2 / 2, False),
    "ratio x (1 + log-ratio) (live ratio x k1)": ("reverse", lambda t: t.r * (1 + t.d), False),
    "ratio x (log-ratio + log-ratio^2 / 2) (live ratio x k2)": ("squared", lambda t: t.r * (t.d + t.d**2 / 2), False),
    "-exp(-log-ratio) (ref / policy differentiated)": ("forward", lambda t: -np.exp(-t.d), False),
    "exp(log-ratio) (1 + log-ratio) (policy / ref x k1)": ("neither", lambda t: np.exp(t.d) * (1 + t.d), False),
    "exp(log-ratio) log-ratio": ("neither", lambda t: np.exp(t.d) * t.d, False),
    "probability x (1 + log-ratio)": ("neither", lambda t: np.exp(t.policy) * (1 + t.d), False),
    "probability x log-ratio": ("neither", lambda t: np.exp(t.policy) * t.d, False),
    "(log-ratio - 1) exp(-log-ratio) (a live weight)": ("neither", lambda t: (t.d - 1) * np.exp(-t.d), False),
    "2 log-ratio - 1 (a live advantage)": ("neither", lambda t: 2 * t.d - 1, False),
    "sum over the completion (half its square)": ("reverse", lambda t: t.total(t.d), True),
    "sum over this and later tokens": ("reverse", lambda t: t.to_go(t.d), True),
    "ratio x sum over this and later tokens": ("reverse", lambda t: t.r * t.to_go(t.d), True),
    "log-ratio + k3 of later tokens": ("reverse", lambda t: t.d + t.to_go(k3(t.d)) - k3(t.d), True),
    "prefix ratio x log-ratio + later k1": ("reverse", lambda t: _prefix(t, t.d), True),
    "prefix ratio x log-ratio + later k3": ("reverse", lambda t: _prefix(t, k3(t.d)), True),
    "prefix ratio - prefix of ref / old": ("forward", lambda t: -t.prefix_r * np.expm1(-t.so_far(t.d)), True),
    "ratio of the completion x k3": (
        "neither",
        lambda t: np.exp(t.average(t.log_r)) * (t.average(k3(t.d)) - np.expm1(-t.d)),
        True,
    ),
    "log-ratio to the old policy (k2)": ("old", lambda t: t.log_r, False),
    "1 - exp(-log-ratio to the old policy) (k3)": ("old", lambda t: -np.expm1(-t.log_r), False),
    "exp(log-ratio to the old policy) - 1": ("old", lambda t: np.expm1(t.log_r), False),
}
"""Name -> (class, c, whether tokens are coupled). The earlier name wins where two give the same numbers."""


def _prefix(t: Tokens, later: Array) -> Array:
    return t.prefix_r * t.d + t.to_go(t.prefix_r * later) - t.prefix_r * later


CLIPS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3))
CAPS = (1.2, 1.28, 2.0, 3.0, 5.0, 10.0)


def policy_forms(t: Tokens) -> list[Form]:
    """The policy losses: -A s of each, for each sampler weight; none without advantages."""
    if t.advantage is None or not np.any(t.advantage):
        return []
    push = -t.advantage
    return distinct(
        Form(name + suffix, name.partition("(")[0], s * weight, push=push)
        for suffix, weight in _sampler_weights(t)
        for name, s in _surrogates(t, t.advantage, plain=bool(suffix))
        if not (name.startswith("cispo(0.") and np.ptp(s) == 0)  # a cap below every ratio: the plain loss
    )


def _surrogates(t: Tokens, advantage: Array, *, plain: bool) -> Iterator[tuple[str, Array]]:
    yield "plain policy loss", np.ones_like(t.r)
    if t.old is None:
        return
    yield "ratio", t.r
    passed = [t.clip] if t.clip else []
    for low, high in list(dict.fromkeys((*passed, *CLIPS)))[: 1 if plain else None]:
        yield f"ppo_clip({low:g}, {high:g})", t.r * np.where(advantage > 0, t.r <= 1 + high, t.r >= 1 - low)
    yield "sequence ratio", np.exp(t.average(t.log_r))
    yield "old / policy", 1 / t.r
    yield "whole ratio", np.exp(np.clip(t.total(t.log_r), -50, 50))
    if plain:
        return
    for low, high in passed:
        yield f"cispo({low:g}, {high:g})", np.clip(t.r, 1 - low, 1 + high)
    for cap in (*(x for _, high in passed for x in (high, 1 + high)), *CAPS):
        yield f"cispo({cap:g})", np.minimum(t.r, cap)
    for positive, negative in ((1.0, 1.05), (1.0, 1.0)):
        soft = 1 / (1 + np.exp(-np.where(advantage > 0, positive, negative) * (t.r - 1)))
        yield f"sapo({positive:g}, {negative:g})", 4 * soft * (1 - soft) * t.r


def _sampler_weights(t: Tokens) -> Iterator[tuple[str, Array]]:
    yield "", np.ones_like(t.r)
    if t.sampler is None:
        return
    behind = t.old if t.old is not None else t.policy
    for name, log_w in (("old / sampler", behind - t.sampler), ("policy / sampler", t.policy - t.sampler)):
        for level, log_weight in (("", log_w), ("sequence ", t.total(log_w)), ("mean ", t.average(log_w))):
            w = np.exp(np.clip(log_weight, -50, 50))
            yield f" x {level}{name}", w
            for cap in (2.0, 3.0, 5.0):
                yield f" x min({level}{name}, {cap:g})", np.minimum(w, cap)
                yield f" x {level}{name} up to {cap:g}", w * (w <= cap)


def masks(t: Tokens, off: Array) -> list[str]:
    """The clips and masks that drop these tokens of a policy loss and no others, each at bounds of its own."""
    other = t.old if t.sampler is None else t.sampler
    if other is None or t.advantage is None:
        return []
    x, p, q, a = t.policy - other, np.exp(t.policy), np.exp(other), np.sign(t.advantage)
    binary = -q * x + (1 - q) * np.log((1 - q + 1e-30) / (1 - p + 1e-30))
    distances = {  # name -> a distance, and the sign of its side; each side may have a bound of its own
        "dppo_tv": (a * (p - q), a),
        "dppo_kl": (a * np.sign(x) * binary, a),
        "a clip of the ratio": (a * x, a),
        "token_mask (IcePop)": (np.abs(x), x),
        "sequence_mask": (np.abs(t.total(x)), t.total(x)),
        "seq_mean_k1": (np.abs(t.average(x)), t.average(x)),
        "seq_max_k3": (np.maximum.reduceat(k3(-x), t.first)[t.row], a * 0),
        "off_policy_mask_threshold": (-t.average(x) * (a < 0), a * 0),
    }
    used = (a != 0) & (np.abs(t.log_r) <= FARTHEST)
    return [
        name
        for name, (far, side) in distances.items()
        if all(np.all(far[x & off] > far[x & ~off].max(initial=0.0)) for x in (used & (side > 0), used & (side <= 0)))
    ]


def advantage_forms(t: Tokens, policy: Form) -> list[Form]:
    """KLs that the loss subtracts from the advantages: they carry the policy loss's own factor."""
    pulls = {} if t.ref is None else {name: policy.factor * course for name, course in t.courses.items()}
    return [
        Form(f"{policy.kind} x {name} (k1 in the advantage)", "reverse", x, name[:5] == "later", kinds=("reverse",))
        for name, x in pulls.items()
        if np.any(x)
    ]


def kl_forms(t: Tokens) -> list[Form]:
    """The KLs that the batch can show: without a reference only the constant and those to the old policy."""
    forms = [*_kls(t, "")]
    for cap in (np.inf, 2.0, 3.0, 5.0, 10.0) if t.sampler is not None and t.ref is not None else ():
        weighted = replace(t, old=t.policy - np.minimum(t.policy - t.sampler, np.log(cap)))
        name = " (policy / sampler" + (")" if cap == np.inf else f", at most {cap:g})")
        forms += [form for form in _kls(weighted, name) if "ratio" in form.name.replace("log-ratio", "")]
    return distinct(forms)


def _kls(t: Tokens, suffix: str) -> Iterator[Form]:
    for name, (kind, values, coupled) in KL.items():
        anchor = t.old if kind == "old" else t.ref
        if (anchor is None and kind != "zero") or (coupled and t.lengths.max() == 1):
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            column = values(t)
        if kind == "reverse" and t.baseline is not None and not coupled:
            scale = t.r if name.startswith("ratio") else 1.0
            yield Form(f"{name} - baseline{suffix}", kind, scale * (t.d - t.baseline))
        if np.isfinite(column).all():
            yield Form(name + suffix, kind, column, coupled)


SAME = 1e-10  # 1 - |cosine| below which two columns are one


def distinct(forms: Iterable[Form]) -> list[Form]:
    """The forms whose columns differ in direction; each takes over the names of those that it replaces."""
    first: list[Form] = []
    sizes: list[float] = []
    for form in forms:
        values = form.values
        size = float(np.linalg.norm(values))
        if size == 0:
            continue
        other = values if form.push is None else values * form.push
        cosines = (x.factor @ other / (length * size) for x, length in zip(first, sizes, strict=True))
        twin, cosine = next(((i, x) for i, x in enumerate(cosines) if 1 - abs(x) < SAME), (None, 0.0))
        if twin is None:
            first.append(form._replace(kinds=(form.kind,)))
            sizes.append(size)
            continue
        x, scaled = first[twin], abs(size / sizes[twin] - 1) > 0.02 or cosine < 0
        names, kinds = (*x.aliases, form.name), tuple(dict.fromkeys((*x.kinds, form.kind)))
        first[twin] = x._replace(aliases=names, kinds=kinds, scaled=x.scaled or scaled)
    return first
