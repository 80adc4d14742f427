"""One update through the service is the local trainer's: the same loss, the same gradient, for every control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.standin import ready
from tests.training.conftest import IN_ADVANTAGE, IN_REWARD, TINY, stored, tiny_llama
from tests.waiting import SECONDS

from klamp.errors import NonFiniteError
from klamp.tinker.testing import Fault
from klamp.training import updates
from klamp.training.config import TrainConfig
from klamp.training.rollouts import rate
from klamp.training.service import calls
from klamp.training.service.connection import Connection
from klamp.training.service.run import TinkerTrainer
from klamp.training.setup import build, make_accelerator
from klamp.training.teachers import Teachers

pytestmark = pytest.mark.slow

HEAD = {"teacher_estimator": "topk", "teacher_head": "teacher", "teacher_top_k": 3}
CONTROLS = {
    "k3": {},
    "no KL": {"beta": 0.0},
    "own gradient, dapo": {"kl_estimator": "k2", "kl_gradient": "own", "loss_type": "dapo"},
    "sequence horizon, off-policy": {"kl_estimator": "k1", "kl_horizon": "sequence", "kl_off_policy": "sequence"},
    "clip, dr_grpo": {"kl_clip_method": "soft", "kl_clip_threshold": 0.01, "loss_type": "dr_grpo"},
    "clip of the group, in parts": {
        "kl_clip_method": "hard",
        "kl_clip_threshold": 0.001,
        "kl_clip_level": "group",
        "gradient_accumulation_steps": 3,
    },
    "reward": {**IN_REWARD, "scale_rewards": "none"},
    "advantage": IN_ADVANTAGE,
    "cispo, in parts": {"surrogate": "cispo", "gradient_accumulation_steps": 4},
    "masks": {"mask_truncated_completions": True, "kl_exclude_tokens": (5, 9)},
    "teacher, k1 in the advantage": {"beta": 0.0, "teacher_placement": "advantage", "teacher_horizon": "sequence"},
    "teacher, k1 in the reward": {
        "teacher_placement": "reward",
        "teacher_horizon": "sequence",
        "scale_rewards": "none",
    },
    "teacher, k3 beside a reference": {"teacher_estimator": "k3", "teacher_off_policy": "token"},
    "teacher, a head, in parts": {**HEAD, "beta": 0.0, "gradient_accumulation_steps": 3},
    "teacher, a head, off-policy": {**HEAD, "teacher_off_policy": "token", "teacher_direction": "js"},
    "teacher, a head, sequence": {**HEAD, "teacher_horizon": "sequence", "teacher_off_policy": "sequence"},
    "teacher, a tail alone": {
        **HEAD,
        "teacher_top_k": 0,
        "teacher_direction": "forward",
        "reward": "none",
        "beta": 0.0,
    },
}
OF_LOGITS = {"policy/skipped", "teacher/overlap_ratio", "teacher/cut_mass"}
"""What is known only where the policy's logits are."""


class Both:
    """The same adapter here and at the service, and completions that the service sampled before it moved on."""

    def __init__(self, tiny, folder: Path, **changes):
        model = stored(tiny_llama(), folder / "model")
        if any(name.startswith("teacher") for name in changes):
            changes |= {"teacher_model": model}
        config = TrainConfig.from_flat(
            {**TINY, "model": model, "output_dir": str(folder / "run"), "beta": 0.5}
            | {"lora_r": 4, "max_grad_norm": 0.0, "kl_reference_length": 4}
            | changes
        )
        self.here = build(config, make_accelerator(config, folder), folder, ())
        self.here.wrapped = self.here.accelerator.prepare_model(self.here.wrapped)
        self.connection = Connection(SECONDS)
        service = self.connection.service
        self.client = ready(service.create_lora_training_client(tiny.base_model, rank=4, train_unembed=False))
        self.weights = tiny.weights()
        examples = self.here.task.train[:3]
        base = ready(service.create_sampling_client(base_model=tiny.base_model))
        self._move(1)
        snapshot = ready(self.client.save_weights_and_get_sampling_client())
        sampler = calls.TinkerReference(self.connection, snapshot, "the sampler")
        self.completions = calls.collect(self.here, sampler, examples, step=0)
        self._move(2)
        weightless = {"policy": torch.nn.ParameterList([torch.zeros(1)]), "scorer": None}
        if self.here.teachers is not None:
            kl, size = config.teacher, self.here.vocabulary
            options = {"top_k": kl.teacher_top_k, "vocabulary": size} if kl.teacher_estimator == "topk" else {}
            model = calls.TinkerReference(self.connection, base, "the base model", **options)
            weightless["teachers"] = Teachers(kl, {"": model}, tokenizer=self.here.tokenizer, prompts={})
        reference = calls.TinkerReference(self.connection, base, "the base model")
        self.there = replace(self.here, **weightless, reference=reference)
        self.trainer = TinkerTrainer(self.there, [], self.connection, self.client)
        self.examples = [example for example in examples for _ in range(4)]

    def _move(self, seed):
        """Other weights, the same in both places: in the end they are neither the reference's nor the sampler's."""
        own = dict(self.here.policy.named_parameters())
        with torch.no_grad():
            for i, (name, tensor) in enumerate(self.weights.items()):
                tensor.add_(0.03 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(100 * seed + i)))
                own[name].copy_(tensor)

    def update(self, rollout, *, rate=0.0, before_step=lambda: None):
        """An update at the service."""
        self.trainer.optimizer.param_groups[0]["lr"] = rate
        self.trainer.optimizer.register_step_pre_hook(lambda *_: before_step())
        return self.trainer.update(rollout, self.there.objective)

    def rated(self, context):
        beta, sampled = context.config.kl.beta, self.completions.sampler_logprobs
        others = context.objective.others
        return rate(context, self.examples, self.completions, beta=beta, others=others, old_logprobs=sampled)


