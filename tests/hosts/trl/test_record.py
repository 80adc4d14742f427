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
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer without a callback of one's own."""
    return trained(tmp_path_factory.mktemp("plain"), callback=False)


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
    (lead,), facts = re.findall(r'<p class="lead">(.*?)</p>', page), re.findall(r'<p class="source">(.*?)</p>', page)
    assert re.fullmatch(r"reward [\d.]+ to [\d.]+ for 0.\d+ nats", lead)
    named, task, kl, seed, hardware, day, took = facts[0].split(" · ")
    assert seed == "seed 42" and hardware.startswith("CPU (")
    assert named and task.startswith("a data set of ") and "reward " in task
    assert kl == "KL: k3, gradient reverse per token, in the loss"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day) and re.fullmatch(r"\d+:\d\d", took)


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


def test_the_run_is_the_same_one(folder: Path, plain: Any) -> None:
    logged = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    for row, wanted in zip(logged, plain.state.log_history, strict=True):
        timed = {name for name in wanted if "time" in name or "per_second" in name}
        assert {**row, **dict.fromkeys(timed)} == {**wanted, **dict.fromkeys(timed)}


def test_one_is_there_by_default_and_a_switch_or_one_of_your_own_takes_its_place(
    plain: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = Path(plain.args.output_dir)
    files = sorted(file.name for file in (default / "_klamp_report").iterdir())
    assert files == ["completions.jsonl", "klamp_report.json", "trainer_state.json"]
    assert main(["report", str(default)]) == 0
    page = (default / "report.html").read_text(encoding="utf-8")
    assert 'id="all-completions"' in page and len(read_record(default).completions[1]) == 4
    trained(tmp_path, callback=False, klamp_report=False, max_steps=1)
    assert not any((each / "_klamp_report").exists() for each in (tmp_path, folder))
    assert (folder / "completions.jsonl").is_file()


def test_what_cannot_be_written_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReportCallback, "_row", lambda *_: {"a": object()})
    with pytest.warns(KLWarning, match="no more completions: TypeError"):
        trained(tmp_path, callback=False, max_steps=1)


def test_a_reward_that_cannot_score_an_answer_ends_no_run(tmp_path: Path) -> None:
    def refuses(completions: Any, **columns: Any) -> list[float]:
        if len(completions) == 1:
            raise RuntimeError("one alone has no group")
        return [float(len(text)) for text in completions]

    with pytest.warns(KLWarning, match="report has no answers: RuntimeError: one alone"):
        trained(tmp_path, max_steps=1, reward=refuses)
    assert not (tmp_path / "answers.jsonl").exists()
