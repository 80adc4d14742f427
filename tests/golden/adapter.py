"""Turns golden cases into calls of klamp, and is the only file of this folder that knows klamp's functions."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
import warnings
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from tests.golden.worlds import END, GROUP, MAX_LENGTH, PAD, SETS, VOCABULARY, World, drawn, fill, summary, world
from torch import Tensor

import klamp
import klamp.verl
from klamp import Batch, KLConfig, LossConfig, TeacherConfig, Totals
from klamp.config.loss import configured_price
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import prepare
from klamp.core.types import Scored, held_anchors

TOTALS = Totals(sequences=11.0, tokens=47.0, kl_tokens=41.0)
RECORDED = Path(__file__).parents[1] / "recorded"


@dataclass(frozen=True)
class Configured:
    """The configurations of a case."""

    kl: KLConfig
    loss: LossConfig
    teacher: TeacherConfig | None
    totals: Totals | None

    @classmethod
    def of(cls, case: dict[str, Any]) -> Configured:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", klamp.KLWarning)
            kl = KLConfig(**{name: tuple(x) if isinstance(x, list) else x for name, x in case["kl"].items()})
            teacher = TeacherConfig(teacher_model="given", **case["teacher"]) if "teacher" in case else None
            return cls(kl, LossConfig(**case["policy"]), teacher, TOTALS if case["totals"] else None)

    def summary(self, loss: Tensor, w: World, metrics: dict[str, Any]) -> dict[str, Any]:
        """The numbers of a loss, with the gradient in the policy's logits; a bounded teacher's metrics are left out."""
        bounded = self.teacher is not None and self.teacher.teacher_max_log_ratio is not None
        kept = {name: x for name, x in metrics.items() if not (bounded and name.startswith("teacher/"))}
        return summary(loss, torch.autograd.grad(loss, w.logits["policy"])[0], kept)

    def advantages(self, rewards: Tensor) -> Tensor:
        return klamp.group_advantages(rewards, GROUP, scale=self.loss.scale, baseline=self.loss.advantage_baseline)


def head_of(teacher: TeacherConfig, policy: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the teacher's head and which of them count. [..., K] each"""
    k = teacher.teacher_top_k
    own, theirs = policy.topk(k).indices, other.topk(k).indices
    if teacher.teacher_head != "union":
        ids = own if teacher.teacher_head == "student" else theirs
        return ids, torch.ones_like(ids, dtype=torch.bool)
    new = (theirs[..., :, None] != own[..., None, :]).all(-1)
    return torch.cat([own, theirs], -1), torch.cat([torch.ones_like(new), new], -1)


def teacher_kl(c: TeacherConfig, w: World) -> Tensor | None:
    """The KL to the teacher at each prefix; None where the log-probabilities of the tokens are all it needs."""
    if c.teacher_estimator == "exact":
        return klamp.exact_kl(w.logits["policy"], w.logits["teacher"], direction=c.teacher_direction)
    if c.teacher_estimator != "topk":
        return None
    policy, other = (w.logits[who].log_softmax(-1) for who in ("policy", "teacher"))
    ids, kept = head_of(c, policy.detach(), other)
    weight = w.logprobs("policy").detach() - w.logprobs("sampler")
    options: dict[str, Any] = {"direction": c.teacher_direction, "tail": c.teacher_tail, "kept": kept}
    options["log_weight"] = None if c.teacher_off_policy == "none" else weight
    outside = ~((ids == w.ids[..., None]) & kept).any(-1)
    heads = (each.gather(-1, ids) for each in (policy, other))
    return klamp.topk_kl(*heads, w.logprobs("policy"), w.logprobs("teacher"), outside, **options)


def kl_mask_of(c: Configured, w: World) -> Tensor | None:
    """The tokens that carry the KL; None: all."""
    excluded = torch.tensor([x for x in c.kl.kl_exclude_tokens if isinstance(x, int)], dtype=torch.long)
    return w.mask & ~torch.isin(w.ids, excluded) if c.kl.excludes else None


