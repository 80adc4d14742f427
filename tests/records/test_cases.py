"""The public reports in `tests/cases`: of each input what is read, which alarms rise, what is said or refused."""

from math import inf, nan
from pathlib import Path

import pytest
from tests.records.test_foreign import examined

from klamp.cli import main
from klamp.doctor.metrics import read_pairs
from klamp.doctor.readers import read_record

ROOT = Path(__file__).parents[2]
INPUTS = ROOT / "tests" / "cases"
CASES = [
    # MedicalGPT #374: one KL of -233 in 12 steps, too few for the rule of many steps
    ("big-negative-once/*.jsonl", "", {"negative-k1": 2}, 1, {"kl/k1": (6, -233.0)}, "-1 nats per token"),
    # a reward that falls with the difficulty of the prompts, and one that collapses later
    ("curriculum/sound.jsonl", "", {}, 0, {}, "no alarm"),
    ("curriculum/then-collapse.jsonl", "", {"reward-collapse": 168}, 1, {}, "(step 168"),
    # EasyR1 nests its metrics; the KL is 9 at step 20
    ("easyr1-nested/*.jsonl", "", {"kl-spike": 20, "kl-far": 21}, 1, {"kl/k3": (20, 9.0), "reward": (1, 0.5)}, ""),
    # one sound log, as Windows, PowerShell, an editor and a full disk leave it
    ("encodings/bom*", "", {}, 0, {"kl/k3": (30, 0.03), "reward": (1, 0.4)}, "30 logged steps"),
    ("encodings/crlf.jsonl", "", {}, 0, {"kl/k3": (30, 0.03)}, "30 logged steps"),
    ("encodings/utf16.jsonl", "", {}, 0, {"kl/k3": (30, 0.03)}, "30 logged steps"),
    ("encodings/cut.jsonl", "", {}, 0, {"kl/k3": (29, 0.029)}, "29 logged steps"),
    ("encodings/cutmiddle.jsonl", "", {}, 2, {}, "line 11 is not JSON"),
    ("encodings/glued.jsonl", "", {}, 2, {}, "fix: fix line 10, or leave it out"),
    ("encodings/gz.jsonl", "", {}, 2, {}, "why: it begins as gzip does fix: unpack it"),
    # open-r1 #704, TRL #4040: a KL that is NaN in every row exploded nowhere
    ("kl-nan-because-beta-0/*", "", {}, 3, {"kl/k3": (1, None)}, "kl is NaN in every row while training went on"),
    ("kl-nan-because-beta-0/*", "--beta 0", {}, 0, {"kl/k3": (1, None)}, "no alarm"),
    # ms-swift #3558: no rounding holds the KL at exactly 0 for 40 steps
    ("kl-zero-grad-moves/*", "", {"detached-reference": 20}, 1, {"train/grad_norm": (1, 0.3)}, "follows the policy"),
    # json.dump(trainer.state.log_history) in a notebook
    ("log-history-list/*", "", {"kl-spike": 9}, 1, {"kl/k3": (9, 40.0)}, "20 logged steps"),
    # TRL's first row may be a mean over ten steps
    ("logging-steps-10/*", "", {}, 0, {"kl/k3": (10, 0.01)}, "12 logged steps up to step 120"),
    # verl #7495, #3821, verl-omni #553: the engine keeps the first weights
    ("lora-never-delivered/*", "", {"sampler-mismatch": 15}, 1, {"sampler/k1": (1, 0.0)}, "that training started from"),
    ("lr-zero/*", "", {"not-trained": 5}, 1, {"train/learning_rate": (1, 0.0)}, "train/learning_rate is 0 in all"),
    # TRL #5144: the mask of a tool has an entry too many
    ("mask-longer-than-tokens/*", "", {}, 2, {}, "'sampler': 20, 'trained': 21, 'tokens': 20"),
    # "global_step/max_steps": "60/200"
    ("ms-swift-logging/*", "", {"kl-spike": 60}, 1, {"kl/k3": (60, 8.0)}, "40 logged steps up to step 200"),
    ("nan-inf-bare-tokens/*", "", {"huge-values": 7}, 1, {"kl/k3": (7, inf)}, "kl/k3 is inf"),
    # TRL #235, #925, verl's kl_loss_type=kl: no k3 is negative
    ("negative-kl-logged/*", "", {"negative-k1": 6}, 1, {"kl/k3": (6, None)}, "kl/k1 is -0.12"),
    ("nemo-json-dump/*", "", {}, 0, {"kl/k3": (1, 0.001), "reward": (1, 0.4)}, "table by metric, 19 logged steps"),
    # NeMo-RL #874, #3722: train/kl_penalty is a k3, not beta times one
    (
        *("nemo-rl/*", "", {"step-zero-kl": 1, "huge-values": 12, "kl-spike": 12, "kl-far": 13}, 1),
        *({"kl/k3": (1, 0.3), "train/kl_penalty": (1, None)}, "kl/k3 is 2.0e+06"),
    ),
    ("tb-nemo-rl/tb", "", {"step-zero-kl": 1}, 1, {"kl/k3": (1, 0.3)}, "TensorBoard, 30 logged steps"),
    # ms-swift #7229, EchoInk #4, TRL #702: nothing is trained, at any learning rate
    ("nothing-moves*/*", "", {"not-trained": 5}, 1, {"kl/k3": (1, 0.0)}, "likely frozen weights, an adapter"),
    # OpenRLHF's kl is a k1 by default: below 0 by chance for 16 steps, and no step-zero-kl
    ("openrlhf-k1/*", "", {"negative-k1": 18}, 1, {"kl/k1": (2, -0.002), "kl/k3": (2, None)}, "17 values of kl/k1"),
    # TRL's ref_model_sync_steps with alpha 1
    ("periodic-reset-is-fine/*", "", {}, 0, {"kl/k3": (21, 0.0)}, "no alarm"),
    ("probabilities-not-logs/*", "", {}, 2, {}, "they are never above 0 (are they probabilities?)"),
    # a token that the reference does not have
    ("reference-stronger-inf/*", "", {"huge-values": 1}, 1, {}, "4 trained tokens have no finite log-probability"),
    # steps 41 to 50 are there twice
    ("resumed-log-overlap/*", "", {}, 0, {"kl/k3": (50, 0.05)}, "80 logged steps up to step 80"),
    ("rollout-bf16-noise/*", "", {}, 0, {"sampler/k3": (40, 0.002)}, "no alarm"),
    # numbers as texts, lists and booleans
    ("rows-odd/a.json", "", {}, 0, {"kl/k3": (4, 0.01), "reward": (3, 0.4)}, "kl is no number in 1 of 5 rows"),
    ("rows-odd/text.*", "", {"huge-values": 1, "step-zero-kl": 1}, 1, {"kl/k3": (3, 0.03)}, "grad_norm is 2.0e+05"),
    # a sum over 50 tokens: only a person can say so
    ("sequence-kl-as-kl/*", "", {"kl-far": 6}, 1, {"kl/k3": (2, 0.550726)}, "per completion"),
    ("sequence-kl-as-kl/*", "--map kl/k1_sequence=kl", {}, 0, {"kl/k1": (2, 0.01101452)}, "no alarm"),
    # slime, LLaMA-Factory, Lightning; logged every 10 steps, the KL jumps at 120
    ("step-names/*", "", {"kl-spike": 120}, 1, {"kl/k3": (120, 8.0)}, "30 logged steps up to step 300"),
    ("summed-logprobs/*", "", {}, 2, {}, "-31.2 where a list belongs, with one entry per token"),
    # a run that was resumed, in two folders of TensorBoard
    ("tb-resumed-two-folders/runs", "", {}, 0, {}, "40 logged steps up to step 40"),
    # tinker-cookbook's kl_policy_base is a k1; SkyRL; slime
    ("tb-tinker-slime/m*", "", {"negative-k1": 1}, 1, {"kl/k1": (1, -0.3)}, "not read optim/kl_sample_train_v2"),
    ("tb-tinker-slime/s*", "", {"huge-values": 11, "kl-spike": 11, "kl-far": 12}, 1, {"kl/k3": (11, 4e4)}, ""),
    # OpenRLHF #853, unsloth-zoo #832: sampled at 0.6, scored at 1
    ("temperature-not-applied/*", "", {"sampler-mismatch": 1}, 1, {}, "sampler/k1 is 0.17"),
    # TRL #5144, TimeSearch-R #7, slime #1370: the loss mask covers a tool's answer, which nobody sampled
    ("tool-tokens-trained/good.jsonl", "", {}, 0, {}, "no alarm"),
    ("tool-tokens-trained/bad.jsonl", "", {"step-zero-kl": 1, "mask-on-prompt": 1, "sampler-mismatch": 1}, 1, {}, ""),
    ("tool-tokens-null-sampler/null.jsonl", "", {"step-zero-kl": 1, "mask-on-prompt": 1}, 1, {}, "in 8 of 8 sequences"),
    ("tool-tokens-null-sampler/none.jsonl", "", {"step-zero-kl": 1}, 1, {}, "mask-on-prompt not checked, needs"),
    # TRL's PPO: objective/kl is a sum over a completion, here of 7 nats
    ("trl-ppo-objective-kl/*", "", {}, 3, {"kl/k1": (40, None), "kl/k3": (40, None)}, "sums over completions"),
    ("trl-stdout/*", "", {}, 0, {"kl/k3": (30, 0.03)}, "text of a log, 30 logged steps"),
    # TRL #3476, #6369: mask_truncated_completions leaves a step without a token
    ("truncated-masked/*", "", {}, 0, {}, "5 logged steps"),
    ("unsloth-table/*", "", {}, 0, {"kl/k3": (30, 0.06)}, "text of a log, 30 logged steps"),
    # verl #751, #891, #747: all completions are one sign from step 21 on
    (
        *("verl-collapse-bang/*", "", {"huge-values": 21, "reward-collapse": 23, "truncated": 23}, 1),
        *({"kl/k3": (21, nan)}, "the weights were broken before: this step's completions earn 0 (0.5 before)"),
    ),
    # verl #7412: a pasted console
    ("verl-console/*", "", {}, 0, {"kl/k3": (30, 0.03)}, "text of a log, 30 logged steps"),
    ("verl-old-inf-string/*", "", {"huge-values": 15}, 1, {"train/grad_norm": (15, inf)}, "kl/k3 is nan"),
    # verl's rollout_data_dir holds texts alone
    ("verl-own-dump/*", "", {}, 2, {}, "lists old_log_probs and ref_log_prob"),
    ("verl-own-dump", "", {}, 2, {}, "lists old_log_probs and ref_log_prob"),
    ("verl-validation-null/*", "", {}, 0, {"kl/k3": (1, 0.0009)}, "no alarm"),
    ("wandb-export-csv/*", "", {}, 0, {"kl/k3": (30, 0.03)}, "text of a log, 30 logged steps"),
    # run.scan_history(): two rows a step, None for what a row lacks
    ("wandb-scan-history/*", "", {"kl-spike": 12}, 1, {"kl/k3": (12, 8.0)}, "30 logged steps up to step 30"),
]  # fmt: skip
"""Input, options, alarm -> the step in which it rises, exit code, metric -> a step and its value there, some text."""
TESTS = {
    "peft-adapter-off": ["hosts/trl/test_reference.py::test_without_a_trained_adapter_means_without_it"],
    "resume-changed-reference": ["training/test_resumed.py::test_a_moving_reference_cannot_begin_at_a_resume"],
    "resume-with-other-beta": [
        "training/test_resumed.py::test_new_values_count_from_the_next_step_on_and_readers_know_since_when",
        "training/test_resumed.py::test_a_kl_can_come_and_go_and_a_clip_has_its_length_measured",
        "hosts/trl/test_session.py::test_what_a_resume_asks_for_counts",
    ],
}
"""A report of training, not of a record -> the tests of it."""
ROWS = [
    pytest.param(file, *row[1:], id=" ".join([str(file.relative_to(INPUTS)), row[1]]).strip())
    for row in CASES
    for file in sorted(INPUTS.glob(row[0]))
]


