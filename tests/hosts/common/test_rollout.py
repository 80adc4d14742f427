"""What is settled of a whole generation batch: the same however it lies over processes, before it is split further."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.batches import read
from tests.hosts.common.several import in_processes
from torch import Tensor

from klamp.config import KLConfig
from klamp.core.advantages import group_advantages
from klamp.core.estimators import kl_estimate
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import KLTerm, Weighted, measure, prepare, sequence_gate_kl
from klamp.errors import ConfigError
from klamp.hosts.common import rollout
from klamp.hosts.common.coefficient import advantages_less_kl
from klamp.hosts.common.control import KLControl
from klamp.hosts.common.rollout import Alone, Generation, advantages_of_rewards, excluded_ids, gate_over_processes
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer

ROWS, LENGTH, GROUP = 8, 5, 4
TOKENIZER = arithmetic_tokenizer()
REWARD: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
CLIP: dict[str, Any] = {"kl_clip_method": "hard", "kl_clip_threshold": 0.05}


def generation(
    accelerator: Any = None, *, processes: int = 1, exact: Tensor | None = None, apart: float = 0.5, **changes: Any
) -> Generation:
    """This process's share of two groups of four completions; `apart`: the largest log-ratio to the reference."""
    generator, accelerator, size = torch.Generator().manual_seed(3), accelerator or Alone(), ROWS // processes
    old = -torch.rand(ROWS, LENGTH, generator=generator) - 0.1
    inputs = {
        "completion_ids": torch.randint(3, 20, (ROWS, LENGTH), generator=generator),
        "completion_mask": (torch.arange(LENGTH) < torch.tensor([5, 4, 3, 5, 2, 5, 1, 4])[:, None]).long(),
        "advantages": torch.randn(ROWS, generator=generator),
        "ref_per_token_logps": old - apart * torch.rand(ROWS, LENGTH, generator=generator),
    }
    mine = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
    given = {"rows": [{}] * size, "lengths": inputs["completion_mask"].sum(-1)[mine], "group_size": GROUP, **changes}
    return Generation(
        inputs={name: x[mine] for name, x in inputs.items()},
        old_logprobs=old[mine],
        accelerator=accelerator,
        exact_kl=None if exact is None else exact[mine],
        **given,
    )


@pytest.mark.parametrize("level", ["sequence", "group", "batch"])
@pytest.mark.parametrize(("value", "processes"), [("k3", 4), ("exact", 2)])
def test_a_gate_is_that_of_the_whole_batch_at_once(level: Any, value: Any, processes: int) -> None:
    """With four processes each holds half a group."""
    exact = torch.arange(1.0, 41.0).view(ROWS, LENGTH) if value == "exact" else None
    term = KLTerm(value=value, clip_method="hard", clip_threshold=0.1, clip_level=level)

    def gate(member: Any) -> Tensor:
        return gate_over_processes(generation(member, processes=processes, exact=exact), term)

    whole = replace(generation().batch(), group_size=GROUP)
    whole = whole if exact is None else whole.with_anchor("reference", kl=exact)
    torch.testing.assert_close(torch.cat(in_processes(processes, gate)), sequence_gate_kl(measure(whole, term)))


MASK = torch.tensor([[True, True, True], [True, True, False]])
CARRIED = torch.tensor([[False, True, True], [False, True, False]])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sequence_mean", [1.5, 2.0]), ("token_mean", [5 / 3] * 2), ("fixed_length", [1, 1]), ("sequence_sum", [1, 1])],
)
def test_what_a_host_divides_by_and_what_klamp_does(reduction: Any, expected: list[float]) -> None:
    assert rollout.exclusion_scale(MASK, CARRIED, reduction, Alone()).tolist() == pytest.approx(expected)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    if reduction == "sequence_mean":
        assert rollout.exclusion_scale(nothing, nothing, reduction, Alone()).tolist() == [1.0], "no tokens: 1 over 1"


def test_tokens_are_counted_over_all_processes() -> None:
    def scale(member: Any) -> list[float]:
        mine = slice(member.process_index, member.process_index + 1)
        return rollout.exclusion_scale(MASK[mine], CARRIED[mine], "token_mean", member).tolist()

    assert in_processes(2, scale) == [[pytest.approx(5 / 3)], [pytest.approx(5 / 3)]]


