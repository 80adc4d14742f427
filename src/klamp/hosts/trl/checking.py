"""`klamp.check` inside TRL's trainers: on one micro-batch before training, or at some training steps."""

from __future__ import annotations

import copy
import logging
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainerCallback

from klamp.audit.examine import of_beta
from klamp.audit.micro_batch import check as check_loss
from klamp.audit.trainers import FixedLogits
from klamp.audit.verdict import Verdict, finding
from klamp.core.arguments import describe
from klamp.errors import ConfigError, KLWarning
from klamp.hosts.common.coefficient import TEACHER, loss_mask, replaced
from klamp.hosts.trl.reference import plain_model, predicted
from klamp.hosts.trl.session import progress, session_of

REF, OLD, SAMPLER = (f"{name}_per_token_logps" for name in ("ref", "old", "sampling"))
SHIFT, EQUAL = 0.3, 0.02
"""How far `check` moves a reference that is nearer to the policy than `EQUAL`, in nats."""
ROWS, POSITIONS, TOKENS = 4, 64, 1024
"""The size of the logits on which a loss on hidden states is checked."""
EXACT = (
    "kl_estimator='exact' sums over the vocabulary, out of this check's sight: klamp.check(loss, logits=, ref_logits=, "
    "ids=) sees it, and `klamp explain` shows what the configuration follows"
)
Means = Literal["reverse", "forward", "js"]


