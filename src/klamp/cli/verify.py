"""`klamp verify`: klamp's claims, proven on this machine; exit code 1 if one of them fails."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from klamp.cli.errors import FAILED
from klamp.cli.flags import fields_of, read_own
from klamp.cli.options import VerifyOptions
from klamp.cli.tables import show_paragraph, show_table
from klamp.errors import ConfigError, DataError, ModelError
from klamp.verify.answers import Answer, answer_direction, answer_importance_sampling, verify_logits
from klamp.verify.convergence import answer_convergence
from klamp.verify.proofs import PROOFS, Check, run_section
from klamp.verify.proofs.values import EstimatorFacts, measure_estimators

if TYPE_CHECKING:  # imported for --model only
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from klamp.training.sampling import Completions

QUESTIONS: dict[str, Callable[..., Answer]] = {
    "direction": answer_direction,
    "importance-sampling": answer_importance_sampling,
    "convergence": lambda **_: answer_convergence(),  # nothing is drawn
}
STYLES = {"ok": "green", "FAIL": "bold red"}


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp verify` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `verify`.
        stream: where the tables go; None: stdout.

    Raises:
        KlampError: wrong flags, a model that cannot be loaded; the caller shows it.
    """
    out = sys.stdout if stream is None else stream
    options = read_options(argv)
    started = time.perf_counter()
    if options.model is not None:
        checks = show_answer(answer_model(options.model, options.ref_model, options.seed), out)
    elif options.question is not None:
        checks = show_answer(QUESTIONS[options.question](samples=options.samples, seed=options.seed), out)
    else:
        checks = show_proofs(out)
    return conclude(checks, time.perf_counter() - started, out)


def read_options(argv: Sequence[str]) -> VerifyOptions:
    """The options that a command line names.

    Raises:
        UnknownNameError: an unknown question or flag; names the nearest.
        ConfigError: a value that cannot be read, or flags that need one another.
    """
    given, _ = read_own(fields_of(VerifyOptions), argv, command="klamp verify")
    if "ref_model" in given and "model" not in given:
        raise ConfigError("--ref_model needs --model", why="it is the reference of that model", fix="--model DIR")
    return VerifyOptions(**given)


PROMPTS = (
    "The capital of France is",
    "Question: what is 17 + 25? Answer:",
    "def fibonacci(n):\n",
    "Once upon a time",
)
ARITHMETIC = ("47+85=", "71-38=", "rev abcd=", "9+86=")
"""Prompts for a model that reads no words, such as the built-in one."""
TOKENS = 16
"""Tokens that are sampled for each prompt."""
NOISE = 0.05
"""Size of the noise on the copy that stands in for a reference, relative to the spread of each weight matrix."""


def answer_model(model: str, ref_model: str | None, seed: int) -> Answer:
    """Measure each estimator's value and gradient on a real model's distributions, against its reference.

    Args:
        model: a folder, a hub id, or a built-in name.
        ref_model: the same of its reference; None: a copy of the model with noise on its weights.
        seed: of the completions, and of the noise.

    Raises:
        ModelError: a model that cannot be loaded, or two that do not share a vocabulary.
        DataError: a tokenizer that can read none of the prompts.
    """
    import torch

    from klamp.scoring.scores import score
    from klamp.training.models import load_model, load_tokenizer

    policy = load_model(model)
    completions = _complete(policy, load_tokenizer(model), seed)
    reference = perturbed(policy, seed) if ref_model is None else load_model(ref_model)
    with torch.no_grad():
        scored = [score(each, completions, temperature=1.0).logits for each in (policy, reference)]
    rows = [logits[completions.mask] for logits in scored if logits is not None]
    if rows[0].shape != rows[1].shape:
        raise ModelError(
            "the reference has another vocabulary than the model",
            got=f"{rows[0].shape[-1]} and {rows[1].shape[-1]} tokens",
            why="a KL is summed over one common vocabulary",
            fix="use a checkpoint of the same model as the reference",
        )
    names = (model, ref_model or f"a copy with {NOISE:g} noise")
    return verify_logits(rows[0], rows[1], completions.ids[completions.mask], names=names)


