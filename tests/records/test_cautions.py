"""What the doctor says of a KL that it does not read."""

import json
from pathlib import Path
from typing import Any

import pytest

from klamp.doctor.metrics import LOGS
from klamp.doctor.readers.logs import read_metrics

STEPS = range(1, 4)


@pytest.mark.parametrize(("log", "name"), [(log, name) for log in LOGS.values() for name in log.other_kl])
def test_a_kl_that_is_not_read_is_said_to_be_what_its_trainer_says(tmp_path: Path, log: Any, name: str) -> None:
    marks = dict.fromkeys(log.marks[:1], 0.1)
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"step": i, name: 0.1, "loss": 0.1, **marks}) + "\n" for i in STEPS))
    assert read_metrics(file).unread == {name: log.other_kl[name]}
    assert name not in read_metrics(file, {"kl/k3": name}).unread, "--map says what it is"
