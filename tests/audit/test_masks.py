"""`klamp.check` names the masks of trust regions that explain which tokens carry no policy loss."""

from typing import Any

import pytest
import torch
from tests.batches import flat_batch, objective_of

import klamp
from klamp.core.objective import grpo_loss
from klamp.core.surrogates import TrustRegion

MASKS: dict[str, dict[str, Any]] = {
    "dppo_tv": {"dppo_mask": "dppo_tv", "dppo_mask_low": 0.05, "dppo_mask_high": 0.08},
    "dppo_kl": {"dppo_mask": "dppo_kl", "dppo_mask_low": 0.01, "dppo_mask_high": 0.02},
    "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.08},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.06},
    "off_policy_mask_threshold": {"threshold": 0.03},
    "token_mask (IcePop)": {"mode": "token_mask", "low": 0.8, "high": 1.4},
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_named_where_it_alone_explains_what_is_dropped(name: str) -> None:
    names = list[set[str]]()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        policy = (-2.5 * torch.rand(10, 16, generator=generator) - 0.02).requires_grad_()
        noise = 0.3 * torch.randn(10, 16, generator=generator) * (0.3 + torch.rand(10, 1, generator=generator))
        sampler, ref = ((policy.detach() + x).clamp(max=-1e-3) for x in (noise, noise.flip(0)))
        mask = torch.arange(16) < torch.randint(8, 17, (10, 1), generator=generator)
        region, advantages = TrustRegion(**MASKS[name]), torch.randn(10, generator=generator)
        scores = {"ref_logprobs": ref, "sampler_logprobs": sampler, "advantages": advantages, "mask": mask}
        scores |= {} if region.mode else {"old_logprobs": sampler}
        batch = flat_batch(policy_logprobs=policy, **scores)
        choices = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 1e6, "reduction": "token_mean", "beta": 0.05}
        loss = grpo_loss(batch, objective_of(**choices, trust=region)).loss
        verdict = klamp.check(loss, policy_logprobs=policy, beta=0.05, once=False, **scores)
        assert not any(x.level == "wrong" for x in verdict.findings), str(verdict)
        gated = [x for x in verdict.findings if x.code == "policy-gated"]
        names.append(set(gated[0].evidence["by"].split(" or ")) if gated else {name})
    assert set.intersection(*names) == {name}, names
