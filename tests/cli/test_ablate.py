"""klamp ablate: the plan and the runs; with --runs, the comparison of runs that are there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.ablation.outcomes import sweep
from tests.cli.fake_trainer import write_files
from tests.cli.test_train import save_tiny_model
from tests.training.conftest import TINY, llama  # noqa: F401  (a fixture)

from klamp.ablation import results
from klamp.ablation.plan import run_folder
from klamp.ablation.results import Outcome, summarise, write_outcome
from klamp.cli import ablate, main
from klamp.cli.ablate import summary_lines
from klamp.errors import TrainingStopped
from klamp.training.backends import train_run
from klamp.training.config import TrainConfig


class Fake:
    """Leaves outcomes that look like runs'; fails one, or stops."""

    def __init__(self, *, fail: str = "", stop: bool = False) -> None:
        self.fail, self.stop, self.ran = fail, stop, []

    def describe(self) -> str:
        return "nowhere"

    def run(self, runs, folder, tell) -> None:
        for run in runs:
            if self.stop:
                raise TrainingStopped("the ablation was stopped", got="an interrupt") from KeyboardInterrupt()
            self.ran.append(run.name)
            tell(run, None)
            beta = run.config.kl.beta
            ids = {"run": run.name, "arm": run.arm.name, "seed": run.seed, "values": run.arm.values}
            if self.fail == run.name:
                outcome = Outcome(**ids, state="failed", error="it broke\n  why: it was bad\nlog: there/log.txt")
            else:
                numbers = {
                    "reward": 0.5,
                    "kl/reverse": 0.1 - beta,
                    "kl/reverse_sequence": 0.4,
                    "kl/forward": 0.2 - beta,
                    "length": 4.0,
                }
                scores = {"addition": 0.7, "reversal": 0.9}
                after = {"addition": 0.8 + 0.01 * run.seed, "reversal": 0.85 + beta}
                outcome = Outcome(**ids, rl_skill="addition", before=scores, after=after, numbers=numbers)
            own = run_folder(folder, run)
            own.mkdir(parents=True, exist_ok=True)
            write_outcome(own, outcome)
            tell(run, outcome)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an executor in the place of the real one; runs are below the working directory."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")

    def put(executor: Fake, *, draw: bool = False) -> Fake:
        monkeypatch.setattr(ablate, "_executor", lambda options, every: executor)
        if not draw:  # pictures take their time
            monkeypatch.setattr(results, "draw_frontier", lambda outcomes: None)
        return executor

    return put


FLAGS = ["--model", "tiny", "--beta", "0", "0.05", "--seeds", "2", "--max_steps", "2", "--eval_size", "2"]


def test_from_start_to_table(use, capsys) -> None:
    use(Fake(), draw=True)
    assert main(["ablate", *FLAGS]) == 0
    out = capsys.readouterr().out
    order = ["2 arms x 2 seeds in runs/ablation-beta-001; nowhere", "beta=0, seed 0: started"]
    order += ["beta=0, seed 0: done, reward 0.500, KL 0.1000, length 4.0"]
    positions = [out.index(part) for part in [*order, "means over seeds", "table.md, table.json, frontier.png"]]
    assert positions == sorted(positions) and "\x1b" not in out
    row = next(line for line in out.splitlines() if line.strip().startswith("beta=0.05  2"))
    assert "0.805" in row
    folder = Path("runs/ablation-beta-001")
    assert {"plan.yaml", "table.md", "table.json", "frontier.png", "runs"} <= {file.name for file in folder.iterdir()}
    assert out.endswith(f"report {folder}\n")


def test_the_same_command_again_does_what_is_left(use, capsys) -> None:
    fake = use(Fake(fail="beta-0.05_seed-0"))
    assert main(["ablate", *FLAGS]) == 1, "a run failed"
    captured = capsys.readouterr()
    assert "failed: beta=0.05, seed 0: it broke\n  why: it was bad\nlog: there/log.txt" in captured.out
    assert "1, 1 failed" in captured.out
    command = next(line for line in captured.out.splitlines() if line.strip().startswith("try again"))
    assert " ".join(FLAGS) in " ".join(captured.out.split()) and "ablate --model tiny" in command
    assert len(fake.ran) == 4
    again, same = use(Fake()), ["--output_dir", "runs/ablation-beta-001"]
    assert main(["ablate", *FLAGS, *same]) == 0
    assert again.ran == ["beta-0.05_seed-0"] and list(Path("runs").iterdir()) == [Path("runs/ablation-beta-001")]
    nothing = use(Fake())
    assert main(["ablate", *FLAGS, *same]) == 0 and nothing.ran == []
    assert capsys.readouterr().out.count("means over seeds") == 2, "the table is shown all the same"
    assert main(["ablate", *FLAGS, *same, "--learning_rate", "1e-3"]) == 1
    assert "holds another ablation" in capsys.readouterr().err


