"""What `ReportCallback` leaves behind: the report's sections of a TRL run are filled, and the run is the same one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.trl.hosts import klamp_trainer, model, reward

from klamp.cli import main
from klamp.doctor.readers import read_record
from klamp.errors import KLWarning
from klamp.trl import ReportCallback

QUICK: dict[str, Any] = {"max_steps": 3, "beta": 0.05, "kl_gradient": "reverse", "learning_rate": 1e-3}


def trained(folder: Path, *, callback: bool = True, reward: Any = reward, **options: Any) -> Any:
    callbacks = [ReportCallback(every=2, completions=3, answers=2)] if callback else []
    given = {"callbacks": callbacks, "reward_funcs": reward}
    trainer = klamp_trainer(model(), folder, trainer=given, **{**QUICK, **options})
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(folder)
    return folder


def test_every_section_of_the_report_is_filled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    for missing in ("does not hold the configuration", "does not hold versions", "No answers of an evaluation"):
        assert missing not in page
    assert "No completions with" not in page and 'class="answers"' in page
    (lead,) = re.findall(r'<p class="lead">(.*?)</p>', page)
    named, task, kl, day, took, verdict = lead.split(" · ")
    assert named and task.startswith("a data set of ") and "reward " in task
    assert kl == "KL: k3, gradient reverse per token, in the loss"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day) and re.fullmatch(r"\d+:\d\d", took) and verdict.startswith("no alarm")


def test_completions_have_the_log_probabilities_of_policy_and_reference(folder: Path) -> None:
    history = read_record(folder)
    assert {step: len(each) for step, each in history.completions.items()} == {1: 3, 2: 3}
    (first, *_), (later, *_) = history.completions[1], history.completions[2]
    assert first.ref is not None and list(first.policy) == pytest.approx(list(first.ref), abs=1e-5), "nothing has moved"
    assert later.ref is not None and list(later.policy) != pytest.approx(list(later.ref), abs=1e-5)
    assert history.settings.beta == 0.05 and first.prompt and first.advantage is not None


def test_answers_are_those_before_and_after(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 0, 3, 3]
    assert rows[0]["question"] == rows[2]["question"] and all(isinstance(row["score"], float) for row in rows)


def test_the_run_is_the_same_one(folder: Path, tmp_path: Path) -> None:
    plain = trained(tmp_path, callback=False)
    logged = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    for row, wanted in zip(logged, plain.state.log_history, strict=True):
        assert {n: x for n, x in row.items() if not timed(n)} == {n: x for n, x in wanted.items() if not timed(n)}


def timed(name: str) -> bool:
    return "runtime" in name or "time" in name or "per_second" in name


def test_a_reward_that_cannot_score_an_answer_ends_no_run(tmp_path: Path) -> None:
    def refuses(completions: Any, **columns: Any) -> list[float]:
        if len(completions) == 1:
            raise RuntimeError("one alone has no group")
        return [float(len(text)) for text in completions]

    with pytest.warns(KLWarning, match="report has no answers: RuntimeError: one alone"):
        trained(tmp_path, max_steps=1, reward=refuses)
    assert not (tmp_path / "answers.jsonl").exists()
