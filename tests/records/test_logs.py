"""What trainers and trackers log of each step: lines of JSON, TRL's state, event files, offline runs of W&B."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.hosts.trl.hosts import stock_trainer
from tests.records.test_records import lines
from tests.training.conftest import stored, tiny_gpt2
from torch.utils.tensorboard import SummaryWriter

from klamp.doctor.examine import Diagnosis, examine
from klamp.doctor.metrics import LOGS
from klamp.doctor.readers import read_record
from klamp.doctor.readers.logs import BLOCK, FILE_HEADER, FRAME, MAGIC, frames, read_metrics, read_wandb
from klamp.errors import DataError, UnknownNameError
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer


def test_a_line_is_a_step_under_klamps_names_and_without_a_step_it_is_counted(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, {"step": 3, "kl": 0.1, "reward": 1, "unknown": 7}, {"step": 5, "kl": 0.2}))
    assert [row.step for row in history.rows] == [3, 5] and history.source == "JSONL metrics"
    assert [dict(row.metrics) for row in history.rows] == [{"kl/k3": 0.1, "reward": 1.0}, {"kl/k3": 0.2}]
    history = read_metrics(lines(tmp_path, {"kl": 0.1}, {"nothing": 1}, {"kl": 0.2}))
    assert [row.step for row in history.rows] == [1, 3], "a line without a known metric counts too"


def test_of_steps_that_were_done_twice_the_later_rows_count(tmp_path: Path) -> None:
    steps = [1, 2, 3, 4, 2, 3]
    history = read_metrics(lines(tmp_path, *({"step": step, "kl": i} for i, step in enumerate(steps))))
    assert [(row.step, row.metrics["kl/k3"]) for row in history.rows] == [(1, 0), (2, 4), (3, 5)]
    history = read_metrics(lines(tmp_path, *({"step": step, "kl": 0.1} for step in (3, 2, 1))))
    assert len(history.rows) == 3, "a log that is written backwards"


@pytest.mark.parametrize(("row", "step", "metrics"), [
    ({"step": "5.0/200", "kl": "0.5"}, 5, {"kl/k3": 0.5}),
    ({"trainer/global_step": 4, "objective/kl": 7.0}, 4, {"kl/k1_sequence": 7.0}),
])  # fmt: skip
def test_what_other_trainers_call_a_step_and_its_kl(tmp_path: Path, row: dict, step: int, metrics: dict) -> None:
    (found,) = read_metrics(lines(tmp_path, row)).rows
    assert (found.step, found.metrics.items() >= metrics.items()) == (step, True)
    assert [name for name in found.metrics if name.startswith("kl/")] == [name for name in metrics if "kl/" in name]


OPENRLHF = {"global_step": 4, "actor_lr": 5e-7, "vllm_kl": 6e-4, "ppo_kl": 0.0}
OTHERS = [
    (OPENRLHF, "kl", "kl/k1"),  # its estimator is k1 by default
    ({"step": 1, "train/token_mult_prob_error": 1.0, "train/lr": 1e-6}, "train/kl_penalty", "kl/k3"),
    ({"step": 1, "train/loss": 0.1}, "train/kl_penalty", "kl/k3"),  # of whoever logs no KL under klamp's own name
    ({"step": 1, "kl/k1": 0.5}, "train/kl_penalty", "train/kl_penalty"),  # klamp's: beta times it
    ({"trainer/global_step": 1, "policy/final_loss": 0.1}, "policy/policy_kl", "kl/k3"),
    ({"train/step": 1, "train/loss": 0.1}, "train/kl_loss", "kl/k3"),
    ({"step": 1, "actor/pg_loss": 0.1}, "critic/kl", "kl/k1"),
    ({"step": 1, "actor/pg_loss": 0.1}, "actor/kl_loss", "kl/k3"),
    ({"step": 1, "optim/lr": 0.1}, "kl_policy_base", "kl/k1"),
    ({"step": 1, "eps": 1}, "objective/kl", "kl/k1_sequence"),
    (OPENRLHF, "act_grad_norm", "train/grad_norm"),  # of its progress bar
    (OPENRLHF, "gen_len", "length/mean"),
    ({"train/global_step": 4, "train/kl": 0.1}, "act_lr", "train/learning_rate"),
    ({"train/global_step": 4, "train/kl": 0.1}, "train/rollout/truncated_rate", "length/truncated"),
    ({"train/global_step": 4, "train/kl": 0.1}, "train/rollout/reward_mean", "reward"),
    ({"step": 1, "rewards/chosen": 0.1}, "kl", None),  # KTO's: of unmatched pairs
    ({"step": 1, "loss": 0.1}, "actor/ppo_kl", None),
    ({"step": 1, "loss": 0.1}, "my/KL_div", None),
    ({"_step": 1, "ppo_actor/task_reward/avg": 0.5}, "ppo_actor/kl_rewards/avg", None),  # AReaL's: times -kl_ctl
    ({"_step": 1, "ppo_actor/task_reward/avg": 0.5}, "ppo_actor/update/approx_kl/avg", None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "column", "ours"), OTHERS)
def test_a_column_is_read_as_its_trainer_means(tmp_path: Path, row: dict, column: str, ours: str | None) -> None:
    history = read_metrics(lines(tmp_path, {**row, "reward" if ours != "reward" else "loss": 0.5, column: 0.25}))
    assert (column in history.unread) is (ours is None)
    assert ours is None or history.rows[0].metrics[ours] == 0.25
    assert ours is not None or not history.measures_kl


def test_a_gradient_that_is_nan_in_every_row_is_an_alarm(tmp_path: Path) -> None:
    rows = [{"step": i, "kl": 0.0, "grad_norm": math.nan, "loss": 0.1} for i in range(1, 9)]
    assert [each.alarm.name for each in examine(read_metrics(lines(tmp_path, *rows))).findings] == ["huge-values"]


def test_rows_of_one_step_are_one_and_what_a_row_lacks_is_no_number_that_was_lost(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, {"step": 1, "kl": 0.5}, {"step": 1, "kl": math.nan, "reward": 1.0}))
    assert [dict(row.metrics) for row in history.rows] == [{"kl/k3": 0.5, "reward": 1.0}]
    (lost,) = read_metrics(lines(tmp_path, {"step": 1, "kl": "nan"})).rows
    assert math.isnan(lost.metrics["kl/k3"]), "written as a text, and no loss says that the run went well"


def test_evaluations_are_kept_apart(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, {"step": 1, "kl": 0.1}, {"step": 2, "eval_reward": 0.5, "kl": 0.2}))
    assert [(row.step, dict(row.metrics)) for row in history.evaluations] == [(2, {"reward": 0.5})]
    assert all("eval_reward" not in row.metrics for row in history.rows)
    ours = {"step": 1, "policy/logp_mean": -1.0, "eval/addition": 0.5}
    assert read_metrics(lines(tmp_path, ours)).evaluations[0].metrics == {"addition": 0.5}, "klamp's are scores, all"


@pytest.mark.parametrize(
    ("rows", "why"), [((), "it holds no whole line"), (({"a": 1, "b": 2},), "the first row has a, b")]
)
def test_a_file_without_a_known_metric_is_refused(tmp_path: Path, rows: tuple, why: str) -> None:
    with pytest.raises(DataError, match="and no token log-probabilities") as caught:
        read_metrics(lines(tmp_path, *rows))
    assert caught.value.why == why
    assert "old_log_probs" in caught.value.fix


def logged_by_verl(kl: list[float | None]) -> list[dict[str, Any]]:
    """Lines of verl's file logger, in its names: a validation before training, then steps with the next one."""
    before = {"val-core/gsm8k/acc/mean@8": 0.8, "val-aux/num_turns/mean": 2.0}
    others = {"critic/score/mean": 0.5, "response_length/clip_ratio": 0.0, "response_length/mean": 20.0}
    rows: list[dict[str, Any]] = [{"step": 0, "data": before}]
    for step, value in enumerate(kl, start=1):
        data = {"training/global_step": step, "actor/kl_loss": value, "actor/grad_norm": 1.0, **others}
        rows.append({"step": step, "data": data})
    rows[-1]["data"]["val-core/gsm8k/acc/mean@8"] = 0.4
    return rows


