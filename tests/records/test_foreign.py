"""Logs of other trainers: kinds of fault, each beside a sound record; what `klamp doctor` says it cannot tell."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.records.test_records import lines

from klamp.cli import main
from klamp.doctor.readers import read_record
from klamp.doctor.readers.klamp_run import describe_changes


def examined(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[dict[str, int], int, str]:
    """What `klamp doctor` answers to a record: alarm -> the step in which it rises, the exit code, the text."""
    code = main(["doctor", str(path), *options])
    out = " ".join("".join(capsys.readouterr()).split())
    return {name: int(step) for name, step in re.findall(r" alarm: (\S+): [^()]*\(step (\d+)", out)}, code, out


COLUMNS = [
    ("mismatch/mismatch_kl", "sampler/k1"),
    ("mismatch/mismatch_k3_kl", "sampler/k3"),
    ("rollout_correction/k3_kl", "sampler/k3"),
    ("policy/rollout_train_logprobs_abs_diff_mean", "sampler/abs"),
    ("debug/vllm_vs_local_logprob_diff_mean", "sampler/abs"),
    ("train/opd_reverse_kl", "teacher/kl"),
    ("actor/distillation/loss", "teacher/kl"),
    ("loss/kl_policy_ref", "kl/k1"),
    ("objective/kl3_avg", "kl/k3"),
    ("my/rollout_k3_kl", "--map sampler/k3=my/rollout_k3_kl (a k3)"),
    ("sglang_vs_trainer_logp_diff", "--map sampler/abs="),
    ("my_mismatch_kl", "--map sampler/k3=my_mismatch_kl (a k3) or sampler/k1=my_mismatch_kl (a k1)"),
    ("student_teacher_kl", "--map teacher/kl=student_teacher_kl"),
    ("distill_loss", "--map teacher/kl=distill_loss"),
    ("my_kl", "--map kl=my_kl (a k3) or k1=my_kl (a k1)"),
    ("my_k1_kl", "as --map k1=my_k1_kl (a k1)"),
    ("kl_per_sequence", "--map kl/k1_sequence=kl_per_sequence"),
    ("my/approx_kl", "between the policy and the one that sampled, not to the reference"),
    ("training/rollout_probs_diff_mean", "a difference of probabilities"),
]


@pytest.mark.parametrize(("column", "meaning"), COLUMNS)
def test_a_distance_is_read_under_its_name_or_named_with_the_right_map(
    column: str, meaning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"step": step, "loss": 0.5, column: 0.002, column.replace("mean", "max"): 0.002} for step in range(1, 4)]
    file = lines(tmp_path, *rows)
    history = read_record(file)
    if "/" in meaning and " " not in meaning:
        assert column not in history.unread and meaning in history.names
        assert meaning in read_record(file, {meaning: column}).names
    else:
        assert list(history.unread) == [column] and meaning in examined(capsys, file)[2]


SHORT = {"step": 57, "kl": 0.01}
PRIME = {"mismatch_kl/mean": 0.001, "reward/mean": 0.5, "entropy/mean": 0.4, "optim/grad_norm": 0.1}
ENDS = [
    ([{**PRIME, "step": step} for step in range(1, 9)], "", 0, "prime-rl trains without a reference model by design"),
    ([SHORT], "", 3, "NOT looked at: the record has too little KL data"),
    ([{"step": 1, "kl": 0.0}], "", 0, "no alarm; 3 of 24 alarms were checked, 21 could not be"),
    ([{"step": step, "objective/kl": 2.0} for step in range(1, 9)], "", 3, "1 of 24 alarms were checked"),
    ([{"step": step, "objective/kl": 2.0} for step in range(1, 9)], "--beta 0", 0, "2 of 24 alarms were checked"),
    ([{"step": step, "kl": 1e-5} for step in range(1, 25)], "", 0, "kl-growing not checked, needs reward"),
    ([{"step": step, "kl": 1e-5, "reward": 0.5} for step in (1, 2, 3)], "", 0, "needs 30 steps with its metrics"),
    ([{"step": step, "reward": 0.5, "reward_std": 0.1} for step in range(1, 9)], "", 2, ""),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "options", "code", "text"), ENDS)
def test_sound_is_0_only_where_the_kl_or_its_absence_was_checked_and_what_could_rise_counts(
    rows: list, options: str, code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, exit_code, out = examined(capsys, lines(tmp_path, *rows), *options.split())
    assert exit_code == code and text in out


def test_a_token_export_of_prime_rl_has_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "tokens": [1, 2, 3],
        "trainer_logprobs": [-1.0] * 3,
        "inference_logprobs": [-1.001] * 3,
        "loss_mask": [1] * 3,
    }
    lines(tmp_path / "step_1" / "rank_0.jsonl", row, row)
    found, code, out = examined(capsys, tmp_path)
    assert (found, code) == ({}, 0) and "prime-rl trains without a reference model by design" in out


def test_changes_over_a_long_history_are_described_in_one_pass() -> None:
    class Counting(dict):
        reads = 0

        def items(self):
            Counting.reads += 1
            return super().items()

    entries = [Counting(until=step, beta=float(step)) for step in range(1, 2001)]
    changes = describe_changes({"beta": 0.0, "lora_r": 4, "history": entries})
    assert changes[1] == "beta 1.0 -> 2.0" and changes[2000] == "beta 2000.0 -> 0.0" and len(changes) == 2000
    assert Counting.reads <= 2 * len(entries)


def wave(step: int, size: float = 1.0) -> float:
    """A value that scatters from step to step."""
    return size * math.sin(7.3 * step) * math.cos(2.1 * step)


def jsonl(steps: int, row: Callable[[int], Mapping[str, Any]]) -> str:
    return "".join(json.dumps({"step": step, **row(step)}) + "\n" for step in range(1, steps + 1))


def taught(level: float, slope: float = 0.0, **more: float) -> Callable[[int], Mapping[str, Any]]:
    return lambda step: {"teacher_kl": level + slope * step + wave(step, 0.01), "loss": 0.1 + wave(step, 0.01), **more}


def entropy(reward: Callable[[int], float], *, left: float = 0.1) -> Callable[[int], Mapping[str, Any]]:
    return lambda step: {
        "actor/entropy": left + (0.8 - left) * math.exp(-step / 15) + wave(step, 0.01),
        "critic/score/mean": reward(step),
        "actor/use_kl_loss": 0.0,
    }


def driver(factor: float) -> str:
    rows = [
        "[2026-11-12 10:01:11] [config.py] config: {'use_kl_loss': true, 'kl_penalty': 'kl', 'learning_rate': 2e-6}\n"
    ]
    for step in range(30):
        kl, policy = 0.02 * step, wave(step, 0.001)
        row = {"step": step, "actor/kl_loss": kl, "actor/kl_loss_coef": 0.05, "actor/pg_loss": policy}
        row |= {"actor/total_loss": policy + factor * 0.05 * kl, "critic/score/mean": 0.3 + 0.01 * step}
        rows.append(f"[2026-11-12 10:{step:02}:07] [INFO] {json.dumps(row)}\n")
    return "".join(rows)


def nemo(error: float) -> str:
    head = "===== Step {0}/40 =====\nLogged data to logs/train_data_step{0}.jsonl, torch: 2.6.0\n"
    form = head + "  • Loss: 0.01\n  • Generation KL Error: {1:.4f}\n  • Avg Reward: 0.5\n  • Total step time: 91.6s\n"
    return "".join(form.format(step, 0.0003 + error * step + abs(wave(step, 1e-4))) for step in range(1, 41))


def prime(error: float) -> str:
    form = (
        "09:12:57 SUCCESS Step {0} | Time: 53.78s | Reward: 0.5000 | Seq. Length: 462.4 tokens | Truncated: 2.0%\n"
        "09:12:58 SUCCESS Step {0} | Time: 24.03s | Loss: 0.00 | Mismatch KL: {1:.4f} | Grad. Norm: 0.04 | LR: 3e-06\n"
    )
    return "".join(form.format(step, 0.0005 + error * step + abs(wave(step, 1e-4))) for step in range(1, 41))


def tune(kl: Callable[[int], float], reward: Callable[[int], float]) -> str:
    form = (
        "Step {0} | loss:-0.0009 policy_loss:-0.001 kl_loss:{1:.6f} rewards:{2:.4f} response_lengths:313.4 lr:1e-06\n"
    )
    return "".join(form.format(step, kl(step), reward(step)) for step in range(1, 121))


def curriculum(step: int) -> float:
    return (0.9 if step < 60 else 0.55) + wave(step, 0.12)


def dump(policy: str, sampler: str, ref: str, gap: float) -> str:
    rows: list[dict[str, Any]] = []
    for step in range(12):
        for group in range(8):
            tokens = [-0.5 - abs(wave(step * 100 + group * 10 + i)) for i in range(40)]
            own = [x + 0.01 * step * wave(i) for i, x in enumerate(tokens)]
            scores = {policy: own, ref: tokens, sampler: [x + gap * step * wave(3 * i) for i, x in enumerate(own)]}
            rows.append({"iteration": step, "group_id": str(group // 2), "reward": group % 2, "steps": 3} | scores)
    return "".join(json.dumps(row) + "\n" for row in rows)


def verl(*config: str) -> str:
    form = "step:{0} - actor/pg_loss:0.01 - critic/score/mean:0.5 - actor/grad_norm:0.1"
    return "\n".join((*config, *map(form.format, range(1, 30)))) + "\n"


TRL_NAMES = ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
NEMO_NAMES = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
OURS = ("train_logprobs", "sampling_logprobs", "base_action_log_probs")
COLLAPSE, REACHED = "entropy-collapse", "teacher-not-reached"
KINDS = [
    ("a.jsonl", jsonl(30, taught(-0.4)), ["negative-k1"], 1, "teacher/kl is -0.4"),
    ("a.jsonl", jsonl(30, taught(0.4)), [], 0, "no alarm"),
    ("a.jsonl", jsonl(30, lambda i: {"loss": 0.1, "teacher/k1": wave(i, 0.001) - 0.02}), ["negative-k1"], 1, "last"),
    ("a.jsonl", jsonl(30, taught(0.3, teacher_logprobs=0.0)), ["teacher-silent"], 1, "in each of 5"),
    ("a.jsonl", jsonl(30, taught(0.3, teacher_logprobs=-1.2)), ["teacher-silent"], 1, "in each of 20 steps"),
    ("a.jsonl", jsonl(30, lambda i: {**taught(0.3)(i), "teacher_logprobs": -1.2 + wave(i)}), [], 0, "no alarm"),
    ("a.jsonl", jsonl(100, entropy(lambda i: 0.6 + wave(i, 0.05))), [COLLAPSE], 1, "the entropy went from"),
    ("a.jsonl", jsonl(100, entropy(lambda i: 0.3 + 0.005 * i + wave(i, 0.05))), [], 3, "no alarm"),
    ("a.jsonl", jsonl(100, entropy(lambda i: 1.96 + wave(i, 0.2 / i))), [], 3, "no alarm"),
    ("a.jsonl", jsonl(100, entropy(lambda i: 0.6 + wave(i, 0.05), left=0.25)), [], 3, "no alarm"),
    ("a.log", driver(0.0), ["kl-not-in-loss"], 1, "beta times the KL is 0.0"),
    ("a.log", driver(1.0), [], 0, "no alarm"),
    ("a.log", nemo(0.001), ["sampler-mismatch"], 1, "it came with the updates"),
    ("a.log", nemo(0.0), [], 3, "no alarm"),
    ("a.log", prime(0.001), ["sampler-mismatch"], 1, "it came with the updates"),
    ("a.log", prime(0.0), [], 0, "prime-rl trains without a reference model"),
    ("a.txt", tune(lambda i: 0.0003 * i, lambda i: 0.8 - 0.006 * i), ["reward-collapse"], 1, "fell"),
    ("a.txt", tune(lambda i: 0.0003 * i, curriculum), [], 0, "no alarm"),
    ("a.jsonl", jsonl(120, lambda i: {"kl": 0.0003 * i, "reward": curriculum(i)}), [], 0, "no alarm"),
    ("a.txt", "".join(f"\x1b[1mIter {i}\x1b[0m kl={i / 1e3}, reward={i / 100}\n" for i in range(9)), [], 0, "9 log"),
    ("a.jsonl", dump(*OURS, 0.06), ["sampler-mismatch"], 1, "it came with the updates"),
    ("a.jsonl", dump(*OURS, 0.0), [], 0, "12 logged steps up to step 11"),
    ("a.jsonl", dump(*NEMO_NAMES, 0.0), [], 0, "12 logged steps up to step 11"),
    ("a.jsonl", dump(*TRL_NAMES, 0.0), [], 0, "12 logged steps up to step 11"),
    ("a.jsonl", jsonl(60, lambda i: {"distill/reverse_kl": 0.3 + 0.01 * i}), [REACHED], 1, "the sign of the KL"),
    ("a.jsonl", jsonl(60, lambda i: {"opd/reverse_kl": 0.3 + wave(i, 0.01)}), [REACHED], 1, "was 0.3"),
    ("a.jsonl", jsonl(60, lambda i: {"distill/reverse_kl": 0.9 - 0.01 * i}), [], 0, "no alarm"),
    ("a.log", verl("{'use_kl_loss': False, 'kl_loss_coef': 0.001,"), [], 0, "the configuration turns the KL off"),
    ("a.log", verl("algorithm.use_kl_in_reward=False actor.use_kl_loss=False"), [], 0, "turns the KL off"),
    ("a.log", verl('{"use_kl_loss": false}'), [], 0, "turns the KL off"),
    ("a.log", verl("kl_coef: 0.0"), [], 0, "turns the KL off"),
    ("a.log", verl("use_kl_loss: True", "use_kl_in_reward: False"), [], 3, "needs beta (--beta says it)"),
    ("a.log", verl("kl_coef: 0.001"), [], 3, "cannot tell"),
]  # fmt: skip
"""File, content, the alarms in their order, the exit code, some of the text."""


@pytest.mark.parametrize(("file", "content", "alarms", "code", "text"), KINDS)
def test_a_kind_of_fault_and_a_sound_record_beside_it(
    file: str, content: str, alarms: list[str], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text(content, encoding="utf-8")
    rising, exit_code, out = examined(capsys, tmp_path / file)
    assert ([*rising], exit_code) == (alarms, code) and text in out


def test_empty_cells_and_a_printed_configuration_are_no_odd_values(tmp_path: Path) -> None:
    file = tmp_path / "history.csv"
    file.write_text("_step,kl,reward,val/acc\n1,0.001,0.5,\n1,,,0.46\n2,0.002,0.6,\n", encoding="utf-8")
    history = read_record(file)
    assert history.cautions == [] and [row.metrics["kl/k3"] for row in history.rows] == [0.001, 0.002]
    (tmp_path / "a.log").write_text(driver(1.0), encoding="utf-8")
    history = read_record(tmp_path / "a.log")
    assert history.cautions == [] and "train/learning_rate" not in history.names
