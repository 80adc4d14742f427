"""The notebook, its cells run in order in one namespace of a fresh process, with sizes that take seconds."""

import json
import re
from pathlib import Path

import pytest
from tests.examples.conftest import ROOT, run

pytestmark = pytest.mark.slow

CELLS = json.loads((ROOT / "examples" / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
SIZES = {"STEPS": "3", "PROMPTS, ANSWERS": "4, 4", "EVALUATED": "16"}
SHOW_LAST = """
import ast, sys
for source in sys.argv[1:]:
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), globals())
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), globals())
        print("Out:", shown)
figure.savefig("curves.png")
"""
"""What a notebook does with its cells: runs them, and shows the value of the last line."""


def smaller(source: str) -> str:
    for name, size in SIZES.items():
        source = re.sub(rf"^{name} = [\d, ]+", f"{name} = {size}  ", source, flags=re.M)
    return source


@pytest.fixture(scope="module")
def printed(default_base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("notebook")
    cells = [smaller("".join(cell["source"])) for cell in CELLS if cell["cell_type"] == "code"]
    assert all(f"{name} = {size} " in cells[0] for name, size in SIZES.items())
    return run("-c", SHOW_LAST, *cells, folder=folder), folder


def test_it_measures_a_kl_and_its_estimators_agree(printed: tuple[str, Path]) -> None:
    shown = re.search(r"Out: \{'exact': (\S+), 'k1': (\S+), 'k3': (\S+)\}", printed[0])
    assert shown
    exact, k1, k3 = map(float, shown.groups())
    assert exact > 0.01 and k3 == pytest.approx(exact, rel=0.1) and k1 == pytest.approx(exact, rel=0.25)


def test_it_trains_and_draws_the_kl(printed: tuple[str, Path]) -> None:
    text, folder = printed
    assert re.search(r"^addition +\S+ -> +\S+$", text, re.M)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "runs" / "first-run" / "report.html").is_file()
