"""Completions with log-probabilities as prime-rl exports them and verl names them, from real models; their metrics."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnostics.histories import completion
from tests.records.test_records import lines as written
from tests.training.conftest import disturb, tiny_llama
from torch import Tensor, nn

from klamp.cli import main
from klamp.doctor.examine import Diagnosis, examine
from klamp.doctor.readers import read_record
from klamp.doctor.readers.rollouts import completion_metrics, completion_of, row_of
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer

PROMPT, LENGTH, ROWS = 5, 12, 24


@torch.no_grad()
def token_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    logprobs = model(ids).logits.float().log_softmax(-1)
    return torch.nn.functional.pad(logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Tokens of a policy, their log-probabilities under it, under a reference, and under what it was before."""
    policy, ref, old = tiny_llama(), tiny_llama(), tiny_llama()
    disturb(policy, size=0.01)
    disturb(old, seed=2, size=0.05)
    torch.manual_seed(0)
    ids = torch.randint(4, len(arithmetic_tokenizer()), (ROWS, PROMPT))
    with torch.no_grad():
        for _ in range(LENGTH):  # the end token is not special here
            ids = torch.cat([ids, policy(ids).logits[:, -1].softmax(-1).multinomial(1)], -1)
    models = {"policy": policy, "ref": ref, "old": old}
    return {"ids": ids.tolist(), **{name: token_logprobs(model, ids).tolist() for name, model in models.items()}}


def prime_rl(rows: dict[str, Any], i: int, **changes: Any) -> dict[str, Any]:
    """A line of prime-rl's token export, schema 1."""
    size = PROMPT + LENGTH
    sampler = [0.0] * PROMPT + rows["policy"][i][PROMPT:]
    return {
        **dict.fromkeys(("step", "export_step", "rank", "micro_step"), 0),
        **dict.fromkeys(("micro_sequence_idx", "export_sequence_idx"), i),
        "schema_version": 1,
        "run_id": None,
        "env_name": "arithmetic",
        "token_ids": rows["ids"][i],
        "position_ids": list(range(size)),
        "loss_mask": [False] * PROMPT + [True] * LENGTH,
        "advantages": [0.5] * size,
        "rewards": [1.0] * size,
        "inference_logprobs": sampler,
        "trainer_logprobs": rows["policy"][i],
        "entropy": [1.0] * size,
        "mismatch_kl": [None] * size,
    } | changes


def diagnose(folder: Path, lines: list[dict[str, Any]], name: str = "token_exports/step_0/rank_0.jsonl") -> Diagnosis:
    written(folder / name, *lines)
    return examine(read_record(folder))


def names(diagnosis: Diagnosis) -> list[str]:
    return [finding.alarm.name for finding in diagnosis.findings]


def test_a_healthy_export(tmp_path: Path, rows: dict[str, Any]) -> None:
    diagnosis = diagnose(tmp_path, [prime_rl(rows, i) for i in range(ROWS)])
    assert diagnosis.history.source == "prime-rl token export"
    assert names(diagnosis) == []
    (row,) = diagnosis.history.rows
    assert row.metrics["reward"] == 1.0 and row.metrics["sampler/k3"] == 0.0 and row.metrics["length/mean"] == LENGTH


@pytest.mark.parametrize(
    ("mask", "alarm"),
    [
        ([True] * (PROMPT + LENGTH), "mask-on-prompt"),
        ([False] * PROMPT + [True] * (LENGTH - 1) + [False], "end-token-lost"),
    ],
)
def test_a_mask_too_long_or_too_short(tmp_path: Path, rows: dict[str, Any], mask: list[bool], alarm: str) -> None:
    found = names(diagnose(tmp_path, [prime_rl(rows, i, loss_mask=mask) for i in range(ROWS)]))
    assert alarm in found and {"mask-on-prompt", "end-token-lost"} & set(found) == {alarm}


