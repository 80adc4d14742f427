"""The page of sources and its five how-tos: what they point to exists, what they tell to type works as shown."""

import ast
import asyncio
import contextlib
import io
import re
import shlex
from typing import Any

import pytest
import torch
from tests.docs.pages import DOCS, ROOT

from klamp.cli import main
from klamp.config import PRESETS
from klamp.core.estimators import ESTIMATORS
from klamp.doctor.alarms import ALARMS
from klamp.verify.judge import FORMS, explain_form

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


PAGES = {
    name: (DOCS / "do" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("steady-length", "own-loop", "tinker-kl", "choose-beta", "k3-backwards")
}


def python(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[name], re.S)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_answers_first_and_is_found_from_its_source(name: str) -> None:
    title, answer = PAGES[name].split("\n\n")[:2]
    assert title.startswith("# ") and title.endswith("?") and answer.startswith("**")
    question = f"[{title.removeprefix('# ')}]"
    assert f": do/{name}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    documents = (DOCS / "sources.md").read_text(encoding="utf-8").split("\n## ")[1:]
    (document,) = [text for text in documents if f"{question}(do/{name}.md)" in text]
    anchor = re.search(r"sources\.md#([\w-]+)", PAGES[name])
    assert anchor and anchor[1] == document.splitlines()[0].lower().replace(" ", "-")


def test_the_loss_of_ones_own_loop_adds_the_kl() -> None:
    names: dict[str, Any] = {}
    (function,) = python("own-loop")
    exec(function, names)
    policy, ref, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.tensor([[True, True]])
    loss = names["loss_with_kl"](torch.tensor(1.0), policy, ref, mask, beta=2.0)
    assert float(loss) == pytest.approx(1 + 2 * (torch.tensor(-0.5).exp().item() - 1 + 0.5) / 2)


def test_the_update_at_a_tinker_service_begins_at_a_kl_of_0() -> None:
    tinker = pytest.importorskip("tinker")
    from klamp.tinker.testing import serve

    names: dict[str, Any] = {}
    (code,) = python("tinker-kl")
    exec(code, names)
    with serve() as standin:
        service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        client = service.create_lora_training_client(base_model=standin.base_model, rank=4)
        base = service.create_sampling_client(base_model=standin.base_model)
        prompts, responses = [[3, 4]] * 2, [[5, 6], [7, 5]]
        logprobs = asyncio.run(names["compute_reference_logprobs"](base, prompts, responses))
        done = asyncio.run(names["update"](client, base, prompts, responses, [1.0, -1.0], logprobs))
    assert done.metrics["kl/k3"] == pytest.approx(0.0, abs=1e-5)


def test_the_verdict_on_k3_is_printed_as_shown() -> None:
    (shown,) = re.findall(r"```text\n\$ (.*?)```", PAGES["k3-backwards"], re.S)
    command, *lines = shown.splitlines()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(shlex.split(command)[1:]) == 0
    printed = output.getvalue().splitlines()
    assert [line for line in lines if line.strip() != "..." and line not in printed] == []
