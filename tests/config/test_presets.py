"""Each preset against its paper's printed formula, written out here: the same loss and the same gradient."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.batches import flat_batch
from torch import Tensor

from klamp import preset
from klamp.config import PRESETS, KLConfig, LossConfig, build_objective
from klamp.core.advantages import group_advantages
from klamp.core.masking import masked_sum
from klamp.core.objective import grpo_loss
from klamp.errors import UnknownNameError

GROUP, GROUPS, TOKENS = 4, 3, 6
STD_EPS = 1e-4


class Sampled(NamedTuple):
    """Completions as a paper has them: log-probabilities under the policy (a leaf), old and reference; rewards."""

    policy: Tensor
    old: Tensor
    ref: Tensor
    mask: Tensor
    rewards: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.policy - self.old).exp()

    @property
    def delta(self) -> Tensor:
        return self.policy - self.ref

    @property
    def k3(self) -> Tensor:
        u = (self.ref - self.policy).exp()
        return u - u.log() - 1

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(-1).double()

    @property
    def spent(self) -> Tensor:
        """The old policy's log-ratio to the reference, of a whole completion."""
        return torch.where(self.mask, self.old - self.ref, 0.0).sum(-1)


def sample(seed: int = 0) -> Sampled:
    """An older policy sampled, so that ratios leave their bounds; completions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (GROUP * GROUPS, TOKENS)
    old, ref = (-2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1 for _ in range(2))
    policy = (old + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    lengths = torch.randint(1, TOKENS + 1, (shape[0], 1), generator=generator)
    rewards = torch.randint(0, 2, (shape[0],), generator=generator).double()
    rewards[:GROUP] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    return Sampled(policy.requires_grad_(True), old, ref, torch.arange(TOKENS) < lengths, rewards)


def klamps_loss(kl: KLConfig, loss: LossConfig, s: Sampled) -> Tensor:
    """The loss of a preset, formed as klamp's trainer forms it."""
    rewards = s.rewards
    if kl.kl_placement == "reward":
        rewards = rewards - kl.beta * masked_sum(s.old - s.ref, s.mask, -1)
    batch = flat_batch(
        policy_logprobs=s.policy,
        mask=s.mask,
        advantages=group_advantages(rewards, GROUP, scale=loss.scale, baseline=loss.advantage_baseline),
        old_logprobs=s.old,
        ref_logprobs=s.ref,
        sampler_logprobs=s.old,
    )
    return grpo_loss(batch, build_objective(kl, loss, max_length=TOKENS)).loss


def centred(rewards: Tensor) -> Tensor:
    groups = rewards.view(-1, GROUP)
    return (groups - groups.mean(-1, keepdim=True)).flatten()[:, None]


def against_the_others(rewards: Tensor) -> Tensor:
    return centred(rewards) * GROUP / (GROUP - 1)


def standardised(rewards: Tensor) -> Tensor:
    groups = rewards.view(-1, GROUP)
    return centred(rewards) / (groups.std(-1, keepdim=True) + STD_EPS).repeat_interleave(GROUP, 0)


def clipped(s: Sampled, advantage: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A), to be maximised."""
    return torch.minimum(s.ratio * advantage, s.ratio.clamp(1 - low, 1 + high) * advantage)


def mean_of_means(s: Sampled, x: Tensor) -> Tensor:
    return (torch.where(s.mask, x, 0.0).sum(-1) / s.lengths).mean()


def token_mean(s: Sampled, x: Tensor) -> Tensor:
    return torch.where(s.mask, x, 0.0).sum() / s.mask.sum()


def fixed_length(s: Sampled, x: Tensor) -> Tensor:
    return torch.where(s.mask, x, 0.0).sum() / (len(s.rewards) * TOKENS)


def recommended(s: Sampled) -> Tensor:
    """klamp's own: the value is k3, the gradient delta times the score."""
    straight = s.k3.detach() + s.delta.detach() * (s.policy - s.policy.detach())
    return -fixed_length(s, clipped(s, against_the_others(s.rewards)) - 0.01 * straight)


def exact_objective(s: Sampled) -> Tensor:
    """klamp's own: reward less beta log(policy / ref) of the whole completion, against the mean of the others."""
    return -fixed_length(s, clipped(s, against_the_others(s.rewards - 0.01 * s.spent)))