@pytest.mark.parametrize(("file", "options", "alarms", "code", "metrics", "text"), ROWS)
def test_a_public_report(
    file: Path, options: str, alarms: dict, code: int, metrics: dict, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    risen, exit_code, out = examined(capsys, file, *options.split())
    assert ([*risen.items()], exit_code) == ([*alarms.items()], code) and text in out
    assert "not-trained" not in alarms or "raise the learning rate" not in out
    if metrics:
        names = read_pairs(part for part in options.split() if "=" in part)
        rows = {row.step: row.metrics for row in read_record(file, names).rows}
        assert {name: rows[step].get(name) for name, (step, _) in metrics.items()} == {
            name: value if value is None else pytest.approx(value, nan_ok=True) for name, (_, value) in metrics.items()
        }


CONFIGS = {
    "llamaf": "got: stage, ppo_target",
    "nemo": "beta for reference_policy_kl_penalty;",
    "openr1": "model for model_name_or_path;",
    "openrlhf": "beta for init_kl_coef;",
    "verl": "beta for kl_loss_coef, kl_estimator=k3 for kl_loss_type=low_var_kl;",
}
"""The configurations of other trainers in `yaml-other-trainers` -> what is said of them."""


@pytest.mark.parametrize("command", ["train --dry_run", "explain"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_configuration_of_another_trainer(name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = INPUTS / "yaml-other-trainers" / f"{name}.yaml"
    assert main([*command.split(), "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert "error: unknown fields\n" in said and f"note: in {file}" in said and CONFIGS[name] in said


def test_every_public_report_has_an_answer() -> None:
    configs = {INPUTS / "yaml-other-trainers" / f"{name}.yaml" for name in CONFIGS}
    assert set(INPUTS.glob("*/*")) == {row.values[0] for row in ROWS} - {INPUTS / "verl-own-dump"} | configs
    text = {test: (ROOT / "tests" / test.partition("::")[0]).read_text() for tests in TESTS.values() for test in tests}
    assert all(f"def {test.partition('::')[2]}(" in text[test] for test in text)
