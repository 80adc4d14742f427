"""Drawn command lines and configuration files: each ends with the exit code 0, 1 or 2, and says why where it failed."""

import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from tests.reliability.drawn import PLAIN, TEXTS, check_readable, examples, run

from klamp.cli.commands import COMMANDS, AblateOptions, fields_after, read_command
from klamp.cli.flags import Field, fields_of
from klamp.config import PRESETS
from klamp.errors import KlampError

WORDS = (
    *("", "-", "--", "---", "=", "--=", "-1", "-h ", "--h", "\udcff", "None", "null", "true"),
    *("1e999", "-inf", "nan", "0x10"),
    *("1_000", "2**70", str(2**70), "1" + "0" * 400, "9" * 5000, "٣", "1,2", "[0, 1]", "{a: 1}", "k3", "adapter"),
    *("--beta=", "--beta=0.1=2", "--no-beta", "--no_resume", "--seed=-1", "--no-no-resume", "--BETA", "--beta\u00a0"),
    *(word for word in TEXTS if "\0" not in word and "\ud800" not in word),
)
"""Words that people and scripts write by mistake; a process never gets one with a NUL in it."""

typed = st.one_of(
    st.sampled_from(WORDS),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=6),
    st.integers().map(str),
    st.floats().map(str),
)
fitting = {"INT": ["0", "1", "2", "8", "50"], "FLOAT": ["0", "0.04", "0.5", "1", "2.5"], "BOOL": ["true", "no"]}
NOWHERE = {"ray", "dry_run"}
"""Flags that reach for another machine, or that the tests set themselves."""


def words_of(field: Field) -> st.SearchStrategy[list[str]]:
    """What may follow the flag of a field: mostly values that fit it."""
    names = [*field.choices, *(PRESETS if field.name == "preset" else ()), "None", "text"]
    good = fitting.get(field.kind, names)
    return st.lists(st.one_of(st.sampled_from(good), st.sampled_from(good), typed), max_size=3, min_size=0)


def flags(known: Mapping[str, Field]) -> st.SearchStrategy[list[str]]:
    """Some flags of a command, some of them misspelled, with words after them."""
    named = ((name, field) for field in known.values() for name in (field.name, *field.aliases))
    every = {name: field for name, field in named if name not in NOWHERE and not field.word}
    if not every:
        return st.just([])
    one = st.sampled_from(sorted(every)).flatmap(
        lambda name: st.tuples(
            st.sampled_from([f"--{name}", f"--{name.replace('_', '-')}", f"--{name}", f"--no_{name}", f"--{name}x"]),
            words_of(every[name]),
        )
    )
    return st.lists(one, max_size=5).map(lambda given: [word for flag, words in given for word in (flag, *words)])


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that was read to its end has ended well; nothing trains."""
    monkeypatch.setattr("klamp.cli.train._train", lambda *given: None)
    monkeypatch.setattr("klamp.cli.train.launch", lambda *given: None)
    monkeypatch.setattr("klamp.cli.ablate._execute", lambda *given, **named: 0)


def ends_well(words: Sequence[str], text: bytes | None = None) -> None:
    """Run a command line in a folder that is empty, or holds this text as file.yaml."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if text is not None:
            Path("file.yaml").write_bytes(text)
        check_readable(run(words))


@given(words=flags(fields_after("train")), dry=st.booleans())
@example(words=["--seed", "-1"], dry=False)
@example(words=["--seed", str(2**70)], dry=False)
@examples(70)
def test_klamp_train(words: list[str], dry: bool) -> None:
    ends_well(["train", *(["--dry_run"] if dry else []), *words])


@given(words=flags(fields_after("ablate")))
@examples(40)
def test_klamp_ablate(words: list[str]) -> None:
    ends_well(["ablate", "--dry_run", *words])


@given(words=flags(fields_after("train")), names=st.lists(st.sampled_from([*PRESETS, "k3", "x.yaml", ""]), max_size=2))
@examples(6)
def test_klamp_explain(words: list[str], names: list[str]) -> None:
    ends_well(["explain", *names, *words])


@given(
    command=st.sampled_from(sorted({*COMMANDS, "help", "trian"} - {"verify", "model"})),
    words=st.lists(typed, max_size=4),
)
@examples(50)
def test_any_words_after_any_command(command: str, words: list[str]) -> None:
    ends_well([command, *words])


@pytest.mark.parametrize("command", ["verify", "audit", "doctor", "report"])
def test_options_of_commands_that_go_to_work_at_once(command: str) -> None:
    @given(words=st.lists(typed, max_size=3), more=flags(fields_after(command)))
    @examples(25)
    def read(words: list[str], more: list[str]) -> None:
        with contextlib.suppress(KlampError):
            read_command(command, [*words, *more])

    read()


scalars = st.one_of(st.sampled_from([each for each in PLAIN if each != "\ud800"]), st.dates(), st.binary(max_size=4))


def content(known: Iterable[str]) -> st.SearchStrategy[Any]:
    """What a configuration file may hold: fields with values that fit them or not, flat or in sections."""
    names = st.sampled_from([*known, "kl", "loss", "task", "run", "preset", "", "1"])
    good = st.sampled_from([0, 1, 8, 0.5, "k3", "none", True, None, [1, 2], ["wandb"]])
    inner = st.dictionaries(names, st.one_of(good, scalars), max_size=3)
    keys = st.one_of(names, names, names, st.sampled_from([None, 3, 2.5, True]))
    return st.one_of(
        st.dictionaries(keys, st.one_of(good, scalars, inner), max_size=4), scalars, st.lists(scalars, max_size=2)
    )


HOSTILE = (
    *("", "---\n---\n", "\t", "a: &a [*a]", "a: [*b]", "<<: 3", "? [1]\n: 2", "\x00", "? {a: 1}\n: 2", "'"),
    *("beta: !!python/object:os.system x", "beta: 2024-99-99", "beta: 1__0", "seed: 0b2", "beta: .inf"),
    *("seed: " + "9" * 5000, "beta: 1:60:61", "\ufeffbeta: 1", "beta: 0.1\nbeta: 0.1"),
    *("[" * 5000, "a: " * 300, "{" * 5000, "beta: !!float x", "beta: !!int x", "beta: !!timestamp x"),
    *("beta: !!binary x", "beta: !!set {a}", "beta: !!omap [a: 1]", "&a ? *a : 1", "a: &a\n  <<: *a"),
)
"""Texts that are no configuration, or hardly one."""


def texts(known: Iterable[str]) -> st.SearchStrategy[bytes]:
    dumped = content(known).map(lambda found: yaml.safe_dump(found).encode())
    cut = st.tuples(dumped, st.integers(0, 60)).map(lambda both: both[0][: both[1]])
    return st.one_of(dumped, dumped, cut, st.sampled_from(HOSTILE).map(str.encode), st.binary(max_size=20))


@given(text=texts(fields_after("train")))
@examples(50)
def test_a_configuration_file(text: bytes) -> None:
    ends_well(["train", "--dry_run", "--config", "file.yaml"], text)


@given(text=texts([*fields_of(AblateOptions), "base", "sweep", "arms", "name", "beta"]))
@examples(40)
def test_a_plan_file(text: bytes) -> None:
    ends_well(["ablate", "--dry_run", "--plan", "file.yaml"], text)
