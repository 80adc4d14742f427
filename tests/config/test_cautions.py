"""Every caution of a reference and of a teacher: a configuration for which it is said and true, and one for which it
would be false and is not said."""

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.config import KLConfig, KLWarning, TeacherConfig
from klamp.core.clipping import clip_gate
from klamp.lab.config import TrainConfig
from klamp.verify.one_step import Scene, StepReport, examine_config
from klamp.verify.oracle import cosine, forward_kl, gradient_of, local_kl, per_outcome
from klamp.verify.proofs.anchors import as_loss
from klamp.verify.worlds import Chain, enumerate_outcomes, random_chain, truncate_top_p

Fields = dict[str, Any]
DIR, TOPK = {"teacher_model": "DIR"}, {"teacher_model": "DIR", "teacher_estimator": "topk", "teacher_top_k": 2}
SOFT = {"kl_clip_method": "soft", "use_per_token_kl_threshold": False}
SEEDS = range(3)


def world(seed: int, *, cut: bool = False, length: int = 2) -> Chain:
    """Completions of one length; `cut`: the sampler keeps the likeliest words of the policy."""
    chain = random_chain(seed, vocab=5, length=length, eos=None)
    return replace(chain, sampler_logits=truncate_top_p(chain.policy_logits, 0.8)) if cut else chain


def step(fields: Fields, seed: int, *, cut: bool = False, length: int = 2) -> StepReport:
    scene = Scene(chain=world(seed, cut=cut, length=length), group_size=1)
    return examine_config(quiet(KLConfig, fields | {"beta": 1.0}), scene=scene)


def taught(fields: Fields, chain: Chain) -> tuple[float, Tensor]:
    """Value and gradient of a KL to a teacher, enumerated."""
    y = enumerate_outcomes(chain)
    found = (y.probs * per_outcome(as_loss(quiet(TeacherConfig, fields)), y)).sum()
    return found.item(), gradient_of(found, chain)


def silent(fields: Fields, *, cut: bool = False) -> bool:
    pulls = [step(fields, seed, cut=cut).kl for seed in SEEDS]
    return all(pull.gradient.norm() + pull.gradient_variance < 1e-12 for pull in pulls)


def quiet(make: Callable[..., Any], fields: Fields) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)
        return make(**fields)


def told(make: Callable[..., Any], fields: Fields) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KLWarning)
        make(**fields)
    return "\n".join(str(each.message) for each in caught)


def run(**fields: Any) -> TrainConfig:
    return TrainConfig.from_flat({"cpu": True} | fields)


def zero(fields: Fields) -> bool:
    return all(step(fields, seed).kl.gradient.norm() < 1e-12 for seed in SEEDS)


def along(name: str) -> Callable[[Fields], bool]:
    def holds(fields: Fields) -> bool:
        for seed in SEEDS:
            chain = world(seed, length=1)
            wanted = {"forward": forward_kl, "L1": distance}[name](chain)
            if not cosine(step(fields, seed, length=1).kl.gradient, gradient_of(wanted, chain)) > 1 - 1e-9:
                return False
        return True

    return holds


def distance(chain: Chain) -> Tensor:
    return (chain.logprobs("policy").exp() - chain.logprobs("ref").exp()).abs().sum()


def proximal(fields: Fields) -> bool:
    """At the start nothing moves, wherever the reference is; a cut sampler is another one than the policy."""
    return silent(fields) and not any(step(fields, seed, cut=True).kl.gradient.norm() < 1e-6 for seed in SEEDS)


def only_update(fields: Fields) -> bool:
    """No sample moves anything, by the sampler that the run has."""
    kl, cut = {k: v for k, v in fields.items() if k.startswith(("kl", "ref"))}, bool({"top_p", "top_k"} & set(fields))
    return silent(kl, cut=cut)


def gate(fields: Fields, kl: float) -> float:
    """How far the clip is open at a KL in nats (per token, as the budget is)."""
    c = quiet(KLConfig, fields)
    options = {"method": c.kl_clip_method, "temperature": c.kl_clip_temperature}
    return float(clip_gate(torch.tensor([[kl]]), c.kl_clip_threshold, **options))  # type: ignore[arg-type]


def lower_bound(fields: Fields) -> bool:
    """Never above the KL and not it, but where the ratio is one number outside of the head."""
    direction, found = fields.get("teacher_direction", "reverse"), list[float]()
    for seed in SEEDS:
        chain = world(seed, length=1)
        value, gradient = taught(fields, chain)
        towards = chain.towards("teacher")
        exact = local_kl(towards, direction=direction)
        if value > exact.item() + 1e-12:
            return False
        found.append((gradient - gradient_of(exact, towards)).norm().item())
        policy, rest = chain.logprobs("policy")[0], chain.logprobs("policy")[0].topk(2).indices
        flat = replace(
            chain, teacher_logits=policy.index_add(0, rest, torch.tensor([0.7, -0.4], dtype=policy.dtype))[None]
        )
        if abs(taught(fields, flat)[0] - local_kl(flat.towards("teacher"), direction=direction).item()) > 1e-9:
            return False
    return max(found) > 1e-3


