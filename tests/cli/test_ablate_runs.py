"""`klamp ablate --runs`: the comparison from its arguments to its lines; and what it does not take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.ablation.outcomes import sweep
from tests.training.conftest import TINY, llama  # noqa: F401  (a fixture)

from klamp.ablation.table import summarise
from klamp.cli import main
from klamp.cli.ablate import summary_lines
from klamp.training.backends import train_run
from klamp.training.config import TrainConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(llama, tmp_path_factory) -> Path:  # noqa: F811  (the fixture above)
    """Two short runs."""
    root = tmp_path_factory.mktemp("runs")
    for beta in (0.0, 0.05):
        values = {"model": llama, **TINY, "eval_size": 3, "max_steps": 2, "beta": beta}
        train_run(TrainConfig.from_flat({**values, "output_dir": str(root / f"output_beta_{beta}")}))
    return root


@pytest.fixture
def runs(made, tmp_path, monkeypatch) -> list[str]:
    """Copies of them in the working directory, by name."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return sorted(path.name for path in Path().iterdir())


def test_from_runs_to_table_pictures_and_lines(runs, capsys) -> None:
    assert runs == ["output_beta_0.0", "output_beta_0.05"]
    assert main(["ablate", "--runs", *runs]) == 0
    out = capsys.readouterr().out
    order = ["2 runs are compared in runs/comparison-beta-001; nothing is trained", "measuring beta-0_seed-0", "Skills"]
    order += ["Distance from the starting model", "The RL skill is addition", "sweep.png", "beta=0: Acc="]
    positions = [out.index(part) for part in order]
    assert positions == sorted(positions)
    folder = Path("runs/comparison-beta-001")
    table = json.loads((folder / "table.json").read_text())
    assert [arm["arm"] for arm in table["rows"]] == ["beta=0", "beta=0.05"]
    numbers = table["rows"][1]["cells"]
    line = next(line for line in out.splitlines() if line.startswith("beta=0.05: "))
    assert line == (
        f"beta=0.05: Acc={numbers['rl/after']['mean']:.1%}, KL={numbers['kl/reverse']['mean']:.4g}, "
        f"retention={numbers['retained/after']['mean']:.1%}"
    )
    assert main(["report", str(folder)]) == 0


def test_the_lines_of_the_tutorial() -> None:
    lines = summary_lines(summarise(sweep([{"beta": 0.0}, {"beta": 0.1}], seeds=2)))
    assert [line.partition(":")[0] for line in lines] == ["beta=0.0", "beta=0.1"]
    assert all(", KL=" in line and line.count("%") == 2 for line in lines)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--beta", "0.1"], "--beta has no meaning with --runs"),
        (["--beta", "0", "0.1"], "--beta has no meaning with --runs"),
        (["--seeds", "2"], "--seeds has no meaning with --runs"),
        (["--dry_run"], "--dry_run has no meaning with --runs"),
    ],
)
def test_what_would_be_passed_over_is_refused(runs, capsys, more, said) -> None:
    words = ["--runs", *runs, *more]
    assert main(["ablate", *words]) == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


def test_runs_that_cannot_be_compared(runs, capsys) -> None:
    text = (Path(runs[1]) / "config.yaml").read_text()
    (Path(runs[1]) / "config.yaml").write_text(text.replace("task: arithmetic", "task: describe"))
    assert main(["ablate", "--runs", *runs]) == 1
    err = capsys.readouterr().err
    assert "they had not the same task" in err and "describe" in err
    (Path(runs[1]) / "config.yaml").write_text(text)
    (Path(runs[1]) / "summary.json").unlink()
    assert main(["ablate", "--runs", *runs]) == 1
    assert f"a run is not finished\n  got: {runs[1]}" in capsys.readouterr().err
    assert main(["ablate", "--runs", runs[0]]) == 1
    assert "one run cannot be compared" in capsys.readouterr().err
    Path("empty").mkdir()
    assert main(["ablate", "--runs", runs[0], "empty"]) == 1
    assert "the folder holds no run" in capsys.readouterr().err
    assert main(["ablate", "--runs", runs[0], runs[0]]) == 1
    assert "named twice" in capsys.readouterr().err
    assert not Path("runs").exists()
