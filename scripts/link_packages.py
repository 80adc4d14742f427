#!/usr/bin/env python3
"""Puts packages of the environment that runs this into another one as hard links, where the pins agree.

    .venv/bin/python scripts/link_packages.py TARGET CONSTRAINTS [NAME ...]

TARGET is a virtual environment, CONSTRAINTS its pins; NAMEs narrow the packages to some of them. What is linked takes
no room on the disk and no time to unpack (torch and triton alone are 1.7 GB in every environment), and pip finds it
installed. A package that pip removes from one of the environments stays in the other. Does nothing where TARGET has
another Python, or lies on another disk.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(sys.prefix)


def pins_of(constraints: Path) -> dict[str, str]:
    """Name -> version, of every line `name==version`."""
    pins = {}
    for line in constraints.read_text().splitlines():
        try:
            pin = Requirement(line.split("#")[0].strip())
        except InvalidRequirement:  # an empty line
            continue
        pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return pins


def link(package: Distribution, target: Path) -> None:
    """Link the files of a package, and what they were compiled to; scripts are written anew, for the other Python."""
    for file in package.files or ():
        path = Path(os.path.normpath(str(file.locate())))
        if path.suffix == ".pyc" or not path.is_file() or not path.is_relative_to(HERE):
            continue
        there = target / path.relative_to(HERE)
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.parent == HERE / "bin":
            there.write_bytes(path.read_bytes().replace(os.fsencode(HERE), os.fsencode(target)))
            there.chmod(path.stat().st_mode)
            continue
        there.hardlink_to(path)
        if path.suffix == ".py" and (compiled := Path(cache_from_source(path))).is_file():
            cached = target / compiled.relative_to(HERE)
            cached.parent.mkdir(exist_ok=True)
            cached.hardlink_to(compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("constraints", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    target = asked.target.absolute()
    if not (target / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}").is_dir():
        return
    pins = pins_of(asked.constraints)
    there = {
        canonicalize_name(each.name)
        for each in distributions(path=[str(p) for p in target.glob("lib/*/site-packages")])
    }
    for package in list(distributions()):
        name = canonicalize_name(package.name)
        if name in there or (asked.names and name not in asked.names):
            continue
        if name not in pins or Version(package.version).public != Version(pins[name]).public:
            continue
        try:
            link(package, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return


if __name__ == "__main__":
    main()