def perturbed(model: nn.Module, seed: int) -> nn.Module:
    """A copy of the model with Gaussian noise on every weight matrix, relative to the spread of that matrix."""
    import torch

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (each for each in other.parameters() if each.ndim >= 2):
            drawn = torch.randn(weight.shape, generator=generator) * (NOISE * float(weight.float().std()))
            weight.add_(drawn.to(weight))
    return other


def _complete(model: nn.Module, tokenizer: PreTrainedTokenizerBase, seed: int) -> Completions:
    """One completion of each prompt, drawn from the whole distribution at temperature 1."""
    from klamp.training.config import RolloutConfig
    from klamp.training.models import end_tokens
    from klamp.training.sampling import encode_prompts, generate, uniform_numbers

    device = next(model.parameters()).device
    try:
        ids, mask = encode_prompts(list(PROMPTS), tokenizer, device)
    except Exception:  # tokenizers raises bare exceptions
        try:
            ids, mask = encode_prompts(list(ARITHMETIC), tokenizer, device)
        except Exception as error:
            why = str(error).partition("\n")[0]
            raise DataError("the tokenizer reads neither words nor sums", got=ARITHMETIC[0], why=why) from error
    stop = end_tokens(model, tokenizer)
    return generate(
        model,
        ids,
        mask,
        rollout=RolloutConfig(max_completion_length=TOKENS),
        stop=stop,
        pad=int(tokenizer.pad_token_id or stop[0]),  # pyright: ignore[reportArgumentType]
        uniforms=uniform_numbers(seed, 0, len(PROMPTS), TOKENS),
    )


def show_proofs(stream: TextIO) -> list[Check]:
    """Run every proof and print it, section by section; returns the checks."""
    headings = ("estimator", "per token", "value", "deviation/KL", "as a loss it follows", "in the reward it follows")
    show_table(
        stream, "the estimators, tokens of the policy", headings, [_cells(each) for each in measure_estimators()]
    )
    checks: list[Check] = []
    for section, proof in PROOFS.items():
        found = run_section(section, proof)
        print(file=stream)
        show_checks(found, section, stream)
        checks += found
    return checks


def show_answer(answer: Answer, stream: TextIO) -> list[Check]:
    """Print an answered question; returns its checks."""
    print(f"{answer.question}\n", file=stream)
    for table in answer.tables:
        show_table(stream, table.title, table.columns, table.rows)
        print(file=stream)
    show_checks(answer.checks, "what this rests on", stream)
    print(file=stream)
    if answer.passed:
        for paragraph in answer.words:
            show_paragraph(stream, paragraph, width=0)
    return list(answer.checks)


def show_checks(checks: Sequence[Check], title: str, stream: TextIO) -> None:
    """Print checks: ok with what was measured, or FAIL with what was expected."""
    rows = [
        ("ok" if check.passed else "FAIL", check.claim, check.measured if check.passed else _failure(check))
        for check in checks
    ]
    show_table(stream, title, ("", "", ""), rows, styles=STYLES)


def conclude(checks: Sequence[Check], seconds: float, stream: TextIO) -> int:
    """Print how many checks passed; returns the exit code."""
    failed = [check for check in checks if not check.passed]
    print(file=stream)
    if not failed:
        print(f"{len(checks)} of {len(checks)} checks passed, in {seconds:.1f} s", file=stream, flush=True)
        return 0
    print(f"{len(failed)} of {len(checks)} checks FAILED:", file=stream)
    for check in failed:
        section = f"{check.section}: " if check.section else ""
        print(f"  {section}{check.claim}: {_failure(check)}", file=stream, flush=True)
    return FAILED


def _failure(check: Check) -> str:
    return f"expected {check.expected}, got {check.measured}"


def _cells(facts: EstimatorFacts) -> tuple[str, ...]:
    return (
        facts.name,
        facts.formula,
        facts.bias_text,
        f"{facts.deviation:.2f}",
        facts.as_loss.in_words,
        facts.in_reward.in_words,
    )