def test_the_length_is_the_users_else_the_columns_else_measured() -> None:
    column: Any = [{"reference_length": 3}, {}] * 4
    users = KLControl(KLConfig(kl_reference_length=7, **CLIP))
    assert rollout.reference_lengths(generation(rows=column), users).tolist() == [7.0] * ROWS
    with pytest.raises(ConfigError, match="a reference_length in the data must be a number"):
        KLControl(KLConfig(**CLIP)).reference_lengths(["12"])  # pyright: ignore[reportArgumentType]
    mixed = KLControl(KLConfig(**CLIP))
    near = generation(rows=column, apart=1e-4)
    mean = float(near.lengths.float().mean())
    assert rollout.reference_lengths(near, mixed).tolist() == pytest.approx([3.0, mean] * 4)
    assert mixed.reference_length == pytest.approx(mean)


@pytest.mark.parametrize("given", [0, 2])
def test_a_length_is_measured_on_all_processes_and_frozen(given: int) -> None:
    """Also if some of them have the column: else the others would wait for them for ever."""
    control = [KLControl(KLConfig(**CLIP)) for _ in range(4)]

    def measure(member: Any) -> list[float]:
        rows: Any = [{"reference_length": 3} if member.process_index < given else {}] * 2
        made = generation(member, processes=4, rows=rows, apart=1e-4)
        return rollout.reference_lengths(made, control[member.process_index]).tolist()

    mean = 29 / ROWS
    assert in_processes(4, measure) == [[3.0] * 2] * given + [pytest.approx([mean] * 2)] * (4 - given)
    longer = generation(apart=1e-4, lengths=torch.full((ROWS,), 50))
    assert rollout.reference_lengths(longer, control[3]).tolist() == pytest.approx([mean] * ROWS)


