"""The run-time type checker that conftest.py puts on the core."""

from typing import Any

from beartype import BeartypeConf, beartype

# is_pep484_tower: an int is welcome where a float is asked for, as in every type checker that reads the source.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(made: Any) -> Any:
    """A function or class with its annotations checked at run time.

    A function within a function is left to pyright: it is made anew at every call, and compiling its checks each time
    took longer than the call. No shape stands in the annotations of one.
    """
    return made if "<locals>" in getattr(made, "__qualname__", "") else _check(made)