def test_an_engine_with_old_weights(tmp_path: Path, rows: dict[str, Any]) -> None:
    stale = [[0.0] * PROMPT + rows["old"][i][PROMPT:] for i in range(ROWS)]
    found = diagnose(tmp_path, [prime_rl(rows, i, inference_logprobs=stale[i]) for i in range(ROWS)])
    assert "sampler-mismatch" in names(found) and "mask-on-prompt" not in names(found)
    (finding,) = [f for f in found.findings if f.alarm.name == "sampler-mismatch"]
    assert finding.evidence.tokens[0].position >= PROMPT


def verl(rows: dict[str, Any], i: int, **changes: Any) -> dict[str, Any]:
    """A line of a verl rollout dump with the tensors of its batch by their names, padded on the right."""
    pad = 3

    def padded(values: list[Any], fill: Any) -> list[Any]:
        return values[i][PROMPT:] + [fill] * pad

    return {
        "input": "12+3=",
        "output": "15",
        "score": 1.0,
        "step": 1,
        "uid": f"prompt-{i // 4}",
        "responses": padded(rows["ids"], 0),
        "response_mask": [1] * LENGTH + [0] * pad,
        "rollout_log_probs": padded(rows["policy"], -1.0),
        "old_log_probs": padded(rows["policy"], 0.0),
        "ref_log_prob": padded(rows["ref"], 0.0),
        "advantages": [0.0] * (LENGTH + pad),
    } | changes


def test_verl_rows(tmp_path: Path, rows: dict[str, Any]) -> None:
    diagnosis = diagnose(tmp_path, [verl(rows, i) for i in range(ROWS)], "1.jsonl")
    assert diagnosis.history.source == "verl rollouts"
    assert names(diagnosis) == ["step-zero-kl"], "the policy has moved, and the record says that this is step 1"
    assert names(diagnose(tmp_path / "later", [verl(rows, i, step=7) for i in range(ROWS)], "7.jsonl")) == []
    policy, ref = (torch.tensor(rows[name])[:, PROMPT:] for name in ("policy", "ref"))
    assert diagnosis.history.rows[0].metrics["kl/k1"] == pytest.approx(float((policy - ref).mean()), rel=1e-5)
    assert diagnosis.history.rows[0].metrics["length/mean"] == LENGTH


def test_swapped_models_give_a_k1_below_chance(tmp_path: Path, rows: dict[str, Any]) -> None:
    old = {"rollout_log_probs": None, "step": 7}
    lines = [verl(rows, i, old_log_probs=rows["old"][i][PROMPT:] + [0.0] * 3, **old) for i in range(ROWS)]
    assert "negative-k1" in names(diagnose(tmp_path, lines, "7.jsonl"))


@pytest.mark.parametrize(
    ("changes", "alarm"),
    [
        (lambda i: {"response_mask": [1] * (LENGTH - 1) + [0] * 4}, "end-token-lost"),
        (lambda i: {"advantages": [-11.0] * (LENGTH + 3)}, "advantage-scale"),
    ],
)
def test_what_is_wrong_in_verls_rows(
    tmp_path: Path, rows: dict[str, Any], changes: Callable[[int], dict[str, Any]], alarm: str
) -> None:
    lines = [verl(rows, i, step=7, **changes(i)) for i in range(ROWS)]
    assert names(diagnose(tmp_path, lines, "7.jsonl")) == [alarm]


TOOL = slice(4, 8)
"""Where a tool answers, in rows of verl."""


def with_tool(rows: dict[str, Any], i: int, **changes: Any) -> dict[str, Any]:
    """A line of verl's in which a tool has written some tokens, which verl's sampler has 0.0 for."""
    row = verl(rows, i, step=7)
    row["rollout_log_probs"][TOOL] = [0.0] * 4
    row["response_mask"][TOOL] = [0] * 4
    return row | changes


