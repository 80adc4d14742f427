"""Logs of other trainers: what `klamp doctor` finds, and what it says it cannot tell; tests/cases_4 has more."""

import json
from pathlib import Path

import pytest
from tests.records.test_records import lines

from klamp.cli import main
from klamp.doctor.readers.klamp_run import describe_changes

FOREIGN = Path(__file__).parent / "foreign"
FILES = [
    ("curriculum.jsonl", "", [], 0, "no alarm"),
    ("curriculum-then-collapse.jsonl", "", ["reward-collapse"], 1, "(step 16"),
]
"""File, options, the alarms in their order, the exit code, some of the text."""


def examined(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[list[str], int, str]:
    code = main(["doctor", str(path), *options])
    out = "".join(capsys.readouterr())
    return [line.split(": ")[1] for line in out.splitlines() if line.startswith("alarm: ")], code, " ".join(out.split())


@pytest.mark.parametrize(("file", "options", "alarms", "code", "text"), FILES)
def test_a_log_of_another_trainer(
    file: str, options: str, alarms: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, exit_code, out = examined(capsys, FOREIGN / file, *options.split())
    assert (found, exit_code) == (alarms, code)
    assert text in out


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
    main(["doctor", str(lines(tmp_path, *rows)), "--json"])
    unread = json.loads(capsys.readouterr().out)["not_read"]
    _, _, out = examined(capsys, lines(tmp_path, *rows))
    if "/" in meaning and " " not in meaning:
        assert column not in unread and f"needs {meaning}" not in out
        assert examined(capsys, lines(tmp_path, *rows), "--map", f"{meaning}={column}")[0] == []
    else:
        assert list(unread) == [column] and meaning in out


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
    assert (found, code) == ([], 0) and "prime-rl trains without a reference model by design" in out


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
