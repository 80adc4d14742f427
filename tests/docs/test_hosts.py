"""Each function of docs/hosts.md, run as it stands there: its expected gradient is that of the KL that the page names.

Every token of a small vocabulary is enumerated at one position; a second one behind it is masked. Stand-ins take the
place of the trainers' own classes.
"""

import re
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tests.docs.pages import DOCS
from torch import Tensor

import klamp
from klamp.audit.verdict import Verdict

SECTIONS = {x.split("\n", 1)[0]: x for x in (DOCS / "hosts.md").read_text(encoding="utf-8").split("\n## ")[1:]}
BETA = 0.3


class Trainer:
    def compute_advantages_and_returns(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        return data | {"advantages": data["rewards"]}


class Worker:
    pipeline_config = SimpleNamespace(kd_temperature=2.0)

    def loss_func(self, data: dict[str, Any], output_tensor: Tensor) -> Tensor:
        return self.kl_loss_func(logits=output_tensor, **data)  # type: ignore[attr-defined]


class BaseLoss:
    class Config:
        pass


def areal_loss(logprobs: Tensor, entropy: None, input_data: dict[str, Tensor], eps_clip: float) -> Tensor:
    assert "teacher_logp" not in input_data
    ratio, mask = (logprobs - input_data["logprobs"]).exp(), input_data["loss_mask"].bool()
    return -(ratio * input_data["advantages"])[mask].mean()


NEMO_NAMES = ("LossType", "LossInputType", "MetricNormalizer")
STANDINS: dict[str, dict[str, Any]] = {
    "prime_rl.trainer.rl.loss": {"LossOutputs": lambda loss, metrics: loss},
    "openrlhf.trainer.ray.ppo_actor": {},
    "skyrl.train.trainer": {"RayPPOTrainer": Trainer},
    "nemo_rl.algorithms.loss.interfaces": {name: MagicMock() for name in NEMO_NAMES},
    "swift.rlhf_trainers.gkd_loss": {},
    "slime.backends.megatron_utils.loss": {"get_log_probs_and_entropy": lambda x, **_: (None, {"log_probs": [x]})},
    "miles.backends.training_utils.loss_hub.logit_processors": {
        "get_log_probs_and_entropy": lambda x, **_: {"log_probs": [x]}
    },
    "areal.trainer.ppo.actor": {"grpo_loss_fn": areal_loss},
    "trinity.algorithm.policy_loss_fn.policy_loss_fn": {"PolicyLossFn": SimpleNamespace},
    "roll.pipeline.distill.distill_worker": {"StudentWorker": Worker},
    "rllm": {"register_loss": lambda name: lambda function: function},
    "torchtitan.components.loss": {"BaseLoss": BaseLoss, "compute_logprobs": lambda logits, labels: logits},
}
"""Module of a trainer's that a snippet imports -> what of it the snippet uses."""


def defined(trainer: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the trainer's snippet defines, with the stand-ins in place."""
    for name, held in STANDINS.items():
        for path in accumulate(name.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
        vars(sys.modules[name]).update(held)
    code, _ = re.findall(r"```python\n(.*?)```", SECTIONS[trainer], re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def prime(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    inputs = SimpleNamespace(trainer_logprobs=x.policy, inference_logprobs=x.old, advantages=x.reward)
    inputs.loss_mask, inputs.ref_logprobs, inputs.loss_weights = x.mask, None, None
    loss = names["klamp_loss"](inputs, beta=BETA)
    inputs.loss_weights = torch.full_like(x.old, 2.0)
    torch.testing.assert_close(names["klamp_loss"](inputs, beta=BETA), 2 * loss)
    return loss


def openrlhf(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    options = {"log_probs_old": x.old[None], "kl_estimator": "k3", "unbiased_gradient": False}  # as 0.11.2 calls it
    kl = names["ppo_actor"].compute_approx_kl(x.policy[None], x.anchor[None], **options)
    return BETA * (kl * x.mask).sum()


def skyrl(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    trainer = names["KlampTrainer"]()
    trainer.beta = BETA
    data = {"action_log_probs": x.policy.detach(), "base_action_log_probs": x.anchor, "rewards": x.reward}
    data = {name: value[None] for name, value in (data | {"loss_mask": x.mask.double()}).items()}
    return -(trainer.compute_advantages_and_returns(data)["advantages"] * x.policy)[0, 0]  # its loss at ratio 1


def nemo(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    loss = names["KlampLoss"]()
    loss.objective = loss.objective.weighted(BETA)
    scored = {"prev": x.old, "generation": x.old, "reference_policy": x.anchor}
    given = {"advantages": x.reward} | {f"{who}_logprobs": value for who, value in scored.items()}
    data = {name: torch.cat((x.old[:1], value))[None] for name, value in given.items()}  # the prompt's token before
    data |= {"token_mask": torch.tensor([[0.0, 1.0, 0.0]]), "sample_mask": torch.ones(1)}
    value, metrics = loss(data, torch.tensor(3.0), torch.tensor(7.0), next_token_logprobs=x.policy[None])
    assert metrics["num_valid_samples"] == 1
    return 7 * value


def nemo_distillation(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    heads = [row.log_softmax(-1)[None, None] for row in x.pair]
    data = {"token_mask": torch.tensor([[0.0, 1.0, 0.0]]), "sample_mask": torch.ones(1)}
    return 7 * BETA * names["KlampDistillation"]()(data, torch.tensor(3.0), torch.tensor(7.0), *heads, None)[0]


def swift(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    policy, anchor = (row.expand(3, -1) for row in x.pair)
    return BETA * names["gkd_loss"].jsd_loss(policy, anchor, 1.0, chunk_size=2) / 3


def slime(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    """For miles too, which has the log-ratio where slime has the teacher's log-probabilities."""
    batch = {key: [] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    batch |= {"log_probs": [x.old], "teacher_log_probs": [x.anchor], "advantages": [x.reward]}
    batch["opd_reverse_kl"] = [x.old - x.anchor]
    return names["klamp_loss"](None, batch, x.policy, lambda tokens: (tokens * x.mask).sum(), coefficient=BETA)[0]


def areal(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    data = {"logprobs": x.old, "advantages": x.reward, "loss_mask": x.mask.int(), "teacher_logp": x.anchor}
    data |= {"rl_loss_weight": 1.0, "distill_loss_weight": BETA}
    return names["actor"].grpo_loss_fn(x.policy, None, data, eps_clip=0.2)


def trinity(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    data = {"old_logprob": x.old, "action_mask": x.mask, "advantages": x.reward, "teacher_logprobs": x.anchor}
    loss = names["KlampLoss"](backend="verl")
    loss.objective = replace(loss.objective, terms=(loss.to_teacher._replace(coefficient=BETA),))
    return loss(x.policy[None], **{name: value[None] for name, value in data.items()})[0]


def roll(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    teacher = x.rows["anchor"].log_softmax(-1)[None, None]
    given = {"teacher_probs": teacher.exp(), "teacher_log_probs": teacher, "teacher_inf_mask": teacher.isinf()}
    return BETA * names["KlampStudent"]().loss_func(given, 2.0 * x.rows["policy"][None, None])[0, 0]


def rllm(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    ctx = SimpleNamespace(logp_curr=x.policy, logp_old=x.old, logp_ref=x.anchor, advantages=x.reward)
    ctx.action_mask, ctx.params, ctx.aggregate = x.mask.double(), {"kl_beta": BETA}, torch.matmul
    return names["klamp_loss"](ctx)[0]


def torchtitan(names: dict[str, Any], x: SimpleNamespace) -> Tensor:
    loss = names["KlampLoss"](names["KlampLoss"].Config(beta=BETA))
    drawn = {"generator_logprobs": x.old.where(x.mask, -torch.inf), "advantages": x.reward}
    return 7 * loss(x.policy, None, 7, **drawn, loss_mask=torch.ones_like(x.mask))[0]


ROWS = (prime, openrlhf, skyrl, nemo, nemo_distillation, swift, slime, slime, areal, trinity, roll, rllm, torchtitan)
CALLS = dict(zip(SECTIONS, ROWS, strict=True))
TO_SAMPLER = {"prime-rl", "torchtitan"}
ON_POLICY = {"SkyRL", "NeMo-RL distillation", "ms-swift", "ROLL"}
KL_ALONE = ON_POLICY - {"SkyRL"} | {"OpenRLHF"}  # their functions contain no policy loss


@pytest.mark.parametrize("trainer", SECTIONS)
def test_the_expected_gradient_is_that_of_the_kl(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = defined(trainer, monkeypatch)
    torch.manual_seed(1)
    policy, anchor, noise, reward = torch.randn(4, 5, dtype=torch.float64)
    policy.requires_grad_()
    old = policy.detach() + 0.05 * noise  # so near that no ratio is clipped
    rows = {"policy": policy, "anchor": old if trainer in TO_SAMPLER else anchor, "old": old}
    drawn_by = rows["policy" if trainer in ON_POLICY else "old"].detach().softmax(-1)
    loss = torch.zeros((), dtype=torch.float64)
    for token in range(5):
        scored = {who: torch.stack((x.log_softmax(-1)[token], x[0] - 9)) for who, x in rows.items()}
        scored["reward"] = torch.stack((reward[token], torch.tensor(5.0)))
        drawn = SimpleNamespace(**scored, mask=torch.tensor([True, False]), rows=rows, pair=(policy, rows["anchor"]))
        loss = loss + drawn_by[token] * CALLS[trainer](names, drawn)
    (gradient,) = torch.autograd.grad(loss, policy)
    log_p, log_q = policy.log_softmax(-1), rows["anchor"].log_softmax(-1)
    reverse, forward = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    rewarded = (trainer not in KL_ALONE) * (log_p.exp() * reward).sum()
    (expected,) = torch.autograd.grad(BETA * (forward if trainer == "ROLL" else reverse) - rewarded, policy)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def test_metrics_that_nemo_rl_sums_are_means(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = defined("NeMo-RL", monkeypatch)["KlampLoss"]()
    names = ("prev", "generation", "reference_policy", "next_token")
    scored = {f"{who}_logprobs": -3 * torch.rand(32, 6) for who in names}
    mask = (torch.arange(6) < torch.randint(2, 7, (32, 1))).float()
    data = scored | {"advantages": torch.randn(32, 6), "token_mask": mask, "sample_mask": torch.ones(32)}
    policy, totals = data.pop("next_token_logprobs")[:, 1:], (torch.tensor(32.0), mask[:, 1:].sum())

    def metrics(rows: slice) -> dict[str, float]:
        return loss({name: x[rows] for name, x in data.items()}, *totals, next_token_logprobs=policy[rows])[1]

    whole, parts = metrics(slice(32)), [metrics(slice(i, i + 1)) for i in range(32)]  # 8 micro-batches on 4 ranks
    ratios = {name: sum(part[name] for part in parts) / value for name, value in whole.items() if value}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=1e-4)


def one_row(x: SimpleNamespace) -> dict[str, Tensor]:
    """Completions as one packed row without padding, for trainers with tokens in one dimension."""
    return {name: value.reshape(-1) for name, value in vars(x).items()}


def _prime(x: SimpleNamespace) -> dict[str, Any]:
    named = {"policy": "trainer", "old": "inference", "ref": "ref"}
    inputs = {f"{theirs}_logprobs": getattr(x, ours) for ours, theirs in named.items()}
    return {"inputs": SimpleNamespace(**inputs, loss_mask=x.mask, advantages=x.advantages), "beta": BETA}


def _openrlhf(x: SimpleNamespace) -> dict[str, Any]:
    scores = {"action_log_probs": x.policy, "old_action_log_probs": x.old, "base_action_log_probs": x.ref}
    experience = SimpleNamespace(action_mask=x.mask)
    given = {"experience": experience, "loss_mask": x.mask, "rollout_action_logprobs": x.old, "kl_ctl": BETA}
    return scores | given | {"advantages": x.advantages}


def _nemo(x: SimpleNamespace) -> dict[str, Any]:
    scores = {"prev": x.old, "generation": x.old, "reference_policy": x.ref}
    data = {f"{who}_logprobs": value for who, value in scores.items()} | {"advantages": x.advantages}
    data = {name: torch.cat((value[:, :1], value), 1) for name, value in (data | {"token_mask": x.mask}).items()}
    return {"next_token_logprobs": x.policy, "data": data | {"sample_mask": torch.ones(len(x.mask))}}


def _slime(x: SimpleNamespace) -> dict[str, Any]:
    named = {"log_probs": x.old, "ref_log_probs": x.ref, "advantages": x.advantages, "loss_masks": x.mask}
    named["opd_reverse_kl"] = x.old - x.ref
    return {"batch": {name: list(value) for name, value in named.items()}, "scored": {"log_probs": x.rows}}


def _areal(x: SimpleNamespace) -> dict[str, Any]:
    data = {"teacher_logp": x.ref, "logprobs": x.old, "advantages": x.advantages, "loss_mask": x.mask}
    return {"logprobs": x.policy, "input_data": data | {"distill_loss_weight": BETA, "rl_loss_weight": 1.0}}


def _trinity(x: SimpleNamespace) -> dict[str, Any]:
    given = {"logprob": x.policy, "old_logprob": x.old, "teacher_logprobs": x.ref, "action_mask": x.mask}
    return given | {"advantages": x.advantages}


def _rllm(x: SimpleNamespace) -> dict[str, Any]:
    ctx = SimpleNamespace(logp_curr=x.policy, logp_old=x.old, logp_ref=x.ref, advantages=x.advantages)
    vars(ctx).update(action_mask=x.mask, params={"kl_beta": BETA})
    return {"ctx": ctx}


def _torchtitan(x: SimpleNamespace) -> dict[str, Any]:
    return vars(x) | {"sampler": x.ref, "self": SimpleNamespace(beta=BETA)}


SCOPES = {"prime-rl": _prime, "OpenRLHF": _openrlhf, "SkyRL": _openrlhf, "NeMo-RL": _nemo, "slime": _slime}
SCOPES |= {"miles": _slime, "AReaL": _areal, "Trinity-RFT": _trinity, "rLLM": _rllm, "torchtitan": _torchtitan}
"""Trainer -> the names that its second snippet finds where it is put."""


def verdict_of(trainer: str, names: dict[str, Any]) -> Verdict:
    """What the trainer's second snippet finds out with these names in its scope."""
    _, code = re.findall(r"```python\n(.*?)```", SECTIONS[trainer], re.S)
    names |= {"klamp": SimpleNamespace(check=partial(klamp.check, once=False))}
    exec(code, names)
    return names["verdict"]


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
@pytest.mark.parametrize(("sound", "kl"), [(True, "reverse"), (False, "forward")])
@pytest.mark.parametrize("trainer", SCOPES)
def test_the_check_of_a_policy_loss(trainer: str, sound: bool, kl: str) -> None:
    torch.manual_seed(2)
    policy = -3 * torch.rand(6, 8, dtype=torch.float64)
    noise, far, reward = torch.randn(3, 6, 8, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([8, 5, 7, 8, 3, 6])[:, None]
    x = {"policy": policy, "old": policy + 0.05 * noise, "ref": policy + 0.3 * far, "mask": mask.double()}
    x["advantages"] = reward[:, :1].expand(6, 8)
    x = {name: value.clamp(max=0) if name in ("old", "ref") else value for name, value in x.items()}
    if trainer == "torchtitan":
        x["ref"] = x["old"]  # it has no other anchor
    if trainer in ("prime-rl", "AReaL"):
        x = one_row(SimpleNamespace(**x))
    rows = [row.clone().requires_grad_() for row in x["policy"]] if trainer in ("slime", "miles") else []
    x["policy"] = torch.stack(rows) if rows else x["policy"].clone().requires_grad_()
    b = SimpleNamespace(**x, rows=rows)
    ratio, delta = (b.policy - b.old).exp(), b.policy - b.ref
    k3 = torch.expm1(-delta) + delta
    beta = 0.05 if trainer in ("NeMo-RL", "slime", "miles", "Trinity-RFT") else BETA
    tokens = beta * (ratio * k3 if sound else k3) - ratio * b.advantages
    verdict = verdict_of(trainer, SCOPES[trainer](b) | {"loss": (tokens * b.mask).sum() / b.mask.sum()})
    assert (verdict.ok, verdict.kl) == (sound, kl), str(verdict)
    assert verdict.beta == pytest.approx(beta, rel=1e-3)


@pytest.mark.filterwarnings("ignore::klamp.KLWarning")
@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("trainer", ["ms-swift", "ROLL"])
def test_the_check_of_a_divergence(trainer: str, sound: bool) -> None:
    torch.manual_seed(2)
    student, teacher = torch.randn(2, 5, 8, 11, dtype=torch.float64)
    heat = 2.0 if trainer == "ROLL" else 1.0
    student = (student if trainer == "ROLL" else student[:, 0]).clone().requires_grad_()
    teacher = teacher if trainer == "ROLL" else teacher[:, 0]
    log_p, log_q = ((x / heat).log_softmax(-1) for x in (student, teacher))
    forward = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    names = {"s_logits": student, "t_logits": teacher, "beta": 0 if sound else 1, "total": forward}
    names |= {"student_logits": student, "teacher_log_probs": log_q, "labels": torch.ones(5, 8)}
    names |= {"distill_loss": forward if sound else (log_p.exp() * (log_p - log_q)).sum(-1).mean()}
    names |= {"self": SimpleNamespace(pipeline_config=SimpleNamespace(kd_temperature=heat))}
    verdict = verdict_of(trainer, names)
    assert (verdict.ok, verdict.kl) == (sound, "forward" if sound or trainer == "ms-swift" else "reverse"), str(verdict)