def test_a_library_that_is_missing_is_said_before_the_first_run(use, capsys, monkeypatch) -> None:
    fake = use(Fake(), draw=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["ablate", *FLAGS]) != 0
    assert "matplotlib" in capsys.readouterr().err and fake.ran == []


def test_an_interrupt_says_how_to_go_on(use, capsys) -> None:
    use(Fake(stop=True))
    assert main(["ablate", *FLAGS]) == 130
    captured = capsys.readouterr()
    assert "klamp: stopped: the ablation was stopped" in captured.err and "means over seeds" not in captured.out
    assert captured.err.rstrip().endswith(f"ablate {' '.join(FLAGS)} --output_dir runs/ablation-beta-001")


# dry run -------------------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_runs_and_does_nothing(use, capsys) -> None:
    fake = use(Fake())
    words = [*FLAGS, "--kl_clip_method", "none", "hard", "--dry_run"]
    assert main(["ablate", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "runs 8: 4 arms x 2 seeds (0, 1)" in out and "steps 16 in all" in out
    assert "folder runs/ablation-beta-kl_clip_method-001 (0 done, 8 to run)" in out and "where nowhere" in out
    assert "common report_to=none, keep_checkpoints=1, model=tiny, max_steps=2, eval_size=2" in out
    assert "beta=0.05 kl_clip_method=hard 0.05 hard" in out
    assert not fake.ran and not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kl_placement loss reward", "the arm 'kl_placement=reward'"),
        ("--reference frozen adapter_off", "the arm 'reference=adapter_off'"),
        ("--kl_controller fixed step", "needs target_kl"),
        ("--beta -1 0", "beta must be a number >= 0"),
        ("--backend local trl --model tiny", "klamp's own loop only"),
    ],
)
def test_bad_combinations_are_refused_before_any_work(use, capsys, words, said) -> None:
    fake = use(Fake())
    for more in ([], ["--dry_run"]):
        assert main(["ablate", *words.split(), *more]) == 2
        err = capsys.readouterr().err
        assert said in err and "fix:" in err
    assert not fake.ran and not Path("runs").exists()


def test_inputs_that_no_run_could_use_are_refused_before_any_run(use, capsys) -> None:
    fake = use(Fake())
    assert main(["ablate", "--model", "tiny", "--task", "arithmetic", "nothing.jsonl", "--output_dir", "out"]) == 1
    err = capsys.readouterr().err
    assert "the data file does not exist" in err and "note: in the arm 'task=nothing.jsonl'" in err
    assert not fake.ran and not Path("out").exists()


# the real thing ------------------------------------------------------------------------------------------------------


# runs that are there already -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_runs_to_table_pictures_and_lines(llama, tmp_path, monkeypatch, capsys) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    names = ["output_beta_0.0", "output_beta_0.05"]
    for name in names:
        values = {"model": llama, **TINY, "eval_size": 3, "max_steps": 2, "beta": float(name.rpartition("_")[2])}
        train_run(TrainConfig.from_flat({**values, "output_dir": name}))
    assert main(["ablate", "--runs", *names]) == 0
    out = capsys.readouterr().out
    order = ["2 runs are compared in runs/comparison-001; nothing is trained", "measuring beta-0_seed-0"]
    order += ["means over seeds", "frontier.png", "beta=0: Acc="]
    positions = [out.index(part) for part in order]
    assert positions == sorted(positions)
    folder = Path("runs/comparison-001")
    table = json.loads((folder / "table.json").read_text())
    assert [arm["arm"] for arm in table["rows"]] == ["beta=0", "beta=0.05"]
    accuracy, kl, kept = (table["rows"][1]["cells"][x]["mean"] for x in ("rl/after", "kl/reverse", "retained/after"))
    line = next(line for line in out.splitlines() if line.startswith("beta=0.05: "))
    assert line == f"beta=0.05: Acc={accuracy:.1%}, KL={kl:.4g}, retention={kept:.1%}"


def test_the_lines_of_the_tutorial() -> None:
    lines = summary_lines(summarise(sweep([{"beta": 0.0}, {"beta": 0.1}], seeds=2)))
    assert [line.partition(":")[0] for line in lines] == ["beta=0.0", "beta=0.1"]
    assert all(", KL=" in line and line.count("%") == 2 for line in lines)
    held, moved = sweep([{"beta": 0.01}, {"beta": 0.02}], seeds=1)
    found = [replace(each, numbers={**each.numbers, "beta": b}) for each, b in ((held, 0.01), (moved, 0.572))]
    ended = summary_lines(summarise(found))
    assert ["at the end" in line for line in ended] == [False, True] and ended[1].endswith("beta=0.572 at the end")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["run"], "one run cannot be compared"),
        (["run", "empty"], "the folder holds no run"),
        (["run", "run"], "a run is named twice"),
    ],
)
def test_what_is_no_two_runs_is_refused(names, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(TrainConfig(), Path("run"))
    Path("empty").mkdir()
    assert main(["ablate", "--runs", *names]) == 1
    assert said in capsys.readouterr().err and not Path("runs").exists()
