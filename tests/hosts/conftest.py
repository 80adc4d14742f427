"""The tests against real trainers: each folder needs the package of its name, and is not there without it.

`make test-verl` makes the environment and runs it; plain `make test` does not have the package.
"""

from importlib.util import find_spec

collect_ignore = [package for package in ("verl",) if find_spec(package) is None]