def test_verls_file_log(tmp_path: Path) -> None:
    kl: list[float | None] = [0.0, 0.02, 0.02, 0.02, 0.02, 0.02, 0.5]
    history = read_metrics(lines(tmp_path, *logged_by_verl(kl)))
    assert history.source == "verl file log"
    assert [(row.step, row.metrics["kl/k3"]) for row in history.rows] == list(enumerate(kl, start=1))
    assert history.rows[0].metrics.keys() == {"kl/k3", "reward", "length/truncated", "length/mean", "train/grad_norm"}
    assert [(row.step, dict(row.metrics)) for row in history.evaluations] == [
        (0, {"gsm8k/acc/mean@8": 0.8}),
        (7, {"gsm8k/acc/mean@8": 0.4}),
    ]
    assert history.settings.k3_over_updates
    assert [finding.alarm.name for finding in examine(history).findings] == ["kl-spike", "retention"]


def test_a_null_of_verls_is_a_number_that_json_could_not_hold(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, *logged_by_verl([0.0, None])))
    assert math.isnan(history.rows[-1].metrics["kl/k3"])
    assert "huge-values" in [finding.alarm.name for finding in examine(history).findings]
    history = read_metrics(lines(tmp_path, logged_by_verl([0.0])[0]))
    assert not history.rows
    assert [row.step for row in history.evaluations] == [0], "a validation alone is a log of verl's too"


