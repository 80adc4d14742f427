"""Rules over tokens: masks, k1 below chance, the tokens to blame, and a sampler that is not the policy."""

import math
from typing import Any

import pytest
import torch
from tests.diagnostics.histories import completion, history_of, look, rises

from klamp.doctor.causes import blame
from klamp.doctor.history import Completion, History, RunSettings
from klamp.doctor.metrics import settings_of, settings_of_run
from klamp.verify.worlds import truncate_top_p


def test_blame_ranks_tokens_by_their_k3() -> None:
    rows = [completion(ref=(-1.0, -5.0, -0.5)), completion(ref=(-1.0, -2.0, 1.5))]
    first, second = blame(history_of(written=rows))
    shares = [math.expm1(2.0) - 2.0, math.expm1(-3.0) + 3.0]
    assert (first.completion, first.position, first.token) == (1, 2, "<eos>")
    assert (second.completion, second.position, second.other_logprob) == (0, 1, -5.0)
    assert [first.share, second.share] == pytest.approx([x / sum(shares) for x in shares])


def test_blame_takes_the_nearest_step_that_was_written() -> None:
    rows = [completion(10, ref=(-2.0, -2.0, -0.5)), completion(20, ref=(-3.0, -2.0, -0.5))]
    for step, nearest in ((14, 10), (16, 20)):
        assert [token.step for token in blame(history_of(first=step, reward=[0.5], written=rows))] == [nearest]
    assert blame(History()) == []


INSIDE = completion(sampled=(False, True, True), trained=(False, True, True))
TOUCHING = completion(sampled=(False, True, True), trained=(True, True, True))
LOST, KEPT = completion(trained=(True, True, False), ended=True), completion(ended=True)
CUT = completion(trained=(True, True, False), ended=False)
LEFT_OUT = completion(trained=(False, False, False), ended=True)
OVER_PADDING = completion(trained=(True, True, False), sampled=(True, True, False), ended=True)
PAD, END = "<pad>", "<eos>"


def padded(pad: str, *, trained: bool) -> list[Completion]:
    """Completions whose padding has finite scores too; `trained`: whether the mask has the end token."""
    rows = []
    for index, length in enumerate((2, 3, 4, 5)):
        tokens = [*(f"{index}{i}" for i in range(length)), END, *[pad] * (8 - length)]
        policy, mask = [-0.1 * i - 0.3 for i in range(9)], [i < length + trained for i in range(9)]
        rows.append(completion(tokens=tokens, policy=policy, ref=None, trained=mask))
    return rows


ROWS: list[tuple[str, bool, dict[str, Any]]] = [
    ("mask-on-prompt", False, {"written": [INSIDE, INSIDE]}),
    ("mask-on-prompt", False, {"written": [completion()]}),
    ("end-token-lost", True, {"written": [LOST, LOST, KEPT]}),
    ("end-token-lost", False, {"written": [LOST, KEPT]}),  # half of them
    ("end-token-lost", False, {"written": [CUT, CUT, KEPT]}),
    ("end-token-lost", False, {"written": [LEFT_OUT, LEFT_OUT, KEPT]}),  # on purpose
    ("end-token-lost", False, {"written": [OVER_PADDING]}),
    *(("end-token-lost", False, {"written": padded(pad, trained=True)}) for pad in (PAD, END)),
    *(("end-token-lost", True, {"written": padded(pad, trained=False)}) for pad in (PAD, END)),
    ("sampler-mismatch", False, {"sampler__k1": [0.002], "sampler__k3": [0.002]}),
    ("sampler-mismatch", False, {"sampler__k1": [0.011], "sampler__k3": [0.002]}),  # one step of few tokens
    ("sampler-mismatch", True, {"sampler__k1": [0.011], "sampler__k3": [0.002], "length": [1e6]}),
    ("sampler-mismatch", True, {"sampler__k1": [-0.011], "sampler__k3": [0.002], "length": [1e6]}),
    ("sampler-mismatch", True, {"sampler__k1": [-0.011] * 10, "sampler__k3": [0.002] * 10}),
    ("sampler-mismatch", False, {"sampler__k3": [0.001, 0.002, 0.001, 0.002, 0.06], "length": [8] * 5}),  # one token
    ("sampler-mismatch", True, {"sampler__k3": [0.05, 0.02, 0.03, 0.04, 0.03] * 2, "length": [8] * 10}),
    ("sampler-mismatch", True, {"sampler__k3": [0.001] * 5 + [0.2], "length": [1e4] * 6}),
    ("sampler-mismatch", False, {"sampler__k1": [0.004, -0.006, 0.001, -0.005, 0.011], "sampler__k3": [0.002] * 5}),
    ("sampler-mismatch", True, {"sampler__k1": [0.003], "sampler__k3": [1635.0]}),
    ("sampler-mismatch", False, {"sampler__abs": [0.02]}),
    ("sampler-mismatch", True, {"sampler__abs": [0.15], "length": [1e4]}),  # E|d| = .15 means E[d^2]/2 >= .011
    ("sampler-mismatch", False, {"sampler__abs": [0.13]}),
    ("sampler-mismatch", False, {"reward": [1.0]}),
]


