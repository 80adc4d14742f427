"""Audits the distillation losses of trainers that are not installed, from checkouts of their repositories.

`python -m scripts.fetched_trainers FOLDER [NAME ...]`: FOLDER holds one checkout per trainer, under the names of
`TRAINERS`. Each loss is the trainer's own code, run on CPU (`scripts.checkouts`): this runs what lies in FOLDER.

Advantages are those of distillation alone (rewards 0), coefficients 1; the student has sampled its tokens by itself and
not moved since. A teacher's service is answered for with the log-probabilities of the audit's teacher.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from scripts.checkouts import Options, Unused, commit_of, cut, nothing, package, stub, undecorated
from torch import Tensor

from klamp.audit.examine import PROMPT, AuditedLoss, Sequences, Subject, audit
from klamp.cli.audit import LEGEND, show_audit
from klamp.cli.text import say
from klamp.core.types import Direction

TOP, ALL = 3, 6
"""The teacher's likeliest tokens that a loss of top-k sees, and all there are in the audit."""
SAMPLED_AT = 0.9
"""ms-swift's default temperature of sampling."""


class Mode(NamedTuple):
    """A loss of a trainer: its name with its options, `loss(batch, folder of the trainer, **options)`, its meaning."""

    name: str
    loss: Callable[..., Tensor]
    options: dict[str, Any]
    means: Direction = "reverse"
    temperature: float = 1.0


def subject_of(name: str, folder: Path) -> Subject:
    """What is audited of a trainer.

    Args:
        name: one of `TRAINERS`.
        folder: its checkout.
    """
    losses = tuple(
        AuditedLoss(
            name=mode.name,
            takes="sequences",
            compute=functools.partial(mode.loss, folder=folder, **mode.options),
            means=mode.means,
            temperature=mode.temperature,
        )
        for mode in TRAINERS[name]
    )
    return Subject(title=f"{name} {commit_of(folder)}".rstrip(), losses=losses, notes=NOTES.get(name, ()))


