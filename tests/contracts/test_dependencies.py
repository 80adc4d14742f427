"""Each library that klamp imports is declared in pyproject.toml and used; `import klamp` itself needs torch alone."""

import ast
import functools
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "klamp"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# module -> what pip calls it, where more than a dash differs.
PIP_NAMES = {"yaml": "pyyaml"}


def by_name(names_of: dict[tuple[str, ...], str]) -> dict[str, tuple[str, ...]]:
    return {name: extras for extras, names in names_of.items() for name in names.split()}


# What may be imported below a folder or in a file, also within functions: base dependencies and those of these extras.
# The longest name that fits counts.
EXTRAS_OF = {"": ()} | by_name({
    ("train",): "cli/ablate.py cli/evaluate.py cli/train.py lab scoring/completions.py scoring/model_parts.py "
    "scoring/vllm_reference.py training",
    ("train", "wandb"): "doctor/readers/logs.py lab/observers.py",
    ("tinker",): "hosts/tinker",
    ("trl",): "hosts/trl trl.py",
    ("unsloth",): "hosts/unsloth",
    ("verl",): "hosts/verl",
    ("train", "ray"): "lab/ablate/execute.py",
    ("train", "trl"): "lab/engines/trl_program.py",
})  # fmt: skip

# Not klamp's to declare: there if and because what is examined or compiled for is there.
GUESTS = {
    "audit/trainers.py": {"liger-kernel", "tensordict", "torchrl", "trl", "verl"},
    "hosts/common/sampler_weights.py": {"vllm", "transformers"},
    "lab/engines/trl_program.py": {"datasets"},
    "lab/tasks/files.py": {"datasets"},
    "tinker/testing.py": {"klamp-standin"},
}

# What has to be importable with these extras alone: all that is imported on the way, within functions apart.
DOORS = by_name({
    (): "klamp klamp.core.objective klamp.cli klamp.cli.audit klamp.cli.doctor klamp.cli.report klamp.cli.verify "
    "klamp.doctor.readers klamp.report.page klamp.audit klamp.verify",
    ("train",): "klamp.lab.ablate.one_run klamp.cli.ablate klamp.cli.train klamp.training.loop klamp.lab.backends "
    "klamp.lab.loop klamp.lab.engines.verl",
    ("train", "trl"): "klamp.lab.engines.trl_program",
    ("tinker",): "klamp.tinker",
    ("trl",): "klamp.trl",
    ("unsloth",): "klamp.unsloth",
    ("verl",): "klamp.verl klamp.verl.checked klamp.verl.registered",
})  # fmt: skip

# Declared though nothing imports them, and why.
NOT_IMPORTED = {
    "antlr4-python3-runtime": "math-verify's parser, which its own extra names differently",
    "tinker": "imported by its name when a function needs it, not by a statement",
    "unsloth": "imported by the user, before klamp",
    "hydra-core": "verl's, which does not name it; a floor keeps pip from taking one of 2019",
}


def declared(*extras: str) -> set[str]:
    """The base dependencies and those of the extras, as pip compares names."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    names = {_pip_name(re.match(r"[\w.-]+", line)[0]) for line in lines}
    nested = [re.search(r"^klamp\[([\w,-]+)\]", line) for line in lines]
    for found in filter(None, nested):
        names |= declared(*found[1].split(","))
    return names - {"klamp"}


def _pip_name(module: str) -> str:
    return PIP_NAMES.get(module, re.sub(r"[-_.]+", "-", module).lower())


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """A file's syntax; no garbage is collected meanwhile, which lets another thread parse: Python 3.11 loses count."""
    gc.disable()
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    finally:
        gc.enable()


@functools.cache
def imports(file: Path, *, within_functions: bool) -> frozenset[str]:
    """The modules, by their full names, that a file imports when it runs; what is for types only is left out."""
    found = set[str]()
    waiting: list[ast.AST] = [tree_of(file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not within_functions:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: the house imports by full names"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def libraries(modules: Iterable[str]) -> set[str]:
    top = {name.partition(".")[0] for name in modules}
    return {_pip_name(name) for name in top - sys.stdlib_module_names - {"klamp"}}


def file_of(module: str) -> Path | None:
    path = ROOT / "src" / Path(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def loaded_with(door: str) -> set[str]:
    """Every module that is imported, directly or on the way, when `door` is."""
    seen: set[str] = set()
    waiting = [door]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        file = file_of(module) if module.partition(".")[0] == "klamp" else None
        if file is not None:
            waiting += imports(file, within_functions=False)
            waiting += [module.rpartition(".")[0]] if "." in module else []
    return seen


def extras_of(path: str) -> tuple[str, ...]:
    fitting = [place for place in EXTRAS_OF if not place or path == place or path.startswith(f"{place}/")]
    return EXTRAS_OF[max(fitting, key=len)]


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def test_a_file_imports_only_what_is_declared_for_it() -> None:
    for path in FILES:
        found = libraries(imports(SOURCE / path, within_functions=True))
        assert found - declared(*extras_of(path)) - GUESTS.get(path, set()) == set(), path


@pytest.mark.parametrize("door", DOORS)
def test_a_door_opens_with_its_extra_alone(door: str) -> None:
    assert libraries(loaded_with(door)) <= declared(*DOORS[door])


def test_the_stand_in_imports_only_what_its_distribution_declares() -> None:
    standin = ROOT / "standin"
    project = tomllib.loads((standin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = "\n".join(project["dependencies"])
    asked = {*re.findall(r"^[\w-]+", lines, re.M), *declared("tinker")}
    files = (standin / "src").rglob("*.py")
    found = {name for file in files for name in libraries(imports(file, within_functions=True))} - {"klamp-standin"}
    assert "klamp[tinker]" in lines and found <= asked


def test_nothing_is_declared_for_nothing() -> None:
    used = {name for path in FILES for name in libraries(imports(SOURCE / path, within_functions=True))}
    assert declared(*TRIED_OLDEST, "unsloth", "verl") - used == set(NOT_IMPORTED)


TRIED_OLDEST = ("train", "wandb", "trl", "tinker", "ray")
"""Extras; those of verl and unsloth are in the environments of their own targets, dev is nobody's but ours."""


def test_what_is_declared_as_oldest_is_tried() -> None:
    lines = [*PROJECT["dependencies"], *(x for extra in TRIED_OLDEST for x in PROJECT["optional-dependencies"][extra])]
    oldest: dict[str, set[Version]] = {}
    for requirement in map(Requirement, lines):
        ends = {Version(each.version) for each in requirement.specifier if each.operator == ">="}
        oldest.setdefault(canonicalize_name(requirement.name), set()).update(ends)
    text = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)
    pins = {canonicalize_name(name): Version(version) for name, version in pinned}
    assert {name: {pins.get(name)} for name in oldest} == oldest
    assert set(PROJECT["optional-dependencies"]) == {*TRIED_OLDEST, "verl", "unsloth", "dev"}


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


def test_klamp_loads_itself_alone_and_every_exported_name_needs_torch_alone_and_prints_and_warns_of_nothing() -> None:
    """With every other library made impossible to import, the library's own functions still run."""
    code = f"""
import sys
before = set(sys.modules)
import klamp
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*(loaded - sys.stdlib_module_names))
for name in {HEAVY!r}:
    sys.modules[name] = None
import torch, warnings
warnings.simplefilter("error")
print(klamp.errors.ConfigError.__name__, klamp.core.__name__)
from klamp import *
policy, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
print(kl_estimate(policy, ref, estimator="k1").tolist())
"""
    assert run_python(code) == "klamp\nConfigError klamp.core\n[[0.5, -1.0]]\n"


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
