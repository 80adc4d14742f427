"""Is the k3 formula backwards? The k3 bug report's four validation methods (docs/sources.md), on the built-in model.

    python examples/kl_formula_methods.py [--max-steps 8]

1. train with `--kl-beta 0`      the command line of `examples/trl_train.py`
2. both formulas side by side    on samples of the trained policy, against the exact KL
3. the five debug numbers        under the report's names, of the run with a KL
4. the installed trainers        `klamp audit trl`: what their KL does, in value and in gradient

docs/records/index.md has the rest of the hunt.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from typing import Any

import torch
from transformers.utils import logging
from trl_train import DEBUG, Train, train

from klamp import exact_kl
from klamp.cli import main as command
from klamp.lab.tasks import load_base_model
from klamp.verify import explain_form

PROMPTS = ["47+85=", "38+47=", "96+29="]


def method_1(max_steps: int) -> dict[float, Any]:
    """Test with KL beta = 0: does training behave where it does not with beta > 0?"""
    trainers = {}
    for beta in (0.0, 0.04):
        print(f"\ntrain --kl-beta {beta} --batch-size 64 --num-generations 8 --max-steps {max_steps}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            given = {"batch_size": 64, "num_generations": 8, "max_steps": max_steps, "learning_rate": 1e-3}
            trainers[beta] = train(Train(kl_beta=beta, output_dir=folder, **given))
        rows = [row for row in trainers[beta].state.log_history if "reward" in row]
        print(f"reward {rows[0]['reward']:.3f} -> {rows[-1]['reward']:.3f}, grad_norm {rows[-1]['grad_norm']:.3f}")
    return trainers


def method_2(policy: torch.nn.Module, samples: int = 20_000) -> None:
    """The formula as it is and as the report first wanted it, over tokens that the policy samples."""
    reference, tokenizer = load_base_model()
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        policy_logits, ref_logits = (model.eval()(**inputs).logits[:, -1].double() for model in (policy, reference))
    policy_logps, ref_logps = policy_logits.log_softmax(-1), ref_logits.log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(policy_logps.exp(), samples, replacement=True, generator=generator)
    per_token_logps, ref_per_token_logps = policy_logps.gather(-1, tokens), ref_logps.gather(-1, tokens)

    current = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    reversed_ = torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1
    chi_squared = (2 * policy_logps - ref_logps).exp().sum(-1) - 1
    kl = exact_kl(policy_logits, ref_logits)
    print("\nprompt       exact KL(policy||ref)   exp(ref - policy) - ... (k3)   exp(policy - ref) - ... (reversed)")
    for i, prompt in enumerate(PROMPTS):
        print(f"{prompt:12} {kl[i]:21.4f} {current[i].mean():30.4f} {reversed_[i].mean():36.4f}")
    print(f"the reversed one estimates chi squared less the KL: {(chi_squared - kl).mean():.4f} on average")
    print(f"as a loss: {explain_form('k3-as-loss').verdict}")


def method_3(trainer: Any) -> None:
    """Log KL components: the debug numbers of the last step."""
    last = [row for row in trainer.state.log_history if "debug/kl_mean" in row][-1]
    print()
    for name in DEBUG:
        print(f"{name:24} {last[name]:.6f}")
    assert last["debug/kl_min"] >= 0, "KL should be positive"


def method_4() -> None:
    """Compare against the standard implementation that is installed here."""
    print("\n$ klamp audit trl", flush=True)
    command(["audit", "trl"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=8)
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # transformers, of TRL's own arguments
    logging.disable_progress_bar()
    trained = method_1(given.max_steps)
    method_2(trained[0.04].model)
    method_3(trained[0.04])
    method_4()
