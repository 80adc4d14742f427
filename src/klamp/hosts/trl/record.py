"""What `klamp report` shows of a TRL run beside its log: completions token by token, answers, settings, versions."""

from __future__ import annotations

import json
import platform
import time
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from klamp._version import __version__
from klamp.config.describe import describe_anchors
from klamp.errors import KLWarning
from klamp.hosts.common.coefficient import loss_mask
from klamp.hosts.common.kl_fields import kl_config, teacher_config
from klamp.hosts.trl.exact import weights_are_split
from klamp.names import ABOUT

COMPLETIONS, ANSWERS, STATE = "completions.jsonl", "answers.jsonl", "trainer_state.json"
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "vllm", "deepspeed")


class ReportCallback(TrainerCallback):
    """Writes into output_dir what `klamp report` shows beside the log of a TRL trainer.

    Give it to `klamp.trl.GRPOTrainer`: `callbacks=[ReportCallback()]`. Completions are those of the main process;
    answers are greedy, to the first prompts of the evaluation set (else of the training set), before and
    after, and left out where the weights are divided among processes. The run is the same one to the last bit.

    Args:
        every: steps between those whose completions are written.
        completions: how many of a step.
        answers: how many prompts are answered before and after.
    """

    def __init__(self, *, every: int = 10, completions: int = 8, answers: int = 4) -> None:
        self.every, self.completions, self.answers = every, completions, answers
        self.trainer: Any = None
        self.about: dict[str, Any] = {}
        self.step, self.written = 0, 0

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(str(self.trainer.args.output_dir))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the settings, and answer before the first step; a run that goes on keeps what was written."""
        if self.trainer is None or not state.is_world_process_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (STATE, *((COMPLETIONS, ANSWERS) if state.global_step == 0 else ())):
            (self.folder / name).unlink(missing_ok=True)
        self.about, self.started = about(self.trainer), time.monotonic()
        self._write()
        if state.global_step == 0:
            self._answer(0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answer after the last step; write the log, which TRL leaves in checkpoints alone, and how long it took."""
        if self.trainer is None or not state.is_world_process_zero:
            return
        self._answer(state.global_step)
        state.save_to_json(str(self.folder / STATE))
        self.about["seconds"] = time.monotonic() - self.started
        self._write()

    def _write(self) -> None:
        (self.folder / ABOUT).write_text(json.dumps(self.about, indent=1, default=str), encoding="utf-8")

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def take(self, inputs: Any, logprobs: torch.Tensor) -> None:
        """Write completions of a micro-batch, as TRL's loss gets it, if their step is due and has not had enough.

        Args:
            inputs: the micro-batch.
            logprobs: of the policy, without gradient. [B, T]
        """
        trainer, step = self.trainer, self.trainer.state.global_step + 1
        self.step, self.written = step, self.written if self.step == step else 0
        due = (step == 1 or step % self.every == 0) and trainer.model.training and trainer.is_world_process_zero()
        rows = range(min(self.completions - self.written, len(logprobs)) if due else 0)
        self.written += len(rows)
        self._append(COMPLETIONS, [self._row(inputs, logprobs, i) for i in rows])

    def _row(self, inputs: Any, logprobs: torch.Tensor, i: int) -> dict[str, Any]:
        tokenizer, there = self.trainer._tokenizer, inputs["completion_mask"][i].bool()
        ids = inputs["completion_ids"][i][there].tolist()
        lists = {"policy": logprobs, "ref": inputs.get("ref_per_token_logps")}
        lists["sampler"] = inputs.get("sampling_per_token_logps")
        told = {f"{name}_logprobs": x[i][there].tolist() for name, x in lists.items() if x is not None}
        return told | {
            "step": self.step,
            "prompt": tokenizer.decode(inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]),
            "completion": tokenizer.decode(ids, skip_special_tokens=True),
            "advantage": float(inputs["advantages"][i].flatten()[0]),
            "tokens": tokenizer.convert_ids_to_tokens(ids),
            "trained": loss_mask(inputs)[i][there].tolist(),
            "ended": bool(ids) and ids[-1] == tokenizer.eos_token_id,
        }

    def _answer(self, step: int) -> None:
        """Answer the first prompts; what goes wrong there ends no run."""
        held_out, train = self.trainer.eval_dataset, self.trainer.train_dataset
        rows, skill = (held_out, "held out") if hasattr(held_out, "select") else (train, "training prompts")
        if weights_are_split(self.trainer) or not hasattr(rows, "select"):
            return
        try:
            found = [answered(self.trainer, rows[i]) for i in range(min(self.answers, len(rows)))]
        except Exception as error:  # a prompt, a reward or a model of another kind
            said = f"klamp's report has no answers: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warnings.warn(said, KLWarning, stacklevel=2)
            return
        self._append(ANSWERS, [{"step": step, "skill": skill, **row} for row in found])


def about(trainer: Any) -> dict[str, Any]:
    """Settings, versions, model, data and KL of a trainer."""
    args, rows = trainer.args, trainer.train_dataset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # said when the arguments were made
        kl, taught = kl_config(args), teacher_config(args)
    versions = {"klamp": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    named = getattr(getattr(rows, "info", None), "dataset_name", None) or "a data set"
    sized = f" of {len(rows):,} prompts" if hasattr(rows, "__len__") else ""
    own = f"TRL's own, beta {args.beta:g}" if args.beta else "none: beta is 0"
    return {
        "model": getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
        "task": f"{named}{sized}, reward {', '.join(trainer.reward_func_names)}",
        "kl": own if kl is None else describe_anchors(kl, taught),
        "config": args.to_dict(),
        "versions": versions,
    }


def answered(trainer: Any, example: dict[str, Any]) -> dict[str, Any]:
    """A greedy answer of a trainer's policy, and the sum of its rewards that are plain functions."""
    tokenizer, model = trainer._tokenizer, trainer.accelerator.unwrap_model(trainer.model)
    prompt, training = example["prompt"], model.training
    chat = not isinstance(prompt, str)
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) if chat else prompt
    options = {"add_special_tokens": not chat, "return_token_type_ids": False}  # generate takes no types of tokens
    given = tokenizer(text, return_tensors="pt", **options).to(model.device)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.eval()
    try:
        ids = model.generate(**given, do_sample=False, max_new_tokens=trainer.args.max_completion_length, **ends)
    finally:
        model.train(training)
    answer = tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    columns = {name: [value] for name, value in example.items() if name not in ("prompt", "completion")}
    said = [[{"role": "assistant", "content": answer}]] if chat else [answer]
    score = 0.0
    for function, weight in zip(trainer.reward_funcs, trainer.reward_weights.tolist(), strict=True):
        if not isinstance(function, torch.nn.Module):
            score += weight * float(function(prompts=[prompt], completions=said, **columns)[0] or 0.0)
    question = "\n".join(str(each.get("content", "")) for each in prompt) if chat else prompt
    return {"question": question, "completion": answer, "score": score}
