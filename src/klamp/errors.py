"""The exceptions that klamp raises: each is a `KlampError`, and the built-in error of its kind.

Every message has four parts: what happened, what klamp got, why that is a problem, how to fix it. A warning of klamp is
a KLWarning (UserWarning).
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from klamp.names import HINTS

LONGEST_PART = 1000
"""Characters that a message shows of what klamp received, and of the reason, which may repeat it."""
URL = re.compile(r"([A-Za-z][\w+.-]*://)(\S+)")
"""A URL in a text, up to the next space."""
HOST = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]*)(:\d*)?")
"""What a URL names without a user: a host, and perhaps a port."""


def without_credentials(text: str) -> str:
    """A text whose URLs have no user, password or query; an URL that cannot be parsed loses more."""
    return URL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if not HOST.fullmatch(host):
        rest = rest.rpartition("@")[2]
    return scheme + re.sub(r"\?[^\s'\"<>)\]},]*", "", rest)


class KlampError(Exception):
    """Root of every klamp error; its text reads what / got / why / fix, with no credentials of a URL in it.

    The text shows the first thousand characters of `got`, the value that klamp received, and of `why`.
    """

    def __init__(self, what: str, *, got: object = None, why: str = "", fix: str = "") -> None:
        what, why, fix = map(without_credentials, (what, why, fix))
        shown = without_credentials(str(got))
        self.what, self.got, self.why, self.fix = what, got if shown == str(got) else shown, why, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        got = "" if self.got is None else brief(str(self.got), LONGEST_PART)
        parts = {"got": got, "why": brief(self.why, LONGEST_PART), "fix": self.fix}
        return "\n".join([self.what, *(f"  {name}: {text}" for name, text in parts.items() if text)])


class ConfigError(KlampError, ValueError):
    """A choice that cannot work, or that would not do what its name says."""


class UnknownNameError(ConfigError, KeyError):
    """A key or name that klamp does not know; the message names the nearest known one."""


class ShapeError(KlampError, ValueError):
    """Tensors whose shapes do not fit together."""


class TensorError(KlampError, TypeError):
    """Something that is no tensor, or a tensor of another data type or on another device than is asked for."""


class NonFiniteError(KlampError, ArithmeticError):
    """NaN, or an infinity where a finite number is needed."""


class EmptyMaskError(KlampError, ValueError):
    """A mask under which there is nothing to average."""


class DataError(KlampError, ValueError):
    """A data row, prompt or file that cannot be used, or a log-probability above 0."""


class RewardError(KlampError, RuntimeError):
    """A reward function that raised, or returned something that is not a finite number."""


class ModelError(KlampError, ValueError):
    """A model or tokenizer that cannot be loaded or used."""


class RunFolderError(KlampError, FileExistsError):
    """An output folder that holds another run, or that cannot be resumed."""


class TrainingStopped(KlampError, RuntimeError):
    """Training ended before its last step; `resumable`: whether there is a saved state to go on from."""

    def __init__(self, what: str, *, resumable: bool = False, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.resumable = resumable

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it rather than something that went wrong."""
        return isinstance(self.__cause__ or self.__context__, KeyboardInterrupt)


class UnsupportedVersion(KlampError, ImportError):
    """A host library outside the version range that klamp was tested with."""


class MissingLibrary(UnsupportedVersion):
    """A library that is not installed; the message names the extra of klamp that brings it."""


class KLWarning(UserWarning):
    """Warns of a configuration that works, but may not do what its name suggests; the text says what to do instead.

    `warnings.simplefilter("error", klamp.KLWarning)` turns every such caution into an error.
    """


@dataclass(frozen=True)
class Refusal:
    """A row of a table of refusals: whether it applies, and the four parts of the `ConfigError` that it then is."""

    applies: bool
    what: str
    why: str
    fix: str
    got: object = None
    """The value that klamp received, if `what` does not name it."""


def refuse(rows: Iterable[Refusal]) -> None:
    """Raise a ConfigError with the text of the first row that applies."""
    for row in rows:
        if row.applies:
            raise ConfigError(row.what, got=row.got, why=row.why, fix=row.fix)


def check_name(kind: str, name: object, choices: Iterable[str | None]) -> None:
    """Refuse a name that is not in a table, see `unknown_name`; None among the names: it may be left out."""
    names = list(choices)
    if not (name is None or isinstance(name, str)) or name not in names:
        raise unknown_name(kind, name, filter(None, names))


def unknown_name(kind: str, name: object, choices: Iterable[str], *, why: str = "", fix: str = "") -> UnknownNameError:
    """The error for a name (a flag with its dashes) outside `choices`; proposes the nearest one, else `fix` or all."""
    names = sorted(choices)
    dashes, plain = "--" * str(name).startswith("--"), str(name).removeprefix("--")
    hint = f"{dashes}{HINTS.get(plain)}"
    nearest = [hint] if hint in names else get_close_matches(str(name), names, n=1, cutoff=0.5)
    fix = f"did you mean {nearest[0]!r}?" if nearest else fix or f"choose one of: {', '.join(names)}"
    return UnknownNameError(f"unknown {kind}", got=brief(repr(name)), why=why or f"known: {', '.join(names)}", fix=fix)


def brief(text: str, longest: int = 200) -> str:
    """A text for a message, cut after so many characters."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def text_of(error: BaseException) -> str:
    """The type and the text of an error of somebody else's code, also of one whose text cannot be printed."""
    return traceback.format_exception_only(error)[-1].strip()


def missing_library(library: str, *, by: str, instead: str = "") -> MissingLibrary:
    """The error for a library that is not installed: `by` needs it, its extra brings it, `instead` would do as well."""
    extra, clone = extra_with(library), Path(__file__).parents[2]
    ours = f"-e '{clone}[{extra}]'" if (clone / "pyproject.toml").is_file() else f"'klamp[{extra}]'"
    brings = "klamp alone brings the KL layer and the commands verify, explain, audit, doctor and report"
    return MissingLibrary(
        f"{by} needs {library}, which is not installed",
        got=f"the environment {sys.prefix}",
        why=brings + (f"; {library} comes with klamp[{extra}]" if extra else ""),
        fix=f"pip install {ours if extra else library}" + (f", {instead}" if instead else ""),
    )


def extra_with(library: str) -> str | None:
    """The first extra of klamp that asks for a library, by the name of its package or module; None: no extra does."""
    try:
        declared = metadata.requires("klamp") or []
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return None
    name = re.sub("[-_.]+", "[-_.]+", library)  # as pip compares names
    asks = re.compile(rf"{name}(?![\w.-]).*extra == ['\"](?!dev['\"])([\w-]+)['\"]", re.IGNORECASE)
    return next((match[1] for match in map(asks.match, declared) if match), None)
