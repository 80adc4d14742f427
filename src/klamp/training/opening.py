"""Opens the folder of a run: chooses it, makes it and keeps every other run out of it until this one is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from klamp.training.config import TrainConfig
from klamp.training.folders import check_folder, make_folder
from klamp.training.lock import held
from klamp.training.peers import timeout_of
from klamp.training.setup import on_cpu


@contextmanager
def opened_folder(config: TrainConfig) -> Iterator[Path]:
    """The folder of the run, the same one for all processes; the main process holds its lock.

    Raises:
        RunFolderError: it holds another run, or one that is under way; or there is none to continue.
    """
    with ExitStack() as stack:
        chosen: list[str | Exception] = [""]
        if PartialState(cpu=on_cpu(config), timeout=timeout_of(config)).is_main_process:
            try:
                chosen[0] = str(stack.enter_context(_own(config)))
            except Exception as error:  # raised below on every process, so that none of them waits for the others
                chosen[0] = error
        broadcast_object_list(chosen)
        if isinstance(chosen[0], Exception):
            raise chosen[0]
        yield Path(chosen[0])


@contextmanager
def _own(config: TrainConfig) -> Iterator[Path]:
    folder, made = make_folder(config)
    try:
        with held(folder, by="klamp train"):
            check_folder(folder, resume=config.run.resume)  # another run may have been here since it was made
            yield folder
    finally:
        if made:
            with suppress(OSError):  # it goes if the run was refused before it wrote anything
                folder.rmdir()
