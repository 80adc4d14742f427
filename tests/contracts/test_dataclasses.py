"""What is handed around in core, config and hosts/common is frozen, and made by names, not by order."""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import klamp

ROOT = Path(klamp.__file__).parent
CONTROLLERS = {f"{name}Controller" for name in ("Fixed", "Hold", "Step", "Proportional")}
CHANGED = {"KLFields", "TeacherFields", *CONTROLLERS}
"""Fields of a dataclass of TRL's, which is not frozen; and what has a state."""
BY_ORDER = {
    "Need",
    "HostLimit",
    "Numbers",
    "Kind",
    "KLFields",
    "TeacherFields",
    "FixedController",
    "Preset",
}
"""Few fields of their own, each of another kind."""


def made() -> Iterator[type]:
    for package in ("core", "core/heads", "config", "hosts/common"):
        for file in sorted((ROOT / package).glob("*.py")):
            module = importlib.import_module(".".join(("klamp", *Path(package).parts, file.stem)))
            found = (
                each for each in vars(module).values() if isinstance(each, type) and dataclasses.is_dataclass(each)
            )
            yield from (each for each in found if each.__module__ == module.__name__)


def test_data_is_frozen_and_made_by_names() -> None:
    own = {
        each: [f for f in dataclasses.fields(each) if f.name in vars(each).get("__annotations__", {})]
        for each in made()
    }
    assert len(own) > 20
    assert {each.__name__ for each in own if not each.__dataclass_params__.frozen} == CHANGED  # pyright: ignore
    assert {each.__name__ for each, fields in own.items() if any(not f.kw_only for f in fields)} == BY_ORDER
