"""The command line itself: exit codes, errors, tables, the terminal, the picture of a run."""

import io
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.fake_trainer import AFTER, BEFORE, metrics_at, rise, run_info
from tests.docs.pages import ROOT

import klamp
from klamp.cli import main
from klamp.cli.arguments import parse_train
from klamp.cli.commands import COMMANDS, check_flags, fields_after
from klamp.cli.display import LEGEND, ROWS, Display, Drawn, legend, skill_rows
from klamp.cli.flags import configured_fields, configured_names
from klamp.cli.text import cautions_shown, say, show_caution, show_error, show_paragraph, show_table
from klamp.config import KLWarning
from klamp.doctor.metrics import COLUMNS
from klamp.errors import DataError, ModelError, RewardError, TrainingStopped


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch):
    def with_error(error: BaseException) -> None:
        def run(argv: list[str]) -> int:
            raise error

        monkeypatch.setattr("klamp.cli.train.run", run)

    return with_error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["-V"]) == 0
    assert capsys.readouterr().out == f"klamp {klamp.__version__}\n" * 2


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "5"]) == 2
    assert "  fix: did you mean 'train'?\n" in capsys.readouterr().err


def test_an_error_is_its_four_parts_and_its_notes(fails, capsys: pytest.CaptureFixture[str]) -> None:
    error = RewardError("the reward raised", got="ZeroDivisionError", why="no score", fix="return a number")
    error.add_note("  the state after step 3 is saved in out")
    fails(error)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == (
        "klamp: error: the reward raised\n  got: ZeroDivisionError\n  why: no score\n"
        "  fix: return a number\n  note: the state after step 3 is saved in out\n"
    )


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


@pytest.mark.parametrize(("words", "shown"), [("train --debug", True), ("--debug train", True), ("train", False)])
def test_debug_shows_the_traceback(words: str, shown: bool, fails, capsys) -> None:
    fails(ModelError("no tokenizer"))
    assert main(words.split()) == 1
    err = capsys.readouterr().err
    assert ("Traceback (most recent call last)" in err) == shown and "klamp: error: no tokenizer" in err


def test_a_stdout_that_lacks_letters_and_one_that_is_closed_end_no_command_with_a_traceback() -> None:
    command = f"{sys.executable} -m klamp.cli"
    for line in (f"{command} doctor tests/recorded/sound | true", f"{command} --help | true"):
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, cwd=ROOT)
        assert "Traceback" not in done.stderr, done.stderr
    lacking = f'PYTHONIOENCODING=ascii {sys.executable} -c "from klamp.cli import main; import klamp.cli.doctor as d\n'
    lacking += "d.run = lambda argv: print('KL(policy\u2016start)')\nmain(['doctor', 'run'])\""
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
        f"for argv in {calls!r}:\n    assert main(argv) == 0\n"
        "    print('LOADED', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert "yaml" not in lines[0]
    for argv, loaded in zip(calls, map(set, lines), strict=True):
        unwanted = HEAVY - {"numpy"} if argv in WITH_TORCH else {*HEAVY, "torch"}  # torch brings numpy
        assert not loaded & unwanted, argv


