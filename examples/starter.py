"""GRPO from scratch with an optional KL penalty: the from-scratch guide's `starter.py` (docs/sources.md), by klamp.

    python examples/starter.py                    # the quick tests, then a run without a KL
    python examples/starter.py --use_kl_penalty   # the same with one; --kl_coef 0.05 sets its strength

Functions, arguments, hyperparameters, the console's line and TensorBoard's `train/kl_penalty` are the guide's; they
come from `klamp.training.loop`. The values are the printed ones too. The gradient is not: differentiated as it is
printed, the guide's penalty holds nothing (the fourth test shows both). The model is klamp's built-in one, which the
first use teaches in about a minute.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.utils.tensorboard import SummaryWriter

from klamp.core.masking import masked_mean
from klamp.lab.tasks import TaskConfig, arithmetic_task, load_base_model
from klamp.training.config import OptimConfig, RolloutConfig
from klamp.training.loop import compute_kl_divergence, compute_loss, train


def test_compute_kl_divergence() -> None:
    """KL(pi || pi_ref) = log pi - log pi_ref, per token, [batch_size, seq_len]."""
    print("Testing compute_kl_divergence...")
    policy_log_probs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.2, -0.9]])
    ref_log_probs = torch.tensor([[-1.1, -2.2, -0.6], [-0.4, -1.0, -1.0]])
    kl = compute_kl_divergence(policy_log_probs, ref_log_probs)
    assert kl.shape == policy_log_probs.shape
    assert torch.allclose(kl, policy_log_probs - ref_log_probs)
    print(f"✅ compute_kl_divergence works! Mean KL: {kl.mean():.4f}")


def test_masked_mean() -> None:
    """The mean over response tokens only."""
    print("Testing masked_mean...")
    result = masked_mean(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
    assert torch.isclose(result, torch.tensor(1.5))
    print(f"✅ masked_mean works! Result: {result:.4f}")


def test_compute_loss_with_kl() -> None:
    """Total Loss = PPO_clipped_loss + kl_coef * KL(policy || reference)."""
    print("Testing compute_loss with KL penalty...")
    policy_log_probs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    old_log_probs, ref_log_probs = torch.tensor([[-1.1, -1.9, -0.5]]), torch.tensor([[-1.3, -2.1, -0.9]])
    given = (policy_log_probs, old_log_probs, torch.tensor([0.7]), torch.ones(1, 3, dtype=torch.bool))
    plain, _ = compute_loss(*given)
    loss, metadata = compute_loss(*given, ref_log_probs=ref_log_probs, kl_coef=0.1)
    assert torch.isclose(metadata["kl_penalty_mean"], 0.1 * (policy_log_probs - ref_log_probs).mean())
    assert torch.isclose(loss, plain + metadata["kl_penalty_mean"])
    print(f"✅ compute_loss with KL penalty works! KL penalty mean: {metadata['kl_penalty_mean']:.4f}")


def test_gradient_of_the_kl() -> None:
    """What the guide does not test: what the penalty does to the weights, on average over the policy's own tokens."""
    print("Testing the gradient of the KL...")
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64).log_softmax(-1)[:, None]  # a row for each token
    policy = logits.log_softmax(-1)[:, None]
    probability = policy.detach().exp()

    def gradient(penalty: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((probability * penalty).sum(), logits, retain_graph=True)[0]

    true_kl = (policy.exp() * (policy - ref)).sum()
    (true,) = torch.autograd.grad(true_kl, logits, retain_graph=True)
    printed, ours = gradient(policy - ref), gradient(compute_kl_divergence(policy, ref))
    assert printed.abs().max() < 1e-12
    assert torch.allclose(ours, true)
    print(f"✅ gradient of KL(policy || reference): {true.norm():.4f}; klamp's {ours.norm():.4f}, printed 0.0000")


def test_functions() -> None:
    """The quick tests, before a run."""
    print("=== Running Quick Tests ===")
    test_compute_kl_divergence()
    test_masked_mean()
    test_compute_loss_with_kl()
    test_gradient_of_the_kl()
    print("=== All Tests Passed! ===\n")


def main() -> None:
    """Train the built-in model on additions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use_kl_penalty", action="store_true", help="Enable/disable KL divergence")
    parser.add_argument("--kl_coef", type=float, default=0.01, help="KL penalty coefficient")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--log_dir", type=Path, default=Path("runs/starter"))
    given = parser.parse_args()
    # Hyperparameters
    use_kl_penalty = given.use_kl_penalty
    kl_coef = given.kl_coef  # 0.001 to 0.01 light, above 0.1 very strong: true of a reward of 1 and short answers
    rollout = RolloutConfig(prompts_per_step=16, num_generations=8, max_completion_length=8)  # rollout_batch_size 128
    optim = OptimConfig(gradient_accumulation_steps=2, max_grad_norm=1.0)

    model, tokenizer = load_base_model()
    task = arithmetic_task(TaskConfig(train_size=512))
    examples = {example.prompt: example for example in task.train}

    ref_model = None
    if use_kl_penalty:  # a frozen copy of the initial policy
        ref_model = copy.deepcopy(model)
        ref_model.eval()
        for param in ref_model.parameters():
            param.requires_grad = False

    log = logging.getLogger("klamp.training.loop")  # `log_train` writes one line a step to it
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    with SummaryWriter(str(given.log_dir)) as writer:
        train(
            model,
            tokenizer,
            list(examples),
            lambda prompt, completion: task.score(examples[prompt], completion),
            AdamW(model.parameters(), lr=3e-4),
            ref_model=ref_model,
            kl_coef=kl_coef if use_kl_penalty else 0.0,
            steps=given.steps,
            rollout=rollout,
            optim=optim,
            writer=writer,
        )
    print(f"\nTensorBoard: {given.log_dir} (train/kl_penalty beside train/loss); klamp doctor {given.log_dir}")


if __name__ == "__main__":
    test_functions()
    main()