@pytest.mark.parametrize("name", CONTROLS)
def test_the_update_is_that_of_the_local_trainer(tiny, tmp_path, name):
    both = Both(tiny, tmp_path, **CONTROLS[name])
    trained = [p for p in both.here.policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    expected = updates.update(both.here, optimizer, both.rated(both.here), both.here.objective)
    gradient = {n: p.grad.clone() for n, p in both.here.policy.named_parameters() if p.requires_grad}
    seen = {}

    def note():
        seen.update({name: tensor.grad.clone() for name, tensor in both.weights.items()})

    remote = both.rated(both.there)
    found = both.update(remote, before_step=note)
    mask = remote.mask
    torch.testing.assert_close(found.policy_logprobs[mask], expected.policy_logprobs[mask], rtol=1e-5, atol=1e-5)
    shared = expected.losses.keys() - OF_LOGITS
    assert found.losses.keys() >= shared
    for key in shared:
        assert found.losses[key] == pytest.approx(expected.losses[key], rel=1e-4, abs=1e-6), key
    assert found.kl_old == pytest.approx(expected.kl_old, rel=1e-3)
    norm = torch.stack([g.norm() for g in gradient.values()]).norm()
    difference = torch.stack([(seen[n] - g).norm() for n, g in gradient.items()]).norm()
    assert seen.keys() == gradient.keys()
    assert norm > 1e-3
    assert difference <= 1e-5 * norm
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert found.entropy is None


def test_the_step_is_adamw_with_the_settings_of_the_run(tiny, tmp_path):
    both = Both(tiny, tmp_path, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, max_grad_norm=0.01)
    before = {name: tensor.detach().clone().requires_grad_(True) for name, tensor in both.weights.items()}
    optimizer = torch.optim.AdamW(before.values(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)

    def note():
        for name, tensor in both.weights.items():
            before[name].grad = tensor.grad.clone()

    rollout = both.rated(both.there)
    found = both.update(rollout, rate=0.01, before_step=note)
    norm = torch.nn.utils.clip_grad_norm_(before.values(), 0.01)
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert norm > 0.01
    optimizer.step()
    for name, tensor in both.weights.items():
        torch.testing.assert_close(tensor.detach(), before[name].detach(), rtol=1e-5, atol=1e-7)


def test_nan_stops_before_the_step_and_leaves_the_client_usable(tiny, tmp_path):
    both = Both(tiny, tmp_path)
    kept = {name: tensor.detach().clone() for name, tensor in both.weights.items()}
    stepped = []
    rollout = both.rated(both.there)
    options = {"rate": 0.01, "before_step": lambda: stepped.append(1)}
    tiny.inject(Fault(kind="nan", route="forward_backward"))
    with pytest.raises(NonFiniteError):
        both.update(rollout, **options)
    assert not stepped
    assert all(tensor.equal(kept[name]) for name, tensor in both.weights.items())
    assert all(not tensor.grad.any() for tensor in both.weights.values())
    path = both.connection.ask("save", lambda: both.client.save_state(f"after-{id(both)}")).path
    assert path.startswith("tinker://")
    assert both.update(rollout, **options).grad_norm > 0


def test_an_infinite_kl_stops_before_the_step_although_the_loss_is_finite(tiny, tmp_path, monkeypatch):
    both, stepped = Both(tiny, tmp_path, kl_estimator="k1", kl_max_log_ratio=5.0), []
    rollout, scored = both.rated(both.there), calls.PartLoss._response_part
    monkeypatch.setattr(calls.PartLoss, "_response_part", lambda *args: scored(*args) - 95.0)
    options = {"rate": 0.01, "before_step": lambda: stepped.append(1)}
    with pytest.raises(NonFiniteError, match="KL of this step is not finite"):
        both.update(rollout, **options)
    assert not stepped


def test_a_completion_without_a_token_is_left_out(tiny, tmp_path):
    both = Both(tiny, tmp_path, beta=0.0)
    mask = both.completions.mask.clone()
    mask[1] = False
    both.completions = replace(both.completions, mask=mask, ended=both.completions.ended.clone())
    rollout = both.rated(both.there)
    before = tiny.tokens["forward"]
    both.update(rollout)
    prompts, responses = calls.token_lists(both.completions)
    sent = sum(len(p) + len(r) - 1 for p, r in zip(prompts, responses, strict=True) if r)
    assert tiny.tokens["forward"] == before + sent
