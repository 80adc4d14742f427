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
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from klamp.audit.capture import PER_COMPLETION, TYPES, Capture, roundoff
from klamp.audit.conclude import NEAR_ZERO, conclude
from klamp.audit.function import check_function
from klamp.audit.logits import beside, check_logits, not_computed_from, reproduce
from klamp.audit.verdict import Verdict, finding
from klamp.errors import ConfigError, KLWarning, ShapeError, TensorError

_VERDICTS: dict[Any, tuple[int, Verdict]] = {}  # call site -> the number of calls, the first verdict that answers
_TAPPED: list[Tensor] = []


class Watched(NamedTuple):
    """Recording copies of the inputs of a loss, from `watch`; None where nothing was passed."""

    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None


def watch(*, ref_logprobs: Tensor | None = None, advantages: Tensor | None = None) -> Watched:
    """Return the same numbers as tensors that record what the loss does with them.

    Compute the loss from them and pass the result as `klamp.check(..., watched=...)`: the policy loss's part of the
    gradient is then exact for every surrogate, and a shift inside the loss or a detached KL is certain.
    Shapes, numbers and the loss's gradient in the policy do not change.
    """
    copies = [None if x is None else x.detach().clone().requires_grad_() for x in (ref_logprobs, advantages)]
    for copy in copies:
        if copy is not None:
            copy.recorded_by_klamp = True  # pyright: ignore[reportAttributeAccessIssue]
    return Watched(*copies)


def tap(policy_logprobs: Tensor) -> Tensor:
    """Return the argument, and remember it as the tensor that the loss is computed from, for `klamp.check(loss)`."""
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
    advantages: Tensor | Sequence[Tensor] | Sequence[float] | None = None,
    rewards: Tensor | Sequence[Tensor] | Sequence[float] | None = None,
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
    Gradient: read, never changed. Second derivatives are taken near the reference and of a watched loss; if the loss
    refuses them, the answer to what they would show is "cannot tell".
    Shapes: [B, T] for everything per token, [B] or [B, T] for advantages, [B, T, V] for logits; lists of 1-D tensors
    and packed rows with `segments` are accepted.

    Args:
        loss: the scalar just before backward; or a function, called as `loss(policy_logprobs, ref_logprobs)`.
        policy_logprobs: the very tensor that the loss was computed from; not needed after `tap`, or with logits alone.
        mask: True = a trained token.
        ref_logprobs: log-probabilities under the reference, or under the teacher.
        old_logprobs, sampler_logprobs: under the policy at the start of the rollout's updates; as the sampler reported.
        advantages: as the loss uses them, before a KL that the loss itself puts into them.
        rewards: [B]; shows whether the advantages hold a KL.
        beta: the coefficient that the KL is meant to have; negative beyond a teacher.
        means: the divergence that is meant.
        baseline: what the loss subtracts from the log-ratio.
        clip: the clip range of the ratio, as distances from 1.
        kl_in: where the KL is meant to be; "loss" lets a missing one be called wrong.
        logits: the policy's, at the places of `policy_logprobs`; without `policy_logprobs` a loss on logits is checked.
        ref_logits, teacher_logits: the logits of the reference or the teacher at the same places.
        ids, temperature: the tokens; what the logits are divided by.
        pad, eos: the id of padding; the id or ids that end a completion.
        segments, group_size: the completion of each place of packed rows; completions per prompt, side by side.
        loss_scale: what the loss was multiplied by for mixed precision.
        watched: from `klamp.watch`.
        example: (policy_logprobs, ref_logprobs) for a function.
        save, save_ids: write a capture file there, for `klamp check FILE`; store token ids in it.
        once: check each call site once, and return the first verdict afterwards.
        host: the name of the trainer, for the capture.

    Raises:
        TensorError, ShapeError: tensors that cannot be checked, or a copy that the loss was not computed from.
        ConfigError: arguments that do not go together.
    """
    call = SimpleNamespace(**locals())
    if not isinstance(loss, Tensor):
        return check_function(loss, example=example, means=means)
    if policy_logprobs is None and logits is None:
        call.policy_logprobs = next(iter(_TAPPED), None)
    return _once(_key(loss) if once else None, lambda: _checked(call))


def _checked(call: SimpleNamespace) -> Verdict:
    teacher = call.ref_logits if call.teacher_logits is None else call.teacher_logits
    if call.policy_logprobs is not None:
        batch = _Batch(call)
        if batch.differentiate():
            batch.compare_logits(teacher)
            capture = Capture(arrays=batch.arrays, facts=batch.facts)
            if call.save is not None:
                capture.save(call.save, ids=call.save_ids)
            return conclude(capture)
        if call.logits is None or not call.logits.requires_grad:
            return Verdict.of([finding("not-in-loss")])
    if call.save is not None:
        why, fix = "a capture holds log-probabilities", "leave save out"
        raise ConfigError("a check of logits writes no capture", got=f"save={call.save!r}", why=why, fix=fix)
    options = {name: getattr(call, name) for name in ("mask", "ids", "beta", "temperature")}
    return check_logits(call.loss, call.logits, teacher, means=call.means, **options)


def _once(key: Any, compute: Callable[[], Verdict]) -> Verdict:
    """The verdict of a call site, computed at its first call; "cannot tell" is tried again at calls 2, 4, 8, ..."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return Verdict(ok=None, not_checked={"this data-parallel rank": "rank 0 is checked"})
    calls, earlier = _VERDICTS.get(key, (0, None))
    calls += 1
    if earlier is not None and (earlier.ok is not None or calls & (calls - 1)):
        _VERDICTS[key] = calls, earlier
        again = "of an earlier call here (once=False checks each call)"
        return replace(earlier, summary=", ".join(filter(None, (earlier.summary, again))))
    verdict = compute()
    if key is not None:
        _VERDICTS[key] = calls, verdict
    for wrong in (x for x in verdict.findings if x.level == "wrong"):
        warnings.warn(f"klamp check: {wrong.what}. Fix: {wrong.fix}", KLWarning, stacklevel=3)
    return verdict


