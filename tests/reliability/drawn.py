"""What the fuzzers share: how many examples they draw, hostile values and texts, and a command run in this process."""

import io
import math
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from klamp.cli import main
from klamp.cli.text import OBEYED
from klamp.errors import KlampError

FACTOR = float(os.environ.get("KLAMP_FUZZ", "1"))
"""KLAMP_FUZZ=50 draws fifty times as many examples, and others each time."""


def examples(count: int) -> settings:
    """Settings of a fuzzer that draws `count` examples in `make test`."""
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=max(1, int(count * FACTOR)), deadline=None, suppress_health_check=slow)


NUMBERS = (0, 1, -1, 2**31, 2**63, 2**70, -(2**70), 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324, *(math.nan, math.inf))
TEXTS = ("", " ", "text", "1", "nan", "-inf", "True", "\ud800", "é\u2028\x00\x1b[31m", "[red]", "<b>", "9" * 5000)
PLAIN: tuple[Any, ...] = (None, True, False, *NUMBERS, -math.inf, *TEXTS, [], {}, [[]], [None], {"": None}, {"a": {}})
"""Values that JSON can hold and a reader may not expect."""

values = st.one_of(
    st.sampled_from(PLAIN),
    st.lists(st.sampled_from(PLAIN), max_size=4),
    st.dictionaries(st.sampled_from(TEXTS), st.sampled_from(PLAIN), max_size=3),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)

LINES = (
    *("null", "3", "[]", '"text"', "{", "}", '{"step": 1', "NaN", "{}", "\x00" * 40, " ", "﻿{}", "---", "a: b: c"),
    *("[" * 100_000, '{"a":' * 100_000, '{"step": ' + "9" * 5000 + "}", '{"step": 1e999}', '{"step": "\\ud800"}'),
)
"""Lines that are no row of any record."""


def _bomb(one: str) -> str:
    """A few lines of YAML of which each stands for the one before it twice; the last is called `last`."""
    names = [f"n{i}" for i in range(40)] + ["last"]
    return "n0: &n0 {x: 1}\n" + "".join(f"{new}: &{new} {one.format(old)}\n" for old, new in pairwise(names))


BOMBS = {"lists": _bomb("[*{0}, *{0}]"), "merges": _bomb("{{<<: [*{0}, *{0}]}}"), "itself": "n0: &last [*last]\n"}
"""Texts of YAML that stand for billions of values, or for themselves."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


SECONDS, MEMORY = 60.0, 3 * 2**30
"""The most that one call of a fuzzer may take: time on a busy machine, and bytes of addresses beyond what it has."""


class TooLong(BaseException):
    """Raised in a call that has not come back in time; nothing of klamp's takes it for an error of its own."""


@contextmanager
def limits() -> Iterator[None]:
    """A context that ends with TooLong or MemoryError what takes time or memory without an end."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TooLong

    held = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler, left = signal.signal(signal.SIGALRM, over), signal.setitimer(signal.ITIMER_REAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, held[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, held)
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, handler)


def run(words: Sequence[str]) -> Ended:
    """Run a command line in this process, within limits; its streams refuse what no UTF-8 terminal or file takes."""
    options: dict[str, Any] = {"encoding": "utf-8", "write_through": True}
    out, err = (io.TextIOWrapper(io.BytesIO(), errors=errors, **options) for errors in ("strict", "backslashreplace"))
    with redirect_stdout(out), redirect_stderr(err), limits():
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    texts = [stream.buffer.getvalue().decode("utf-8") for stream in (out, err)]  # pyright: ignore
    return Ended(code, *texts)


def check_readable(ended: Ended) -> None:
    """Hold that a command ended with a code of its own, without a traceback or anything that a terminal would obey."""
    assert ended.code in (0, 1, 2, 3), ended
    assert not OBEYED.search(ended.out + ended.err), ended
    assert "Traceback" not in ended.out + ended.err, ended
    if ended.code == 2:
        assert ended.err.count("klamp: error: ") == 1, ended


def check_says_why(error: KlampError) -> None:
    """Hold that an error has its message, of a length that can be read, and its reason."""
    assert error.what and error.why and len(str(error)) < 2000, str(error)[:2000]


@contextmanager
def or_refused(kind: type[KlampError] = KlampError) -> Iterator[None]:
    """A context for a call within limits that may end with an error of this kind, which has its reason."""
    try:
        with limits():
            yield
    except kind as error:
        check_says_why(error)