def test_a_mistyped_flag_is_answered_without_torch_and_every_flag_is_known() -> None:
    mistyped = [[name, flag, "1"] for name in COMMANDS for flag in ("--bta", "--lerning-rate=5", "-beta", "--no_jsn")]
    code = (
        "import sys\nfrom klamp.cli import main\n"
        f"assert [main(argv) for argv in {mistyped!r}] == [2] * {len(mistyped)}\n"
        "print({'torch', 'numpy', 'rich', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n" and "did you mean '--beta'?" in done.stderr, done.stderr
    for name in COMMANDS:
        flags = [flag for flag in fields_after(name).values() if not flag.word]
        named = [word for flag in flags for word in (flag.name, *flag.aliases, *["no_" + flag.name] * flag.is_switch)]
        check_flags(name, [f"--{word}" for word in named])
        check_flags(name, ["-1", "-.5", "word", "--", "--anything"])
    assert configured_names() == {name for x in configured_fields().values() for name in (x.name, *x.aliases)}


def test_a_library_of_an_extra_that_is_missing_is_named_with_the_extra(fails, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    fails(ModuleNotFoundError("No module named 'transformers.utils'", name="transformers.utils"))
    assert main(["train", "--beta", "0.1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("klamp: error: klamp train --beta 0.1 needs transformers, which is not installed\n")
    assert re.search(r"  fix: pip install -e '/.*\[train\]'\n$", err), "of the clone"
    assert "Traceback" not in err


def test_a_table_is_aligned_and_without_headings_it_has_no_head(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("title", ("a", "long heading"), [("x", "1"), ("wide cell", "2")])
    assert capsys.readouterr().out == "title\n  a          long heading\n  x          1\n  wide cell  2\n"
    show_table("title", ("", ""), [("ok", "1")])
    assert capsys.readouterr().out == "title\n  ok  1\n"


def test_a_terminal_folds_a_wide_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    headings = ("arm", *(f"a long heading, {i}" for i in range(6)))
    rows = [("beta=0.01", *(f"0.8{i}23 [0.{i}9, 0.8{i}]" for i in range(6)))]
    show_table("title", headings, rows)
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_table("title", headings, rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(word in out for cell in rows[0] for word in cell.split())


HOSTILE = "a\x1b[31mred\x07\x9b2J\r\u202etxt"
SHOWN = r"a\x1b[31mred\x07\x9b2J\r\u202etxt"


def test_what_a_terminal_would_obey_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"\t{HOSTILE}\n\ud800")
    show_paragraph(HOSTILE, label="caution")
    show_caution(HOSTILE)
    show_error(DataError(HOSTILE, got=HOSTILE, why=HOSTILE, fix=HOSTILE))
    Display(Console(file=sys.stdout, force_terminal=True)).on_warning(HOSTILE)
    show_table(HOSTILE, (f"{HOSTILE}\n", "b"), [("x", "1")])
    out, err = capsys.readouterr()
    assert (out + err).count(SHOWN) == 10 and not set(out + err) & set("\x07\x9b\r\u202e")
    assert out.splitlines()[-1] == f"  x{' ' * (len(SHOWN) + 1)}  1", "and a table is aligned by what is shown"
    assert SHOWN + r"\n  b" in out and "\t" in out and r"\ud800" in out


def test_cautions_are_shown_once_each_and_without_pythons_format(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning
    with cautions_shown():
        for text in ("k1 regularises nothing", "k1 regularises nothing", "another"):
            warnings.warn(text, KLWarning, stacklevel=1)
    assert capsys.readouterr().err == "klamp: caution: k1 regularises nothing\nklamp: caution: another\n"
    assert warnings.showwarning is before


class Log(io.StringIO):
    """A file that counts how often it is flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed += 1
        super().flush()


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def console(*, terminal: bool, width: int = 110, height: int = 42) -> Console:
    return Console(file=Log(), force_terminal=terminal, width=width, height=height, color_system=None)


def text_of(display: Drawn) -> str:
    return display.console.file.getvalue()  # pyright: ignore


def play(*flags: str, start_step: int = 0, steps: int | None = None, on: Console | None = None) -> Display:
    """A display that has followed a run, or its first steps."""
    display, config = Display(on or console(terminal=False)), parse_train(flags)[0]
    display.on_start(run_info(config, Path("out"), start_step=start_step))
    if not start_step:
        display.on_evaluation(0, BEFORE)
    for step in range(start_step + 1, (config.run.max_steps if steps is None else steps) + 1):
        display.on_step(step, metrics_at(step, config))
    if steps is None:
        display.on_evaluation(config.run.max_steps, AFTER)
    return display


def rows_of(display: Display) -> list[str]:
    return [line for line in text_of(display).splitlines() if line.endswith("12,345")]


def drawn(display: Display) -> list[str]:
    shown = console(terminal=False, width=display.console.width)
    shown.print(display.picture())
    return [line.rstrip() for line in shown.file.getvalue().splitlines()]  # pyright: ignore


@pytest.mark.parametrize(("steps", "lines"), [(5, 5), (20, 20), (205, 20), (1000, 21)])
def test_about_twenty_lines_with_the_first_and_the_last_step_written_at_once(steps: int, lines: int) -> None:
    display = play("--max_steps", str(steps))
    rows = rows_of(display)
    assert len(rows) == lines
    assert rows[0].startswith(f"step 1/{steps}: reward 0.") and rows[-1].startswith(f"step {steps}/{steps}: ")
    assert "KL k3 0." in rows[-1]
    explained = text_of(display).split("\nstep 1/")[0].splitlines()[-1]
    assert explained == legend(["KL k3", "clip", "tok/s"]) and explained.count(";") == 2, "before the first step"
    assert display.console.file.flushed >= lines  # pyright: ignore


@pytest.mark.parametrize("terminal", [False, True])
def test_news_are_lines(terminal: bool) -> None:
    display = play("--max_steps", "5", on=console(terminal=terminal))
    for text in ("one", "two"):
        display.on_warning(text)
    display.on_alarm(rise("kl-spike", 7))
    display.on_alarm(rise("kl-high", 7))  # a note
    display.close()
    text = text_of(display)
    assert "  evaluation after step 0: addition 76.2, subtraction 90.2, reversal 100.0\n" in text
    assert "after step 5: addition 93.8 (+17.6), subtraction 89.5 (−0.8), reversal 99.6 (−0.4)" in text
    assert (text.count("  caution: one\n"), text.count("  caution: two\n")) == (1, 1)
    assert text.count("alarm after") == 1 and "kl-spike" in text and "next step: " in text
    assert display.raised == {"kl-spike", "kl-high"}


def test_a_terminal_has_the_last_steps_and_a_bar() -> None:
    display = play("--max_steps", "60", "--kl_clip_method", "hard", steps=30, on=console(terminal=True))
    lines = drawn(display)
    display.close()
    assert "━" in lines[0] and lines[0].startswith("step") and "30/60" in lines[0] and "left" in lines[0]
    assert " ".join(lines[1].split()) == "step reward KL exact KL k3 KL k1 over beta length entropy clip lr tok/s"
    assert " ".join(lines[-3].split()) == (
        "30 0.847 0.006859 0.006806 0.005912 0.25 0.01 4.8 0.2572 0.0123 0.00015 12,345"
    )
    assert [line.split()[0] for line in lines[2:-2]] == [str(step) for step in range(31 - ROWS, 31)]
    assert "30 0.847" in " ".join(text_of(display).split()), "it stays on the screen"


@pytest.mark.parametrize(("width", "height", "left_out"), [(60, 12, "length"), (80, 24, "lr"), (120, 24, "")])
def test_a_picture_fits_the_terminal_with_whole_columns_and_explains_those(width, height, left_out) -> None:
    on = console(terminal=True, width=width, height=height)
    display = play("--kl_clip_method", "hard", "--target_kl", "0.05", steps=30, on=on)
    display.close()
    lines = drawn(display)
    assert max(map(len, lines)) <= width and len(lines) < height and "…" not in "".join(lines)
    titles = ["step", *(title for title in COLUMNS if title != "teacher")]
    titles = titles[: titles.index(left_out) if left_out else None]
    assert " ".join(lines[1].split()) == " ".join(titles)
    assert [display.rows[-1][title] for title in titles] in [line.split() for line in lines[2:]]
    text, parts = " ".join(lines[-2:]), LEGEND.split("; ")
    assert all((part in text) == any(part[: len(t[:2])] == t[:2] for t in titles) for part in parts)


def test_a_reader_that_leaves_ends_nothing() -> None:
    assert rows_of(play("--max_steps", "1")) and play("--max_steps", "1", on=Console(file=Gone())).rows


def test_the_trained_skill_comes_first_and_a_missing_score_is_a_dash() -> None:
    rows = skill_rows({"b": 0.5}, {"b": 0.25, "a": 1.0}, "a")
    assert rows == [("a (trained)", "–", "100.0", "–"), ("b", "50.0", "25.0", "−25.0")]


@pytest.mark.parametrize(("total", "due"), [(3, [1, 2, 3]), (700, [1, 140, 280, 420, 560, 700])])
def test_slow_work_before_the_run_has_some_lines_in_a_log_and_a_bar_on_a_terminal(total: int, due: list[int]) -> None:
    log, live = Drawn(console(terminal=False)), Drawn(console(terminal=True))
    for done in range(1, total + 1):
        log.on_loading("x", done, total, 0.5)
    live.on_loading("x", 2, total, 0.5)
    live.close()
    assert text_of(log).splitlines() == [f"x: {done}/{total}, loss 0.500" for done in due]
    assert "x, once" in text_of(live) and f"2/{total}" in text_of(live)