def test_names_of_ones_own(tmp_path: Path) -> None:
    mine = lines(tmp_path, {"step": 1, "my/kl": 0.1, "kl": 7.0, "note": "x"}, {"step": 2, "my/kl": 0.2})
    assert [dict(row.metrics) for row in read_metrics(mine, {"kl/k3": "my/kl"}).rows] == [
        {"kl/k3": 0.1},
        {"kl/k3": 0.2},
    ]
    with pytest.raises(UnknownNameError, match="unknown number in the rows of") as caught:
        read_metrics(mine, {"kl/k3": "note"})
    assert caught.value.why == "it has kl, my/kl, step"
    history = read_metrics(lines(tmp_path, *logged_by_verl([0.0, 0.1])), {"kl/k1": "actor/kl_loss"})
    assert [row.metrics["kl/k1"] for row in history.rows] == [0.0, 0.1] and "kl/k3" not in history.names


def accuracy_reward(completions: list[str], **_: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of six steps of TRL's own GRPOTrainer, with TensorBoard."""
    folder = tmp_path_factory.mktemp("trl")
    model = stored(tiny_gpt2(), folder / "model")  # GPT-2 comes with dropout, and TRL leaves it on
    options = {"beta": 0.04, "loss_type": "dr_grpo", "max_steps": 6, "report_to": ["tensorboard"]}
    options |= {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 6}
    given = {"reward_funcs": accuracy_reward, "processing_class": arithmetic_tokenizer()}
    given["train_dataset"] = Dataset.from_dict({"prompt": ["1+1=", "2+3=", "4-1=", "7+2="] * 4})
    torch.manual_seed(0)
    trainer = stock_trainer(model, folder / "out", trainer=given, learning_rate=1e-4, **options)
    trainer.train()
    (folder / "out" / "checkpoint-6").mkdir(parents=True)
    trainer.state.save_to_json(str(folder / "out" / "checkpoint-6" / "trainer_state.json"))
    return folder / "out"


def found(diagnosis: Diagnosis) -> dict[str, int]:
    return {finding.alarm.name: finding.first_step for finding in diagnosis.findings}


def test_the_state_of_a_real_run(trl_run: Path) -> None:
    history = read_record(trl_run)
    assert history.source == "TRL trainer state"
    assert [row.step for row in history.rows] == [1, 2, 3, 4, 5, 6]
    logged = {"kl/k3", "reward", "reward_std", "length/mean", "length/truncated", "train/grad_norm", "policy/entropy"}
    assert logged <= history.names
    assert history.settings.verifier == "rules", "by the name of the reward function"
    totals = [row.metrics["length/total"] for row in history.rows]
    lengths = [row.metrics["length/mean"] for row in history.rows]
    # 8 completions and their prompts of 4 tokens a step
    assert totals == pytest.approx([sum(8 * (4 + length) for length in lengths[: n + 1]) for n in range(6)])
    diagnosis = examine(history)
    assert found(diagnosis)["step-zero-kl"] == 1
    assert "settings.loss_type" in diagnosis.unchecked["dr-grpo-with-kl"]
    assert read_record(trl_run / "checkpoint-6" / "trainer_state.json").rows == history.rows


def test_its_tensorboard_folder_holds_the_arguments_too(trl_run: Path) -> None:
    (events,) = trl_run.rglob("events.out.tfevents*")
    history = read_record(events.parent)
    assert history.source == "TensorBoard"
    assert (history.settings.loss_type, history.settings.beta) == ("dr_grpo", 0.04)
    assert found(examine(history)).items() >= {"dr-grpo-with-kl": 1, "step-zero-kl": 1}.items()
    state = read_record(trl_run / "checkpoint-6" / "trainer_state.json")
    assert [row.metrics["kl/k3"] for row in history.rows] == pytest.approx([r.metrics["kl/k3"] for r in state.rows])


def write(folder: Path, first: int = 1, **curves: list[float]) -> Path:
    with SummaryWriter(str(folder)) as writer:
        for name, curve in curves.items():
            for step, value in enumerate(curve, start=first):
                writer.add_scalar(name.replace("__", "/"), value, step)
    return folder


def test_several_runs_below_one_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, kl=[0.1])
    with pytest.raises(DataError, match="several TensorBoard runs") as caught:
        read_record(tmp_path)
    assert caught.value.why == "a, b" and "into one folder" in caught.value.fix
    write(tmp_path / "of one run" / "b", kl=[0.1, 0.2])
    write(tmp_path / "of one run" / "a", first=3, kl=[0.3])
    assert [row.step for row in read_record(tmp_path / "of one run").rows] == [1, 2, 3], "a resumed run"