@pytest.mark.parametrize(("alarm", "raised", "run"), ROWS)
def test_both_sides_of_each_threshold(alarm: str, raised: bool, run: dict[str, Any]) -> None:
    assert rises(alarm, **{"reward": [0.5], **run}) is raised


def test_a_mask_on_the_prompt_names_the_token() -> None:
    found = look("mask-on-prompt", history_of(reward=[0.5], written=[INSIDE, TOUCHING]))
    assert found is not None and "1 of 2" in found.text and "'4'" in found.text


def test_a_mismatch_names_the_tokens_by_the_sampler() -> None:
    evidence = look("sampler-mismatch", history_of(sampler__k3=[0.5], written=[completion(sampler=(-1.0, -0.5, -0.5))]))
    assert evidence is not None
    assert [(token.position, token.other_logprob, token.share) for token in evidence.tokens] == [(1, -0.5, 1.0)]


def cause(history: History) -> str:
    evidence = look("sampler-mismatch", history)
    assert evidence is not None
    return evidence.causes[0] if evidence.causes else ""


def test_what_came_with_the_updates_is_a_missing_sync_and_what_was_there_from_the_start_is_arithmetic() -> None:
    text = cause(history_of(sampler__k3=[0.001, 0.02, 0.4]))
    assert text.startswith("it came with the updates (sampler/k3 was 0.001 before the first one)")
    text = cause(history_of(sampler__k3=[0.02, 0.02]))
    assert "a missing sync alone does not explain it: other data types or kernels" in text
    assert "does not explain it" in cause(history_of(sampler__k3=[0.02, 0.2])), "it was there, whatever came after"
    assert cause(history_of(sampler__k1=[0.008, 0.02], length=[1e6] * 2)) == "", "hardly grown"
    assert "it came with the updates" in cause(history_of(sampler__abs=[0.01, 0.9])), "TRL logs no k3"


@pytest.mark.parametrize("name", ["sampler__k3", "sampler__abs", "sampler__k1"])
def test_a_single_step_after_steps_that_agreed_is_no_missing_sync(name: str) -> None:
    assert cause(history_of(**{name: [0.002, 0.003, 8.0]})).startswith("this step alone, so far: sampler and trainer")
    for drifting in ([0.002, 8.0], [0.002, 0.2, 8.0]):
        assert cause(history_of(**{name: drifting})).startswith("it came with the updates")


