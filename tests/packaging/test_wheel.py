"""What a user has after `pip install klamp`, and after an extra: the built wheel in environments with nothing else."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from tests.packaging.conftest import ROOT, Environment

import klamp

SMALL = ("verify", "explain", "audit", "check", "doctor", "report")
NEED_TRAIN = (("train",), ("ablate", "--kl_estimator", "k1", "k3"))
BELONG_TO_EXTRAS = "accelerate datasets math_verify matplotlib peft ray tensorboard tokenizers transformers"


@pytest.fixture
def base(installed: Callable[[str], Path], tmp_path: Path) -> Environment:
    return Environment(installed("wheel"), tmp_path)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The folder of a klamp run of seven steps, whose KL jumps at the last."""
    folder = tmp_path / "run-1"
    folder.mkdir()
    (folder / "config.yaml").write_text("beta: 0.04\n")
    kl = [0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7]
    rows = [{"step": i + 1, "kl/k3": value, "reward": 0.5} for i, value in enumerate(kl)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as file:
        names = set(file.namelist())
    told = f"klamp-{klamp.__version__}.dist-info/"
    source = [path for path in (ROOT / "src" / "klamp").rglob("*.*") if path.suffix != ".pyc" and path.is_file()]
    assert {name for name in names if not name.startswith(told)} == {str(x.relative_to(ROOT / "src")) for x in source}
    assert {"klamp/py.typed", "klamp/report/assets/page.css"} <= names
    assert f"{told}licenses/LICENSE" in names


def test_nothing_is_missing_and_nothing_of_the_extras_is_there(base: Environment) -> None:
    assert "No broken requirements found" in base.run("pip", "check").stdout
    found = f"import importlib.util as u; print([m for m in {BELONG_TO_EXTRAS.split()} if u.find_spec(m)])"
    assert base.python(found) == "[]"


def test_klamp_is_imported_and_computes_without_a_warning(base: Environment) -> None:
    where = base.python("import klamp; print(klamp.__file__)")
    assert where.startswith(str(base.folder)), "the wheel, not this checkout"
    compute = "import torch, klamp; print(klamp.kl_estimate(-torch.ones(1), torch.zeros(1), estimator='k1').item())"
    assert base.python(compute, "-W", "error") == "-1.0"
    everything = "import klamp; [getattr(klamp, name) for name in klamp.__all__]"
    assert base.python(everything, "-W", "error") == ""


def test_the_command_line_starts(base: Environment) -> None:
    assert base.run("klamp", "--version").stdout == f"klamp {klamp.__version__}\n"
    shown = base.run("klamp", "--help").stdout
    assert all(f"\n  {command} " in shown for command in (*SMALL, "train", "ablate"))


@pytest.mark.parametrize("words", [("verify",), ("explain", "grpo"), ("train", "--help"), ("ablate", "--help")])
def test_a_command_that_needs_no_extra(base: Environment, words: tuple[str, ...]) -> None:
    done = base.run("klamp", *words)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_audit(base: Environment) -> None:
    (base.cwd / "mine.py").write_text("def kl(policy, ref):\n    return policy - ref\n")
    done = base.run("klamp", "audit", "mine:kl")
    assert done.returncode == 1 and "zero" in done.stdout, "k1 as a loss pulls nowhere: " + done.stdout + done.stderr
    done = base.run("klamp", "audit", "trl")
    assert done.returncode == 2 and done.stderr.startswith("klamp: error: klamp audit trl needs trl")


def test_doctor_and_report(base: Environment, record: Path) -> None:
    done = base.run("klamp", "doctor", str(record))
    assert done.returncode == 1 and "alarm: kl-spike" in done.stdout, done.stderr
    done = base.run("klamp", "report", str(record))
    assert done.returncode == 0 and "1 run, 1 alarm" in done.stdout, done.stderr
    assert "kl-spike" in (record / "report.html").read_text()


@pytest.mark.parametrize("words", NEED_TRAIN, ids=" ".join)
def test_what_needs_the_extra_train_says_so(base: Environment, words: tuple[str, ...]) -> None:
    done = base.run("klamp", *words)
    first, *_, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert first.startswith(f"klamp: error: klamp {' '.join(words)} needs ") and first.endswith(" is not installed")
    assert last == "  fix: pip install 'klamp[train]'"
    assert "Traceback" not in done.stderr
    assert list(base.cwd.iterdir()) == [], "nothing was begun"


@pytest.mark.parametrize("command", ["doctor", "report"])
@pytest.mark.parametrize(
    ("file", "library", "extra"),
    [("events.out.tfevents.1.host.2.0", "tensorboard", "train"), ("run-1.wandb", "wandb", "wandb")],
)
def test_a_record_names_its_library(base: Environment, command: str, file: str, library: str, extra: str) -> None:
    (base.cwd / file).write_bytes(b"")
    done = base.run("klamp", command, file)
    assert done.returncode == {"doctor": 2, "report": 1}[command], "doctor's 1 is an alarm"
    assert done.stderr.startswith(f"klamp: error: the record {file} needs {library}, which is not installed\n")
    assert done.stderr.endswith(f"  fix: pip install 'klamp[{extra}]'\n")


def test_doors_to_hosts_that_are_not_there(base: Environment) -> None:
    for door, extra in (("klamp.trl", "trl"), ("klamp.unsloth", "trl")):
        done = base.run("python", "-c", f"import {door}")
        assert f"fix: pip install 'klamp[{extra}]'" in done.stderr, done.stderr
    assert base.python("import klamp.tinker, klamp.verl; print(*klamp.verl.overrides(klamp.KLConfig()))")


def test_trl_alone_is_enough_for_its_door(installed: Callable[[str], Path], tmp_path: Path) -> None:
    with_trl = Environment(installed("wheel-trl"), tmp_path)
    code = """
from klamp.trl import GRPOConfig, GRPOTrainer
print(GRPOConfig(kl_estimator="k1", beta=0.1, use_cpu=True, bf16=False, report_to=[]).kl_estimator)
"""
    assert with_trl.python(code).splitlines()[-1] == "k1", "TRL prints a line of its own"
    code = "import importlib.util as u; print([m for m in ('peft', 'tensorboard', 'matplotlib') if u.find_spec(m)])"
    assert with_trl.python(code) == "[]"


def test_tinker_alone_is_enough_for_its_door(installed: Callable[[str], Path], tmp_path: Path) -> None:
    with_tinker = Environment(installed("wheel-tinker"), tmp_path)
    code = """
import klamp.tinker
datum = klamp.tinker.build_datum([1, 2], [3, 4], 1.0, [-0.5, -0.5], [-0.5, -0.6])
print(type(datum).__module__.partition(".")[0])
"""
    assert with_tinker.python(code) == "tinker"
    assert with_tinker.python("import importlib.util as u; print(u.find_spec('peft'))") == "None"
    done = with_tinker.run("python", "-c", "import klamp.tinker.testing")
    assert "fix: pip install klamp-standin" in done.stderr, done.stderr


@pytest.fixture(scope="session")
def of_the_users(installed: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """File of the user's -> lines in which strict pyright finds an error, with the installed klamp alone in sight."""
    folder = tmp_path_factory.mktemp("users")
    for file in ("user.py", "user_wrong.py"):
        (folder / file).write_text((ROOT / "tests" / "packaging" / file).read_text())
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    python = installed("wheel") / "bin" / "python"
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found: dict[str, set[int]] = {"user.py": set(), "user_wrong.py": set()}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        print(each["file"], each["range"]["start"]["line"] + 1, each["message"])
        found[Path(each["file"]).name].add(each["range"]["start"]["line"] + 1)
    return found


def test_a_users_file_passes_strict_pyright(of_the_users: dict[str, set[int]]) -> None:
    assert of_the_users["user.py"] == set()


def test_a_users_mistakes_are_found(of_the_users: dict[str, set[int]]) -> None:
    lines = (ROOT / "tests" / "packaging" / "user_wrong.py").read_text().splitlines()
    assert of_the_users["user_wrong.py"] == {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_what_the_users_file_does_runs(base: Environment) -> None:
    base.python((ROOT / "tests" / "packaging" / "user.py").read_text())