def _logps(logits: Tensor, tokens: Tensor) -> Tensor:
    """What a trainer's forward pass, or a teacher's service, gives of the tokens."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def _scores(batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of an aligned batch's tokens: the student's, the same held fixed, the teacher's."""
    now = _logps(batch.student, batch.tokens)
    return now, now.detach(), _logps(batch.teacher, batch.tokens)


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
        old, teacher = (pad(host.logps(batch.tokens, x), (1, 0)) for x in (batch.student.detach(), batch.teacher))
        advantages = host.advantages({"name": "opd"}, None).compute_advantage(
            None, None, batch.mask.float(), teacher_logprobs=teacher, prev_logprobs=old
        )
        loss = host.losses.ClippedPGLossFn(host.losses.ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
        scores = dict.fromkeys(("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"), old)
        return _nemo_run(host, loss, batch, advantages=advantages, **scores)


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

    old, teacher = logps(batch.student.detach()), logps(batch.teacher)
    if server:  # the log-probabilities of a prompt, at temperature 1
        teacher = _logps(batch.aligned.teacher * SAMPLED_AT, batch.aligned.tokens)[:, PROMPT - 1 :]
    base = torch.zeros(len(mask))
    rows = Options(
        completion_mask=mask,
        advantages=host.advantages.expand_advantage_to_per_token(base, mask, teacher, old, 1.0),
        old_per_token_logps=old,
        teacher_per_token_logps=teacher,
        num_items_in_batch=mask.sum(),
    )
    trainer = Options(
        model=SimpleNamespace(training=True),
        args=Options(),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x),
        **{"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "sdar_loss_coef": 0.0, **options},
        importance_sampling_level="token",
        _has_teacher=True,
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


def _slime_opd(batch: Sequences, folder: Path) -> Tensor:
    host, rows = _slime_module(folder), _without_padding(batch)
    kinds = {"opd_type": "sglang", "advantage_estimator": "grpo", "loss_type": "policy_loss"}
    numbers = {"opd_kl_coef": 1.0, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "kl_coef": 0.0}
    clips = {"eps_clip": 0.2, "eps_clip_high": 0.2, "entropy_coef": 0.0, "log_probs_chunk_size": -1}
    args = Options(use_opd=True, **kinds, **numbers, **clips)
    lengths: dict[str, Any] = {
        "unconcat_tokens": [row.tokens for row in rows],
        "total_lengths": [len(row.tokens) for row in rows],
        "response_lengths": [int(row.mask.sum()) for row in rows],
    }
    student, teacher = (torch.cat([row[i] for row in rows])[None].float() for i in range(2))
    scores = functools.partial(host.get_log_probs_and_entropy, args=args, **lengths)
    data = {
        **lengths,
        "log_probs": scores(student.detach())[1]["log_probs"],
        "teacher_log_probs": scores(teacher)[1]["log_probs"],
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
            "logprobs": scores.detach(),
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


def _openrlhf_kd(batch: Sequences, folder: Path, *, as_called: bool) -> Tensor:
    """As kd_trainer.py calls it, neither logits nor labels are shifted."""
    package("openrlhf_losses", folder / "openrlhf/models")
    stub("openrlhf_losses.utils")
    trained = batch.mask | batch.mask.roll(-1, 1)  # the loss_mask of SFTDataset begins at the prompt's last token
    if not as_called:
        batch = batch.aligned
        trained = batch.mask
    labels = batch.tokens.masked_fill(~trained, -100)
    return importlib.import_module("openrlhf_losses.loss").KDLoss()(batch.student, batch.teacher, labels)


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


def _roll_opd(batch: Sequences, folder: Path, *, kl_penalty: str) -> Tensor:
    host, (now, old, teacher), mask = _roll_modules(folder), _scores(batch.aligned), batch.mask.double()
    teachers = {"default": SimpleNamespace(opd_kl_coef=1.0)}
    numbers = {"pg_clip": 0.2, "entropy_loss_coef": 0.0, "loss_agg_mode": "seq-mean-token-mean"}
    config = Options(is_pure_opd=True, reference_configs=teachers, kl_penalty=kl_penalty, **numbers)
    scores = {"infer_logprobs": old, "ref_log_probs": old, "ref_log_probs_default": teacher}
    sizes = {"batch_num_tokens": {"response_mask": mask.sum()}, "global_valid_samples": {"response_mask": len(mask)}}
    data = SimpleNamespace(batch={"response_mask": mask, "input_ids": batch.tokens, **scores}, meta_info=sizes)
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

TRAINERS: dict[str, tuple[Mode, ...]] = {
    "NeMo-RL": (
        Mode("distillation, kl_type=mixed (default)", _nemo_distill, {}),
        Mode("distillation, kl_type=reverse", _nemo_distill, {"kl_type": "reverse"}),
        Mode(f"distillation, reverse, topk_logits_k={TOP}", _nemo_distill, _REVERSE),
        Mode("the same, zero_outside_topk=True", _nemo_distill, {**_REVERSE, "zero_outside_topk": True}),
        Mode("adv_estimator opd (default loss)", _nemo_opd, {}),
    ),
    "ms-swift": (
        Mode("GKD, beta=0.5, temperature=0.9 (default)", _swift_gkd, {"beta": 0.5, "temperature": 0.9}, "js", 0.9),
        Mode("GKD, beta=1", _swift_gkd, {"beta": 1, "temperature": 1.0}),
        Mode(f"GKD, beta=1, gkd_logits_topk={TOP}", _swift_gkd, {"beta": 1, "temperature": 1.0, "topk": TOP}),
        Mode("GRPO, teacher_model, temperature=0.9 (default)", _swift_opd, {}),
        Mode("GRPO, teacher_model_server, temperature=0.9", _swift_opd, {"server": True}),
        Mode("GRPO, teacher_model, cispo, epsilon_high=None", _swift_opd, {"loss_type": "cispo"}),
        Mode("GRPO, teacher_model, cispo, epsilon_high=5", _swift_opd, {"loss_type": "cispo", "epsilon_high": 5.0}),
    ),
    "slime": (Mode("--use-opd (default)", _slime_opd, {}),),
    "tinker-cookbook": (
        Mode("train_on_policy (default)", _tinker, {"loss": _tinker_opd}),
        Mode("SDFT, topk=20, skip_first_n_tokens=3 (default)", _tinker, {"loss": _sdft}, "forward"),
        Mode("SDFT, skip_first_n_tokens=0", _tinker, _NO_SKIP, "forward"),
        Mode("SDFT, reverse, skip_first_n_tokens=0", _tinker, {**_NO_SKIP, "reverse": True}),
        Mode(f"the same, topk={TOP}", _tinker, {**_NO_SKIP, "reverse": True, "topk": TOP}),
    ),
    "OpenRLHF": (
        Mode("KDLoss, as kd_trainer calls it (default)", _openrlhf_kd, {"as_called": True}, "forward"),
        Mode("KDLoss, on the rows that predict the completion", _openrlhf_kd, {"as_called": False}, "forward"),
    ),
    "AReaL": (
        Mode("rl_loss_weight=1 (default)", _areal, {"rl_loss_weight": 1.0}),
        Mode("rl_loss_weight=0", _areal, {"rl_loss_weight": 0.0}),
    ),
    "Trinity-RFT": (
        Mode("on_policy_distill", _trinity, {"advantage": "on_policy_distill_advantage.OnPolicyDistillAdvantage"}),
        Mode("jsd, lambda_coef=0.5 (default)", _trinity, _JSD, "js"),
        Mode("jsd, lambda_coef=0", _trinity, {**_JSD, "lambda_coef": 0}),
        Mode("jsd, lambda_coef=1", _trinity, {**_JSD, "lambda_coef": 1}, "forward"),
    ),
    "ROLL": (
        Mode("distill, forward_kl (default)", _roll_distill, {"kd_objective": "forward_kl"}, "forward"),
        Mode("distill, reverse_kl", _roll_distill, {"kd_objective": "reverse_kl"}),
        Mode(f"distill, reverse_kl, logits_topk={TOP}", _roll_distill, {"kd_objective": "reverse_kl", "topk": TOP}),
        Mode("pure OPD, kl_penalty=kl (default)", _roll_opd, {"kl_penalty": "kl"}),
        *(Mode(f"pure OPD, kl_penalty={name}", _roll_opd, {"kl_penalty": name}) for name in ("abs", "mse", "full")),
    ),
    "prime-rl": (Mode("ref_kl of algorithm=opd (default)", _prime_opd, {}),),
}
"""The name of a checkout in FOLDER, and what is audited of it: the default, what was found wrong, what is right."""

NOTES = {
    "NeMo-RL": (
        "kl_type=mixed is half reverse, half forward, which no heading names: it is held against reverse.",
        "topk_logits_k is 64 by default; where it is not told, all six tokens are among them.",
    ),
    "ms-swift": ("GRPO: tokens are sampled at the temperature; the gradient is in logits divided by it.",),
    "tinker-cookbook": (
        "Tinker's optimiser is a service; importance_sampling and cross_entropy are those of FOLDER/SkyRL's server.",
        "Tinker sums over all tokens; here the sum is divided by their number.",
    ),
    "AReaL": ("distill_loss_weight is 0.005 by default, and 1 here.",),
    "ROLL": ("logits_topk is 64 by default; where it is not told, all six tokens are among them.",),
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
    torch._dynamo.config.disable = True  # some compile their loss; the mathematics is the same
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