def test_a_sampler_that_cuts_its_distribution_is_no_missing_sync() -> None:
    """Under top-p 0.9 k3 is some .001 where k1 is .03: in the first step, before any update, already."""
    torch.manual_seed(0)
    logits = torch.randn(60, 40, dtype=torch.float64)
    policy, cut = logits.log_softmax(-1), truncate_top_p(logits, 0.9).log_softmax(-1)
    tokens = cut.exp().multinomial(1)
    sampled = {"policy": policy.gather(1, tokens)[:, 0].tolist(), "sampler": cut.gather(1, tokens)[:, 0].tolist()}
    deltas = torch.tensor(sampled["sampler"]) - torch.tensor(sampled["policy"])
    k1, k3 = deltas.mean().item(), (torch.expm1(-deltas) + deltas).mean().item()
    assert k3 < 0.01 < k1
    means = {"sampler__k1": [k1], "sampler__k3": [k3]}
    without = cause(history_of(**means))
    assert "before the first update (sampler/k1 was 0.0" in without and "top-p or top-k" in without
    rows = completion(tokens=tuple("a" * 60), ref=None, **sampled)
    seen = cause(history_of(**means, written=[rows]))
    assert seen.startswith("each of 60 tokens is at least as likely under the sampler: it cuts")
    sampled["sampler"][7] = sampled["policy"][7] - 0.5
    seen = cause(history_of(**means, written=[rows]))
    assert "cuts the distribution" not in seen, "one token is likelier under the trainer"


def test_a_large_difference_everywhere_is_another_temperature_and_without_a_first_step_there_is_no_cause() -> None:
    row = completion(policy=(-2.0,) * 6, sampler=(-1.0,) * 6, tokens="abcdef", ref=None)
    assert "scores with another temperature, another prompt" in cause(history_of(sampler__k3=[2.0], written=[row]))
    assert "scores with another temperature" in cause(history_of(sampler__k3=[2.0])), "without completions too"
    assert cause(history_of(first=2, sampler__k3=[0.5])) == ""
    assert "scores with another temperature" in cause(history_of(sampler__abs=[0.9]))


def test_a_sampler_as_far_as_the_reference_has_the_weights_of_the_start() -> None:
    kl = [0.001 * i for i in range(20)]
    history = history_of(k3=kl, sampler__k3=[1.04 * x for x in kl])
    found = look("sampler-mismatch", history)
    assert found is not None and found.causes[0].startswith("the sampler still has the weights that training started")
    stale = look("sampler-mismatch", history_of(k3=kl, sampler__k3=[0.0, *[0.02] * 19]))
    assert stale is not None and stale.causes[0].startswith("it came with the updates")


def test_the_runs_own_top_k_is_named_where_mass_is_cut() -> None:
    def told(k3: float, **own: float) -> str:
        history = history_of(sampler__k1=[0.2] * 10, sampler__k3=[k3] * 10, settings=RunSettings(**own))  # pyright: ignore
        return cause(history)

    assert told(0.03, top_k=20).startswith("the run's own top_k 20: the trainer scores the whole")
    assert told(0.03, top_k=20, top_p=0.9).startswith("the run's own top_p 0.9 and top_k 20:")
    for k3, own in ((0.21, {"top_k": 20}), (0.03, {"top_k": 0}), (0.03, {"top_k": -1}), (0.03, {})):
        assert "the run's own" not in told(k3, **own), "of other weights k1 and k3 are alike"
    assert settings_of({"top_k": 20}, set()).top_k == settings_of_run({"top_k": 20}).top_k == 20


def test_the_runs_own_top_p_is_named_and_only_where_it_explains_the_mismatch() -> None:
    own = RunSettings(top_p=0.9)
    assert cause(history_of(sampler__k1=[0.05] * 10, settings=own)).startswith("the run's own top_p 0.9:")
    assert "the run's own" not in cause(history_of(sampler__k1=[0.2] * 10, settings=own)), "at most -log(0.9) = 0.105"
    assert "the run's own" not in cause(history_of(sampler__k1=[-0.05] * 10, settings=own))
    assert "the run's own" not in cause(history_of(sampler__k1=[0.05] * 10))
    assert settings_of({"top_p": 0.9}, set()).top_p == 0.9
