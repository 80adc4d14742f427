"""Every metric that anything in klamp logs or reads is in the one table, by one name."""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.batches import flat_batch, objective_of
from tests.contracts.test_dependencies import tree_of
from tests.hosts.tinker.fakes import fake_batch

import klamp
from klamp.config import KLConfig
from klamp.core.objective import grpo_loss
from klamp.core.term import KLTerm
from klamp.core.types import Batch
from klamp.doctor.metrics import LOGS, METRICS, NAMES
from klamp.hosts.tinker.loss import compute_grpo_kl_loss

FAMILIES = sorted({name.partition("/")[0] for name in METRICS if "/" in name})
NAME = re.compile(rf"({'|'.join(FAMILIES)})/[a-z0-9_]+(/[a-z0-9_]+)?")
SOURCE = Path(klamp.__file__).parent
LOGGING = ("core", "doctor", "hosts", "lab", "report")
"""The rooms that log a run or read its log; the columns of an ablation's table are left out."""


@pytest.mark.parametrize("host", LOGS)
def test_other_names_stand_for_a_row(host: str) -> None:
    names = LOGS[host].names
    assert LOGS[host].source and not names.keys() & LOGS[host].other_kl.keys()
    assert set(names.values()) <= METRICS.keys()
    assert not names.keys() & METRICS.keys(), "a name of the table means itself"


def test_no_two_logs_use_one_name_for_two_things() -> None:
    """They are read without knowing whose they are, unless a mark says it."""
    pairs = {pair for logs in LOGS.values() if not logs.marks for pair in logs.names.items()}
    assert len({theirs for theirs, _ in pairs}) == len(pairs)
    assert pairs <= set(NAMES.items()), "where no mark is, those without one win"


def written(file: Path) -> Iterator[str]:
    """The strings of a file that look like a metric's name; pieces of an f-string are none."""
    tree = tree_of(file)
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            yield from (part for part in node.value.split("|") if NAME.fullmatch(part))


def test_every_name_that_is_written_anywhere_in_the_source_is_documented() -> None:
    known = METRICS.keys() | NAMES.keys() | NO_METRICS
    files = [file for room in LOGGING for file in (SOURCE / room).rglob("*.py") if file.parent.name != "ablate"]
    found = {name: file.name for file in files for name in written(file)}
    assert {name: file for name, file in found.items() if name not in known} == {}
    assert len(found) > 40, "else the walk finds nothing"


NO_METRICS = {"train/global_step", "train/step", "train/token_mult_prob_error", "reward/nat"}
NO_METRICS |= {"kl/reverse", "kl/reverse_sequence"}
"""Where others' logs say which step a row is of, or whose it is; the unit of beta; the KL in an ablation's outcome."""


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    policy, ref, sampler = (-torch.rand(4, 5, generator=generator) for _ in range(3))
    return flat_batch(
        policy_logprobs=policy.requires_grad_(),
        mask=torch.ones(4, 5, dtype=torch.bool),
        advantages=torch.randn(4, generator=generator),
        ref_logprobs=ref,
        sampler_logprobs=sampler,
        old_logprobs=sampler,
        exact_kl=torch.rand(4, 5, generator=generator),
        group_size=2,
        reference_length=3.0,
    )


def test_what_grpo_loss_gives() -> None:
    seen: set[str] = set()
    for placement, clip, beta in product(("loss", "advantage", "reward"), ("none", "hard"), (0.0, 0.3)):
        bounds: Mapping[str, Any] = {"max_weight": 1.1, "max_log_ratio": 0.5, "off_policy": "token"}
        term = KLTerm(value="k1", placement=placement, clip_method=clip, **bounds)  # pyright: ignore[reportArgumentType]
        seen |= grpo_loss(batch(), objective_of(beta=beta, kl=term)).metrics.keys()
    assert seen <= METRICS.keys()
    assert {"train/policy_loss", "train/kl_penalty", "kl/after_clip", "kl/weights_truncated"} <= seen


def test_what_klamp_tinker_gives() -> None:
    data, policies = fake_batch()
    kl = KLConfig(beta=0.3, kl_clip_method="hard", kl_max_log_ratio=0.3, kl_reference_length=3)
    _, metrics = compute_grpo_kl_loss(data, policies, kl=kl, group_size=2)
    assert metrics.keys() <= METRICS.keys() and {"train/loss", "train/denominator"} <= metrics.keys()
