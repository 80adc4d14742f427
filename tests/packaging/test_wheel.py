"""What a user has after `pip install klamp`, and after an extra: the built wheel in environments with nothing else."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from tests.packaging.conftest import ROOT, Environment

import klamp

USER = ROOT / "tests" / "packaging" / "user.py"
COMMANDS = ("verify", "explain", "audit", "check", "doctor", "report", "train", "ablate")
BELONG_TO_EXTRAS = "accelerate datasets math_verify matplotlib peft ray tensorboard tokenizers transformers"


@pytest.fixture
def base(installed: Callable[[str], Path], tmp_path: Path) -> Environment:
    return Environment(installed("wheel"), tmp_path)


def absent(environment: Environment, libraries: str) -> bool:
    found = f"import importlib.util as u; print([name for name in {libraries.split()} if u.find_spec(name)])"
    return environment.python(found) == "[]"


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
    assert absent(base, BELONG_TO_EXTRAS)


def test_klamp_is_imported_and_computes_without_a_warning(base: Environment) -> None:
    where = base.python("import klamp; print(klamp.__file__)")
    assert where.startswith(str(base.folder)), "the wheel, not this checkout"
    compute = "import torch, klamp; print(klamp.kl_estimate(-torch.ones(1), torch.zeros(1), estimator='k1').item())"
    assert base.python(compute, "-W", "error") == "-1.0"
    everything = "import klamp; [getattr(klamp, name) for name in klamp.__all__]"
    assert base.python(everything, "-W", "error") == ""


@pytest.mark.parametrize("words", ["--version", "--help", "verify", "explain grpo", "train --help", "ablate --help"])
def test_a_command_that_needs_no_extra(base: Environment, words: str) -> None:
    done = base.run("klamp", *words.split())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    if words == "--version":
        assert done.stdout == f"klamp {klamp.__version__}\n"
    if words == "--help":
        assert all(f"\n  {command} " in done.stdout for command in COMMANDS)


def test_audit(base: Environment) -> None:
    (base.cwd / "mine.py").write_text("def kl(policy, ref):\n    return policy - ref\n")
    done = base.run("klamp", "audit", "mine:kl")
    assert done.returncode == 1 and "zero" in done.stdout, "k1 as a loss pulls nowhere: " + done.stdout + done.stderr
    done = base.run("klamp", "audit", "trl")
    assert done.returncode == 2 and done.stderr.startswith("klamp: error: klamp audit trl needs trl")


def test_doctor_and_report(base: Environment) -> None:
    record = base.cwd / "run-1"
    record.mkdir()
    (record / "config.yaml").write_text("beta: 0.04\n")
    kl = [0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7]
    rows = [{"step": i + 1, "kl/k3": value, "reward": 0.5} for i, value in enumerate(kl)]
    (record / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = base.run("klamp", "doctor", str(record))
    assert done.returncode == 1 and "alarm: kl-spike" in done.stdout, done.stderr
    done = base.run("klamp", "report", str(record))
    assert done.returncode == 0 and "1 run, 1 alarm" in done.stdout, done.stderr
    assert "kl-spike" in (record / "report.html").read_text()


@pytest.mark.parametrize("words", [("train",), ("ablate", "--kl_estimator", "k1", "k3")], ids=" ".join)
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


TRL_DOOR = """
from klamp.trl import GRPOConfig, GRPOTrainer
print(GRPOConfig(kl_estimator="k1", beta=0.1, use_cpu=True, bf16=False, report_to=[]).kl_estimator)
"""
TINKER_DOOR = """
import klamp.tinker
datum = klamp.tinker.build_datum([1, 2], [3, 4], 1.0, [-0.5, -0.5], [-0.5, -0.6])
print(type(datum).__module__.partition(".")[0])
"""


@pytest.mark.parametrize(
    ("host", "code", "printed", "others"),
    [("trl", TRL_DOOR, "k1", "peft tensorboard matplotlib"), ("tinker", TINKER_DOOR, "tinker", "peft")],
)
def test_a_host_alone_is_enough_for_its_door(
    installed: Callable[[str], Path], tmp_path: Path, host: str, code: str, printed: str, others: str
) -> None:
    environment = Environment(installed(f"wheel-{host}"), tmp_path)
    assert environment.python(code).splitlines()[-1] == printed, "TRL prints a line of its own"
    assert absent(environment, others)
    if host == "tinker":
        done = environment.run("python", "-c", "import klamp.tinker.testing")
        assert "fix: pip install klamp-standin" in done.stderr, done.stderr


def test_strict_pyright_finds_a_users_mistakes_and_no_others(installed: Callable[[str], Path], tmp_path: Path) -> None:
    """With the installed klamp alone in sight."""
    wrong = set()
    for file in (USER, USER.with_name("user_wrong.py")):
        shutil.copy(file, tmp_path)
        lines = enumerate(file.read_text().splitlines(), start=1)
        wrong |= {(file.name, number) for number, line in lines if line.endswith("# wrong")}
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    python = installed("wheel") / "bin" / "python"
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    assert {(Path(e["file"]).name, e["range"]["start"]["line"] + 1) for e in errors} == wrong, done.stdout


def test_what_the_users_file_does_runs(base: Environment) -> None:
    base.python(USER.read_text())