def exact_objective_loss(s: Sampled) -> Tensor:
    """klamp's own: the value is k3; the coefficient of a token is its log-ratio and the k3 of all tokens behind it."""
    k3 = torch.where(s.mask, s.k3, 0.0)
    behind = torch.stack([k3[:, t + 1 :].sum(-1) for t in range(TOKENS)], dim=-1)
    straight = s.k3.detach() + (s.delta + behind).detach() * (s.policy - s.policy.detach())
    return -fixed_length(s, clipped(s, against_the_others(s.rewards)) - 0.01 * straight)


def grpo(s: Sampled) -> Tensor:
    """DeepSeekMath, equations 3 and 4."""
    return -mean_of_means(s, clipped(s, standardised(s.rewards)) - 0.04 * s.k3)


def dr_grpo(s: Sampled) -> Tensor:
    """Dr. GRPO: no KL, no standard deviation, a constant in the place of the length."""
    return -fixed_length(s, clipped(s, centred(s.rewards)))


def dapo(s: Sampled) -> Tensor:
    """DAPO, equation 8: token mean, clip higher, no KL."""
    return -token_mean(s, clipped(s, standardised(s.rewards), 0.2, 0.28))


def ppo(s: Sampled) -> Tensor:
    """R = r - beta log(policy / ref) of the whole completion (1909.08593, equation 2; InstructGPT beta .02)."""
    return -mean_of_means(s, clipped(s, centred(s.rewards - 0.02 * s.spent)))


def deepseek_v3_2(s: Sampled) -> Tensor:
    """DeepSeek-V3.2, section 3.1: k3 times the differentiated ratio; centred advantages; the mask of equation 9."""
    away = torch.where(s.mask, s.old - s.policy.detach(), 0.0).sum(-1) / s.mask.sum(-1)
    kept = ~((centred(s.rewards) < 0) & (away > 0.5)).unsqueeze(-1)
    return -mean_of_means(s, kept * clipped(s, centred(s.rewards)) - 0.001 * s.ratio * s.k3)


def frpo(s: Sampled) -> Tensor:
    """FRPO, equation 5.1: the reverse cumulative sum of the log-ratio, taken from the standardised advantage.

    The paper keeps the old policy's log-ratio in later updates, which then follow KL(policy || ref) less
    KL(policy || old); klamp's KL is that of the present policy.
    """
    spent = torch.where(s.mask, s.policy.detach() - s.ref, 0.0)
    to_go = torch.stack([spent[:, t:].sum(-1) for t in range(TOKENS)], dim=-1)
    return -mean_of_means(s, clipped(s, standardised(s.rewards) - 0.01 * to_go))


def rpg(s: Sampled) -> Tensor:
    """RPG, proposition 3.6 (unnormalised reverse KL, reference other than the sampler; constant mass included)."""
    mass = (s.ref - s.old).exp()
    penalty = s.ratio * s.delta - s.ratio + mass
    return -token_mean(s, clipped(s, centred(s.rewards), 0.2, 0.28) - 1e-4 * penalty)


def k1_as_loss(s: Sampled) -> Tensor:
    """PPO_clipped_loss + kl_coef * mean(log policy - log ref)."""
    return -token_mean(s, clipped(s, standardised(s.rewards))) + 0.01 * token_mean(s, s.delta)


def k3_as_loss(s: Sampled) -> Tensor:
    """exp(ref - policy) - (ref - policy) - 1, in the loss of Dr. GRPO."""
    return -fixed_length(s, clipped(s, centred(s.rewards)) - 0.04 * s.k3)


PAPERS: dict[str, Callable[[Sampled], Tensor]] = {
    "recommended": recommended,
    "exact-objective": exact_objective,
    "exact-objective-loss": exact_objective_loss,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "ppo": ppo,
    "deepseek-v3.2": deepseek_v3_2,
    "frpo": frpo,
    "rpg": rpg,
    "k1-as-loss": k1_as_loss,
    "k3-as-loss": k3_as_loss,
}


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize("name", sorted({*PAPERS, *PRESETS}))
@pytest.mark.parametrize("seed", range(2))
def test_a_preset_is_its_papers_loss_and_gradient(name: str, seed: int) -> None:
    s = sample(seed)
    ours, theirs = klamps_loss(PRESETS[name].kl, PRESETS[name].loss, s), PAPERS[name](s)
    (our_gradient,) = torch.autograd.grad(ours, s.policy)
    (their_gradient,) = torch.autograd.grad(theirs, s.policy)
    assert theirs.abs() > 1e-6
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    assert torch.allclose(our_gradient, their_gradient, rtol=0, atol=1e-12)
    assert their_gradient.norm() > 1e-3


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'frpo'"):
        preset("frppo")
