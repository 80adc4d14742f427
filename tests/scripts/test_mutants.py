"""The mutation run: which tests it chooses, what it counts, and that equivalent mutants are of the code as it is."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from scripts.mutants import (
    Mutant,
    annotations,
    equivalent,
    is_a_marker,
    modules,
    page_of,
    record_of,
    recorded,
    source,
    stages,
    text,
)

from scripts import mutants

pytestmark = pytest.mark.slow

CONTROLLERS = "core/controllers.py"


def names(files: tuple[str, ...]) -> list[str]:
    return [Path(file).name for file in files]


def changed(before: str, after: str) -> Mutant:
    code = source(CONTROLLERS)
    assert code.count(before) == 1
    number = code[: code.index(before)].count("\n") + 1
    return Mutant(CONTROLLERS, "by hand", number, code.replace(before, after))


def test_the_tests_of_a_modules_name_run_before_those_that_import_it() -> None:
    first, second, *_ = stages("core/gradients.py")
    assert names(first) == [f"test_gradients{each}.py" for each in ("", "_derivatives", "_numerics", "_sequence")]
    assert "test_penalty.py" in names(second)
    assert "test_controllers.py" not in names(second)
    assert names(stages("core/heads/kl.py")[0]) == ["test_kl.py"]
    assert [names(each) for each in stages("core/controllers.py")] == [
        ["test_dataclasses.py"],
        ["test_controllers.py"],
        ["test_hold.py"],  # it imports the module
        ["test_bad_input.py"],
    ]
    slow = [module for module in modules() if "test_logprobs.py" in names(sum(stages(module), ()))]
    assert slow == ["core/heads/logprobs.py"]


@pytest.mark.parametrize("module", modules())
def test_every_module_has_tests_to_run(module: str) -> None:
    assert stages(module)
    assert all(Path(file).is_file() for files in stages(module) for file in files)


def test_annotations_are_left_alone_and_defaults_are_not() -> None:
    code = "def f(x: int | None = 1 | 2) -> int | str:\n    y: bool | None = 3 | 4\n"
    texts = [code.splitlines()[start[0] - 1][start[1] : end[1]] for start, end in annotations(code)]
    assert sorted(texts) == ["bool | None", "int | None", "int | str"]


def test_a_star_between_parameters_is_no_product() -> None:
    code = "def f(x, *, y=2 * 3):\n    return x * y * (\n        *\n"
    stars = [(n, c) for n, line in enumerate(code.splitlines(), 1) for c, sign in enumerate(line) if sign == "*"]
    assert [is_a_marker(code, star) for star in stars] == [True, False, False, False, True]


@pytest.mark.parametrize("key", equivalent(), ids=str)
def test_an_equivalent_mutant_is_of_a_line_that_is_there_and_says_why(key: mutants.Key) -> None:
    module, _, line, becomes = key
    assert line in [line.strip() for line in source(module).splitlines()]
    assert line != becomes
    assert len(equivalent()[key].split()) > 4


def test_a_mistake_is_caught_and_a_change_of_nothing_is_not(tmp_path: Path) -> None:
    """In a process of its own: a process has one fork server, and that of other tests has loaded klamp as it is."""
    process = multiprocessing.get_context("spawn").Process(target=_catch, args=(tmp_path,))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0


def _catch(folder: Path) -> None:
    file = folder / "test_half.py"
    file.write_text(
        "from klamp.core.controllers import kl_schedule_factor\n\n\n"
        "def test_half():\n    assert kl_schedule_factor(5, 10, schedule='linear') == 0.5\n"
    )
    mutants.stages = lambda module: [(str(file),)]
    workplace = mutants.Workplace(folder / "copy")
    assert workplace.catches(changed("1 - (1 - end) * x", "1 + (1 - end) * x"))
    assert not workplace.catches(changed("1 - (1 - end) * x", "1 - x * (1 - end)"))
    workplace.limit = lambda files: 1.0
    assert workplace.catches(changed("return 1 - (1 - end) * x", "while True: pass")), "tests that never end"
    assert (workplace.copy / "klamp" / CONTROLLERS).read_text(encoding="utf-8") == source(CONTROLLERS)


def test_the_page_shows_the_record() -> None:
    page = mutants.PAGE.read_text(encoding="utf-8")
    assert page_of(page, recorded()) == page, "what is on the page comes from make mutants MUTANTS_ARGS=--record"


def test_a_record_is_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(mutants, "PAGE", tmp_path / "page.md")
    mutants.PAGE.write_text(page_of(f"before\n{mutants.BEGIN}\nold\n{mutants.END}\nafter\n", None), encoding="utf-8")
    assert recorded() is None and "No run is recorded yet" in mutants.PAGE.read_text(encoding="utf-8")
    mutant = changed("1 - (1 - end) * x", "1 + (1 - end) * x")
    found = record_of([(mutant, "caught")] * 3 + [(mutant, "alive"), (mutant, "equivalent")], "a run")
    mutants.keep(found)
    assert recorded() == found and found["modules"] == {CONTROLLERS: {"caught": 3, "alive": 1, "equivalent": 1}}
    page = mutants.PAGE.read_text(encoding="utf-8")
    assert page == f"before\n{mutants.BEGIN}\n\n{text(found)}\n\n{mutants.END}\nafter\n"
    assert "- core/controllers.py: `return 1 - (1 - end) * x` → `return 1 + (1 - end) * x`" in page
