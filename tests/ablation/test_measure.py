"""The distance from the starting model: held against enumeration, and token by token against plain float64 forwards."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training import rewards
from tests.training.conftest import TINY, disturb, rows_of, scores_of, stored, tiny_llama

from klamp.lab import checkpoint
from klamp.lab.ablate import one_run as module
from klamp.lab.ablate.one_run import evaluate, measured, numbers_of
from klamp.lab.anchors import LocalReference
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.folders import newest_policy
from klamp.lab.models import load_model
from klamp.lab.setup import Context
from klamp.lab.tasks import arithmetic_tokenizer
from klamp.lab.tasks.base import Example, Task
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Scorer

pytestmark = pytest.mark.slow

TEMPERATURE = 0.8


def moved(size: float = 0.03) -> torch.nn.Module:
    model = tiny_llama()
    disturb(model, size=size)
    return model


def pair_of(policy, start, *, length: int, prompts: dict[str, list[str]], rows: int = 10**6) -> Context:
    tokenizer = arithmetic_tokenizer()
    evaluation = {skill: [Example(prompt=p) for p in texts] for skill, texts in prompts.items()}
    first = next(iter(evaluation))
    task = Task(name="t", train=(), evaluation=evaluation, rl_skill=first, score=lambda e, text: rewards.digits(text))
    rollout = {"temperature": TEMPERATURE, "max_completion_length": length, "num_generations": 2}
    return Context(
        config=TrainConfig.from_flat({**rollout, "prompts_per_step": rows // 2, "cpu": True}),
        scorer=Scorer(policy, probe(policy)),
        reference=LocalReference(start),
        tokenizer=tokenizer,
        task=task,
    )


def log_probabilities(model, ids: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    with torch.no_grad():
        return (model(ids).logits.double() / temperature).log_softmax(-1)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def enumerated(model, other, prompt: str, stop: list[int]) -> tuple[float, float]:
    """Exact KL(model||other) over completions of at most two tokens, and their mean length, by going through all."""
    tokenizer = arithmetic_tokenizer()
    head = tokenizer(prompt, return_tensors="pt")["input_ids"]
    size = len(tokenizer)
    every = torch.cat([head.repeat(size, 1), torch.arange(size)[:, None]], 1)
    p, q = log_probabilities(model, every), log_probabilities(other, every)
    first_p, first_q = p[0, -2], q[0, -2]
    goes_on = (~torch.isin(torch.arange(size), torch.tensor(stop))).double()
    # the sum over sequences of p(y) log p(y)/q(y), term by term: y ends after its first token, or has a second one
    total = 0.0
    for v in range(size):
        if not goes_on[v]:
            total += float(first_p[v].exp() * (first_p[v] - first_q[v]))
            continue
        log_p, log_q = first_p[v] + p[v, -1], first_q[v] + q[v, -1]
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total, float(1 + (first_p.exp() * goes_on).sum())


def even_draws(seed: int, step: int, sequences: int, length: int) -> torch.Tensor:
    """First draws spread evenly over [0, 1): every first token comes up as often as its probability says, to 1/n."""
    each = sequences // PROMPTS
    even = ((torch.arange(each, dtype=torch.float64) + 0.5) / each).repeat(PROMPTS)
    second = torch.rand(sequences, length - 1, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return torch.cat([even[:, None], second], 1)


PROMPTS = 2
EACH = 4000


def test_both_directions_are_those_of_enumeration(monkeypatch) -> None:
    """Completions of at most two tokens; what is summed depends on the first token only, so even draws leave 1/n."""
    monkeypatch.setattr(module, "COMPLETIONS", EACH)
    monkeypatch.setattr(module, "uniform_numbers", even_draws)
    policy, start = moved(), tiny_llama()
    texts = ["12+34=", "rev ab="]
    pair = pair_of(policy, start, length=2, prompts={"addition": texts}, rows=1500)
    found = numbers_of(pair)
    for name, one, other in (("reverse", policy, start), ("forward", start, policy)):
        exact = [enumerated(one, other, text, list(pair.stop)) for text in texts]
        sequence = sum(value for value, _ in exact) / PROMPTS
        length = sum(value for _, value in exact) / PROMPTS
        assert sequence > 0.1
        assert found[f"kl/{name}_sequence"] == pytest.approx(sequence, rel=2e-3)
        assert found[f"kl/{name}"] == pytest.approx(sequence / length, rel=2e-3)
        if name == "reverse":
            assert found["length"] == pytest.approx(length, rel=1e-3)
    assert found["kl/reverse"] != pytest.approx(found["kl/forward"], rel=0.02), "the directions can be told apart"


@pytest.fixture
def sampled(monkeypatch):
    seen = []
    usual = module.completed

    def note(context, prompts, *, uniforms, reference):
        completions = usual(context, prompts, uniforms=uniforms, reference=reference)
        seen.append((context.policy if reference is None else reference.scorer.model, completions, uniforms))
        return completions

    monkeypatch.setattr(module, "completed", note)
    return seen


def by_hand(sampled, policy, start, by, *, temperature: float = TEMPERATURE) -> dict[str, float]:
    """Sums over the completions that one of the models sampled, each alone and unpadded, in float64."""
    sums = {"kl": 0.0, "tokens": 0, "sequences": 0, "entropy": 0.0, "reward": 0.0}
    tokenizer = arithmetic_tokenizer()
    for model, c, _ in sampled:
        if model is not by:
            continue
        for i in range(len(c.ids)):
            prompt, ids = c.prompt_ids[i][c.prompt_mask[i].bool()], c.ids[i][c.mask[i]]
            both = torch.cat([prompt, ids])[None]
            rows = [log_probabilities(m, both, temperature)[0, len(prompt) - 1 : -1] for m in (policy, start)]
            ours, theirs = rows
            sums["kl"] += float((kl(ours, theirs) if by is policy else kl(theirs, ours)).sum())
            sums["entropy"] -= float((ours.exp() * ours).sum())
            sums["tokens"] += len(ids)
            sums["sequences"] += 1
            sums["reward"] += rewards.digits(tokenizer.decode(ids, skip_special_tokens=True))
    return sums


def test_every_number_is_that_of_plain_forwards(sampled) -> None:
    policy, start = moved(), tiny_llama()
    pair = pair_of(policy, start, length=6, prompts={"addition": ["12+34=", "5+6=", "77+1="]}, rows=4)
    found = numbers_of(pair)
    ours, theirs = by_hand(sampled, policy, start, policy), by_hand(sampled, policy, start, start)
    assert ours["sequences"] == theirs["sequences"] == 3 * module.COMPLETIONS
    expected = {
        "kl/reverse": ours["kl"] / ours["tokens"],
        "kl/reverse_sequence": ours["kl"] / ours["sequences"],
        "kl/forward": theirs["kl"] / theirs["tokens"],
        "kl/forward_sequence": theirs["kl"] / theirs["sequences"],
        "length": ours["tokens"] / ours["sequences"],
        "entropy": ours["entropy"] / ours["tokens"],
        "reward": ours["reward"] / ours["sequences"],
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert 0 < found["reward"] < 1 and 1 < found["length"] < 6


def trained(llama: str, folder: Path, **changes) -> TrainConfig:
    values = {"model": llama, **TINY, "max_steps": 2, "eval_size": 3, "save_every": 1, **changes}
    config = TrainConfig.from_flat({**values, "output_dir": str(folder)})
    train_run(config)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.0},
        {"beta": 0.1, "lora_r": 2},
        {"beta": 0.1, "reference": "ema", "reference_decay": 0.5},
        {"beta": 0.1, "ref_model": "other"},
    ],
    ids=["no KL", "adapter", "moving reference", "another reference"],
)
def test_it_is_always_the_starting_model_that_is_measured_against(llama, tmp_path, sampled, changes) -> None:
    if "ref_model" in changes:
        other = tiny_llama()
        disturb(other, seed=9, size=0.2)
        changes = {**changes, "ref_model": stored(other, tmp_path / "other")}
    config = trained(llama, tmp_path / "run", top_p=0.9, **changes)
    found = numbers_of(measured(config, newest_policy(tmp_path / "run")))
    at = checkpoint.checkpoints(tmp_path / "run")[-1] / "policy"
    if "lora_r" in changes:
        from peft import PeftModel

        policy = PeftModel.from_pretrained(load_model(llama), str(at)).eval()
    else:
        policy = load_model(str(at))
    first = [(policy, *sampled[0][1:])]
    sums = by_hand(first, policy, tiny_llama(), policy, temperature=1.0)
    assert sums["sequences"] == 3 * module.COMPLETIONS
    assert found["kl/reverse"] == pytest.approx(sums["kl"] / sums["tokens"], rel=1e-4)
    assert found["kl/reverse"] > 1e-5, "something was learned"


def test_nothing_is_cut_from_the_support_and_a_run_without_a_step_has_not_moved(llama, tmp_path) -> None:
    config = TrainConfig.from_flat({"model": llama, **TINY, "top_p": 0.5, "top_k": 3, "temperature": 1.5})
    context = measured(config, None)
    assert context.config.rollout == replace(config.rollout, top_p=1.0, top_k=0)
    found = numbers_of(context)
    assert found["kl/reverse_sequence"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("changes", [{}, {"lora_r": 2}, {"beta": 0.0, "temperature": 1.5}], ids=["all", "lora", "hot"])
def test_the_scores_are_those_that_the_run_itself_found(llama, tmp_path, changes) -> None:
    folder = tmp_path / "run"
    config = trained(llama, folder, eval_size=7, **changes)
    found = evaluate(config, checkpoint.checkpoints(folder)[-1] / "policy")
    evaluations = [scores for row in rows_of(folder) if (scores := scores_of(row))]
    assert found.before == evaluations[0] and found.after == evaluations[-1]
    assert found.rl_skill == "addition" and found.state == "done"
    assert found.numbers == numbers_of(measured(config, newest_policy(folder)))
    assert found.numbers["kl/reverse"] > 1e-5, "something was learned"
