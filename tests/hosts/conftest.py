"""The tests against real trainers: each folder needs the package of its name, and is not there without it.

`make test-trl` and `make test-verl` make the environments and run them; plain `make test` has neither package.
"""

from importlib.util import find_spec

collect_ignore = [package for package in ("trl", "verl") if find_spec(package) is None]
