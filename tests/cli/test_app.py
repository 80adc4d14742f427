"""The entry point: commands, exit codes, tracebacks on request; once for real in a process of its own."""

import re
import subprocess
import sys

import pytest
from tests.docs.pages import ROOT

import klamp
from klamp.cli import main
from klamp.cli.commands import COMMANDS
from klamp.errors import ModelError, TrainingStopped


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch):
    def with_error(error: BaseException) -> None:
        def run(argv: list[str]) -> int:
            raise error

        monkeypatch.setattr("klamp.cli.train.run", run)

    return with_error


@pytest.mark.parametrize("argv", [["--version"], ["-V"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"klamp {klamp.__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "5"]) == 2
    assert "  fix: did you mean 'train'?\n" in capsys.readouterr().err


def test_an_error_is_one(fails, capsys: pytest.CaptureFixture[str]) -> None:
    fails(ModelError("no tokenizer", fix="add one"))
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "klamp: error: no tokenizer\n  fix: add one\n"


def test_code_that_ends_the_program_is_an_error_whatever_its_code(fails, capsys: pytest.CaptureFixture[str]) -> None:
    for code in (0, None, 3):
        fails(SystemExit(code))
        assert main(["train"]) == 1
        assert f"  got: sys.exit({code})\n" in capsys.readouterr().err


def test_an_interrupt_is_130(fails, capsys: pytest.CaptureFixture[str]) -> None:
    error = TrainingStopped("stopped after step 3", fix="continue with: klamp train --resume")
    error.__cause__ = KeyboardInterrupt()
    fails(error)
    assert main(["train"]) == 130
    assert "klamp: stopped: stopped after step 3\n  fix: continue with" in capsys.readouterr().err
    fails(KeyboardInterrupt())
    assert main(["train"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "shown"), [(["train", "--debug"], True), (["--debug", "train"], True), (["train"], False)]
)
def test_debug_shows_the_traceback(argv: list[str], shown: bool, fails, capsys) -> None:
    fails(ModelError("no tokenizer"))
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert ("Traceback (most recent call last)" in err) == shown and "klamp: error: no tokenizer" in err


def test_a_stdout_that_lacks_letters_and_one_that_is_closed_end_no_command_with_a_traceback() -> None:
    command = f"{sys.executable} -m klamp.cli"
    run = "tests/recorded/sound"
    for line in (
        f"PYTHONIOENCODING=ascii {command} explain grpo",
        f"{command} doctor {run} | true",
        f"{command} --help | true",
    ):
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, cwd=ROOT)
        assert "Traceback" not in done.stderr and "UnicodeEncodeError" not in done.stderr, done.stderr
    lacking = f'PYTHONIOENCODING=ascii {sys.executable} -c "from klamp.cli import main; import klamp.cli.train as t\n'
    lacking += "t.run = lambda argv: print('KL(policy\u2016start)')\nmain(['train'])\""
    done = subprocess.run(lacking, shell=True, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "KL(policy\\u2016start)\n", done.stderr


HEAVY = {"accelerate", "datasets", "matplotlib", "numpy", "peft", "rich", "scipy", "transformers"}
"""Libraries that no help needs; for some torch comes on top, and for the doctor yaml, in which its alarms stand."""
CONFIGURED = ("evaluate", "explain", "train", "ablate")
WITH_TORCH = [[name, "-h"] for name in CONFIGURED]
WITHOUT_TORCH = [["--help"], ["--version"], [], *([name, "-h"] for name in COMMANDS if name not in CONFIGURED)]


def test_help_loads_only_what_it_shows() -> None:
    """`klamp --help` asks for no library; the help of a run needs the classes of its configuration."""
    calls = [*WITHOUT_TORCH, *WITH_TORCH]
    code = (
        "import sys\nfrom klamp.cli import main\n"
        f"for argv in {calls!r}:\n"
        "    assert main(argv) == 0\n"
        "    print('LOADED', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert "yaml" not in lines[0]
    for argv, loaded in zip(calls, map(set, lines), strict=True):
        unwanted = HEAVY - {"numpy"} if argv in WITH_TORCH else {*HEAVY, "torch"}  # torch brings numpy
        assert not loaded & unwanted, argv


def test_a_library_of_an_extra_that_is_missing_is_named_with_the_extra(
    fails, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    fails(ModuleNotFoundError("No module named 'transformers.utils'", name="transformers.utils"))
    assert main(["train", "--beta", "0.1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("klamp: error: klamp train --beta 0.1 needs transformers, which is not installed\n")
    assert re.search(r"  fix: pip install -e '/.*\[train\]'\n$", err), "of the clone"
    assert "Traceback" not in err