def batch_of(c: Configured, w: World, *, on_policy: bool) -> Batch:
    """The batch of a case, without a KL in its rewards."""
    logits, exact = w.logits, c.kl.kl_estimator == "exact"
    anchors = held_anchors(w.logprobs("ref"), w.logprobs("sampler"), mask=kl_mask_of(c, w))
    if exact:
        kl, forward = (klamp.exact_kl(logits["policy"], logits["ref"], direction=d) for d in ("reverse", "forward"))
        anchors["reference"] = anchors["reference"]._replace(kl=kl, forward_kl=forward)
    if c.teacher is not None:
        anchors["teacher"] = Scored(w.logprobs("teacher"), kl=teacher_kl(c.teacher, w))
    return Batch(
        policy_logprobs=w.logprobs("policy"),
        mask=w.mask,
        advantages=c.advantages(w.rewards),
        old_logprobs=None if on_policy else w.logprobs("old"),
        anchors=anchors,
        reference_length=c.kl.kl_reference_length,
        group_size=GROUP,
    )


def grpo_loss(case: dict[str, Any]) -> dict[str, Any]:
    """klamp's own loss; the gradient is with respect to the policy's logits."""
    c, w = Configured.of(case), world(case)
    objective = klamp.build_objective(c.kl, c.loss, max_length=MAX_LENGTH, teacher=c.teacher)
    batch = batch_of(c, w, on_policy=case["on_policy"])
    for beta, term in objective.active:
        if term.placement == "reward":
            found = advantages_with_kl(w.rewards, prepare(batch, term), beta=beta, advantages=c.advantages)
            batch = replace(batch, advantages=found)
    loss, metrics = klamp.grpo_loss(batch, objective, totals=c.totals)
    return c.summary(loss, w, metrics)


def tinker(case: dict[str, Any]) -> dict[str, Any]:
    """The loss for Tinker's `forward_backward_custom`; the gradient is with respect to the policy's logits."""
    c, w = Configured.of(case), world(case)
    b, first = batch_of(c, w, on_policy=False), [len(prompt) - 1 for prompt in w.prompts]
    head = None
    if c.teacher is not None and c.teacher.teacher_estimator == "topk" and c.teacher.teacher_top_k:
        head = head_of(c.teacher, w.logits["policy"].detach(), w.logits["teacher"])[0]
    taught = w.logits["teacher"].log_softmax(-1)
    policies, data, whole = [], [], w.logits["policy"].log_softmax(-1)
    for i, completion in enumerate(w.completions):
        size = len(completion)

        def row(values: Tensor, blank: float = 0.0, i: int = i, size: int = size) -> Tensor:
            return torch.cat([values.new_full((first[i], *values.shape[2:]), blank), values[i, :size]])

        rows = {
            "target_tokens": row(w.ids),
            "advantages": row(b.advantages[:, None].expand(w.mask.shape)),
            "mask": row(w.mask.double()),
            "logprobs": row(w.logprobs("sampler").detach()),
            "ref_logprobs": row(w.logprobs("ref").detach()),
        }
        asked = w.ids[..., None] if head is None else torch.cat([head, w.ids[..., None]], -1)
        policies.append(row(whole.gather(-1, asked), -3.0)[..., 0 if head is None else slice(None)])
        if c.teacher is not None:
            rows["teacher_logprobs"] = row(w.logprobs("teacher").detach())
        if head is not None:
            rows["teacher_head_tokens"] = row(head, -1)
            rows["teacher_head_logprobs"] = row(taught.gather(-1, head).detach())
        if (kl_mask := kl_mask_of(c, w)) is not None:
            rows["kl_mask"] = row(kl_mask.double())
        data.append(SimpleNamespace(loss_fn_inputs=rows))  # as much of a datum of the SDK as the loss reads
    from klamp.tinker import compute_grpo_kl_loss

    loss, metrics = compute_grpo_kl_loss(
        data,
        policies,
        kl=c.kl,
        loss=replace(c.loss, scale_rewards="none"),
        normalizer="token_sum" if case.get("sum") else "loss_type",
        max_length=MAX_LENGTH,
        group_size=GROUP,
        totals=None if case.get("sum") else c.totals,
        **({"teacher": c.teacher} if c.teacher is not None else {}),
    )
    return c.summary(loss, w, metrics)


