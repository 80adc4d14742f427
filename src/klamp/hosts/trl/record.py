"""What `klamp report` shows of a TRL run beside its log: completions token by token, answers, settings, versions."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from klamp._version import __version__
from klamp.config.describe import describe_kl
from klamp.diagnostics.doctor import ABOUT
from klamp.errors import KLWarning
from klamp.hosts.common.coefficient import loss_mask
from klamp.hosts.common.kl_fields import kl_config
from klamp.hosts.trl.exact import weights_are_split

COMPLETIONS, ANSWERS = "completions.jsonl", "answers.jsonl"
"""Completions with their log-probabilities; answers before and after."""
STATE = "trainer_state.json"
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "vllm", "deepspeed")


class ReportCallback(TrainerCallback):
    """Writes into output_dir what `klamp report` shows beside the log of a TRL trainer.

    Give it to `klamp.trl.GRPOTrainer`: `callbacks=[ReportCallback()]`. Completions are those of an optimizer step's
    first micro-batches on the main process, and there are some where there is a KL; answers are greedy, to the first
    prompts of the evaluation set (else of the training set), before and after, and left out where the weights are
    divided among processes. Nothing is drawn and no gradient changes: the run is the same one.

    Args:
        every: steps between those whose completions are written.
        completions: how many of a step.
        answers: how many prompts are answered before and after.
    """

    def __init__(self, *, every: int = 10, completions: int = 8, answers: int = 4) -> None:
        self.every, self.completions, self.answers = every, completions, answers
        self.trainer: Any = None
        self.about: dict[str, Any] = {}
        self.written: dict[int, int] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the settings, and answer before the first step; a run that goes on keeps what was written."""
        if not state.is_world_process_zero or self.trainer is None:
            return
        folder = Path(str(args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).unlink(missing_ok=True)
        if state.global_step == 0:
            for name in (COMPLETIONS, ANSWERS):
                (folder / name).unlink(missing_ok=True)
        self.about = about(self.trainer) | {"started": time.time()}
        (folder / ABOUT).write_text(json.dumps(self.about, indent=1, default=str), encoding="utf-8")
        if state.global_step == 0:
            self._answer(folder, step=0)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Answer after the last step; write the log, which TRL leaves in checkpoints alone, and how long it took."""
        if not state.is_world_process_zero or self.trainer is None:
            return
        folder = Path(str(args.output_dir))
        self._answer(folder, step=state.global_step)
        state.save_to_json(str(folder / STATE))
        self.about["seconds"] = time.time() - self.about["started"]
        (folder / ABOUT).write_text(json.dumps(self.about, indent=1, default=str), encoding="utf-8")

    @torch.no_grad()
    def take(self, inputs: Any, logprobs: torch.Tensor) -> None:
        """Write completions of a micro-batch, if their step is one of those and has not had enough.

        Args:
            inputs: the micro-batch, as TRL's loss gets it.
            logprobs: of the policy, [B, T].
        """
        trainer = self.trainer
        step = trainer.state.global_step + 1
        due = step == 1 or step % self.every == 0
        left = self.completions - self.written.get(step, 0)
        if not (due and left > 0 and trainer.model.training and trainer.is_world_process_zero()):
            return
        rows = [self._row(inputs, logprobs, i) | {"step": step} for i in range(min(left, len(logprobs)))]
        self.written = {step: self.written.get(step, 0) + len(rows)}
        with (Path(str(trainer.args.output_dir)) / COMPLETIONS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def _row(self, inputs: Any, logprobs: torch.Tensor, i: int) -> dict[str, Any]:
        tokenizer, there = self.trainer._tokenizer, inputs["completion_mask"][i].bool()
        ids, prompt = inputs["completion_ids"][i][there].tolist(), inputs["prompt_mask"][i].bool()
        advantage = inputs["advantages"][i]
        row = {
            "prompt": tokenizer.decode(inputs["prompt_ids"][i][prompt]),
            "completion": tokenizer.decode(ids, skip_special_tokens=True),
            "advantage": float(advantage if advantage.ndim == 0 else advantage[there].abs().max()),
            "tokens": tokenizer.convert_ids_to_tokens(ids),
            "policy_logprobs": logprobs[i][there].tolist(),
            "ref_logprobs": inputs["ref_per_token_logps"][i][there].tolist(),
            "trained": loss_mask(inputs)[i][there].tolist(),
            "ended": bool(ids) and ids[-1] == tokenizer.eos_token_id,
        }
        told = inputs.get("sampling_per_token_logps")
        return row if told is None else row | {"sampler_logprobs": told[i][there].tolist()}

    def _answer(self, folder: Path, *, step: int) -> None:
        """Answer the first prompts greedily, by the main process alone; an error there ends no run."""
        trainer, held_out = self.trainer, self.trainer.eval_dataset
        rows = trainer.train_dataset if held_out is None or isinstance(held_out, dict) else held_out
        if not self.answers or weights_are_split(trainer) or not hasattr(rows, "select"):
            return
        try:
            examples = [rows[i] for i in range(min(self.answers, len(rows)))]
            texts = answered(trainer, [each["prompt"] for each in examples])
            scores = [scored(trainer, example, text) for example, text in zip(examples, texts, strict=True)]
        except Exception as error:  # a prompt, a reward or a model of another kind
            said = f"klamp's report has no answers: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warnings.warn(said, KLWarning, stacklevel=2)
            return
        skill = "training prompts" if rows is trainer.train_dataset else "held out"
        with (folder / ANSWERS).open("a", encoding="utf-8") as file:
            for example, text, score in zip(examples, texts, scores, strict=True):
                row = {"step": step, "skill": skill, "question": _words(example["prompt"]), "completion": text}
                file.write(json.dumps(row | {"score": score}) + "\n")


def about(trainer: Any) -> dict[str, Any]:
    """Settings with their defaults, versions, model, data and KL of a trainer."""
    args, kl = trainer.args, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # said when the arguments were made
        kl = kl_config(args)
    own = f"TRL's own, beta {args.beta:g}" if args.beta else "none: beta is 0"
    versions = {"klamp": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    rows, rewards = trainer.train_dataset, ", ".join(trainer.reward_func_names)
    named = getattr(getattr(rows, "info", None), "dataset_name", None) or "a data set"
    sized = f" of {len(rows):,} prompts" if hasattr(rows, "__len__") else ""
    return {
        "model": getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
        "task": f"{named}{sized}, reward {rewards}",
        "kl": own if kl is None else describe_kl(kl),
        "config": args.to_dict(),
        "defaults": {f.name: f.default for f in dataclasses.fields(args) if f.default is not dataclasses.MISSING},
        "versions": versions,
    }


def answered(trainer: Any, prompts: list[Any]) -> list[str]:
    """Greedy answers of a trainer's policy, prompt by prompt."""
    tokenizer, model = trainer._tokenizer, trainer.accelerator.unwrap_model(trainer.model)
    training, texts = model.training, list[str]()
    model.eval()
    try:
        for prompt in prompts:
            whole, chat = isinstance(prompt, str), tokenizer.apply_chat_template
            text = prompt if whole else chat(prompt, add_generation_prompt=True, tokenize=False)
            given = tokenizer(text, return_tensors="pt", add_special_tokens=whole).to(model.device)
            ids = model.generate(
                **given,
                do_sample=False,
                max_new_tokens=trainer.args.max_completion_length,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            texts.append(tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    finally:
        model.train(training)
    return texts


def scored(trainer: Any, example: dict[str, Any], text: str) -> float:
    """The weighed sum of the rewards that are plain functions; a reward model is left out."""
    chat = not isinstance(example["prompt"], str)
    columns = {name: [value] for name, value in example.items() if name not in ("prompt", "completion")}
    given = [[{"role": "assistant", "content": text}]] if chat else [text]
    total = 0.0
    for function, weight in zip(trainer.reward_funcs, trainer.reward_weights.tolist(), strict=True):
        if not isinstance(function, torch.nn.Module):
            (value,) = function(prompts=[example["prompt"]], completions=given, **columns)
            total += weight * float(value or 0.0)
    return total


def _words(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(each.get("content", "")) for each in prompt)
