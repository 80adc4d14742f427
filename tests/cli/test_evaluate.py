"""`klamp evaluate`: which policy a name stands for, what is printed, what is refused."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
from tests.training.conftest import TINY, llama, rows_of, scores_of, stored  # noqa: F401  (llama: a fixture)
from transformers import AutoModelForCausalLM

from klamp.cli import main
from klamp.cli.evaluate import find_subject, run
from klamp.errors import KLWarning
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory) -> Path:  # noqa: F811  (the fixture above)
    folder = tmp_path_factory.mktemp("runs") / "output_beta_0.01"
    values = {"model": llama, **TINY, "eval_size": 7, "max_steps": 4, "eval_every": 2, "save_every": 2}
    train_run(TrainConfig.from_flat({**values, "output_dir": str(folder)}))
    return folder


def as_json(*argv: str) -> dict:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run([*argv, "--json"]) == 0
    return json.loads(out.getvalue())


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {int(row["step"]): scores for row in rows_of(folder) if (scores := scores_of(row))}


def test_a_run_has_the_numbers_of_its_last_evaluation(trained) -> None:
    found = as_json("--checkpoint", str(trained))
    scores = evaluations(trained)
    assert found["scores"] == scores[4] and found["before"] == scores[0]
    assert (found["steps"], found["rl_skill"], found["task"]) == (4, "addition", "arithmetic")
    others = [skill for skill in scores[4] if skill != "addition"]
    assert found["retained"]["after"] == pytest.approx(sum(scores[4][s] for s in others) / 2)
    assert found["retained"]["before"] == pytest.approx(sum(scores[0][s] for s in others) / 2)
    assert found["kl/reverse"] > 1e-5


@pytest.mark.parametrize("inside", ["", "policy"])
def test_a_checkpoint_of_a_run_brings_its_run_with_it(trained, inside) -> None:
    found = as_json("--checkpoint", str(trained / "checkpoints" / "step-000002" / inside))
    assert found["scores"] == evaluations(trained)[2] and found["steps"] == 2
    assert found["kl/reverse"] != as_json("--checkpoint", str(trained))["kl/reverse"]


def test_any_model_is_scored_and_with_a_start_measured(trained, llama, tmp_path) -> None:  # noqa: F811
    weights = trained / "checkpoints" / "step-000004" / "policy"
    copy = stored(AutoModelForCausalLM.from_pretrained(weights), tmp_path / "copy")
    flags = ["--reward", TINY["reward"], "--eval_size", "7", "--max_completion_length", "6", "--cpu"]
    alone = as_json("--checkpoint", copy, *flags)
    assert alone["scores"] == evaluations(trained)[4]
    assert alone["start"] is None and not alone["before"] and "kl/reverse" not in alone
    assert alone["retained"] == {"before": None, "after": None, "forgotten": None}
    measured = as_json("--checkpoint", copy, *flags, "--ref_model", llama)
    of_the_run = as_json("--checkpoint", str(trained))
    assert (measured["scores"], measured["before"]) == (of_the_run["scores"], of_the_run["before"])
    for name in ("kl/reverse", "kl/forward_sequence", "length", "reward"):
        assert measured[name] == pytest.approx(of_the_run[name], rel=1e-4), name


def test_another_task_brings_its_own_reward(trained, tmp_path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10, 60)))
    config = find_subject(str(trained), {"task": str(data), "reward": "exact_match"}).config
    assert (config.task.task, config.task.reward, config.task.eval_size) == (str(data), "exact_match", 7)
    assert config.rollout.max_completion_length == TINY["max_completion_length"]
    same = find_subject(str(trained), {"eval_size": 3}).config
    assert (same.task.reward, same.task.eval_size) == (TINY["reward"], 3)
    found = as_json("--checkpoint", str(trained), "--task", str(data), "--reward", "exact_match")
    assert list(found["scores"]) == ["task"] and found["kl/reverse"] > 0


def test_the_kl_to_the_runs_teacher(trained, llama, tmp_path, capsys) -> None:  # noqa: F811
    """0 to itself, that to the start where that is the teacher; a teacher that is gone is named."""
    folder = tmp_path / "taught"
    shutil.copytree(trained, folder)
    text, own = (folder / "config.yaml").read_text(), str(folder / "checkpoints" / "step-000004")
    measured = []
    for teacher in (own, llama, "gone/DIR"):
        (folder / "config.yaml").write_text(text.replace("teacher_model: null", f"teacher_model: {teacher}"))
        with pytest.warns(KLWarning, match="not measured") if teacher == "gone/DIR" else contextlib.nullcontext():
            measured.append(as_json("--checkpoint", str(folder)))
    assert measured[0]["teacher/kl"] == pytest.approx(0, abs=1e-7) and "teacher/kl" not in measured[2]
    assert measured[1]["teacher/kl"] == pytest.approx(measured[1]["kl/reverse"], rel=0.3)
    (folder / "config.yaml").write_text(text.replace("teacher_model: null", f"teacher_model: {llama}"))
    assert main(["evaluate", "--checkpoint", str(folder)]) == 0
    assert f"KL(policy‖teacher): {measured[1]['teacher/kl']:.4g} nats per token" in capsys.readouterr().out


def test_what_it_prints(trained, capsys) -> None:
    assert main(["evaluate", "--checkpoint", str(trained)]) == 0
    out = capsys.readouterr().out
    found = as_json("--checkpoint", str(trained))
    assert found["scores"] == evaluations(trained)[4]
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["addition"][:2] == ["addition", "(trained)"]
    assert lines["subtraction"][2] == f"{100 * found['scores']['subtraction']:.1f}"
    assert f"{found['kl/reverse']:.4g}" in out and f"{found['kl/forward_sequence']:.4g}" in out
    assert "retention" in out and f"{100 * found['retained']['after']:.1f} of " in out
    assert out.startswith(f"{trained}, after 4 steps; ")


def test_a_folder_that_is_not_there_is_refused(capsys) -> None:
    assert main(["evaluate", "--checkpoint", "no/such/folder/here"]) == 1
    err = capsys.readouterr().err
    assert "klamp: error: cannot load" in err and "  fix: " in err


def test_a_run_without_a_checkpoint_and_an_adapter_with_another_start(trained, tmp_path, capsys) -> None:
    young = tmp_path / "young"
    young.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (young / name).write_bytes((trained / name).read_bytes())
    assert main(["evaluate", "--checkpoint", str(young)]) == 1
    assert "the run has no checkpoint" in capsys.readouterr().err
    (young / "checkpoints" / "step-000001").mkdir(parents=True)
    text = (young / "config.yaml").read_text().replace("lora_r: 0", "lora_r: 2")
    (young / "config.yaml").write_text(text)
    assert main(["evaluate", "--checkpoint", str(young), "--ref_model", "builtin"]) == 2
    assert "--ref_model cannot be given for an adapter" in capsys.readouterr().err


def test_weights_that_changed_are_refused_and_a_damaged_optimizer_is_not_asked_for(trained, tmp_path, capsys) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    newest = copy / "checkpoints" / "step-000004"
    (newest / "optimizer.pt").write_bytes(b"")
    assert as_json("--checkpoint", str(copy))["steps"] == 4
    weights = newest / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert main(["evaluate", "--checkpoint", str(copy)]) == 1
    err = capsys.readouterr().err
    assert "is damaged" in err and "policy/model.safetensors changed on the disk" in " ".join(err.split())
    assert "the checkpoint before it is" in " ".join(err.split()) and "step-000002" in err