def test_no_scalars(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("note", "hello")
    with pytest.raises(DataError, match="no scalars"):
        read_record(tmp_path)


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An offline run with TRL's names, long enough to fill several blocks of its file."""
    wandb = pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    config = {"beta": 0.04, "loss_type": "dr_grpo", "scale_rewards": "group"}
    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
    run = wandb.init(mode="offline", project="klamp", dir=str(folder), config=config, settings=settings)
    for step in range(1, 61):
        run.log({"train/global_step": step, "train/kl": 0.001 * step, "train/rewards/math_verify/mean": 0.5})
        run.log({"train/global_step": step, "train/grad_norm": 1e5 if step == 30 else 1.0, "note": "x" * 1000})
    run.log({"train/global_step": 60, "eval/reward": 0.25, "eval/runtime": float("nan")})
    run.finish()
    wandb.teardown()  # its service has written everything
    return folder


def test_an_offline_run(wandb_folder: Path) -> None:
    (file,) = wandb_folder.glob("wandb/offline-run-*/*.wandb")
    assert file.stat().st_size > 2 * BLOCK
    for path in (wandb_folder, wandb_folder / "wandb", file.parent, file):
        history = read_record(path)
        assert [row.step for row in history.rows] == list(range(1, 61))
        assert [row.metrics["kl/k3"] for row in history.rows] == pytest.approx([0.001 * i for i in range(1, 61)])
        assert (history.settings.beta, history.settings.loss_type) == (0.04, "dr_grpo")
        assert [row.metrics for row in history.evaluations] == [{"reward": 0.25}]
    assert found(examine(history)) == {"dr-grpo-with-kl": 1, "huge-values": 30}


def test_a_run_that_was_killed_reads_up_to_there(wandb_folder: Path, tmp_path: Path) -> None:
    (file,) = wandb_folder.glob("wandb/offline-run-*/*.wandb")
    data = file.read_bytes()
    (tmp_path / "run.wandb").write_bytes(data[: len(data) // 2])
    steps = [row.step for row in read_wandb(tmp_path / "run.wandb").rows]
    assert 10 < len(steps) < 60 and steps == list(range(1, len(steps) + 1))


def test_records_are_pieced_together_over_blocks(tmp_path: Path) -> None:
    """A block ends with fewer bytes than a frame's head takes: they are zeros; the next record is in two parts."""

    def frame(data: bytes, kind: int) -> bytes:
        return FRAME.pack(0, len(data), kind) + data

    first = frame(b"a" * (BLOCK - FILE_HEADER - FRAME.size - 3), 1)
    second = frame(b"b" * (BLOCK - FRAME.size), 2) + frame(b"c" * 10, 4)
    file = tmp_path / "run.wandb"
    file.write_bytes(MAGIC + b"\0" * (FILE_HEADER - len(MAGIC)) + first + b"\0" * 3 + second + frame(b"d", 1))
    assert [(len(data), data[:1], data[-1:]) for data in frames(file)] == [
        (BLOCK - FILE_HEADER - FRAME.size - 3, b"a", b"a"),
        (BLOCK - FRAME.size + 10, b"b", b"c"),
        (1, b"d", b"d"),
    ]


def test_several_tracked_runs_in_one_folder_are_not_mixed(wandb_folder: Path, tmp_path: Path) -> None:
    (file,) = wandb_folder.glob("wandb/offline-run-*/*.wandb")
    for name in ("offline-run-a", "offline-run-b"):
        (tmp_path / name).mkdir()
        os.link(file, tmp_path / name / "run.wandb")
    with pytest.raises(DataError, match="several W&B runs"):
        read_record(tmp_path)


@pytest.mark.parametrize(("log", "name"), [(log, name) for log in LOGS.values() for name in log.other_kl])
def test_a_kl_that_is_not_read_is_said_to_be_what_its_trainer_says(tmp_path: Path, log: Any, name: str) -> None:
    marks = dict.fromkeys(log.marks[:1], 0.1)
    file = lines(tmp_path, *({"step": step, name: 0.1, "loss": 0.1, **marks} for step in (1, 2, 3)))
    assert read_metrics(file).unread == {name: log.other_kl[name]}
    assert name not in read_metrics(file, {"kl/k3": name}).unread, "--map says what it is"