class Listener:
    """Checks a trainer's loss until advantages are not all 0; `move`: moves a reference that equals the policy."""

    others: ClassVar[list[Callable[[Any], None]]] = []
    """What listens to the losses of other packages; see `klamp.hosts.unsloth.hooks`."""

    def __init__(
        self, trainer: Any, tell: Callable[[Verdict], Any], means: Means | None, *, save: Any = None, move: bool = False
    ) -> None:
        self.trainer, self.tell, self.save, self.move = trainer, tell, save, move
        self.means: Means | None = means
        self.scores, self.hidden, self.logits = list[Tensor](), list[Tensor](), list[Tensor]()
        self.calls, self.done, self.stack = list[Any](), False, ExitStack()
        self.reference: Tensor | None = None

    def __enter__(self) -> Listener:
        self._keep("_get_per_token_logps_and_entropies", lambda result: self.scores.append(result[0]))
        self._keep("_read", lambda result: self.scores.append(result[1]))
        self._keep("_get_last_hidden_state", self.hidden.append)
        self.stack.enter_context(replaced(self.trainer, "compute_loss", partial(self._loss, self.trainer.compute_loss)))
        for listen in self.others:
            listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _keep(self, name: str, keep: Callable[[Any], None]) -> None:
        inner: Any = getattr(self.trainer, name, None)

        def method(*args: Any, **options: Any) -> Any:
            result = inner(*args, **options)
            keep(result)
            return result

        if inner is not None:
            self.stack.enter_context(replaced(self.trainer, name, method))

    def _loss(self, inner: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        teacher, shift = getattr(self.trainer, "teacher_model", None), None
        for tensors in (self.scores, self.hidden, self.logits, self.calls):
            tensors.clear()
        with ExitStack() as hooks:
            for scored_model in (model, teacher) if "labels" in inputs and teacher is not None else ():
                hook = scored_model.register_forward_hook(lambda *x: self.logits.append(x[-1].logits))
                hooks.callback(hook.remove)
            result = inner(model, inputs, *more, **named)
        if self.move and (shift := self._shift(inputs)) is not None:
            inputs = {**inputs, REF: inputs[REF] + shift}
            self.scores.clear()
            result = inner(model, inputs, *more, **named)
        loss = result[0] if isinstance(result, tuple) else result
        if self.done or not loss.requires_grad:  # an evaluation
            return result
        with warnings.catch_warnings(action="ignore", category=KLWarning):
            verdict = _attempt(lambda: self._verdict(loss, inputs))
        if shift is not None:
            verdict = replace(verdict, findings=(*verdict.findings, finding("reference-moved", shift=SHIFT)))
        self.done = inputs.get("advantages") is None or bool((inputs["advantages"] != 0).any())
        self.tell(verdict)
        return result

    def _with_gradient(self) -> list[Tensor]:
        # Unsloth's own method returns None, and hidden states to its loss function
        return [scores for scores in self.scores if scores is not None and scores.requires_grad]

    def _shift(self, inputs: Any) -> Tensor | None:
        """What is added to the reference's log-probabilities if they equal the policy's; None: nothing."""
        ref, scores, session = inputs.get(REF), self._with_gradient(), session_of(self.trainer)
        if ref is None or len(scores) != 1 or (session is not None and session.term.placement != "loss"):
            return None
        wave = SHIFT * torch.arange(ref.numel(), device=ref.device, dtype=ref.dtype).mul(2.4).sin().reshape(ref.shape)
        equal = (scores[0].detach() - ref)[loss_mask(inputs)].abs().max() < EQUAL
        return (ref + wave).clamp(max=0) - ref if equal else None

    def _verdict(self, loss: Tensor, inputs: Any) -> Verdict:
        scores, advantages = self._with_gradient(), inputs.get("advantages")
        if call := next((call for call in self.calls if call.new.requires_grad), None):
            self.reference = call.ref
            tokens = {"mask": call.mask, "ids": call.input_ids, "old_logprobs": call.old}
            tokens |= {"sampler_logprobs": call.sampling, "advantages": call.advantages}
            return self._of_scores(loss, call.new, call.ref, tokens, ended=True)
        if len(scores) == 1 and "completion_ids" in inputs:
            self.reference = inputs.get(REF)
            ref = inputs.get(TEACHER) if self.reference is None else self.reference
            if advantages is None and len(self.scores) == 2:  # klamp's distillation; the second pass is the teacher's
                ref = self.scores[1]
            tokens = {"mask": loss_mask(inputs), "ids": inputs["completion_ids"], "old_logprobs": inputs.get(OLD)}
            tokens |= {"sampler_logprobs": inputs.get(SAMPLER), "advantages": advantages}
            # with tools each turn of a conversation has an end
            return self._of_scores(loss, scores[0], ref, tokens, ended="tool_mask" not in inputs)
        if len(self.hidden) == 2 and not scores and session_of(self.trainer) is None:
            return self._of_hidden_states(inputs)
        if len(self.logits) == 2:
            student, teacher = self.logits
            return self._of_logits(loss, student, teacher, pad(inputs["labels"][:, 1:], (0, 1), value=-100))
        return Verdict.of([finding("no-log-probabilities")])

    def _of_scores(
        self, loss: Tensor, policy: Tensor, ref: Tensor | None, tokens: dict[str, Any], *, ended: bool
    ) -> Verdict:
        trainer, (beta, way, where) = self.trainer, self._meant(ref)
        if ref is None or tokens["advantages"] is None:  # another KL than GRPO's has no coefficient that is known here
            beta = where = None
        tokenizer = getattr(trainer, "_tokenizer", trainer.processing_class)
        ends = {"eos": tokenizer.eos_token_id} if ended else {"pad": tokenizer.pad_token_id}
        clip = (trainer.epsilon_low, trainer.epsilon_high) if hasattr(trainer, "epsilon_high") else None
        verdict = check_loss(
            loss, policy_logprobs=policy, ref_logprobs=ref, beta=beta, means=self.means or way, kl_in=where, clip=clip,
            save=self.save, once=False, host="trl", **tokens, **ends,
        )  # fmt: skip
        session = session_of(trainer)
        if session is None or session.term.value != "exact":
            return verdict
        mended = (replace(x, fix=EXACT) if x.code == "path-around" else x for x in verdict.findings)
        return replace(verdict, findings=tuple(mended))

    def _meant(self, ref: Any) -> tuple[Any, Any, Any]:
        """The coefficient of a KL to `ref`, its direction, and where it enters, as far as the trainer says."""
        trainer, session = self.trainer, session_of(self.trainer)
        if session is not None and session.teacher is not None and ref is not None and ref is not self.reference:
            teacher = session.teacher
            return teacher.coefficient(trainer), teacher.config.teacher_direction, teacher.term.placement
        if session is not None and session.control is not None:
            way = "forward" if session.term.gradient == "forward" else "reverse"
            return session.control.beta(*progress(trainer)), way, session.term.placement
        return getattr(trainer, "beta", None), "reverse", "loss"

    def _of_logits(self, loss: Tensor, logits: Tensor, teacher: Tensor, labels: Tensor) -> Verdict:
        beta = float(self.trainer.beta)  # TRL's name for the divergence
        return check_loss(
            loss, logits=logits, teacher_logits=teacher, mask=labels != -100, ids=labels.clamp(min=0), host="trl",
            means=self.means or of_beta(beta), beta=beta, temperature=float(self.trainer.temperature), once=False,
        )  # fmt: skip

    def _of_hidden_states(self, inputs: Any) -> Verdict:
        """Call the trainer's loss once more, on logits of this micro-batch at a part of the vocabulary."""
        trainer, teacher = self.trainer, self.trainer.teacher_model
        names = ("completion_ids", "completion_mask", "tool_mask")
        part = {name: inputs[name][:ROWS, :POSITIONS] for name in names if name in inputs}
        part |= {name: torch.ones_like(part["completion_ids"][:, :1]) for name in ("prompt_ids", "prompt_mask")}
        with torch.no_grad():
            pairs = zip((trainer.model, teacher), self.hidden, strict=True)
            whole = [predicted(plain_model(trainer, x), h[:ROWS, :POSITIONS]).logits() for x, h in pairs]
            width, ids = min(x.shape[-1] for x in whole), part["completion_ids"]
            score = torch.stack([x[..., :width].amax((0, 1)) for x in whole]).amax(0)
            score[ids[ids < width]] = torch.inf
            chosen = score.topk(min(TOKENS, width)).indices.sort().values
            student, other = (pad(x[..., chosen].float(), (0, 0, 0, 1)) for x in whole)
        labels = torch.searchsorted(chosen, ids).masked_fill(~loss_mask(part), -100)
        with replaced(trainer, "teacher_model", FixedLogits(other)):
            loss, *_ = trainer._compute_loss(FixedLogits(student.requires_grad_()), part, None)
        return self._of_logits(loss, student, other, pad(labels, (0, 1), value=-100))


def _attempt(run: Callable[[], Verdict]) -> Verdict:
    try:
        return run()
    except Exception as error:  # a check stops no training
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Verdict.of([finding("check-failed", error=text)])


@contextmanager
def _undisturbed(trainer: Any) -> Iterator[None]:
    """A context that computes no gradient and restores trainer, model and random numbers."""
    own, before, accelerator = vars(trainer), dict(vars(trainer)), trainer.accelerator
    modes, loaders = [(module, module.training) for module in trainer.model.modules()], list(accelerator._dataloaders)
    drawn, arrays, session = random.getstate(), np.random.get_state(), session_of(trainer)
    counts = {name for name, x in before.items() if name == "state" or (name[0] == "_" and isinstance(x, dict))}
    own.update({name: copy.deepcopy(before[name]) for name in counts})
    if session is not None:
        parts = {name: copy.deepcopy(getattr(session, name)) for name in ("control", "windows", "rollout", "warned")}
        trainer._klamp = replace(session, record=None, **parts)
    without_backward = replaced(accelerator, "backward", lambda *_, **__: None)
    try:
        with without_backward, torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(arrays)
        accelerator._dataloaders[:] = loaders
        for module, mode in modes:
            module.training = mode
        own.clear()
        own.update(before)


def check(trainer: Any, *, means: Means | None = None) -> Verdict:
    """Is the KL in this trainer's loss right? Computes the loss of one micro-batch, without an update.

    Call it on each process, after the trainer is built and before `train()`. It generates completions and calls the
    reward functions. Parameters, gradients, metrics, counters and random numbers do not change. Before training the
    reference equals the policy, and no KL would show: the check then moves the reference's log-probabilities by up to
    0.3 nats.

    Args:
        trainer: a GRPO or distillation trainer of TRL's, klamp's or Unsloth's, or of a class derived from one.
        means: the divergence that is meant; None: the reverse KL, or the divergence that the trainer's arguments name.

    Returns:
        The verdict; "cannot tell" with the finding `check-failed` if the trainer raises an error.

    Raises:
        ConfigError: no trainer.
    """
    if not all(hasattr(trainer, name) for name in ("compute_loss", "training_step", "accelerator")):
        why, fix = "it runs the trainer's own generation, rewards and loss on one micro-batch", "check(trainer)"
        raise ConfigError("check takes a trainer of TRL's, built already", got=describe(trainer), why=why, fix=fix)
    verdicts = list[Verdict]()

    def run() -> Verdict:
        with _undisturbed(trainer), Listener(trainer, verdicts.append, means, move=True) as listener:
            steps = trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
            loader = trainer.get_train_dataloader()
            for batch in islice(loader, steps):  # until the advantages are not all 0
                if not listener.done:
                    trainer.training_step(trainer.model_wrapped, batch, None)
            getattr(loader, "end", bool)()  # accelerate then notes that the iteration is over
        return verdicts[-1]

    verdict = _attempt(run)
    return verdict if trainer.is_world_process_zero() else Verdict(ok=None, not_checked={"this process": "see rank 0"})


class CheckCallback(TrainerCallback):
    """Checks the loss of a TRL trainer at some of its steps: `callbacks=[CheckCallback()]`.

    A wrong verdict is a `KLWarning`, once for the same findings; each other verdict is logged. The main process checks.

    Args:
        at: the steps, from 1. At step 1 the policy is the reference: the KL shows only in the loss's derivatives.
        means: the divergence that is meant; None: the reverse KL, or the divergence that the trainer's arguments name.
        save: write `check-STEP.json` and a capture file, `check-STEP.safetensors`, into output_dir.
        raise_if_wrong: raise WrongKL before the step's update.

    Attributes:
        verdicts: step -> verdict.
    """

    def __init__(
        self, at: Collection[int] = (1, 10, 100), *, means: Means | None = None, save: bool = False,
        raise_if_wrong: bool = False,
    ) -> None:  # fmt: skip
        self.at, self.save, self.raise_if_wrong = at, save, raise_if_wrong
        self.means: Means | None = means
        self.verdicts, self.warned, self.stack = dict[int, Verdict](), set[tuple[str, ...]](), ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen to the step if it is due."""
        self.stack.close()
        step, frame = state.global_step + 1, sys._getframe(1)
        file = Path(str(args.output_dir)) / f"check-{step}.safetensors"
        while step in self.at and state.is_world_process_zero and frame is not None:
            trainer, frame = frame.f_locals.get("self"), frame.f_back  # transformers hands over no trainer
            if self in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
                tell = lambda verdict: self._tell(step, verdict, file)  # noqa: E731
                self.stack.enter_context(Listener(trainer, tell, self.means, save=file if self.save else None))
                return

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen no longer."""
        self.stack.close()

    def _tell(self, step: int, verdict: Verdict, file: Path) -> None:
        self.verdicts[step] = verdict
        if self.save:
            with suppress(OSError):
                file.with_suffix(".json").write_text(verdict.to_json() + "\n", encoding="utf-8")
        wrong = verdict.codes("wrong")
        if wrong and wrong not in self.warned:
            warnings.warn(f"step {step}: {verdict}", KLWarning, stacklevel=2)
        elif not wrong:
            logging.getLogger("klamp").info("step %d: %s", step, verdict)
        self.warned.add(wrong)
        if self.raise_if_wrong:
            verdict.raise_if_wrong()
