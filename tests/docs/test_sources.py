"""The page of sources: what it points to exists (tests, alarms, formulas, commands), and its verdicts are measured."""

import ast
import re

import pytest
from tests.docs.pages import DOCS, ROOT

from klamp.config import PRESETS
from klamp.core.estimators import ESTIMATORS
from klamp.doctor.alarms import ALARMS
from klamp.verify.judge import FORMS, explain_form

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PAGE, PAPERS = (file.read_text(encoding="utf-8") for file in (DOCS / "sources.md", ROOT / "PAPERS.md"))
CODE = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
TESTS = [code for code in CODE if code.startswith("tests/")]


@pytest.mark.parametrize("path", TESTS)
def test_the_tests_that_judge_a_claim_exist(path: str) -> None:
    file, _, name = path.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in functions if name else any(each.startswith("test_") for each in functions)


def test_each_of_the_five_documents_is_judged_by_tests() -> None:
    documents = PAGE.split("\n## ")[1:]
    assert len(documents) == 5
    for number, text in enumerate(documents):
        assert f"Document 00{number}:" in text
        assert "`tests/" in text and "**Where klamp differs.**" in text


def test_alarms_and_their_places_exist() -> None:
    named = re.findall(r"alarms?\.md#([\w-]+)", PAGE)
    places = re.findall(r'<a id="([\w-]+)"></a>', (DOCS / "alarms.md").read_text(encoding="utf-8"))
    assert named and set(named) <= set(ALARMS) & set(places)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("k1-as-loss", "the value is right, the expected gradient is zero"),
        ("minus-k1", "the sign is wrong"),
        ("k3-as-loss", "it follows the gradient of KL(ref||policy)"),
    ],
)
def test_the_verdicts_of_the_table_are_those_of_the_measurement(name: str, verdict: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    measured = explain_form(name).verdict
    for words in verdict.split(", "):
        assert words in measured
        assert words.replace("||", "‖") in row.replace("as a loss ", "")


def test_every_formula_of_the_page_is_a_form() -> None:
    assert set(FORMS) <= set(CODE)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_has_a_source(name: str) -> None:
    (rows,) = [part for part in PAPERS.split("\n## ") if part.startswith("Values\n")]
    assert f"`{name}`" in rows or f'estimator="{name}"' in rows


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_a_preset_has_a_source(name: str) -> None:
    """A formula that is passed around stands on the page of those documents, a recipe among the papers."""
    printed = "docs/sources.md" in PRESETS[name].paper
    assert f"| `{name}` |" in (PAGE if printed else PAPERS)