def test_a_policy_that_has_moved_is_no_sample_of_the_reference() -> None:
    moved = generation(apart=0.5)
    batch = moved.batch()
    k3 = kl_estimate(batch.policy_logprobs, read(batch, "ref_logprobs"))[batch.mask.bool()].mean()
    with pytest.raises(ConfigError, match=rf"reference length cannot be measured\n.*KL {float(k3):.2e} nats per token"):
        rollout.reference_lengths(moved, KLControl(KLConfig(**CLIP)))


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("clip", [{}, {**CLIP, "kl_reference_length": 2}])
def test_the_kl_in_the_reward_is_the_advantage_of_lower_rewards(processes: int, clip: dict[str, Any]) -> None:
    """The host has formed its advantages already; what it would have formed from the lower rewards comes out."""
    term = KLConfig(beta=0.3, **REWARD, **clip).build_term()
    rewards = torch.randn(ROWS, generator=torch.Generator().manual_seed(8))
    formed = group_advantages(rewards, GROUP, scale="none")

    def shift(member: Any) -> Tensor:
        made = generation(member, processes=processes)
        mine = formed.split(ROWS // processes)[member.process_index]
        extra = {"klamp_gate_kl": gate_over_processes(made, term), "klamp_reference_length": torch.full_like(mine, 2)}
        made = replace(made, inputs={**made.inputs, "advantages": mine, **(extra if clip else {})})
        return advantages_of_rewards(made, term, beta=0.3)

    batch = replace(generation().batch(), group_size=GROUP, reference_length=2.0)
    whole = prepare(batch, term)
    assert whole.gate is None or 0 < float(whole.gate.factor.mean()) < 1, "some are over budget, some are not"
    expected = advantages_with_kl(
        rewards, whole, beta=0.3, advantages=lambda r: group_advantages(r, GROUP, scale="none")
    )
    torch.testing.assert_close(torch.cat(in_processes(processes, shift)), expected)
    assert (expected - formed).abs().max() > 0.01


def test_a_completion_without_a_reward_has_no_say() -> None:
    term = KLConfig(beta=0.3, **REWARD).build_term()
    scorable = torch.tensor([True, True, True, False] + [False] * 4)
    made = generation(scorable=scorable)
    found = advantages_of_rewards(made, term, beta=0.3) - made.inputs["advantages"]
    spent = (made.old_logprobs - made.inputs["ref_per_token_logps"]) * made.inputs["completion_mask"]  # pyright: ignore
    taken = 0.3 * spent.sum(-1)[:3]
    torch.testing.assert_close(found[:3], taken.mean() - taken)
    assert found[3:].tolist() == [0.0] * 5
    by_token = made.inputs["advantages"][:, None].expand(made.inputs["completion_mask"].shape)
    tokens = replace(made, inputs={**made.inputs, "advantages": by_token})
    shift = advantages_of_rewards(tokens, term, beta=0.3) - by_token
    torch.testing.assert_close(shift, found[:, None].expand_as(shift))


def test_the_kl_in_the_advantage_is_the_present_policys() -> None:
    kl = KLConfig(beta=0.3, kl_estimator="k1", kl_placement="advantage")
    made, term = generation(), kl.build_term()
    added = rollout.prepared(made, KLControl(kl), TOKENIZER, beta=0.3, reduction="token_mean")
    assert torch.equal(added["advantages"], made.inputs["advantages"]), "the loss shifts them"
    batch = replace(made.batch(), policy_logprobs=made.batch().policy_logprobs - 0.7)  # after an update
    delta = (batch.policy_logprobs - made.inputs["ref_per_token_logps"]) * batch.mask
    found = advantages_less_kl(batch, [Weighted(0.3, term), Weighted(9.0, KLTerm())])
    torch.testing.assert_close(found, batch.advantages[:, None] - 0.3 * delta)
    assert advantages_less_kl(batch, [Weighted(0.0, term)]) is batch.advantages, "a schedule that starts at 0"


def test_exclusions_are_settled_before_the_gate() -> None:
    made = generation()
    ids = made.inputs["completion_ids"]
    kl = KLConfig(beta=0.3, kl_exclude_tokens=tuple(ids[0, :2].tolist()), kl_reference_length=2, **CLIP)
    added = rollout.prepared(made, KLControl(kl), TOKENIZER, beta=0.3, reduction="sequence_mean")
    mask = made.inputs["completion_mask"].bool()
    carried = mask & (ids != ids[0, 0]) & (ids != ids[0, 1])
    assert torch.equal(added["klamp_kl_mask"], carried)
    assert added["klamp_kl_scale"][0] == pytest.approx(5 / int(carried[0].sum())) and carried[0].sum() < 5
    k3 = kl_estimate(made.old_logprobs, made.inputs["ref_per_token_logps"], estimator="k3")  # pyright: ignore
    kept = (k3 * added["klamp_kl_mask"]).sum(-1)
    groups = kept.view(2, GROUP)
    others = (groups.sum(-1, keepdim=True) - groups) / (GROUP - 1)
    torch.testing.assert_close(added["klamp_gate_kl"], others.view(-1))
    assert added["klamp_reference_length"].tolist() == [2.0] * ROWS
    by_part = rollout.prepared(made, KLControl(kl), TOKENIZER, beta=0.3, reduction=None)
    assert "klamp_kl_scale" not in by_part


def carried(texts: list[str], *names: int | str) -> list[str]:
    """Per completion, the characters that carry the KL."""
    ids = torch.tensor([TOKENIZER.convert_tokens_to_ids(list(text)) for text in texts])
    kept = rollout.kl_tokens(ids, torch.ones_like(ids).bool(), excluded_ids(names, TOKENIZER))
    return ["".join(c for c, k in zip(text, row, strict=True) if k) for text, row in zip(texts, kept, strict=True)]


def test_tokens_are_named_by_string_or_id():
    plus = TOKENIZER.convert_tokens_to_ids("+")
    assert carried(["12+3", "=rev"]) == ["12+3", "=rev"]
    for name in ("+", plus):
        assert carried(["12+3"], name) == ["123"]
    assert carried(["12+3"], "2") == ["1+3"], "a digit that is a token, and no id"
    found = set(excluded_ids(("special", "+"), TOKENIZER))
    assert found == {*excluded_ids(("special",), TOKENIZER), plus} >= {TOKENIZER.eos_token_id, TOKENIZER.pad_token_id}


@pytest.mark.parametrize("name", ["<nowhere>", 999999, len(TOKENIZER)])
def test_an_unknown_token_is_refused_and_named(name: int | str) -> None:
    with pytest.raises(ConfigError, match=f"{name}(.|\n)*use an id below {len(TOKENIZER)}"):
        excluded_ids((name,), TOKENIZER)
