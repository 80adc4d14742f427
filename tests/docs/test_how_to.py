"""The five how-tos: in the navigation and linked from their source, and what they tell to type works as shown."""

import asyncio
import contextlib
import io
import re
import shlex
from typing import Any

import pytest
from tests.docs.pages import DOCS, ROOT

from klamp.cli import main

PAGES = {
    name: (DOCS / "do" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("steady-length", "own-loop", "tinker-kl", "choose-beta", "k3-backwards")
}
pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def python(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[name], re.S)


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.\d+", text)]


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


def test_the_loss_of_ones_own_loop_holds_and_that_of_k1_does_not() -> None:
    function, measured = python("own-loop")
    names: dict[str, Any] = {}
    exec(function, names)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(measured, names)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGES["own-loop"], re.S)
    start, held_by_k1, held = numbers(output.getvalue())
    assert [start, held_by_k1, held] == pytest.approx(numbers(shown), abs=0.02)
    assert held_by_k1 > 0.8 * start and held < 0.1 * start
    torch = names["torch"]
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