def leaves_the_teacher(fields: Fields) -> bool:
    arrived = (replace(chain, policy_logits=chain.logits("teacher")) for chain in map(world, SEEDS))
    return all(taught(fields, chain)[1].norm() > 1e-3 for chain in arrived)


def another_elsewhere(fields: Fields) -> bool:
    direction = fields.get("teacher_direction", "reverse")
    value = local_kl(world(0).towards("teacher"), direction=direction).item()
    return not leaves_the_teacher(fields) and abs(taught(fields, world(0))[0] - value) > 1e-3


def cut_off(fields: Fields) -> bool:
    """Under a cut sampler the gradient is not that of the KL at the sampler's prefixes, over all or what it keeps."""
    return any(min(distances(fields, seed)) > 1e-2 for seed in SEEDS)


def over_what_it_keeps(fields: Fields) -> bool:
    return all(whole > 1e-2 and kept < 1e-9 for whole, kept in (distances(fields, seed) for seed in SEEDS))


def distances(fields: Fields, seed: int) -> tuple[float, float]:
    """How far from the KL's gradient over all words, and over those that a cut sampler keeps, at its prefixes."""
    config = {name: value for name, value in fields.items() if name.startswith("teacher")}
    chain = world(seed, cut=True, length=1)
    gradient, policy, teacher = taught(config, chain)[1], chain.logprobs("policy"), chain.logprobs("teacher")
    delta, kept = (policy - teacher).detach(), chain.logprobs("sampler").isfinite()
    head = policy.detach() >= policy.detach().topk(2).values[:, 1:]
    kept = kept | head if config.get("teacher_estimator") == "topk" else kept
    terms = policy.exp() * delta
    wanted = [gradient_of(each.sum(), chain) for each in (terms, terms.where(kept, 0.0))]
    return tuple(((gradient - each).norm() / wanted[0].norm()).item() for each in wanted)  # type: ignore[return-value]


def same_numbers(name: str) -> Callable[[Fields], bool]:
    """A field of a teacher that nothing reads: the loss is the one without it."""

    def holds(fields: Fields) -> bool:
        bare = {key: value for key, value in fields.items() if key != name}
        one, other = ((taught(each, world(1, cut=True)), quiet(TeacherConfig, each)) for each in (fields, bare))
        moves = [[c.coefficient(s, 4) for s in range(4)] + [c.kind] for c in (one[1], other[1])]
        return torch.equal(one[0][1], other[0][1]) and moves[0] == moves[1]

    return holds


Row = tuple[str, Callable[..., Any], Fields, list[Fields], Callable[[Fields], bool]]
SAMPLER = {"reference": "sampler", "beta": 0.1}
CLIP = {"target_kl": 0.1, "kl_clip_method": "hard", "kl_clip_threshold": 0.2}
CUT = {"top_p": 0.8}
ROWS: list[Row] = [
    ("an expected gradient of exactly zero", KLConfig, {"kl_estimator": "k1", "kl_gradient": "own"},
     [{"kl_estimator": "k1"}, {"kl_estimator": "k2", "kl_gradient": "own"}], zero),
    ("follows the gradient of KL(ref||policy)", KLConfig, {"kl_estimator": "k3", "kl_gradient": "own"},
     [{"kl_estimator": "k3"}, {"kl_estimator": "k2", "kl_gradient": "own"}], along("forward")),
    ("pulls down the L1 distance", KLConfig, {"kl_estimator": "abs", "kl_gradient": "own"},
     [{"kl_estimator": "abs"}], along("L1")),
    ("nothing to its gradient", KLConfig, {"kl_gradient": "none"}, [{}, {"kl_gradient": "forward"}], silent),
    ("is a proximal term", KLConfig, SAMPLER, [{}, {"kl_estimator": "k1", "kl_gradient": "own"} | SAMPLER], proximal),
    ("lies within the clip's free budget", KLConfig, CLIP, [CLIP | {"target_kl": 0.3}],
     lambda c: gate(c, c["target_kl"]) == 0),
    ("pulls less, so the controller raises beta with less effect", KLConfig,
     CLIP | {"kl_clip_method": "soft", "kl_clip_temperature": 0.001}, [CLIP | {"target_kl": 0.3}],
     lambda c: 0 <= gate(c, c["target_kl"]) < 0.5),
    ("is wide against", KLConfig, SOFT | {"kl_clip_threshold": 2.0}, [SOFT | {"kl_clip_threshold": 20.0}],
     lambda c: gate(c, 0.0) > 1e-4),
    ("a lower bound", TeacherConfig, TOPK | {"teacher_tail": "bucket"}, [TOPK], lower_bound),
    *(("a lower bound", TeacherConfig, TOPK | {"teacher_tail": "bucket", "teacher_direction": d}, [], lower_bound)
      for d in ("forward", "js")),
    ("training leaves it", TeacherConfig, TOPK | {"teacher_tail": "none"},
     [TOPK, TOPK | {"teacher_tail": "none", "teacher_direction": "js"}, TOPK | {"teacher_tail": "bucket"}],
     leaves_the_teacher),
    ("training leaves it", TeacherConfig, TOPK | {"teacher_tail": "none", "teacher_direction": "forward"}, [],
     leaves_the_teacher),
    *(("0 at the teacher, another one elsewhere", TeacherConfig,
       TOPK | {"teacher_tail": tail, "teacher_direction": d}, [TOPK | {"teacher_tail": "none"}], another_elsewhere)
      for d, tail in [*itertools.product(("reverse", "forward", "js"), ("generalised",)), ("js", "none")]),
    ("no effect with num_iterations=1, but for rounding", run, SAMPLER,
     [SAMPLER | CUT, SAMPLER | {"top_k": 2}, SAMPLER | {"kl_estimator": "k1", "kl_gradient": "own"}],
     only_update),
    *(("without the weight policy / sampler the KL to the teacher is off", run, DIR | CUT | fields,
       [DIR | CUT | {"teacher_estimator": "exact"}, DIR | CUT | fields | {"teacher_off_policy": "token"}], cut_off)
      for fields in ({}, {"teacher_estimator": "k3"}, TOPK)),
    *(("that over what it keeps. For the KL over all words sample the whole policy", run,
       DIR | CUT | {"teacher_off_policy": "token"} | fields,
       [DIR | CUT | fields, DIR | CUT | {"teacher_estimator": "exact"}],
       over_what_it_keeps)
      for fields in ({}, {"teacher_estimator": "k3"}, TOPK)),
    *((f"{name}=.* has no effect", TeacherConfig, fields | {name: value}, [fields | {name: value} | on],
       same_numbers(name))
      for name, value, fields, on in (
          ("teacher_top_k", 1, DIR, TOPK | {"teacher_top_k": 1}),
          ("teacher_head", "teacher", DIR, TOPK | {"teacher_tail": "none"}),
          ("teacher_tail", "none", DIR, TOPK),
          ("teacher_off_policy", "token", DIR | {"teacher_estimator": "exact"}, {"teacher_estimator": "k1"}),
          ("teacher_off_policy", "token", TOPK | {"teacher_tail": "bucket"}, {"teacher_tail": "sampled"}),
      )),
]  # fmt: skip
"""What is said, by what, where, where not, and whether it is true."""


