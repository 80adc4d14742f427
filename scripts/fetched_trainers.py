"""Audits the losses of trainers that are not installed, from checkouts of their repositories.

`python -m scripts.fetched_trainers FOLDER [NAME ...]`: FOLDER holds one checkout per trainer, under the names of
`TRAINERS`. Each loss is the trainer's own code, run on CPU (`scripts.checkouts`): this runs what lies in FOLDER.

Advantages are those of distillation alone (rewards 0), coefficients 1. A teacher's service is answered for with the
log-probabilities of the audit's teacher; a reference is that teacher, too.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from scripts.checkouts import Options, Unused, commit_of, cut, nothing, package, stub, undecorated
from torch import Tensor

from klamp.audit.examine import AuditedLoss, Subject, audit
from klamp.cli.audit import LEGEND, show_audit
from klamp.cli.text import say
from klamp.core.types import Direction
from klamp.verify.sequences import PROMPT, WORDS, Sequences
from klamp.verify.sequences import logprobs_of as _logps

TOP, ALL = 64, WORDS
"""The tokens of a head, and all there are in the audit."""
SAMPLED_AT = 0.9
"""ms-swift's default temperature of sampling."""


class Mode(NamedTuple):
    """A loss of a trainer: its name with its options, `loss(batch, folder of the trainer, **options)`, its meaning."""

    name: str
    loss: Callable[..., Tensor]
    options: dict[str, Any]
    means: Direction = "reverse"
    temperature: float = 1.0
    takes: Literal["logprobs", "function", "reward", "sequences"] = "sequences"


def subject_of(name: str, folder: Path) -> Subject:
    """What is audited of a trainer.

    Args:
        name: one of `TRAINERS`.
        folder: its checkout.
    """
    torch._dynamo.config.disable = True  # some compile their loss; the mathematics is the same
    losses = tuple(
        AuditedLoss(
            name=mode.name,
            takes=mode.takes,
            compute=functools.partial(mode.loss, folder=folder, **mode.options),
            means=mode.means,
            temperature=mode.temperature,
        )
        for mode in TRAINERS[name]
    )
    return Subject(title=f"{name} {commit_of(folder)}".rstrip(), losses=losses, notes=NOTES.get(name, ()))


