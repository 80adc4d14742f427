"""`klamp.check`: takes the gradients of one micro-batch of anybody's loss, and hands them to the fit.

Torch is used for the gradients only: d loss / d log-probability of each token, and on request its derivatives. No model
is run, no activation is touched, no random number is drawn, and the training continues with identical gradients.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from klamp.audit.capture import Capture
from klamp.audit.conclude import NEAR_ZERO, conclude
from klamp.audit.forms import roundoff
from klamp.audit.verdict import Finding, Verdict, finding
from klamp.errors import ConfigError, KLWarning, ShapeError, TensorError

Numbers: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[float]"

_SEEN: dict[Any, tuple[int, Verdict]] = {}
_TAPPED: list[Tensor] = []


class Watched(NamedTuple):
    """Recording copies of the inputs of a loss, from `watch`; None where nothing was passed."""

    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None


def watch(
    *, ref_logprobs: Tensor | None = None, advantages: Tensor | None = None, old_logprobs: Tensor | None = None
) -> Watched:
    """Return the same numbers as tensors that record what the loss does with them.

    Compute the loss from them and pass the result as `klamp.check(..., watched=...)`: the policy loss's part of the
    gradient is then exact, whatever the surrogate, and a shift inside the loss or a detached KL is certain.
    Shapes and numbers stay as they are; the loss's gradient in the policy does too.
    """
    named = {"ref_logprobs": ref_logprobs, "advantages": advantages, "old_logprobs": old_logprobs}
    copies = {k: None if x is None else x.detach().clone().requires_grad_() for k, x in named.items()}
    for copy in copies.values():
        if copy is not None:
            copy.recorded_by_klamp = True  # pyright: ignore[reportAttributeAccessIssue]
    return Watched(**copies)


def tap(policy_logprobs: Tensor) -> Tensor:
    """Return the argument, and remember it: `klamp.check(loss)` then knows which tensor the loss was computed from."""
    _TAPPED[:] = [policy_logprobs]
    return policy_logprobs


def check(  # noqa: PLR0913
    loss: Tensor | Callable[..., Tensor],
    *,
    policy_logprobs: Tensor | Sequence[Tensor] | None = None,
    mask: Tensor | Sequence[Tensor] | None = None,
    ref_logprobs: Tensor | Sequence[Tensor] | None = None,
    old_logprobs: Tensor | Sequence[Tensor] | None = None,
    sampler_logprobs: Tensor | Sequence[Tensor] | None = None,
    advantages: Numbers | None = None,
    rewards: Numbers | None = None,
    beta: float | None = None,
    means: Literal["reverse", "forward", "js"] = "reverse",
    baseline: Tensor | float | None = None,
    clip: tuple[float, float] | None = None,
    kl_in: Literal["loss", "advantage", "reward"] | None = None,
    logits: Tensor | None = None,
    ref_logits: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    pad: int | None = None,
    eos: int | Sequence[int] | None = None,
    segments: Tensor | None = None,
    group_size: int | None = None,
    loss_scale: float = 1.0,
    watched: Watched | None = None,
    example: tuple[Tensor, Tensor] | None = None,
    save: str | Path | None = None,
    save_ids: bool = False,
    once: bool = True,
    host: str = "",
) -> Verdict:
    """Is the KL in this loss right? Call it just before `loss.backward()`, or with a loss function.

    Equation: g_t = d loss / d log policy_t is explained as a w_t (-A_t s_t) + b u_t c(log policy_t - log ref_t).

    Sampler: the policy, or the old policy where `old_logprobs` are passed; the verdict's classes assume it.
    Gradient: read, never changed. Second derivatives are taken only where the policy is (nearly) the reference, or the
    loss was watched; a loss that refuses them gets the answer "cannot tell" for what they would have shown.
    Shapes: [B, T] for everything per token, [B] or [B, T] for advantages, [B, T, V] for logits; lists of 1-D tensors
    and packed rows with `segments` are accepted.

    Args:
        loss: the scalar just before backward; or a function, called as `loss(policy_logprobs, ref_logprobs)`.
        policy_logprobs: the very tensor that the loss was computed from; not needed after `tap`, or with logits alone.
        mask: True = a trained token.
        ref_logprobs: log-probabilities under the reference, or under the teacher.
        old_logprobs: under the policy at the start of the rollout's updates.
        sampler_logprobs: as whoever sampled reported them.
        advantages: as the loss uses them, before a KL that the loss itself puts into them.
        rewards: [B]; shows whether the advantages hold a KL.
        beta: the coefficient that the KL is meant to have; negative beyond a teacher.
        means: the divergence that is meant.
        baseline: what the loss subtracts from the log-ratio.
        clip: the clip range of the ratio, as distances from 1.
        kl_in: where the KL is meant to be; "loss" lets a missing one be called wrong.
        logits: the policy's, at the places of `policy_logprobs`; without `policy_logprobs` a loss on logits is checked.
        ref_logits: the reference's logits at the same places.
        teacher_logits: the same of the teacher.
        ids: the tokens.
        temperature: what the logits are divided by.
        pad: the id of padding.
        eos: the id or ids that end a completion.
        segments: the completion of each place of packed rows.
        group_size: completions per prompt, next to each other.
        loss_scale: what the loss was multiplied by for mixed precision.
        watched: from `klamp.watch`.
        example: (policy_logprobs, ref_logprobs) for a function.
        save: write a capture file there, for `klamp check FILE`.
        save_ids: store token ids in it.
        once: check each call site once, and return the first verdict afterwards.
        host: the name of the trainer, for the capture.

    Raises:
        TensorError, ShapeError: tensors that cannot be checked, or a copy that the loss was not computed from.
        ConfigError: arguments that do not go together.
    """
    if not isinstance(loss, Tensor):
        from klamp.audit.examine import check_function

        return check_function(loss, example=example, means=means)
    key = _key(loss, once)
    if (known := _checked_before(key)) is not None:
        return known
    if policy_logprobs is None and logits is None:
        policy_logprobs = _tapped()
    teacher = teacher_logits if teacher_logits is not None else ref_logits

    def on_logits() -> Verdict:
        from klamp.audit.logits import check_logits

        if save is not None:
            raise ConfigError("a check of logits writes no capture", got=f"save={save!r}", fix="leave save out")
        return check_logits(loss, logits, teacher, mask=mask, ids=ids, means=means, beta=beta, temperature=temperature)

    if policy_logprobs is None:
        return _remember(key, on_logits())
    batch = _Batch(loss, policy_logprobs, mask)
    scores = {"ref_logprobs": ref_logprobs, "old_logprobs": old_logprobs, "sampler_logprobs": sampler_logprobs}
    batch.add(**scores, baseline=baseline, advantages=advantages, rewards=rewards, segments=segments, ids=ids)
    batch.facts.update(means=means, clip=clip, kl_in=kl_in, group_size=group_size, pad=pad, host=host)
    batch.facts["beta"] = None if beta is None else float(beta)
    batch.facts["eos"] = eos if eos is None or isinstance(eos, int) else list(eos)
    batch.facts["temperature"] = temperature
    if not batch.differentiate(loss_scale, watched):
        from_logits = logits is not None and logits.requires_grad
        return _remember(key, on_logits() if from_logits else Verdict.of([finding("not-in-loss")]))
    if logits is not None:
        batch.compare_logits(logits, teacher, temperature)
    verdict = conclude(Capture(arrays=batch.arrays, facts=batch.facts))
    if save is not None:
        stored = {k: x for k, x in batch.arrays.items() if k != "ids" or save_ids}
        Capture(arrays=stored, facts=batch.facts).save(save)
    return _remember(key, verdict)


def _key(loss: Tensor, once: bool) -> Any:
    """The call site outside of klamp and the operations of the loss; None: every call is checked."""
    if not once:
        return None
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("klamp."):
        frame = frame.f_back
    site = ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return (*site, _operations(loss))


def _operations(loss: Tensor) -> tuple[Any, ...]:
    """The names of the nearest operations of a loss and how they are joined: the same in each step of a loop."""
    found: list[Any] = []
    layer = [loss.grad_fn]
    for _ in range(12):
        layer = [parent for node in layer if node is not None for parent, _ in node.next_functions][:64]
        found.append(tuple("-" if node is None else type(node).__name__ for node in layer))
    return tuple(found)


def _checked_before(key: Any) -> Verdict | None:
    """The verdict of an earlier call here; one that could not tell is tried again at calls 2, 4, 8, ..."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return Verdict(ok=None, not_checked={"this data-parallel rank": "rank 0 is checked"})
    if key is None or key not in _SEEN:
        return None
    calls, verdict = _SEEN[key]
    _SEEN[key] = (calls + 1, verdict)
    if verdict.ok is None and (calls + 1) & calls == 0:
        return None
    again = [verdict.summary] * bool(verdict.summary) + ["of an earlier call here (once=False checks each call)"]
    return replace(verdict, summary=", ".join(again))


