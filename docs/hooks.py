"""What the documentation build does beyond Markdown: it includes the repository's own pages, and refuses gaps.

Two jobs. A page with a line `{{ include FILE }}` gets that file of the repository root, its links turned from the
repository's layout (or its address) to the site's. And after the build, every public name must have a docstring and
must be found in the API reference; `python docs/hooks.py` prints the same findings without a build.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Where the public names live: these modules and no module below them,
DOORS = (
    "klamp.errors",
    "klamp.tinker",
    "klamp.tinker.testing",
    "klamp.training.loop",
    "klamp.trl",
    "klamp.unsloth",
    "klamp.verl",
)
# and every module of these packages.
OPEN_PACKAGES = ("klamp.config", "klamp.core", "klamp.verify")

# Files of the repository that are pages of the site; every other link into the repository becomes plain text.
PAGES = {
    "README.md": "index.md",
    "PAPERS.md": "papers.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
HOME = "https://github.com/klamp-rl/klamp/blob/main/"
RAW = "https://raw.githubusercontent.com/klamp-rl/klamp/main/"
# A page on its way into the site: what stands there under its own address, and in the repository under these.
ON_THE_SITE = {HOME + file: page for file, page in PAGES.items()} | {HOME + "docs/": "", RAW + "docs/": ""}
INCLUDE = re.compile(r"^\{\{ include (\S+) \}\}$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the named files of the repository in the place of their include lines."""
    return INCLUDE.sub(lambda found: relink((ROOT / found[1]).read_text(encoding="utf-8")), markdown)


def relink(markdown: str) -> str:
    """Turns links that are right in the repository into links that are right in the site."""

    def replace(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2].removeprefix("./"), found[3] or ""
        if target in PAGES:
            return f"[{label}]({PAGES[target]}{anchor})"
        if target.startswith("docs/") and target.endswith(".md"):
            return f"[{label}]({target.removeprefix('docs/')}{anchor})"
        return label

    markdown = LINK.sub(replace, markdown)
    for address, page in ON_THE_SITE.items():
        markdown = markdown.replace(address, page)
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Fails the build when a public name has no docstring or is not in the API reference."""
    from mkdocs.exceptions import PluginError

    findings = [*find_undocumented(), *find_unreferenced(Path(config["site_dir"]) / "objects.inv")]
    if findings:
        raise PluginError("public names that the documentation leaves out:\n  " + "\n  ".join(findings))


def find_undocumented() -> list[str]:
    """Lists the public modules, functions, classes and methods that have no docstring."""
    return [f"{name}: no docstring" for name, thing in iterate_public() if not is_documented(thing)]


def is_documented(thing: object) -> bool:
    """Whether someone wrote a docstring; the signature that a dataclass makes of itself does not count."""
    text = inspect.getdoc(thing) or ""
    return bool(text.strip()) and not text.startswith(f"{getattr(thing, '__name__', None)}(")


def find_unreferenced(inventory: Path) -> list[str]:
    """Lists the public names that the built reference has no entry for."""
    body = inventory.read_bytes().split(b"\n", 4)[4]
    rendered = {line.split(" ", 1)[0] for line in zlib.decompress(body).decode().splitlines()}
    return [f"{name}: not in docs/api.md" for name, _ in iterate_public() if name not in rendered]


def iterate_public() -> Iterator[tuple[str, object]]:
    """Yields (the name that it is imported by, the thing) for each public module and each public thing in it."""
    modules = list(iterate_modules())
    public = {module.__name__ for module in modules}
    for module in modules:
        yield module.__name__, module
        exported = getattr(module, "__all__", None)
        for name in sorted(exported or (name for name in vars(module) if not name.startswith("_"))):
            thing = getattr(module, name)
            if not (inspect.isfunction(thing) or inspect.isclass(thing)):
                continue
            own = (thing.__module__, thing.__name__) == (module.__name__, name)
            if not own and (exported is None or thing.__module__ in public):
                continue  # imported, or a second name for something that is documented under its first
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                yield from iterate_methods(f"{module.__name__}.{name}", thing)


def iterate_methods(path: str, owner: type) -> Iterator[tuple[str, object]]:
    """Yields the public methods and properties that the class itself defines."""
    for name, member in vars(owner).items():
        is_method = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
        if is_method and not name.startswith("_"):
            yield f"{path}.{name}", getattr(owner, name)


def iterate_modules() -> Iterator[ModuleType]:
    """Yields the public modules, the open packages walked through."""
    for name in (*DOORS, *OPEN_PACKAGES):
        yield importlib.import_module(name)
    for name in OPEN_PACKAGES:
        for found in pkgutil.walk_packages(importlib.import_module(name).__path__, prefix=f"{name}."):
            if not found.name.rpartition(".")[2].startswith("_"):
                yield importlib.import_module(found.name)


if __name__ == "__main__":
    problems = find_undocumented()
    print("\n".join(problems) or "every public name has a docstring")
    sys.exit(bool(problems))
