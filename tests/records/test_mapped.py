"""Names that do not fit a record: what is said, and what is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.errors import ConfigError, DataError
from klamp.records.files import check_logged, refuse_names

HERE = Path("run")


def test_names_that_stand_there_and_none_at_all_pass() -> None:
    check_logged({"kl/k3": "a"}, {"a", "b"}, HERE)
    check_logged(None, (), HERE)
    refuse_names(None, HERE, why="")
    refuse_names({}, HERE, why="")


@pytest.mark.parametrize(
    ("logged", "why", "fix"),
    [
        ({"my_kl", "my_reward"}, "it has my_kl, my_reward", "did you mean 'my_kl'?"),
        ({f"{i:02}" for i in range(20)}, f"it has {', '.join(f'{i:02}' for i in range(12))}, ...", "write the name as"),
        ((), "it has none", "write the name as"),
    ],
)
def test_a_name_that_stands_in_no_row_lists_those_that_do(logged: set[str], why: str, fix: str) -> None:
    with pytest.raises(DataError, match="no row of the record has a number called 'my_k'") as caught:
        check_logged({"kl/k3": "my_k"}, logged, HERE)
    assert caught.value.why == why
    assert caught.value.fix.startswith(fix)


def test_names_for_a_record_that_has_klamps_are_refused() -> None:
    with pytest.raises(ConfigError, match="no names to map") as caught:
        refuse_names({"kl/k3": "a", "reward": "b"}, HERE, why="a reason")
    assert (caught.value.got, caught.value.why) == ("kl/k3=a, reward=b for run", "a reason")