def _scores(batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of an aligned batch's tokens: the student's, those it was sampled with, the teacher's."""
    now, old, teacher = (_logps(x, batch.tokens) for x in (batch.student, batch.old, batch.teacher))
    return now, old, teacher


def _without_padding(batch: Sequences) -> list[Sequences]:
    """The rows of a batch, for hosts that keep rows of different lengths."""
    ends = (PROMPT + batch.mask.sum(-1)).tolist()
    return [Sequences(*(x[i, :end] for x in batch)) for i, end in enumerate(ends)]


@functools.cache
def _nemo_modules(folder: Path) -> Any:
    class Batch(dict[str, Any]):
        """Of their BatchedDataDict, what the loss uses."""

    root = folder / "nemo_rl"
    package("nemo_rl", root, "algorithms", "algorithms.loss", "distributed")
    unused = "data data.chat_templates models models.policy models.dtensor models.dtensor.parallelize utils"
    unused += " utils.fastokens utils.logger"
    unused += " algorithms.x_token algorithms.x_token.loss_utils algorithms.x_token.utils"
    stub(*(f"nemo_rl.{name}" for name in unused.split()))
    stub("nemo_rl.distributed.batched_data_dict", BatchedDataDict=Batch)
    return SimpleNamespace(
        batch=Batch,
        losses=importlib.import_module("nemo_rl.algorithms.loss.loss_functions"),
        prepare=importlib.import_module("nemo_rl.algorithms.loss.utils").prepare_loss_input,
        logps=importlib.import_module("nemo_rl.distributed.model_utils").get_next_token_logprobs_from_logits,
        advantages=cut(root / "algorithms/advantage_estimator.py", "OPDAdvantageEstimator").OPDAdvantageEstimator,
    )


def _nemo_run(host: Any, loss: Any, batch: Sequences, **more: Tensor) -> Tensor:
    count, length = batch.tokens.shape
    lengths, samples = torch.full((count,), length), torch.ones(count)
    mask = batch.mask.float()
    data = host.batch(input_ids=batch.tokens, input_lengths=lengths, token_mask=mask, sample_mask=samples, **more)
    inputs, data = host.prepare(batch.student, data, loss)
    return loss(data=data, global_valid_seqs=samples.sum(), global_valid_toks=mask.sum(), **inputs)[0]


def _nemo_distill(batch: Sequences, folder: Path, *, k: int = ALL, **options: Any) -> Tensor:
    host = _nemo_modules(folder)
    loss = host.losses.DistillationLossFn(host.losses.DistillationLossConfig(**options))
    best = batch.teacher.topk(k, -1)
    return _nemo_run(host, loss, batch, teacher_topk_logits=best.values, teacher_topk_indices=best.indices)


def _nemo_opd(batch: Sequences, folder: Path) -> Tensor:
    host, pad = _nemo_modules(folder), torch.nn.functional.pad
    with _on_cpu():
        old, teacher = (pad(host.logps(batch.tokens, x), (1, 0)) for x in (batch.old, batch.teacher))
        advantages = host.advantages({"name": "opd"}, None).compute_advantage(
            None, None, batch.mask.float(), teacher_logprobs=teacher, prev_logprobs=old
        )
        loss = host.losses.ClippedPGLossFn(host.losses.ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
        scores = dict.fromkeys(("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"), old)
        return _nemo_run(host, loss, batch, advantages=advantages, **scores)


def _nemo_kl(batch: Sequences, folder: Path, *, kl_type: str = "k3", **options: Any) -> Tensor:
    """ClippedPGLossFn with the reference at coefficient 1."""
    host, pad = _nemo_modules(folder), torch.nn.functional.pad
    with _on_cpu():
        old, ref = (pad(host.logps(batch.tokens, x), (1, 0)) for x in (batch.old, batch.teacher))
        config = {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": kl_type, **options}
        loss = host.losses.ClippedPGLossFn(host.losses.ClippedPGLossConfig(**config))
        scores = dict.fromkeys(("prev_logprobs", "generation_logprobs"), old)
        advantages = torch.zeros_like(batch.mask, dtype=torch.float)
        return _nemo_run(host, loss, batch, advantages=advantages, reference_policy_logprobs=ref, **scores)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Where the host moves tensors to a GPU unasked, they stay."""
    kept = torch.Tensor.cuda
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = kept  # type: ignore[method-assign]


@functools.cache
def _swift_modules(folder: Path) -> Any:
    from trl.trainer.utils import selective_log_softmax  # what their file imports too

    trainers = folder / "swift/rlhf_trainers"
    package("swift_losses", trainers)
    gkd = importlib.import_module("swift_losses.gkd_loss")
    one_process = dict.fromkeys(("gather", "gather_object", "nanmax", "nanmin"), lambda x: x)
    methods = ("GRPOTrainer._get_logps_via_local_forward", "GRPOTrainer._compute_loss_and_metrics")
    advantages = ("compute_teacher_logratio", "expand_advantage_to_per_token")
    return SimpleNamespace(
        teacher=gkd.TeacherOutput,
        gkd=cut(trainers / "gkd_trainer.py", "GKDTrainer._compute_jsd_loss", gkd_loss=gkd.gkd_loss),
        advantages=cut(folder / "swift/rl_core/advantage.py", *advantages),
        grpo=cut(trainers / "grpo_trainer.py", *methods, selective_log_softmax=selective_log_softmax, **one_process),
    )


def _swift_gkd(batch: Sequences, folder: Path, *, beta: float, temperature: float, topk: int | None = None) -> Tensor:
    host = _swift_modules(folder)
    labels = batch.tokens.masked_fill(~batch.mask, -100)
    trainer = SimpleNamespace(gkd_logits_topk=topk, beta=beta, temperature=temperature)
    said = host.teacher(full_logits=batch.teacher, labels=labels)
    return host.gkd._compute_jsd_loss(trainer, batch.student, said, labels)


def _swift_opd(batch: Sequences, folder: Path, *, server: bool = False, **options: Any) -> Tensor:
    """GRPO with a teacher; the logits are such that at the trainer's temperature they are those of the audit."""
    host = _swift_modules(folder)
    length, mask = batch.tokens.shape[1] - PROMPT, batch.mask[:, PROMPT:]
    asked = SimpleNamespace(model_kwarg_keys=[], temperature=SAMPLED_AT, template=Options())

    def logps(logits: Tensor) -> Tensor:
        heated = SimpleNamespace(logits=logits * SAMPLED_AT)
        return host.grpo._get_logps_via_local_forward(asked, lambda: heated, {}, length, batch.tokens)[0]

    old, teacher = logps(batch.old), logps(batch.teacher)
    if server:  # the log-probabilities of a prompt, at temperature 1
        teacher = _logps(batch.aligned.teacher * SAMPLED_AT, batch.aligned.tokens)[:, PROMPT - 1 :]
    base, distils = torch.zeros(len(mask)), not options.get("beta")
    per_token = host.advantages.expand_advantage_to_per_token(base, mask, teacher, old, 1.0)
    rows = Options(
        completion_mask=mask,
        advantages=per_token if distils else torch.zeros_like(per_token),
        old_per_token_logps=old,
        **{f"{'teacher' if distils else 'ref'}_per_token_logps": teacher},
        num_items_in_batch=mask.sum(),
    )
    trainer = Options(
        model=SimpleNamespace(training=True),
        args=Options(),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x),
        **{"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "sdar_loss_coef": 0.0, **options},
        importance_sampling_level="token",
        _has_teacher=distils,
        _metrics={"train": {}},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps(batch.student), None),
    )
    return host.grpo._compute_loss_and_metrics(trainer, None, {}, rows)[0]


class _OneProcess:
    """Of megatron's `mpu`."""

    def __getattr__(self, name: str) -> Any:
        answers = {"rank": 0, "size": 1, "group": None, "stage": True}
        return lambda **_: answers[name.rpartition("_")[2]]


@functools.cache
def _slime_module(folder: Path) -> Any:
    stub("megatron", "megatron.core", mpu=_OneProcess())
    package("slime", folder / "slime", "utils", "backends", "backends.megatron_utils")
    stub("slime.utils.distributed_utils", "slime.utils.misc", "slime.utils.types")
    return importlib.import_module("slime.backends.megatron_utils.loss")


def _slime(batch: Sequences, folder: Path, **options: Any) -> Tensor:
    host, rows = _slime_module(folder), _without_padding(batch)
    kinds = {"opd_type": "sglang", "advantage_estimator": "grpo", "loss_type": "policy_loss", **options}
    numbers = {"opd_kl_coef": 1.0, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "kl_coef": 0.0}
    clips = {"eps_clip": 0.2, "eps_clip_high": 0.2, "entropy_coef": 0.0, "log_probs_chunk_size": -1}
    args = Options(kl_loss_coef=1.0, **kinds, **numbers, **clips)
    lengths: dict[str, Any] = {
        "unconcat_tokens": [row.tokens for row in rows],
        "total_lengths": [len(row.tokens) for row in rows],
        "response_lengths": [int(row.mask.sum()) for row in rows],
    }
    student, teacher, old = (torch.cat([row[i] for row in rows])[None].float() for i in (0, 1, 4))
    scores = functools.partial(host.get_log_probs_and_entropy, args=args, **lengths)
    data = {
        **lengths,
        "log_probs": scores(old)[1]["log_probs"],
        **dict.fromkeys(("teacher_log_probs", "ref_log_probs"), scores(teacher)[1]["log_probs"]),
        "rewards": [0.0] * len(rows),
        "loss_masks": [torch.ones(count) for count in lengths["response_lengths"]],
        "rollout_mask_sums": [torch.tensor(float(count)) for count in lengths["response_lengths"]],
    }
    host.compute_advantages_and_returns(args, data)
    return host.loss_function(args, data, 1, len(rows), student)[0]


@functools.cache
def _tinker_modules(folder: Path) -> Any:
    package("tinker_cookbook", folder / "tinker_cookbook", "distillation", "rl", "utils")
    stub("chz", chz=undecorated, field=nothing)
    unused = "checkpoint_utils model_info display distillation.datasets eval eval.evaluators rl.data_processing"
    unused += " rl.metric_util rl.train rl.types tokenizer_utils renderers utils.ml_log utils.git_rev supervised"
    unused += " supervised.common stores stores.training_store completers rl.rollouts rl.problem_env rl.builder_utils"
    stub(*(f"tinker_cookbook.{name}" for name in unused.split()))
    stub("tinker_cookbook.utils.trace", scope=undecorated)
    for name in ("trace", "ml_log"):
        setattr(sys.modules["tinker_cookbook.utils"], name, sys.modules[f"tinker_cookbook.utils.{name}"])
    kinds = {"register_policy_loss": lambda _: undecorated, "PolicyLossType": Unused("PolicyLossType", (), {})}
    losses = ("importance_sampling_loss", "cross_entropy_loss", "reduce_loss")
    return SimpleNamespace(
        on_policy=importlib.import_module("tinker_cookbook.distillation.train_on_policy"),
        sdft=importlib.import_module("tinker_cookbook.distillation.sdft"),
        service=cut(folder.parent / "SkyRL/skyrl/backends/skyrl_train/utils/ppo_utils.py", *losses, **kinds),
    )


class _Teacher(NamedTuple):
    """The teacher of one row, as Tinker's sampling client answers."""

    said: Tensor

    async def compute_logprobs_async(self, sequence: Any) -> list[float | None]:
        following = torch.tensor(sequence.to_ints()[1:])
        return [None, *self.said[: len(following)].gather(-1, following[:, None])[:, 0].tolist()]

    async def sample_async(self, *, topk_prompt_logprobs: int, **_: Any) -> Any:
        best = self.said.topk(min(topk_prompt_logprobs, self.said.shape[-1]))
        rows = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        return SimpleNamespace(topk_prompt_logprobs=[None, *rows])


def _tinker(batch: Sequences, folder: Path, *, loss: Callable[..., Tensor], **options: Any) -> Tensor:
    """Tinker sums over tokens and rows; the audit's loss is the mean over tokens."""
    import tinker

    host, total = _tinker_modules(folder), torch.zeros(())
    for row in _without_padding(batch):
        scores = _logps(row.student[:-1], row.tokens[1:])
        inputs = {
            "target_tokens": row.tokens[1:],
            "logprobs": _logps(row.old[:-1], row.tokens[1:]),
            "mask": row.mask[1:].float(),
            "advantages": torch.zeros(len(scores)),
        }
        given = {name: tinker.TensorData.from_torch(x) for name, x in inputs.items()}
        read = tinker.ModelInput.from_ints(row.tokens[:-1].tolist())
        datum = tinker.Datum(model_input=read, loss_fn_inputs=given)
        total = total + loss(host, row, datum, _Teacher(row.teacher.detach().log_softmax(-1)), **options)
    return total / batch.mask.sum()


def _tinker_opd(host: Any, row: Sequences, datum: Any, teacher: _Teacher) -> Tensor:
    asyncio.run(host.on_policy.incorporate_kl_penalty([datum], [teacher], [0], 1.0, 0.0))
    old, advantages = (datum.loss_fn_inputs[name].to_torch() for name in ("logprobs", "advantages"))
    return host.service.importance_sampling_loss(_logps(row.student[:-1], row.tokens[1:]), old, advantages, None)[0]


def _sdft(host: Any, row: Sequences, datum: Any, teacher: _Teacher, *, reverse: bool = False, **options: Any) -> Tensor:
    import tinker

    build = host.sdft.build_reverse_kl_datums if reverse else host.sdft.build_topk_distillation_datums
    prompts = [tinker.ModelInput.from_ints(row.tokens[:PROMPT].tolist())]
    size = row.student.shape[-1]  # the trainer gives len(tokenizer)
    made = asyncio.run(build([datum], [{"group_idx": 0}], teacher, prompts, vocab_size=size, **options))[0]
    targets, weights = (made[0].loss_fn_inputs[name].to_torch() for name in ("target_tokens", "weights"))
    scores = row.student[:-1].log_softmax(-1).gather(-1, targets.reshape(len(row.tokens) - 1, -1))
    if reverse:
        return host.sdft.reverse_kl_custom_loss(made, [scores])[0]
    return host.service.cross_entropy_loss(scores, None, None, None, weights.reshape(scores.shape))[0]


@functools.cache
def _openrlhf_modules(folder: Path) -> Any:
    models = folder / "openrlhf/models"
    utils = cut(models / "utils.py", "masked_mean", "KL_IS_WEIGHT_CLIP", "compute_approx_kl")
    loss = cut(models / "loss.py", "aggregate_loss", "PolicyLoss", masked_mean=utils.masked_mean)
    return SimpleNamespace(kl=utils.compute_approx_kl, **vars(loss))


def _openrlhf(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    """The sum of ppo_actor.py with `--algo.kl.use_loss`."""
    host = _openrlhf_modules(options.pop("folder"))
    kl = host.kl(policy, ref, log_probs_old=old, **options)
    pushes = advantages[:, None].expand_as(policy)
    return host.PolicyLoss()(policy, old, pushes, action_mask=mask)[0] + host.aggregate_loss(kl, mask)


@functools.cache
def _skyrl_modules(folder: Path) -> Any:
    utils = folder / "skyrl/backends/skyrl_train/utils"
    means = cut(utils / "torch_utils.py", "masked_mean", "safe_exp_delta")
    known = {**vars(means), "register_policy_loss": lambda _: undecorated}
    known["PolicyLossType"] = Unused("PolicyLossType", (), {})
    known["apply_off_policy_correction"] = lambda loss, old, rollout, mask, config: (loss, mask, {})
    wanted = ("compute_approx_kl", "reduce_loss", "ppo_policy_loss", "apply_loss_reduction_to_advantages_minibatch")
    return SimpleNamespace(**vars(means), **vars(cut(utils / "ppo_utils.py", *wanted, **known)))


def _skyrl(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    """The sum of worker.py with use_kl_loss, on one micro-batch and one rank."""
    host, mask = _skyrl_modules(options.pop("folder")), mask.to(policy.dtype)
    config = Options(policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2)
    pushes = advantages[:, None].expand_as(policy)
    pushes = host.apply_loss_reduction_to_advantages_minibatch(pushes, mask, "token_mean", len(mask), mask.shape[1])
    loss = host.ppo_policy_loss(policy, old, pushes, config, mask)[0]
    kl = host.compute_approx_kl(policy, ref, loss_mask=mask, **options)
    return loss + host.masked_mean(kl, mask, dim=-1).mean()


@functools.cache
def _miles_modules(folder: Path) -> Any:
    hub = folder / "miles/backends/training_utils/loss_hub"
    names = ("compute_approx_kl", "compute_policy_loss", *_defined(hub / "math_utils.py", "_"))
    return SimpleNamespace(
        **vars(cut(hub / "math_utils.py", *names)), **vars(cut(hub / "opd.py", "apply_opd_kl_to_advantages"))
    )


def _defined(file: Path, start: str) -> list[str]:
    """The functions and constants of a file whose names begin so."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    names = [getattr(x, "name", "") or getattr(getattr(x, "targets", [None])[0], "id", "") for x in nodes]
    return [name for name in names if name.startswith(start)]


def _miles_kl(
    policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, *, folder: Path, unbiased: bool, kind: str
) -> Tensor:
    """The KL of losses.py; the mean is that of --calculate-per-token-loss."""
    ratio = (policy - old).exp() if unbiased else None
    return _miles_modules(folder).compute_approx_kl(policy, ref, kl_loss_type=kind, importance_ratio=ratio)[mask].mean()


def _miles_opd(batch: Sequences, folder: Path, *, exact: bool = False) -> Tensor:
    """--use-opd: from the sampled token, or a KL of each prefix that the rollout computed (top-k)."""
    host, (now, old, teacher), mask = _miles_modules(folder), _scores(batch.aligned), batch.aligned.mask
    data: dict[str, Any] = {"teacher_log_probs": [teacher]}
    if exact:
        s = batch.aligned.old.log_softmax(-1).topk(TOP)
        at = batch.aligned.teacher.log_softmax(-1).gather(-1, s.indices)
        data["opd_reverse_kl"] = [(s.values.exp() * (s.values - at)).sum(-1)]
    advantages = [torch.zeros_like(old)]
    host.apply_opd_kl_to_advantages(Options(opd_kl_coef=1.0), data, advantages, [old])
    return host.compute_policy_loss(old - now, advantages[0], 0.2, 0.2)[0][mask].mean()


def _areal_reward(policy: Tensor, ref: Tensor, folder: Path, *, kind: str) -> Tensor:
    return cut(folder / "areal/utils/data.py", "KLEstimator").KLEstimator(kind)(policy, ref)


def _trinity_kl(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, *, folder: Path, kind: str) -> Tensor:
    package("trinity", folder / "trinity", "algorithm", "algorithm.kl_fn")
    fn = getattr(importlib.import_module("trinity.algorithm.kl_fn.kl_fn"), kind)(kl_coef=1.0)
    return fn.calculate_kl_loss(policy, ref, mask, "token-mean", old)[0]


def _prime_rl(policy: Tensor, ref: Tensor, folder: Path, *, loss: str) -> Tensor:
    """The KL to whoever sampled, here the reference; the sum per token."""
    host = _prime_module(folder)
    config = Options(dppo_mask_high=1.0, dppo_mask_low=1.0, ipo_threshold=1.0, adv_tau=1.0, kl_tau=1.0)
    mask, zeros = torch.ones_like(policy, dtype=torch.bool), torch.zeros_like(policy)
    inputs = host.LossInputs(policy, ref, None, zeros, mask)
    return getattr(host, loss)(inputs, config).loss * torch.ones_like(policy) / policy.numel()


def _rllm(batch: Sequences, folder: Path, **options: Any) -> Tensor:
    """Its advantages of distillation, in a policy loss with the ratio and no clip."""
    functions = cut(folder / "rllm/trainer/distill/advantage.py", "discounted_future_sum", "compute_distill_reverse_kl")
    (now, old, teacher), mask = _scores(batch.aligned), batch.aligned.mask
    rows = (
        functions.compute_distill_reverse_kl(t[on].tolist(), s[on].tolist(), **options)
        for s, t, on in zip(old, teacher, mask, strict=True)
    )
    pushes = torch.cat([torch.tensor(row) for row in rows])
    return (-pushes * (now - old).exp()[mask]).mean()


@functools.cache
def _ema_module(folder: Path) -> Any:
    names = ("compute_not_in_topk_mask", "compute_memory_efficient_kl", "kl_penalty")
    return cut(folder / "search/verl/trainer/ppo/core_algos.py", *names)


def _ema_pg(batch: Sequences, folder: Path, *, kind: str, tail: bool = True, weighted: bool = False) -> Tensor:
    """The KL of dp_actor.py with kl_topk_tokens; the tail is weighted with use_kl_iw."""
    host, batch = _ema_module(folder), batch.aligned
    (now, old, ref), reverse = _scores(batch), kind == "full_reverse"
    heads = (batch.old if reverse else batch.teacher).topk(TOP, -1).indices
    sides = (x for z in (batch.student, batch.teacher) for x in (z.gather(-1, heads), z.logsumexp(-1)))
    names = {"sampled_indices": batch.tokens, "log_prob": now, "ref_log_prob": ref}
    names["actor_topk_indices" if reverse else "ref_topk_indices"] = heads
    head, rest = host.compute_memory_efficient_kl(*sides, kind, tail, **names)
    weight = (now - old).detach().exp() if weighted else 1.0
    return (head + weight * rest)[batch.mask].mean()


def _ema_kl(policy: Tensor, ref: Tensor, folder: Path, *, kind: str) -> Tensor:
    return _ema_module(folder).kl_penalty(policy, ref, kind)


@functools.cache
def _areal_loss(folder: Path) -> Any:
    ppo = cut(folder / "areal/utils/functional/functional.py", "ppo_actor_loss_fn")
    counted = ("infer_token_denominator", "_log_proximal_approximation_stats", "_log_version_staleness_stats")
    return cut(
        folder / "areal/trainer/ppo/actor.py",
        "grpo_loss_fn",
        ppo_actor_loss_fn=ppo.ppo_actor_loss_fn,
        PROX_LOGP_METHOD_RECOMPUTE="recompute",
        stats_tracker=SimpleNamespace(denominator=nothing, stat=nothing, scalar=nothing),
        _resolve_proximal_logp=lambda **named: named["old_logp"],
        **dict.fromkeys(counted, nothing),
    ).grpo_loss_fn


def _areal(batch: Sequences, folder: Path, **weights: float) -> Tensor:
    now, old, teacher = (x.flatten() for x in _scores(batch.aligned))
    scores = {"logprobs": old, "prox_logp": old, "teacher_logp": teacher, "advantages": torch.zeros_like(old)}
    data = {**scores, "loss_mask": batch.aligned.mask.flatten(), "distill_loss_weight": 1.0, **weights}
    return _areal_loss(folder)(now, torch.zeros_like(old), data, 0.2, None, None)


def _trinity(batch: Sequences, folder: Path, *, advantage: str, **options: Any) -> Tensor:
    package("trinity", folder / "trinity", "algorithm", "algorithm.advantage_fn", "algorithm.policy_loss_fn", "utils")
    stub("verl", "trinity.utils.log", "trinity.algorithm.advantage_fn.advantage_fn")
    module, _, made = f"trinity.algorithm.advantage_fn.{advantage}".rpartition(".")
    loss = importlib.import_module("trinity.algorithm.policy_loss_fn.importance_sampling_policy_loss")
    (now, old, teacher), mask = _scores(batch.aligned), batch.aligned.mask.double()
    data = SimpleNamespace(batch={"old_log_probs": old, "teacher_logprobs": teacher, "response_mask": mask})
    getattr(importlib.import_module(module), made)(**options)(data)
    given = {"logprob": now, "old_logprob": old, "action_mask": mask, "advantages": data.batch["advantages"]}
    return loss.ImportanceSamplingLossFn()(**given)[0]


@functools.cache
def _roll_modules(folder: Path) -> Any:
    root, logger = folder / "roll", SimpleNamespace(warning=nothing)
    functions = cut(root / "utils/functionals.py", "compute_approx_kl", "masked_mean", "masked_sum", "agg_loss")
    known = {**vars(functions), "logger": logger}
    names = ("topk_logits", "topk_probs_and_indices", "gather_by_teacher_indices", "various_divergence")
    operations = [f"InferenceStrategy.op_compute_{name}" for name in names]
    return SimpleNamespace(
        advantage=cut(root / "pipeline/agentic/utils.py", "agentic_compute_advantage", **known),
        actor=cut(root / "pipeline/base_worker.py", "ActorWorker.loss_func", **known),
        divergence=cut(root / "pipeline/distill/various_divergence.py", "VariousDivergence", IGNORE_INDEX=-100),
        strategy=cut(root / "distributed/strategy/strategy.py", *operations, IGNORE_INDEX=-100),
    )


def _roll_distill(batch: Sequences, folder: Path, *, topk: int = ALL, **options: Any) -> Tensor:
    host, batch, strategy = _roll_modules(folder), batch.aligned, SimpleNamespace()
    vars(strategy).update({name: types.MethodType(f, strategy) for name, f in vars(host.strategy).items()})
    divergence = host.divergence.VariousDivergence(SimpleNamespace(kd_temperature=1, **options))
    size = batch.student.shape[-1]
    said = strategy.op_compute_topk_probs_and_indices(batch.teacher, topk=topk, target_vocab_size=size)
    labels = batch.tokens.masked_fill(~batch.mask, -100)
    return strategy.op_compute_various_divergence(divergence, batch.student, *said, labels)[0]


def _roll_opd(batch: Sequences, folder: Path, *, kl_penalty: str = "") -> Tensor:
    """Distillation alone; without kl_penalty, the loss with use_kl_loss."""
    host, (now, old, teacher), mask = _roll_modules(folder), _scores(batch.aligned), batch.mask.double()
    teachers = {"default": SimpleNamespace(opd_kl_coef=1.0)}
    numbers = {"pg_clip": 0.2, "entropy_loss_coef": 0.0, "loss_agg_mode": "seq-mean-token-mean"}
    numbers |= {"use_kl_loss": not kl_penalty, "kl_loss_coef": 1.0}
    config = Options(is_pure_opd=True, reference_configs=teachers, kl_penalty=kl_penalty, **numbers)
    scores = {"infer_logprobs": old, "ref_log_probs": old if kl_penalty else teacher, "ref_log_probs_default": teacher}
    scores["advantages"] = torch.zeros_like(old)
    sizes = {"batch_num_tokens": {"response_mask": mask.sum()}, "global_valid_samples": {"response_mask": len(mask)}}
    data = SimpleNamespace(batch={"response_mask": mask, "input_ids": batch.tokens, **scores}, meta_info=sizes)
    if kl_penalty:
        host.advantage.agentic_compute_advantage(data, 0, 1, "reinforce", pipeline_config=config)
    strategy = SimpleNamespace(op_compute_log_probs=lambda **_: now)
    worker = Options(pipeline_config=config, strategy=strategy, get_old_log_probs_with_cache=lambda *_: old)
    return host.actor.loss_func(worker, data, batch.student)[0]


@functools.cache
def _prime_module(folder: Path) -> Any:
    package("prime_losses", folder / "src/prime_rl/trainer/rl")
    stub("prime_rl", "prime_rl.configs", "prime_rl.configs.trainer", "prime_rl.utils", "prime_rl.utils.utils")
    return importlib.import_module("prime_losses.loss")


def _prime_opd(batch: Sequences, folder: Path) -> Tensor:
    host, batch = _prime_module(folder), batch.aligned
    now, old, teacher = ([*x] for x in _scores(batch))
    zeros, weights = [torch.zeros_like(x) for x in old], [x.double() for x in batch.mask]
    counts = (1, 1, int(batch.mask.sum()))  # rl, ce, ref_kl
    return host.compute_loss(now, old, teacher, zeros, [*batch.mask], zeros, None, weights, None, *counts)[0]


_REVERSE: dict[str, Any] = {"kl_type": "reverse", "k": TOP}
_JSD: dict[str, Any] = {"advantage": "jsd_advantage.JSDAdvantage"}
_NO_SKIP: dict[str, Any] = {"loss": _sdft, "skip_first_n_tokens": 0}
_EMA: dict[str, Any] = {"kind": "full_reverse"}


def _of_tokens(
    loss: Callable[..., Tensor], takes: Any, names: str, field: str = "kind", **more: Any
) -> tuple[Mode, ...]:
    """A mode per estimator of a trainer; the first is its default."""
    modes = []
    for i, name in enumerate(names.split()):
        text = ", ".join([*(f"{key}={x}" for key, x in more.items()), name]) + " (default)" * (i == 0 and not more)
        modes.append(Mode(f"KL {text}", loss, {field: name, **more}, takes=takes))
    return tuple(modes)


TRAINERS: dict[str, tuple[Mode, ...]] = {
    "EMA-PG": (
        Mode(f"full_reverse, kl_topk_tokens={TOP}, sampled tail (default)", _ema_pg, _EMA),
        Mode(f"full_reverse, kl_topk_tokens={TOP}, sampled tail, use_kl_iw", _ema_pg, {**_EMA, "weighted": True}),
        Mode(f"full_reverse, kl_topk_tokens={TOP}, no tail", _ema_pg, {**_EMA, "tail": False}),
        Mode(f"full_forward, kl_topk_tokens={TOP}, sampled tail", _ema_pg, {"kind": "full_forward"}, "forward"),
        *_of_tokens(_ema_kl, "function", "low_var_kl k3plusplus k4"),
        Mode("KL k5", _ema_kl, {"kind": "k5"}, "forward", takes="function"),
    ),
    "NeMo-RL": (
        Mode("distillation, kl_type=mixed (default)", _nemo_distill, {}),
        Mode("distillation, kl_type=reverse", _nemo_distill, {"kl_type": "reverse"}),
        Mode(f"distillation, reverse, topk_logits_k={TOP}", _nemo_distill, _REVERSE),
        Mode("the same, zero_outside_topk=True", _nemo_distill, {**_REVERSE, "zero_outside_topk": True}),
        Mode("adv_estimator opd (default loss)", _nemo_opd, {}),
        Mode("ClippedPGLossFn, reference_policy_kl_type=k3 (default)", _nemo_kl, {}),
        Mode("ClippedPGLossFn, k3, use_on_policy_kl_approximation", _nemo_kl, {"use_on_policy_kl_approximation": True}),
        Mode("ClippedPGLossFn, reference_policy_kl_type=k1", _nemo_kl, {"kl_type": "k1"}),
        Mode("ClippedPGLossFn, reference_policy_kl_type=k2", _nemo_kl, {"kl_type": "k2"}),
    ),
    "ms-swift": (
        Mode("GKD, beta=0.5, temperature=0.9 (default)", _swift_gkd, {"beta": 0.5, "temperature": 0.9}, "js", 0.9),
        Mode("GKD, beta=1", _swift_gkd, {"beta": 1, "temperature": 1.0}),
        Mode(f"GKD, beta=1, gkd_logits_topk={TOP}", _swift_gkd, {"beta": 1, "temperature": 1.0, "topk": TOP}),
        Mode("GRPO, beta (default)", _swift_opd, {"beta": 1.0}),
        Mode("GRPO, beta, loss_type=bnpo", _swift_opd, {"beta": 1.0, "loss_type": "bnpo"}),
        Mode("GRPO, teacher_model, temperature=0.9 (default)", _swift_opd, {}),
        Mode("GRPO, teacher_model_server, temperature=0.9", _swift_opd, {"server": True}),
        Mode("GRPO, teacher_model, cispo, epsilon_high=None", _swift_opd, {"loss_type": "cispo"}),
        Mode("GRPO, teacher_model, cispo, epsilon_high=5", _swift_opd, {"loss_type": "cispo", "epsilon_high": 5.0}),
    ),
    "slime": (
        Mode("--use-opd (default)", _slime, {"use_opd": True}),
        *(
            Mode(f"--use-kl-loss --kl-loss-type {x}", _slime, {"use_kl_loss": True, "kl_loss_type": x})
            for x in ("k1", "k2", "k3", "low_var_kl")
        ),
        *(
            Mode(
                f"--use-kl-loss --use-unbiased-kl --kl-loss-type {x}",
                _slime,
                {"use_kl_loss": True, "kl_loss_type": x, "use_unbiased_kl": True},
            )
            for x in ("k2", "low_var_kl")
        ),
    ),
    "miles": (
        Mode("--use-opd (default)", _miles_opd, {}),
        Mode("--use-opd, top-k KL of each prefix", _miles_opd, {"exact": True}),
        *_of_tokens(_miles_kl, "logprobs", "k1 k2 k3 low_var_kl", unbiased=False),
        *_of_tokens(_miles_kl, "logprobs", "k2 low_var_kl", unbiased=True),
    ),
    "tinker-cookbook": (
        Mode("train_on_policy (default)", _tinker, {"loss": _tinker_opd}),
        Mode("SDFT, topk=20, skip_first_n_tokens=3 (default)", _tinker, {"loss": _sdft}, "forward"),
        Mode("SDFT, skip_first_n_tokens=0", _tinker, _NO_SKIP, "forward"),
        Mode("SDFT, reverse, skip_first_n_tokens=0", _tinker, {**_NO_SKIP, "reverse": True}),
        Mode(f"the same, topk={TOP}", _tinker, {**_NO_SKIP, "reverse": True, "topk": TOP}),
    ),
    "OpenRLHF": (
        *_of_tokens(_openrlhf, "logprobs", "k1 k2 k3", "kl_estimator"),
        *_of_tokens(_openrlhf, "logprobs", "k1 k3", "kl_estimator", unbiased_gradient=True),
    ),
    "SkyRL": _of_tokens(_skyrl, "logprobs", "k3 k1 k2 abs", "kl_estimator_type"),
    "AReaL": (
        Mode("rl_loss_weight=1 (default)", _areal, {"rl_loss_weight": 1.0}),
        Mode("rl_loss_weight=0", _areal, {"rl_loss_weight": 0.0}),
        *_of_tokens(_areal_reward, "reward", "k1 k2 k3"),
    ),
    "Trinity-RFT": (
        Mode("on_policy_distill", _trinity, {"advantage": "on_policy_distill_advantage.OnPolicyDistillAdvantage"}),
        Mode("jsd, lambda_coef=0.5 (default)", _trinity, _JSD, "js"),
        Mode("jsd, lambda_coef=0", _trinity, {**_JSD, "lambda_coef": 0}),
        Mode("jsd, lambda_coef=1", _trinity, {**_JSD, "lambda_coef": 1}, "forward"),
        *_of_tokens(_trinity_kl, "logprobs", "K2Fn K1Fn K3Fn LowVarKLFn AbsFn CorrectedK3Fn"),
    ),
    "ROLL": (
        Mode("distill, forward_kl (default)", _roll_distill, {"kd_objective": "forward_kl"}, "forward"),
        Mode("distill, reverse_kl", _roll_distill, {"kd_objective": "reverse_kl"}),
        Mode(f"distill, reverse_kl, logits_topk={TOP}", _roll_distill, {"kd_objective": "reverse_kl", "topk": TOP}),
        Mode("pure OPD, kl_penalty=kl (default)", _roll_opd, {"kl_penalty": "kl"}),
        *(Mode(f"pure OPD, kl_penalty={name}", _roll_opd, {"kl_penalty": name}) for name in ("abs", "mse", "full")),
        Mode("use_kl_loss (k3)", _roll_opd, {}),
    ),
    "prime-rl": (
        Mode("ref_kl of algorithm=opd (default)", _prime_opd, {}),
        *_of_tokens(_prime_rl, "function", "default_loss_fn ipo_loss_fn", "loss"),
    ),
    "rLLM": (
        Mode("distill, clip -5 to 5 (default)", _rllm, {"clip_min": -5.0, "clip_max": 5.0}),
        Mode(
            "distill, kl_discount_factor=0.99", _rllm, {"clip_min": -5.0, "clip_max": 5.0, "kl_discount_factor": 0.99}
        ),
    ),
}
"""The name of a checkout in FOLDER, and what is audited of it: the default, what was found wrong, what is right."""

NOTES = {
    "NeMo-RL": (
        "kl_type=mixed is half reverse, half forward, which no heading names: it is held against reverse.",
        "topk_logits_k is 64 by default; where it is not told, all words are among them.",
    ),
    "ms-swift": ("GRPO: tokens are sampled at the temperature; the gradient is in logits divided by it.",),
    "miles": ("The mean over tokens is the audit's.",),
    "tinker-cookbook": (
        "Tinker's optimiser is a service; importance_sampling and cross_entropy are those of FOLDER/SkyRL's server.",
        "Tinker sums over all tokens; here the sum is divided by their number.",
    ),
    "AReaL": ("distill_loss_weight is 0.005 by default, and 1 here.",),
    "ROLL": ("logits_topk is 64 by default; where it is not told, all words are among them.",),
    "prime-rl": ("default_loss_fn and ipo_loss_fn hold a KL to whoever sampled, which is the reference here.",),
    "rLLM": ("The policy loss with the ratio is the audit's.",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Audit what is there of the trainers that are named; without a name, of all.

    Args:
        argv: FOLDER and names; None: those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m scripts.fetched_trainers")
    parser.add_argument("folder", type=Path, help="that holds the checkouts")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRAINERS)}")
    given = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if unknown := [name for name in given.names if name not in TRAINERS]:
        parser.error(f"{', '.join(unknown)}: known are {', '.join(TRAINERS)}")
    for name in given.names or TRAINERS:
        folder = given.folder / name
        if not folder.is_dir():
            say(f"{name}: there is no folder {folder}; skipped.\n")
            continue
        subject = subject_of(name, folder.resolve())
        show_audit(subject, audit(subject))
    say(LEGEND)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
