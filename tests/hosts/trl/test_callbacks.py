"""What klamp hangs into the loop of transformers: the alarms while a run goes on, the shorter console."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.trl.hosts import arguments, distiller, klamp_trainer, model, noisy, saved, stock_trainer
from tests.training.conftest import disturb
from transformers import TrainerCallback

from klamp.doctor.examine import AlarmFinding, examine
from klamp.doctor.readers import read_record
from klamp.errors import KLWarning, UnknownNameError
from klamp.hosts.trl.callbacks import settings_of_arguments
from klamp.trl import DoctorCallback

JUMPS: dict[str, Any] = {"learning_rate": 1e-4, "max_steps": 8, "beta": 0.05, "warmup_steps": 0}
"""A calm run, in which something jumps."""


class Jump(TrainerCallback):
    """Moves the weights after the third step, so that the KL of the fourth one is a spike, whatever is learned."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 3:
            disturb(model, size=0.2)


def run(
    folder: Path, *, build: Any = klamp_trainer, policy: Any = None, **options: Any
) -> tuple[Any, DoctorCallback, list[str]]:
    callback = options.pop("callback", None) or DoctorCallback(options.pop("stop_on", ()))
    given, jumps = options.pop("trainer", {}), [Jump()] if options.pop("jumps", False) else []
    trainer = build(policy or model(), folder, trainer={**given, "callbacks": [*jumps, callback]}, **options)
    with warnings.catch_warnings(record=True, action="always") as seen:
        trainer.train()
    return trainer, callback, [str(each.message) for each in seen if issubclass(each.category, KLWarning)]


def test_a_teacher_of_one_number_is_named_in_the_first_step(tmp_path: Path) -> None:
    """Case: an output head of zeros gives every token the same log-probability."""
    teacher = model(seed=5, tie_word_embeddings=False)
    teacher.lm_head.weight.data.zero_()
    options = {"teacher_coef": 0.5, "beta": 0.0, "max_steps": 1}
    assert "teacher-silent" in " ".join(run(tmp_path, trainer={"teacher_model": teacher}, **options)[2])
    sound = run(tmp_path, trainer={"teacher_model": model(seed=5)}, **options)[1]
    assert "teacher-silent" not in {finding.alarm.name for finding in sound.findings}
    callback = DoctorCallback()
    options = {"max_steps": 1, "teacher_estimator": "exact"}
    distiller(model(), teacher, tmp_path, trainer={"callbacks": [callback]}, **options).train()
    assert "teacher-silent" in {finding.alarm.name for finding in callback.findings}


def test_a_run_that_explodes_is_told_once_with_its_cause(tmp_path: Path) -> None:
    rose: list[AlarmFinding] = []
    trainer, callback, told = run(tmp_path, jumps=True, callback=DoctorCallback(on_alarm=rose.append), **JUMPS)
    (spike,) = [text for text in told if ": kl-spike:" in text]
    assert "likely the learning rate" in spike and "Next step:" in spike
    names = [finding.alarm.name for finding in callback.findings]
    assert len(names) == len(set(names))
    written = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [row["name"] for row in written] == names and callback.stopped_by is None
    assert not [text for text in told if "kl-high" in text], "a note is written, not told"
    assert rose == [each for each in callback.findings if each.alarm.level == "alarm"]
    trainer.save_state()
    assert {each.alarm.name for each in examine(read_record(tmp_path)).findings} == set(names), (
        "the doctor's, afterwards"
    )


def test_an_alarm_that_is_named_ends_the_run_with_a_checkpoint_and_it_goes_on(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 100}
    trainer, callback, told = run(tmp_path, jumps=True, stop_on="kl-spike", **saving, **JUMPS)
    step = trainer.state.global_step
    assert step == 4 and callback.stopped_by is not None and callback.stopped_by.first_step == step
    assert f"training stops after step {step}: stop_on names kl-spike" in told
    assert (tmp_path / f"checkpoint-{step}").is_dir()
    again = DoctorCallback()
    second = klamp_trainer(model(), tmp_path, trainer={"callbacks": [again]}, save_strategy="no", **JUMPS)
    with warnings.catch_warnings(record=True, action="always") as seen:
        second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert second.state.global_step == JUMPS["max_steps"]
    assert not [each for each in seen if ": kl-spike:" in str(each.message)], "it was told before"


def test_a_stock_trainer_has_the_alarms_that_its_log_allows(tmp_path: Path) -> None:
    base = saved(model(), tmp_path / "base")
    _, callback, told = run(tmp_path, build=stock_trainer, policy=base, jumps=True, **JUMPS)
    assert "kl-spike" in {finding.alarm.name for finding in callback.findings} and told


def test_a_chosen_reference_is_no_fault_at_step_0_but_a_far_one_is_named(tmp_path: Path) -> None:
    _, callback, _ = run(tmp_path, beta=0.05, max_steps=1, trainer={"ref_model": noisy(model(), size=0.3)})
    names = {finding.alarm.name for finding in callback.findings}
    assert "reference-differs" in names and "step-zero-kl" not in names


def test_what_the_arguments_say() -> None:
    assert settings_of_arguments(arguments(beta=0.1, kl_placement="advantage", kl_estimator="k1")).beta == 0.1
    plain = settings_of_arguments(arguments(beta=0.3, loss_type="dr_grpo"))
    assert (plain.beta, plain.loss_type, plain.moving_reference) == (0.3, "dr_grpo", False)


def test_names_are_checked_before_any_work() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'kl-far'"):
        DoctorCallback(stop_on=["kl-fat"])
