"""The GRPO tutorial's hands-on part (docs/sources.md): train over beta, evaluate, compare, and a KL by hand.

    python examples/kl_tutorial.py [--max_steps 20] [--out runs/kl-tutorial]

Its shell loop, with klamp's commands, and its two Python examples with their own lines. In a shell:

    for beta in 0.0 0.001 0.01 0.1; do
        klamp train --config examples/config_demo.yaml --kl_penalty $beta --target_kl none \\
            --output_dir output_beta_$beta --max_steps 5000
        klamp evaluate --checkpoint output_beta_$beta
    done
    klamp ablate --runs output_beta_*

`--target_kl none`: the file has the tutorial's target too, and a beta that follows a target is no longer the one that
is compared. A few steps on a small model show how it goes, not which beta is best: docs/ablation.md has a whole one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from klamp import adaptive_kl_coefficient, exact_kl
from klamp.cli import main as command
from klamp.lab.tasks.arithmetic import base_model_folder

CONFIG = Path(__file__).parent / "config_demo.yaml"
SMALL = "--prompts_per_step 8 --eval_size 32 --eval_every 0 --save_every 0 --warmup_steps 0 --report_to none --cpu"
"""What makes a run of the built-in task a matter of seconds; leave it out for a whole one."""


def klamp(*words: str) -> None:
    """Print a command and run it in this process, which loads the libraries once for all of them."""
    print(f"\n$ klamp {' '.join(words)}", flush=True)
    if code := command(words):
        raise SystemExit(code)


def ablation_study(out: Path, max_steps: int) -> None:
    """Example 2: train with different KL coefficients, evaluate each, compare."""
    betas = ("0.0", "0.001", "0.01", "0.1")
    for beta in betas:
        output_dir = f"{out}/output_beta_{beta}"
        klamp("train", "--config", str(CONFIG), "--kl_penalty", beta, "--target_kl", "none", "--output_dir", output_dir,
              "--max_steps", str(max_steps), "--learning_rate", "3e-4", *SMALL.split())  # fmt: skip
        klamp("evaluate", "--checkpoint", output_dir, "--kl_prompts", "32")
    runs = [f"{out}/output_beta_{beta}" for beta in betas]
    klamp("ablate", "--runs", *runs, "--output_dir", f"{out}/compared", "--kl_prompts", "32")


def monitor_kl_divergence(grpo_checkpoint: Path, sft_checkpoint: Path) -> float:
    """Example 1: the exact KL between two checkpoints, at every place of two prompts."""
    policy_model = AutoModelForCausalLM.from_pretrained(grpo_checkpoint)
    reference_model = AutoModelForCausalLM.from_pretrained(sft_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(sft_checkpoint)

    for param in reference_model.parameters():  # freeze reference
        param.requires_grad = False

    prompts = ["47+85=", "rev abcd="]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        policy_outputs = policy_model(**inputs)
        ref_outputs = reference_model(**inputs)
        policy_logprobs = torch.log_softmax(policy_outputs.logits, dim=-1)
        ref_logprobs = torch.log_softmax(ref_outputs.logits, dim=-1)
        kl_div = (policy_logprobs.exp() * (policy_logprobs - ref_logprobs)).sum(dim=-1)
        torch.testing.assert_close(kl_div, exact_kl(policy_outputs.logits, ref_outputs.logits), rtol=1e-4, atol=1e-6)

    places = inputs["attention_mask"].bool()  # the tutorial's mean counts padding too
    answers = kl_div[:, -1]  # where the answer begins; prompts are padded on the left
    print(f"KL divergence: {kl_div[places].mean().item():.4f}; where the answers begin: {answers.mean().item():.4f}")
    return float(kl_div[places].mean())


def adaptive_kl(metrics: Path, target_kl: float = 0.05) -> None:
    """What the tutorial's rule makes of beta over the KL of a run: it falls while nothing is learnt, then winds up."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    kl_coefficient, course = 0.01, []
    for row in rows:
        if "kl/k3" in row:
            kl_coefficient = adaptive_kl_coefficient(row["kl/k3"], target_kl, kl_coefficient=kl_coefficient)
            course.append(kl_coefficient)
    print(
        f"adaptive_kl_coefficient, from 0.01: lowest {min(course):.2g}, last {course[-1]:.2g} after {len(course)} steps"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/kl-tutorial"))
    given = parser.parse_args()
    ablation_study(given.out, given.max_steps)
    print("\nExample 1: monitor KL divergence")
    trained = given.out / "output_beta_0.01"
    (checkpoint,) = (trained / "checkpoints").glob("step-*")
    monitor_kl_divergence(checkpoint / "policy", base_model_folder())
    adaptive_kl(trained / "metrics.jsonl")