def _key(loss: Tensor) -> Any:
    """The call site outside of klamp and the nearest operations of the loss: the same in each step of a loop."""
    frames = (x for x, _ in walk_stack(sys._getframe()) if not str(x.f_globals.get("__name__")).startswith("klamp."))
    frame = next(frames, None)
    layer, layers = [loss.grad_fn], list[Any]()
    for _ in range(12):
        layer = [parent for node in layer if node is not None for parent, _ in node.next_functions][:64]
        layers.append(tuple("-" if node is None else type(node).__name__ for node in layer))
    return frame and (frame.f_code.co_filename, frame.f_lineno), tuple(layers)


FACTS = ("means", "clip", "kl_in", "group_size", "pad", "eos", "temperature", "host")
ARRAYS = ("segments", "mask", "ref_logprobs", "old_logprobs", "sampler_logprobs", "baseline", *PER_COMPLETION, "ids")


class _Batch:
    """The arrays and facts of a capture, from the arguments of a check."""

    def __init__(self, call: SimpleNamespace) -> None:
        loss, policy = call.loss, call.policy_logprobs
        if loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            why, fix = "the verdict follows from its gradient", "pass the scalar that backward is called on"
            raise TensorError("the loss must be one number with a gradient", got=got, why=why, fix=fix)
        self.call, self.loss, self.is_list = call, loss, not isinstance(policy, Tensor)
        self.inputs: list[Tensor] = list(policy) if self.is_list else [policy]
        if not self.inputs or not all(isinstance(x, Tensor) and x.requires_grad for x in self.inputs):
            got, why = "a tensor with requires_grad=False", "the loss cannot have been computed from it"
            fix = "pass the tensor before .detach(), the one that the loss was computed from"
            raise TensorError("policy_logprobs has no gradient", got=got, why=why, fix=fix)
        dtype = self.inputs[0].dtype
        self.facts: dict[str, Any] = {name: getattr(call, name) for name in FACTS} | {
            "dtype": str(dtype).removeprefix("torch."),
            "eps": roundoff(torch.finfo(dtype).eps, torch.finfo(loss.dtype).eps),
            "loss": float(loss.detach()) / call.loss_scale,
            "beta": None if call.beta is None else float(call.beta),
            "findings": [],
        }
        self.arrays = {"policy_logprobs": np.atleast_2d(_dense(policy))}
        if call.mask is None:
            self._add("mask", [torch.ones_like(x) for x in self.inputs] if self.is_list else torch.ones_like(policy))
        for name in ARRAYS:
            self._add(name, getattr(call, name))

    def _add(self, name: str, x: Any) -> None:
        """Store an array of the shape of policy_logprobs; advantages and rewards may be one number per completion."""
        if x is None:
            return
        array, shape = _dense(x), self.arrays["policy_logprobs"].shape
        if name == "baseline":
            array = np.broadcast_to(array, shape)
        if name not in PER_COMPLETION:
            array = np.atleast_2d(array)
        elif array.shape == (shape[0], 1):
            array = array[:, 0]
        one_each = array.ndim == 1 and ("segments" in self.arrays or len(array) == shape[0])
        if array.shape != shape and not one_each:
            what, why = f"{name} does not fit policy_logprobs", "all values are of the same tokens"
            fix = "pass [B, T]" + ", or [B]; with packed rows one per segment, and segments=" * (name in PER_COMPLETION)
            raise ShapeError(what, got=f"{array.shape} beside {shape}", why=why, fix=fix)
        self.arrays[name] = array.astype(TYPES.get(name, np.float64))

    def differentiate(self) -> bool:
        """Take d loss / d log-probability, and where it helps its own derivatives; whether the loss depends on them."""
        gradient, watched = self._gradient(self.loss), self.call.watched
        if all(x is None for x in gradient):
            if any(is_copy(x, self.loss) for x in self.inputs):
                fix = "; or compute the loss from klamp.tap(logp)"
                raise not_computed_from("this policy_logprobs", "logp * mask, flat[None], logp.float()", fix)
            return False
        self._store("gradient", gradient)
        self.facts["around"] = reaches_around(self.loss, self.inputs, watched)
        ref, mask = self.arrays.get("ref_logprobs"), self.arrays["mask"]
        apart = np.zeros(0) if ref is None else np.square(self.arrays["policy_logprobs"] - ref)[mask]
        near = apart.size > 0 and apart.mean() <= NEAR_ZERO**2
        try:
            if near or watched is not None:
                self._higher(near=near)
        except (RuntimeError, ConfigError, NotImplementedError) as error:  # a compiled or custom loss may refuse
            text = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            self.facts["findings"].append(vars(finding("no-second-derivative", error=text)))
        return True

    def _store(self, name: str, parts: Sequence[Tensor | None]) -> None:
        whole = [torch.zeros_like(x) if g is None else g for g, x in zip(parts, self.inputs, strict=True)]
        self._add(name, whole if self.is_list else whole[0])
        self.arrays[name] /= self.call.loss_scale

    def _gradient(self, y: Tensor, x: Tensor | None = None, *, create_graph: bool = False) -> Sequence[Tensor | None]:
        """The gradient in x, or in the log-probabilities; None where y does not depend on them."""
        inputs = self.inputs if x is None else [x]
        if not y.requires_grad:
            return [None] * len(inputs)
        return torch.autograd.grad(y, inputs, retain_graph=True, create_graph=create_graph, allow_unused=True)

    def _higher(self, *, near: bool) -> None:
        """The second and third derivative near the reference; of a watched loss what advantages and reference do."""
        total = _total(self._gradient(self.loss, create_graph=True))
        compiled = any(type(x).__name__.startswith("CompiledFunction") for x in nodes_of(self.loss))
        if compiled and not total.requires_grad:
            raise RuntimeError("it is compiled")
        if self.call.watched is not None and total.requires_grad:
            self._watched(total, self.call.watched)
        for name in ("second", "third") if near else ():
            parts = self._gradient(total, create_graph=name == "second")
            total = _total(parts)
            self._store(name, parts)

    def _watched(self, total: Tensor, watched: Watched) -> None:
        """The advantages' part of the gradient, and whether the reference is in the loss's value alone."""
        a, ref = watched.advantages, watched.ref_logprobs
        if a is not None and (slope := self._gradient(self.loss, a, create_graph=True)[0]) is not None:
            push = self._gradient((slope * a.detach()).sum())  # exact for a loss that is linear in the advantages
            if any(x is not None and x.any() for x in push):
                self._store("policy_part", push)
        if ref is not None and not self.is_list:
            slopes = [self._gradient(y, ref)[0] for y in (self.loss, total)]
            self.facts["ref_detached"] = [x is not None and bool(x.any()) for x in slopes] == [True, False]

    def compare_logits(self, other: Tensor | None) -> None:
        """Do the log-probabilities follow from the logits; and which divergence passes beside them?"""
        logits, temperature = self.call.logits, self.call.temperature
        if logits is None:
            return
        if "ids" not in self.arrays:
            raise ConfigError("logits need the tokens", got="ids=None", why="each place has one id", fix="pass ids=")
        self.facts["logits_seen"] = True
        self.facts["findings"] += map(vars, reproduce(self.arrays, logits, other, temperature))
        if other is not None and self.facts["around"] and logits.requires_grad and not self.is_list:
            self.facts["beside"] = beside(self.loss, self.inputs[0], logits, other, self.arrays, temperature)


def _total(parts: Sequence[Tensor | None]) -> Tensor:
    return sum((x.sum() for x in parts if x is not None), torch.zeros(()))


def _dense(x: Any) -> Any:
    """A number, a tensor, or a list, as an array in float64 on the CPU; 1-D tensors of a list are padded."""
    if isinstance(x, Tensor | float | int):
        return torch.as_tensor(x).detach().double().cpu().numpy()
    if all(isinstance(part, Tensor) and part.ndim == 1 for part in x):
        return pad_sequence([part.detach().double().cpu() for part in x], batch_first=True).numpy()
    return np.array([float(part) for part in x])


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
    # The nodes themselves, which keeps them alive: a freed node's id may belong to another one.
    stop = {x.grad_fn for x in inputs if x.grad_fn is not None}
    passed = {id(x) for x in (*inputs, *(watched or ())) if isinstance(x, Tensor)}
    leaves = (getattr(node, "variable", None) for node in nodes_of(loss, stop))
    return any(leaf is not None and id(leaf) not in passed for leaf in leaves)
