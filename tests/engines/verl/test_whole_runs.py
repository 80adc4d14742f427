"""Whole runs of `klamp train --backend verl` on the CPU. verl draws its own sample, so bounds are asserted."""

import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.verl.programs import LIMIT, TEACHER, started, training
from tests.training.lies import cells, folder_of, loaded, scores, spans

from klamp.cli import main
from klamp.doctor.readers import read_record
from klamp.lab.folders import lines_of
from klamp.lab.models import load_model
from klamp.names import IDENTITY

pytestmark = [pytest.mark.usefixtures("default_base_model"), pytest.mark.timeout(2 * LIMIT + 60)]

SIZES: dict[str, Any] = {"max_completion_length": 8, "max_prompt_length": 16, "train_size": 64, "eval_size": 4}
SIZES |= {"prompts_per_step": 8, "num_generations": 4, "max_steps": 4, "eval_every": 0}
SIZES |= {"learning_rate": 5e-4, "lr_scheduler_type": "constant", "warmup_steps": 0}
SAME = 1e-5
"""Bound on the mean difference between two kernels' log-probabilities under the same weights, in float32."""
SAME_TOKEN = 1e-4
"""The same for the probability of one token: the built-in model's logits are about 20, where 30 eps are 7e-5."""
ENGINE = "training/rollout_probs_diff_max"
"""verl's name of the largest difference of a token's probability in vLLM from that in the actor."""


def run(folder: Path, *words: str, verl: dict[str, Any] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """A run to its last step, which leaves no process; the metrics of its steps, as `klamp doctor` reads them."""
    with started([*training(folder, verl=verl, **SIZES | fields), *words], folder.parent / "around") as running:
        assert running.wait() == 0, running.said()[-5000:]
        assert running.left(patience=20) == {}
    rows = [row.metrics for row in read_record(folder).rows]
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    return rows


def logged(folder: Path, name: str) -> list[float]:
    """What verl logged under a name, at each step of the last run that has it."""
    rows = [row["data"] for row in lines_of(folder / "verl.jsonl")]
    return [row[name] for row in rows if name in row]


def grows(values: Sequence[float], *, to: float) -> bool:
    """Whether the values start at 0 and reach some bound."""
    return abs(values[0]) < 1e-6 and max(values) > to


@pytest.mark.gate
def test_a_short_run(tmp_path: Path) -> None:
    """Its vLLM and verl's reference score every token alike; the teacher is the model it begins with."""
    folder = tmp_path / "run"
    rows = run(folder, max_steps=2, beta=0.04, teacher_model="builtin", teacher_estimator="k3", verl=TEACHER)
    assert len(rows) == 2
    saved = folder / "checkpoints" / "global_step_2" / IDENTITY
    assert saved.read_text(encoding="utf-8") == (folder / IDENTITY).read_text(encoding="utf-8")
    assert abs(rows[0]["kl/k3"]) < 1e-6 < rows[1]["kl/k3"], "the reference is the policy it began with"
    differences = logged(folder, ENGINE)
    assert len(differences) == 2 and max(differences) < SAME_TOKEN, "vLLM follows the actor"
    # verl logs the KL in the loss as the loss has it: divided by the longest completion
    per_token = [row["kl/k3"] * SIZES["max_completion_length"] / row["length/mean"] for row in rows]
    assert [row["teacher/kl"] for row in rows] == pytest.approx(per_token, abs=SAME)
    # where the page says that its model lies, by the lines that it has
    model, begun = loaded(folder, "verl"), load_model("builtin")
    assert (scores(model) - scores(begun)).abs().max() > 1e-4, "it is the trained one"
    evaluate, option = spans(cells("verl")["evaluate it, or train on from it"])
    assert main(evaluate.replace("RUN", str(folder)).split()[1:]) == 0
    given = option.replace("FOLDER", str(folder_of(folder, "verl"))).split()
    assert given[0] == "--model" and torch.equal(scores(load_model(given[1])), scores(model))


CONTROLLED: dict[str, Any] = {"beta": 0.04, "target_kl": 0.005, "kl_controller": "proportional"}
CLIPPED: dict[str, Any] = {"kl_clip_method": "soft", "kl_clip_temperature": 0.05, "kl_exclude_tokens": "special"}


def test_a_run_is_stopped_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With all that klamp's driver settles; the controller and the reference length go on where they were."""
    folder, kl = tmp_path / "run", {**CONTROLLED, **CLIPPED}
    sizes = {**SIZES, "max_steps": 5, "save_every": 1, **kl}
    with started(training(folder, **sizes), tmp_path / "first") as running:
        running.wait_for("1", folder / "checkpoints" / "latest_checkpointed_iteration.txt")
        running.process.send_signal(signal.SIGINT)
        assert running.wait() != 0, running.said()[-3000:]
        assert running.left(patience=20) == {}
    done = [row.metrics for row in read_record(folder).rows]
    rows = done + run(folder, "--resume", **sizes)
    assert grows([row["kl/k3"] for row in rows], to=1e-4), "KL in the loss"
    differences = logged(folder, ENGINE)
    assert 2 <= len(differences) <= 4 and max(differences) < SAME_TOKEN, "vLLM follows the actor"
    assert {row["kl/reference_length"] for row in rows} == {rows[0]["kl/reference_length"]}, "measured once"
    assert rows[0]["kl/over_budget"] == 0
    assert len({row["beta"] for row in rows}) > 2
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0 and (folder / "report.html").is_file()
    assert main(["doctor", str(folder)]) in (0, 1), "it finds enough to judge"
