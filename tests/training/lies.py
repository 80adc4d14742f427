"""What the page docs/scale.md says of where a model lies and how to load it, as something that can be done."""

import re
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
BACKENDS = {"local": 1, "trl": 2, "verl": 3}
"""Backend -> its column of the table."""


def cells(backend: str) -> dict[str, str]:
    """The rows of the table for a backend; `the same` is what stands to its left."""
    found: dict[str, str] = {}
    text = PAGE.read_text(encoding="utf-8").partition("| what | `local`")[2].partition("\n\n")[0]
    for line in text.splitlines()[2:]:
        row = [cell.strip() for cell in line.strip("|").split("|")]
        said = row[BACKENDS[backend]]
        found[row[0]] = row[1] if said == "the same" else said
    return found


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def folder_of(run: Path, backend: str, *, adapter: bool = False) -> Path:
    rows = cells(backend)
    (place,) = spans(rows["a checkpoint, in the run's folder"])[:1]
    pattern = place.replace("-N", "-*").replace("_N", "_*")
    newest = max(run.glob(pattern), key=lambda each: int(re.findall(r"\d+$", each.name)[0]))
    inside = rows[
        "with `lora_r`, the adapter, as peft loads it" if adapter else "the model in it, as transformers loads it"
    ]
    return newest if inside == "the folder itself" else newest / spans(inside)[0]


def loaded(run: Path, backend: str) -> Any:
    (line,) = spans(cells(backend)["in Python"])
    assert line.startswith("AutoModelForCausalLM.from_pretrained(FOLDER")
    model = eval(line, {"AutoModelForCausalLM": AutoModelForCausalLM, "FOLDER": folder_of(run, backend)})  # our page
    assert AutoTokenizer.from_pretrained(folder_of(run, backend)).get_vocab(), "its tokenizer lies beside it"
    return model.float().eval()


def loaded_adapter(run: Path, backend: str) -> Any:
    return AutoPeftModelForCausalLM.from_pretrained(folder_of(run, backend, adapter=True)).float().eval()


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(2, 12)[None]).logits