def found_in(folder: Path, lines: list[dict[str, Any]]) -> str:
    """What is seen of a mask on tokens that nobody sampled; "" where nothing is."""
    diagnosis = diagnose(folder, lines, "7.jsonl")
    assert "mask-on-prompt" not in diagnosis.unchecked
    return next((f.evidence.text for f in diagnosis.findings if f.alarm.name == "mask-on-prompt"), "")


def test_verl_rows_whose_mask_covers_a_tools_answer_or_the_padding(tmp_path: Path, rows: dict[str, Any]) -> None:
    assert found_in(tmp_path / "sound", [with_tool(rows, i) for i in range(ROWS)]) == ""
    everything = [1] * LENGTH + [0] * 3
    text = found_in(tmp_path / "covered", [with_tool(rows, i, response_mask=everything) for i in range(ROWS)])
    assert text.startswith(f"in {ROWS} of {ROWS} sequences; ") and "from position 4" in text
    covered = [verl(rows, i, step=7, response_mask=[1] * (LENGTH + 3)) for i in range(ROWS)]
    assert f"3 in sequence 0 alone, from position {LENGTH}" in found_in(tmp_path, covered)


def test_a_sampler_that_says_nothing_of_prompt_tokens(tmp_path: Path, rows: dict[str, Any]) -> None:
    """null in the place of 0.0, as a program writes what is no number."""

    def lines(mask: list[bool]) -> list[dict[str, Any]]:
        sampler = [[None] * PROMPT + rows["policy"][i][PROMPT:] for i in range(ROWS)]
        return [prime_rl(rows, i, loss_mask=mask, inference_logprobs=sampler[i]) for i in range(ROWS)]

    covered = diagnose(tmp_path / "covered", lines([True] * (PROMPT + LENGTH)))
    assert "mask-on-prompt" in names(covered)
    assert names(diagnose(tmp_path / "sound", lines([False] * PROMPT + [True] * LENGTH))) == []


def test_without_the_samplers_numbers_nobody_knows_what_the_model_wrote(tmp_path: Path, rows: dict[str, Any]) -> None:
    bare = [verl(rows, i, step=7, rollout_log_probs=None) for i in range(ROWS)]
    assert diagnose(tmp_path, bare, "7.jsonl").unchecked["mask-on-prompt"] == "sampler_logprobs"


@pytest.mark.parametrize(
    ("row", "ended"),
    [({"ended": True}, True), ({"is_truncated": True}, False), ({"finish_reason": "stop"}, True), ({}, None)],
)
def test_how_a_completion_ended(row: dict[str, Any], ended: bool | None) -> None:
    made = completion_of({"policy_logprobs": [-1.0], "ref_logprobs": [None], "reward": 0.5} | row)
    assert made.ended is ended
    assert made.tokens == ["?"] and made.log_ratios() == [] and made.reward == 0.5


def test_a_token_that_its_sampler_was_certain_of_is_no_prompt_token() -> None:
    row = {"policy_logprobs": [-3.0, -0.1, -3.0], "inference_logprobs": [0.0, 0.0, -2.9], "loss_mask": [True] * 3}
    assert completion_of(row).sampled == [False, True, True]


def test_a_log_probability_above_zero_is_refused_where_it_counts() -> None:
    row = {"policy_logprobs": [-1.0, 0.4], "ref_logprobs": [-1.0, -2.0]}
    with pytest.raises(ValueError, match="a log-probability of 0.4"):
        completion_of(row)
    assert list(completion_of({**row, "trained": [1, 0]}).policy) == [-1.0], "masked at the end: padding"


def test_a_log_may_go_back_to_an_earlier_step(tmp_path: Path, capsys: Any) -> None:
    lines = [{"step": step, "policy_logprobs": [-1.0], "ref_logprobs": [-1.0], "reward": 0.5} for step in (1, 3, 2, 3)]
    file = written(tmp_path / "log.jsonl", *lines)
    assert main(["doctor", str(file)]) == 0
    assert "3 logged steps up to step 3" in capsys.readouterr().out
    written(file, *lines[:2], {"step": 4})
    assert main(["doctor", str(file)]) == 2, "what is damaged is found wherever it is"
    assert "line 3 is no completion" in capsys.readouterr().err


