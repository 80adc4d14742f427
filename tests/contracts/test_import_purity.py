"""`import klamp` is light, needs no library but torch, and no module needs what Linux alone has."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "klamp"

# Loaded by `import klamp`, any of these would make the library heavy, or tie it to one framework.
HEAVY = (
    *("accelerate", "datasets", "huggingface_hub", "math_verify", "matplotlib", "pandas", "peft"),
    *("pyarrow", "ray", "rich", "safetensors", "tensorboard", "tinker", "tokenizers", "transformers"),
    *("triton", "trl", "unsloth", "verl", "wandb", "yaml"),
)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_klamp_loads_nothing_but_itself() -> None:
    loaded = set(
        run_python("import sys; before = set(sys.modules); import klamp; print(*set(sys.modules) - before)").split()
    )
    assert {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names} == {"klamp"}


def test_every_exported_name_needs_torch_alone_and_prints_and_warns_of_nothing() -> None:
    """With every other library made impossible to import, the library's own functions still run."""
    code = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import torch, warnings
warnings.simplefilter("error")
from klamp import *
policy, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
print(kl_estimate(policy, ref, estimator="k1").tolist())
"""
    assert run_python(code) == "[[0.5, -1.0]]\n"


def test_the_doctor_loads_neither_torch_nor_the_laboratory(tmp_path: Path) -> None:
    record = tmp_path / "log.jsonl"
    record.write_text('{"step": 1, "kl": 0.0, "reward": 1.0}\n', encoding="utf-8")
    code = f"""
import sys, klamp.doctor
from klamp.cli import main
assert main(["doctor", {str(record)!r}]) == 0
import klamp.report.page
print(*(name for name in sys.modules if name == "torch" or name.startswith(("klamp.core", "klamp.lab", "klamp.hosts"))))
"""
    assert run_python(code).splitlines()[-1] == ""


IMPORTED_ELSEWHERE = """
import importlib, os, signal, sys
def load(names):
    for name in names:
        importlib.import_module(name)
load({names})  # with all that others need: what that does on another system is theirs
for name in [name for name in sys.modules if name.partition(".")[0] == "klamp"]:
    del sys.modules[name]
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for module, name in ((os, "sched_getaffinity"), (os, "register_at_fork"), (os, "getuid"), (signal, "SIGHUP")):
    delattr(module, name)
load({names})
print("all")
"""
"""Imports modules once more without what macOS (the affinity) and Windows (all of it) lack."""


@pytest.mark.slow
def test_no_module_needs_what_linux_alone_has_to_be_imported() -> None:
    parts = ("cli", "doctor", "lab", "report")
    paths = [path.relative_to(SOURCE.parent) for part in parts for path in sorted((SOURCE / part).rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.stem not in ("__init__", "__main__")]
    assert "klamp.lab.folders" in names and "klamp.lab.ablate.one_run" in names
    assert run_python(IMPORTED_ELSEWHERE.format(names=names)).splitlines()[-1] == "all"