def _remember(key: Any, verdict: Verdict) -> Verdict:
    """Keep a verdict for its call site, and warn of what is wrong."""
    if key is not None:
        _SEEN[key] = (_SEEN.get(key, (1,))[0], verdict)
    for each in verdict.findings:
        if each.level == "wrong":
            warnings.warn(f"klamp check: {each.what}. Fix: {each.fix}", KLWarning, stacklevel=4)
    return verdict


def _tapped() -> Tensor:
    if not _TAPPED:
        raise ConfigError(
            "klamp.check does not know the log-probabilities",
            got="neither policy_logprobs nor logits",
            why="the verdict follows from the gradient in them",
            fix="pass policy_logprobs=, or compute the loss from klamp.tap(logp)",
        )
    return _TAPPED[0]


class _Batch:
    """The arrays and facts of a capture, from a loss and its tensors."""

    def __init__(self, loss: Tensor, policy: Tensor | Sequence[Tensor], mask: Tensor | Sequence[Tensor] | None) -> None:
        if loss.numel() != 1 or not loss.requires_grad:
            raise TensorError(
                "the loss must be one number with a gradient",
                got=f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}",
                fix="pass the scalar that backward is called on",
            )
        self.loss = loss
        self.pieces: list[Tensor] | None = None if isinstance(policy, Tensor) else list(policy)
        tensors = [policy] if isinstance(policy, Tensor) else self.pieces or []
        if not tensors or not all(isinstance(x, Tensor) and x.requires_grad for x in tensors):
            raise TensorError(
                "policy_logprobs has no gradient",
                got="a tensor with requires_grad=False",
                why="the loss cannot have been computed from it",
                fix="pass the tensor before .detach(), the one that the loss was computed from",
            )
        self.inputs, dtype = tensors, tensors[0].dtype
        self.arrays: dict[str, Any] = {}
        self.arrays["policy_logprobs"] = self.wide("policy_logprobs", policy)
        shape = self.arrays["policy_logprobs"].shape
        if mask is None:
            lengths = [len(x) for x in self.pieces] if self.pieces else [shape[1]] * shape[0]
            self.arrays["mask"] = np.arange(shape[1])[None] < np.array(lengths)[:, None]
        else:
            self.arrays["mask"] = self.wide("mask", mask) > 0
        self.facts: dict[str, Any] = {
            "dtype": str(dtype).removeprefix("torch."),
            "eps": roundoff(torch.finfo(dtype).eps, torch.finfo(loss.dtype).eps),
            "loss": float(loss.detach()),
            "findings": [],
        }

    def wide(self, name: str, x: Any) -> Any:
        """A tensor, or a list of tensors, as [B, T] in float64 on the CPU."""
        if isinstance(x, Tensor | float | int):
            array = torch.as_tensor(x).detach().double().cpu().numpy()
            array = array[None] if array.ndim == 1 and name not in ("advantages", "rewards") else array
        elif len(x) and all(isinstance(each, Tensor) and each.ndim == 1 for each in x):
            width = max(len(each) for each in x)
            array = np.zeros((len(x), width))
            for row, each in enumerate(x):
                array[row, : len(each)] = each.detach().double().cpu().numpy()
        else:
            array = np.array([float(each) for each in x])
        known = self.arrays.get("policy_logprobs")
        if name == "baseline" and known is not None:
            array = np.broadcast_to(array, known.shape)
        if name == "advantages" and known is not None and array.ndim == 2 and array.shape[1] == 1 < known.shape[1]:
            array = array[:, 0]
        per_row = name in ("advantages", "rewards") and array.ndim == 1
        if known is not None and not per_row and array.shape != known.shape:
            what, got = f"{name} does not have the shape of policy_logprobs", f"{array.shape} beside {known.shape}"
            raise ShapeError(what, got=got, why="all values are of the same tokens", fix="cut or pad it to [B, T]")
        if per_row and known is not None and "segments" not in self.arrays and len(array) != len(known):
            got = f"{len(array)} numbers for {len(known)} completions"
            fix = "pass [B], or [B, T]; with packed rows one per segment, and segments="
            raise ShapeError(f"{name} does not have one number per completion", got=got, fix=fix)
        return array

    def add(self, **named: Any) -> None:
        if named.get("segments") is not None:
            self.arrays["segments"] = self.wide("segments", named.pop("segments")).astype(int)
        for name, x in named.items():
            if x is not None:
                self.arrays[name] = self.wide(name, x)
        if "ids" in self.arrays:
            self.arrays["ids"] = self.arrays["ids"].astype(int)

    def differentiate(self, scale: float, watched: Watched | None) -> bool:
        """Take d loss / d log-probability, and where it helps its own derivatives; whether the loss depends on them."""
        first = self._gradient(self.loss)
        if first is None and any(is_copy(x, self.loss) for x in self.inputs):
            raise TensorError(
                "the loss was not computed from this policy_logprobs",
                got="no gradient reaches it",
                why="a copy (logp * mask, flat[None], logp.float()) is another tensor than the one in the loss",
                fix="pass the tensor that the loss was computed from, before any slice, cast or product; "
                "or compute the loss from klamp.tap(logp)",
            )
        if first is None:
            return False
        self.scale = scale
        self._store("gradient", first)
        self.facts |= {"loss": self.facts["loss"] / scale, "around": reaches_around(self.loss, self.inputs, watched)}
        ref, mask = self.arrays.get("ref_logprobs"), self.arrays["mask"]
        apart = None if ref is None or not mask.any() else np.square(self.arrays["policy_logprobs"] - ref)[mask].mean()
        near = apart is not None and apart <= NEAR_ZERO**2
        try:
            if near or watched is not None:
                self._higher(watched, near=near)
        except (RuntimeError, ConfigError, NotImplementedError) as error:  # a compiled or custom loss may refuse
            told = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            self._say(finding("no-second-derivative", error=told))
        return True

    def _store(self, name: str, parts: Sequence[Tensor] | None) -> None:
        """Keep one tensor per input, divided by the scale of the loss; None: zeros."""
        parts = [torch.zeros_like(x) for x in self.inputs] if parts is None else parts
        self.arrays[name] = self.wide(name, parts if self.pieces is not None else parts[0]) / self.scale

    def _say(self, *findings: Finding) -> None:
        self.facts["findings"] += [vars(x) | {"evidence": dict(x.evidence)} for x in findings]

    def _gradient(self, y: Tensor, *, create_graph: bool = False) -> list[Tensor] | None:
        if not y.requires_grad:
            return None
        found = torch.autograd.grad(y, self.inputs, retain_graph=True, create_graph=create_graph, allow_unused=True)
        if all(x is None for x in found):
            return None
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, self.inputs, strict=True)]

    def _higher(self, watched: Watched | None, *, near: bool) -> None:
        """The second and third derivative near the reference; of a watched loss the part of the advantages."""
        live = self._gradient(self.loss, create_graph=True) or []
        if not any(x.requires_grad for x in live):
            if any(type(node).__name__.startswith("CompiledFunction") for node in nodes_of(self.loss)):
                raise RuntimeError("it is compiled")
        elif watched is not None:
            self._watched(live, watched)
        if near:
            second = self._gradient(_sum(live), create_graph=True)
            self._store("second", second)
            self._store("third", None if second is None else self._gradient(_sum(second)))

    def _watched(self, parts: Sequence[Tensor], watched: Watched) -> None:
        """The advantages' part of the gradient, and where the loss uses the reference."""
        live = [x for x in parts if x.requires_grad]
        push = None if watched.advantages is None else _along(live, watched.advantages)
        if push is not None:
            dense = iter(push)
            self._store("policy_part", [next(dense) if x.requires_grad else x for x in parts])
            if not np.any(self.arrays["policy_part"]):
                del self.arrays["policy_part"]
        if watched.ref_logprobs is not None and self.pieces is None:
            ref = watched.ref_logprobs
            in_value, in_gradient = (
                torch.autograd.grad(y, ref, retain_graph=True, allow_unused=True)[0] for y in (self.loss, _sum(live))
            )
            used = [x is not None and bool(x.abs().sum() > 0) for x in (in_value, in_gradient)]
            self.facts["ref_detached"] = used == [True, False]
            self._inner_shift(live[0], ref)

    def _inner_shift(self, g: Tensor, ref: Tensor) -> None:
        places = np.argwhere(self.arrays["mask"])
        offsets = set()
        for row, at in places[np.linspace(0, len(places) - 1, min(4, len(places))).astype(int)]:
            touched = torch.autograd.grad(g[row, at], ref, retain_graph=True, allow_unused=True)[0]
            where = torch.nonzero(touched) if touched is not None else torch.empty(0, 2)
            if len(where) == 1 and int(where[0, 0]) == row:
                offsets.add(int(where[0, 1]) - int(at))
        if len(offsets) == 1 and (offset := offsets.pop()):
            what = f"the loss compares each token with ref_logprobs {abs(offset)} place(s) "
            what += "after it" if offset > 0 else "before it"
            self._say(finding("shift", what=what, tensor="ref_logprobs", shift=offset))

    def compare_logits(self, logits: Tensor, other: Tensor | None, temperature: float) -> None:
        """Do the log-probabilities follow from the logits; and which divergence passes beside them?"""
        from klamp.audit.logits import beside, reproduce

        if "ids" not in self.arrays:
            why = "a log-probability is that of one id"
            raise ConfigError("logits need the tokens", got="ids=None", why=why, fix="pass ids=")
        self.facts["logits_seen"] = True
        self._say(*reproduce(self.arrays, logits, other, temperature))
        if other is not None and self.facts["around"] and logits.requires_grad and self.pieces is None:
            self.facts["beside"] = beside(self.loss, self.inputs[0], logits, other, self.arrays, temperature)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.sum() for x in parts]).sum()