@pytest.mark.parametrize(
    ("words", "make", "said", "unsaid", "true"), ROWS, ids=[f"{r[0][:30]}-{i}" for i, r in enumerate(ROWS)]
)
def test_it_is_said_where_it_is_true_and_not_where_it_is_false(
    words: str, make: Callable[..., Any], said: Fields, unsaid: list[Fields], true: Callable[[Fields], bool]
) -> None:
    pattern = words if ".*" in words else re.escape(words)
    assert re.search(pattern, told(make, said)) and true(said)
    for fields in unsaid:
        assert not re.search(pattern, told(make, fields)), fields
        assert not true(fields), f"it is true there, and not said: {fields}"


def test_a_cut_sampler_is_no_matter_to_a_teacher_without_a_coefficient() -> None:
    fields = DIR | CUT | {"teacher_estimator": "k3"}
    assert "cut the sampler" in told(run, fields)
    assert "cut the sampler" not in told(run, fields | {"teacher_coef": 0.0})


@pytest.mark.parametrize(
    ("teacher", "kl", "warned"),
    [({"teacher_kind": "ema"}, 0.1, True), ({"teacher_kind": "ema"}, 0.0, False), (DIR, 0.1, False)],
)
def test_a_teacher_that_is_the_policy_begins_at_0(teacher: Fields, kl: float, warned: bool) -> None:
    from klamp.lab.loop import Trainer

    said: list[str] = []
    trainer: Any = SimpleNamespace(context=SimpleNamespace(config=run(**teacher)), step=0, step_zero_kl=1e-4)
    trainer.tell = lambda hook: hook(SimpleNamespace(on_warning=said.append))
    Trainer._check_step_zero(trainer, {"teacher/kl": kl})
    assert ["should be about 0" in text for text in said] == [True] * warned


@pytest.mark.parametrize(
    ("fields", "prompts", "warned"),
    [({"target_kl": 0.05}, 7, True), ({"target_kl": 0.05}, 8, False), ({}, 1, False), ({"beta": 0.0}, 1, False)],
)
def test_a_target_with_few_prompts_is_warned_of_in_every_trainer(
    tmp_path: Path, fields: Fields, prompts: int, warned: bool
) -> None:
    """verl: tests/hosts/verl/test_columns.py. That few prompts miss it: studies/results/target-map.md."""
    from klamp.trl import GRPOConfig

    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "num_generations": 4, "beta": 0.1}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2 * prompts}
    words = f"target_kl=0.05 may be missed with {prompts} prompts per step"
    assert (words in told(run, fields | {"prompts_per_step": prompts})) == warned
    assert (words in told(GRPOConfig, options | fields)) == warned
