"""Sends the local files that runs read to Ray workers: packed where the ablation starts, unpacked on the worker.

A run reads local files where its configuration names them: a model's or tokenizer's folder, a data file, a file with
a reward function, or the built-in base model in klamp's cache. Each is packed once, however many runs read it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from klamp.errors import DataError
from klamp.tasks import NAMED_MODELS, BaseModelConfig, base_model_folder, named_model_folder
from klamp.tasks.cache import cache_root, make_readable
from klamp.training.models import BUILTIN

FIELDS = ("model", "ref_model", "tokenizer", "task", "eval_split", "reward")
"""Fields of a run's configuration that may name local files."""
FOLDER = "shipped"
"""The folder in klamp's cache that files are unpacked into."""


class Packed(NamedTuple):
    """One file with its content."""

    name: str
    """The path relative to the folder, with forward slashes."""
    size: int
    """The size in bytes."""
    modified: int
    """The time of the last change, in nanoseconds."""
    content: Any
    """The content, as Ray's `put` returned it."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A packed folder or file."""

    path: str
    """The absolute path that it was packed from."""
    digest: str
    """The SHA-256 of names and contents."""
    single: bool
    """Whether it is a file and not a folder."""
    files: tuple[Packed, ...]
    """The files in it."""


Parcels = Mapping[str, Parcel]
"""Value of a field -> its parcel."""


def pack_all(configs: list[Mapping[str, Any]], put: Callable[[bytes], Any]) -> dict[str, Parcel]:
    """Pack every local file and folder that the configurations name, each once.

    Args:
        configs: flat configurations.
        put: takes the bytes of a file; what it returns travels in their place.
    """
    found: dict[str, Parcel] = {}
    for config in configs:
        for field in FIELDS:
            key, path = _local(config, field)
            if path is not None and key not in found:
                found[key] = pack(path, put)
    return found


def pack(path: Path, put: Callable[[bytes], Any]) -> Parcel:
    """Pack a file, or a folder with everything in it.

    Args:
        path: of it.
        put: as for `pack_all`.
    """
    top, single = path.absolute(), path.is_file()
    total, files = hashlib.sha256(), []
    for file in [top] if single else sorted(file for file in top.rglob("*") if file.is_file()):
        name = file.relative_to(top.parent if single else top).as_posix()
        content, state = file.read_bytes(), file.stat()
        total.update(f"{len(name)} {name} {len(content)} ".encode() + content)
        files.append(Packed(name, len(content), state.st_mtime_ns, put(content)))
    return Parcel(path=str(top), digest=total.hexdigest(), single=single, files=tuple(files))


def unpack_all(config: Mapping[str, Any], parcels: Parcels, fetch: Callable[[Any], bytes]) -> dict[str, Any]:
    """The configuration with paths of this machine; files that are not here are unpacked into klamp's cache.

    Args:
        config: a flat configuration.
        parcels: as packed where the ablation was started.
        fetch: gives the bytes back for what `put` returned.

    Raises:
        DataError: a parcel with a file outside its folder.
    """
    local = dict(config)
    for field in FIELDS:
        value = config.get(field)
        parcel = parcels.get(_key(config, field))
        if parcel is None or not value:
            continue
        made = _made_by_klamp(config, value)
        if made is not None:
            unpack(parcel, made, fetch)
            continue
        path = Path(parcel.path)
        if not is_here(parcel):
            path = cache_root() / FOLDER / parcel.digest / path.name
            unpack(parcel, path.parent if parcel.single else path, fetch)
        function = f":{value.rpartition(':')[2]}" if field == "reward" else ""
        local[field] = f"{path}{function}"
    return local


def is_here(parcel: Parcel) -> bool:
    """Whether this machine has the same files in the same place: equal names, sizes and times."""
    top = Path(parcel.path).parent if parcel.single else Path(parcel.path)
    try:
        found = [(top / file.name).stat() for file in parcel.files]
    except OSError:
        return False
    return all((s.st_size, s.st_mtime_ns) == (f.size, f.modified) for s, f in zip(found, parcel.files, strict=True))


def unpack(parcel: Parcel, folder: Path, fetch: Callable[[Any], bytes]) -> None:
    """Write a parcel's files into a folder, completely or not at all; nothing is done where the folder exists.

    Args:
        parcel: what to write.
        folder: where its files go.
        fetch: as for `unpack_all`.

    Raises:
        DataError: a file's name leads out of the folder.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for file in parcel.files:
            target = part / safe_name(file.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(fetch(file.content))
        make_readable(part)
        part.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another run was quicker
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def safe_name(name: str) -> PurePosixPath:
    """Check that a relative file name stays below the folder that it is joined to.

    Raises:
        DataError: it is absolute, empty, or leads out of its folder.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or re.search(r"[\\\0]|^[A-Za-z]:", name):
        raise DataError(
            "a file's name leads out of its folder",
            got=repr(name),
            why="files from another machine are written below one folder only",
            fix="check which cluster this is; klamp's own workers send plain relative names",
        )
    return path


def _key(config: Mapping[str, Any], field: str) -> str:
    """The key of a field's value."""
    return str(config.get(field) or "")


def _made_by_klamp(config: Mapping[str, Any], value: str) -> Path | None:
    """The folder of the cache that a model of klamp's own has; None for any other value."""
    if value == BUILTIN:
        return base_model_folder(BaseModelConfig())
    return named_model_folder(value) if value in NAMED_MODELS else None


def _local(config: Mapping[str, Any], field: str) -> tuple[str, Path | None]:
    """The key of a field's value with the local file or folder that it names; None where it names none."""
    value = str(config.get(field) or "")
    made = _made_by_klamp(config, value)
    if made is not None:
        return _key(config, field), made if made.is_dir() else None
    name = value.rpartition(":")[0] if field == "reward" else value
    path = Path(name).expanduser()
    there = bool(name) and (path.is_file() if field in ("task", "eval_split", "reward") else path.is_dir())
    return value, path if there else None