def test_metrics_are_over_trained_tokens_and_what_is_not_there_is_no_metric() -> None:
    rows = [
        completion(ref=(-1.5, -2.0, -0.5), sampler=(-1.1, -2.0, -0.5), reward=1.0, ended=True),
        completion(ref=(-1.0, -1.0, -9.0), trained=(True, True, False), reward=0.0, ended=False),
    ]
    found = completion_metrics(rows)
    deltas = [0.5, 0.0, 0.0, 0.0, -1.0]
    assert found["kl/k1"] == pytest.approx(sum(deltas) / 5)
    assert found["kl/k3"] == pytest.approx(sum(math.expm1(-d) + d for d in deltas) / 5)
    assert found["sampler/k1"] == pytest.approx(-0.1 / 3)
    assert found["sampler/k3"] == pytest.approx((math.expm1(0.1) - 0.1) / 3)
    assert (found["reward"], found["length/truncated"], found["length/mean"]) == (0.5, 0.5, 3)
    assert completion_metrics([completion(ref=None)]) == {"length/mean": 3, "length/repeated": 0}


@pytest.mark.parametrize(
    ("teacher", "name"),
    [
        ([-1.3] * 3, "repeated"),
        ([0.0] * 3, "repeated"),
        ([math.nan] * 3, "unscored"),
        (None, "unscored"),
        ([-1.1, -2.2, -0.4], ""),
    ],
    ids=["constant", "zero", "null", "no column", "sound"],
)
def test_a_teacher_that_falls_silent_in_a_file_of_completions(tmp_path, teacher, name) -> None:
    sound = {"policy_logprobs": [-1.0, -2.0, -0.5], "teacher_logprobs": [-1.1, -2.2, -0.4]}
    last = sound | {"teacher_logprobs": teacher} if teacher else {"policy_logprobs": [-1.0, -2.0, -0.5]}
    rows = [sound | {"step": 1}, sound | {"step": 2}, last | {"step": 3}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)).replace("NaN", "null"))
    diagnosis = examine(read_record(tmp_path / "rows.jsonl"))
    assert diagnosis.history.rows[0].metrics["teacher/k1"] == pytest.approx((0.1 + 0.2 - 0.1) / 3)
    assert "teacher-silent" in diagnosis.checked and "teacher-inert" in {*diagnosis.checked, *diagnosis.unchecked}
    risen = {x.alarm.name: (x.first_step, x.evidence.text) for x in diagnosis.findings}
    assert ("teacher-silent" in risen) == bool(name)
    assert not name or (risen["teacher-silent"][0] == 3 and f"teacher/{name}" in risen["teacher-silent"][1])


def test_groups_repetition_and_the_prompts_of_a_step() -> None:
    said = completion(tokens=tuple("ababab"), policy=(-1.0,) * 6, ref=None, reward=1.0, group="p")
    rows = [said, completion(reward=0.0, group="p"), *[completion(reward=0.5, group="q")] * 2]
    found = completion_metrics(rows)
    assert found["length/repeated"] == pytest.approx(3 / 15), "ab, ba, ab, ba, ab: three were there before"
    assert found["reward_std"] == pytest.approx(math.sqrt(0.5) / 2) and found["groups/saturated"] == 0.5
    assert found["length/reward_correlation"] == pytest.approx(1)
    assert "reward_std" not in completion_metrics(rows[:3]), "a group is not whole"
    assert "length/repeated" not in completion_metrics([replace(said, tokens=("?",) * 6)]), "tokens without a name"

    twice = [completion(2, reward=0.25, group="a"), completion(2, reward=0.25, group="a")]
    row = row_of(2, [*twice, completion(2, reward=0.25, group="b")])
    assert (row.step, row.metrics["reward"], row.prompts) == (2, 0.25, 2)