@cache
def _tokenizer() -> Any:
    """One token per letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"<pad>": PAD, "<eos>": END, **{chr(95 + i): i for i in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(names, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="a", padding_side="left"
    )


@cache
def _drawn_model(seed: str) -> Any:
    """A Llama of a thousand drawn weights, in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    ids = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None}
    return fill(LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids)), seed)


@cache
def _rows(chosen: int) -> Any:
    """The prompts of a set as TRL's data set."""
    from datasets import Dataset

    prompts = SETS[chosen]["prompts"]
    return Dataset.from_list([{"prompt": "".join(_tokenizer().convert_ids_to_tokens(each))} for each in prompts])


def trl(case: dict[str, Any]) -> dict[str, Any]:
    """The loss of `klamp.trl.GRPOTrainer`; the gradient is with respect to the model's weights."""
    from klamp.trl import GRPOConfig, GRPOTrainer

    w, rows, teacher = world(case), _rows(case["set"]), case.get("teacher", {})
    kl = {name: tuple(x) if isinstance(x, list) else x for name, x in case["kl"].items()}
    silent: dict[str, Any] = {"output_dir": "unused", "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    sizes = {"num_generations": GROUP, "per_device_train_batch_size": len(rows), "max_completion_length": MAX_LENGTH}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_steps": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = GRPOConfig(**(silent | sizes | plain | case["policy"] | kl | teacher))
        trainer: Any = GRPOTrainer(
            model=copy.deepcopy(_drawn_model("policy")),
            reward_funcs=lambda completions, **_: w.rewards.tolist(),
            args=args,
            train_dataset=rows,
            processing_class=_tokenizer(),
            ref_model=copy.deepcopy(_drawn_model("ref")) if kl["beta"] else None,
            **({"teacher_model": copy.deepcopy(_drawn_model("teacher"))} if teacher else {}),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        trainer._generate_single_turn = lambda *_, **__: (w.completions, None)
        inputs = trainer._generate_and_score_completions(rows.to_list())
        assert inputs["completion_ids"].tolist() == w.ids.tolist()
        if not case["on_policy"]:
            whole = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            scored = trainer._get_per_token_logps_and_entropies(trainer.model, *whole, w.ids.shape[1])[0].detach()
            inputs["old_per_token_logps"] = (scored + 0.15 * drawn("old", *w.ids.shape)).clamp(max=-0.01)
            inputs["sampling_per_token_logps"] = (scored + 0.25 * drawn("sampler", *w.ids.shape)).clamp(max=-0.01)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    gradient = [each.grad.flatten() for each in trainer.model.parameters() if each.grad is not None]
    return summary(loss, torch.cat(gradient))


MEANS = {"dapo": "token-mean", "bnpo": "token-mean", "grpo": "seq-mean-token-mean"}


def _averaged(tokens: Tensor, mask: Tensor, mode: str) -> Tensor:
    """verl's averages over tokens."""
    kept = torch.where(mask, tokens, 0.0)
    if mode == "token-mean":
        return kept.sum() / mask.sum()
    return (kept.sum(-1) / (mask.sum(-1) if mode == "seq-mean-token-mean" else MAX_LENGTH)).mean()


def verl(case: dict[str, Any]) -> dict[str, Any]:
    """klamp's functions for verl, without verl: its average is above, the identity replaces two of its helpers."""
    from klamp.hosts.common.control import KLControl
    from klamp.hosts.verl import hooks
    from klamp.hosts.verl.driver import PER_TOKEN, StepSettings, columns
    from klamp.hosts.verl.overrides import LOSS_FIELDS, name_of, needs_driver, teacher_name

    c, w = Configured.of(case), world(case)
    mode, old = MEANS.get(c.loss.loss_type, "seq-mean-token-sum-norm"), w.logprobs("old").detach()
    known = {"response_mask": w.mask, "old_log_probs": old}
    advantages, metrics = c.advantages(w.rewards)[:, None].expand(w.mask.shape), dict[str, Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", klamp.KLWarning)
        name = name_of(c.kl, LOSS_FIELDS)
        if needs_driver(hooks.loss_kl(name)):
            given = {"ref_log_prob": w.logprobs("ref"), "advantages": advantages, "rm_scores": w.rewards}
            given |= {"responses": w.ids, "rollout_log_probs": w.logprobs("sampler").detach(), **known}
            out = c.loss.advantage_baseline == "leave_one_out"
            options: dict[str, Any] = {"group_size": GROUP, "price": None, "leave_one_out": out}
            settings = StepSettings(loss_agg_mode=mode, beta=c.kl.beta, **options)
            uids = [str(row // GROUP) for row in range(len(w.ids))]
            added, metrics = columns(given, uids, KLControl(c.kl), _tokenizer(), settings)
            advantages = added.pop("advantages", advantages)
            known |= {key: x.bool() if key in PER_TOKEN else x for key, x in added.items()}
    policy = w.logprobs("policy")
    loss = _averaged(-advantages * (policy - old).exp(), w.mask, mode)
    hooks._batch.update(known)
    try:
        loss = loss + c.kl.beta * _averaged(hooks.penalty_in_loss(policy, w.logprobs("ref"), name), w.mask, mode)
    finally:
        hooks._batch.clear()
    if c.teacher is not None:
        klamp.verl.overrides(KLConfig(), c.teacher)  # refuses what verl cannot have
        k = c.teacher.teacher_top_k if c.teacher.teacher_estimator == "topk" else 0
        p, q = (w.logits[who].log_softmax(-1) for who in ("policy", "teacher"))
        ids = q.topk(k).indices
        ours, theirs = p.gather(-1, ids), q.gather(-1, ids)
        output = {"distillation_losses": (theirs.exp() * (theirs - ours)).sum(-1), "log_probs": policy}
        output |= {"student_mass": ours.exp().sum(-1), "teacher_mass": theirs.exp().sum(-1)}
        data = {**known, "teacher_logprobs": w.logprobs("teacher")[..., None], "dp_size": 1, "batch_num_tokens": 0}
        loss_mode = teacher_name(c.teacher)
        coef = {"distillation_loss_coef": c.teacher.teacher_coef, "use_task_rewards": True}
        asked = SimpleNamespace(loss_mode=loss_mode, use_policy_gradient=False, **coef)
        stand_in: dict[str, Any] = {
            hooks.PADDING: SimpleNamespace(no_padding_2_padding=lambda x, data: x),
            hooks.METRIC: SimpleNamespace(Metric=lambda kind, value: value),
        }
        with patch.dict(sys.modules, stand_in):
            config = SimpleNamespace(distillation_loss=asked)
            tokens, found = hooks.kl_to_teacher(config=None, distillation_config=config, model_output=output, data=data)
        loss, metrics = loss + c.teacher.teacher_coef * _averaged(tokens, w.mask, mode), metrics | found
    return summary(loss, torch.autograd.grad(loss, w.logits["policy"])[0], metrics)


class UnslothLoss:
    """A loss with the arguments of Unsloth's, in plain torch."""

    @staticmethod
    def apply(*args: Any) -> tuple[Tensor, ...]:
        """The mean over tokens of the surrogate plus beta times k3; its length and its mean k3."""
        new, old, ref, _, _, _, mask, advantages, beta, *_ = args
        a = advantages if advantages.ndim == 2 else advantages[:, None]
        gap = ref - new
        tokens = -a * (new - (new.detach() if old is None else old)).exp() + beta * (gap.exp() - gap - 1)
        kept = torch.where(mask.bool(), tokens, 0.0)
        return kept.sum() / mask.sum(), mask.sum(-1).double().mean(), gap.detach().mean()


def unsloth(case: dict[str, Any]) -> dict[str, Any]:
    """klamp's KL in Unsloth's loss, whose place a plain loss of the same arguments takes."""
    from klamp.hosts.common.control import KLControl
    from klamp.hosts.common.rollout import Alone, Generation, prepared
    from klamp.hosts.trl.session import Session
    from klamp.hosts.unsloth.hooks import Step
    from klamp.hosts.unsloth.loss_function import Call, LossWithKL

    c, w = Configured.of(case), world(case)
    old = w.logprobs("old").detach()
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(w.ids), 1, dtype=torch.long),
        "completion_ids": w.ids,
        "completion_mask": w.mask,
        "advantages": c.advantages(w.rewards),
        "old_per_token_logps": old,
        "ref_per_token_logps": w.logprobs("ref").detach(),
        "sampling_per_token_logps": w.logprobs("sampler").detach(),
    }
    sizes: dict[str, Any] = {"rows": [{}] * len(w.ids), "lengths": w.mask.sum(-1), "group_size": GROUP}
    generation = Generation(inputs=inputs, old_logprobs=old, accelerator=Alone(), **sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", klamp.KLWarning)
        inputs = prepared(generation, KLControl(c.kl), _tokenizer(), beta=c.kl.beta, reduction="token_mean")
        trainer = SimpleNamespace(_klamp=Session.of(c.kl), _tokenizer=_tokenizer())
    call: dict[str, Any] = dict.fromkeys(Call._fields)
    call |= {"new": w.logprobs("policy"), "old": old, "ref": inputs["ref_per_token_logps"], "mask": w.mask}
    call |= {"sampling": inputs["sampling_per_token_logps"], "input_ids": w.ids, "beta": c.kl.beta, "extra_kwargs": {}}
    call["advantages"] = inputs["advantages"]
    step = Step(trainer, inputs, c.kl.beta)
    loss, _, mean, *_ = LossWithKL(UnslothLoss, step.adds).apply(*call.values())
    return summary(loss, torch.autograd.grad(loss, w.logits["policy"])[0], {"kl": mean})


@cache
def proofs() -> dict[str, Any]:
    """What `klamp verify` prints: of each check whether it passed and its numbers, and the facts of the estimators."""
    from klamp.verify.direction import answer_direction
    from klamp.verify.proofs import PROOFS
    from klamp.verify.proofs.values import measure_estimators

    found: dict[str, Any] = {}
    for each in measure_estimators():
        gradients = [each.as_loss.factor, each.in_reward.factor]
        found[f"estimator {each.name}"] = [[each.bias, each.deviation, each.lowest, *gradients]]
    for proof in PROOFS.values():
        found[proof.__name__] = [[float(each.passed), *_numbers(each.measured)] for each in proof()]
    answer = answer_direction()
    rows = [cells for table in answer.tables for cells in table.rows]
    found["direction"] = [[float(x) for x in row[1:] if re.fullmatch(r"[+-]?\d[\d.e+-]*", x)] for row in rows]
    found["direction"] += [[float(each.passed)] for each in answer.checks]
    return found


def _numbers(text: str) -> list[float]:
    """The numbers of a measurement, without the rounding errors that stand in brackets."""
    bare = re.sub(r"\((error [^)]*|exactly)\)", "", text)
    return [float(x) for x in re.findall(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)", bare)]


def ends(case: dict[str, Any]) -> dict[str, Any]:
    """The price of a nat, and where a configuration ends in an enumerated world."""
    from klamp.verify.convergence import follow, worlds

    c = Configured.of({"totals": False, **case})
    sizes = {"group_size": 8, "mean_length": 300.0, "max_length": 1000}
    price = configured_price(c.kl, c.loss, **sizes)
    found = follow(c.kl, c.loss, worlds()[case["world"]], c.teacher)
    numbers = {"price": price.per_completion, "stands": float(found.stands)}
    if found.stands:
        names = ("distance", "nearest", "kl", "optimal_kl", "length", "optimal_length")
        numbers |= {name: getattr(found, name) for name in names} | {"end_price": found.price}
    return numbers


def known_alarms() -> set[str]:
    """The names of klamp's alarms."""
    from klamp.doctor.alarms import ALARMS

    return set(ALARMS)


def recorded_runs() -> list[str]:
    """The recorded runs."""
    return sorted(file.parent.name for file in RECORDED.glob("*/metrics.jsonl"))


def alarms(record: str) -> dict[str, int]:
    """The alarms that rise in a recorded run, with the step after which each rises."""
    from klamp.doctor.examine import examine
    from klamp.doctor.readers import read_record

    return {each.alarm.name: each.first_step for each in examine(read_record(RECORDED / record)).findings}


def parameters(module: str, name: str) -> list[str]:
    """The parameters of an exported name (of a class those of its constructor); of a dataclass also its fields."""
    found = getattr(importlib.import_module(module), name)
    public = [each for each in dir(found) if not each.startswith("_")]
    if hasattr(found, "__dataclass_fields__"):
        return [each.name for each in fields(found)] + public
    try:
        return list(inspect.signature(found).parameters) + public
    except ValueError:  # a warning class
        return public