def _along(g: Sequence[Tensor], direction: Tensor) -> list[Tensor] | None:
    """The derivative of g in the direction of a tensor's own value: exact for whatever is linear in it."""
    dummies = [torch.zeros_like(x, requires_grad=True) for x in g]
    product = _sum([x * dummy for x, dummy in zip(g, dummies, strict=True)])
    back = torch.autograd.grad(product, direction, create_graph=True, allow_unused=True)[0]
    if back is None or not back.requires_grad:
        return None
    along = (back * direction.detach()).sum()
    found = torch.autograd.grad(along, dummies, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if y is None else y for x, y in zip(g, found, strict=True)]


COPIES = ("View", "UnsafeView", "Reshape", "Expand", "Squeeze", "Unsqueeze", "Transpose", "TBackward", "Slice")
COPIES += ("Select", "Index", "Alias", "Clone", "ToCopy", "Mul")
"""Operations, by the start of their names, that make a copy of log-probabilities."""


def nodes_of(loss: Tensor, stop: Collection[Any] = ()) -> set[Any]:
    """The operations that a loss was computed by, as far as `stop`."""
    nodes = set[Any]()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes and node not in stop:
            nodes.add(node)
            stack += [parent for parent, _ in node.next_functions]
    return nodes


def is_copy(x: Tensor, loss: Tensor) -> bool:
    """Whether a tensor is a slice, cast or product of one in the loss, or shares nothing with the loss."""
    nodes, node = nodes_of(loss), x.grad_fn
    while node is not None and type(node).__name__.startswith(COPIES):
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
        if node in nodes:
            return True
    leaf = getattr(node, "variable", None)
    return node is None or (leaf is not None and node not in nodes)


def reaches_around(loss: Tensor, inputs: Sequence[Tensor], watched: Watched | None) -> bool:
    """Whether the loss reaches a parameter by a path that avoids these tensors."""
    # The nodes themselves, which keeps them alive: the id of a node that is gone may be that of another one.
    stop = {x.grad_fn for x in inputs if x.grad_fn is not None}
    known = {id(x) for x in (*inputs, *(watched or ())) if isinstance(x, Tensor)}
    leaves = (getattr(node, "variable", None) for node in nodes_of(loss, stop))
    return any(leaf is not None and id(leaf) not in known for leaf in leaves)
