"""Names of models: folders, checkpoints of klamp's, ids of the hub; and whether the hub can be asked at all."""

from __future__ import annotations

import re
from pathlib import Path

from klamp.errors import ModelError
from klamp.hosts.common.policy_folder import policy_folder
from klamp.training.folders import checkpoint_folders

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WAIT = 5.0
"""Seconds that the hub has to answer; its own libraries try for most of a minute."""


def weights_folder(spec: str) -> str:
    """The folder of the weights where a checkpoint of klamp's is named; any other name as it is.

    Args:
        spec: a folder, or a hub id.

    Raises:
        ModelError: the folder holds an adapter alone, or a whole run.
    """
    given = Path(spec).expanduser()
    if not given.is_dir() or (given / "config.json").exists():
        return spec if not given.is_dir() else str(given)
    folder = Path(policy_folder(str(given)))
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ModelError(
            "the folder holds a LoRA adapter, not a model",
            got=spec,
            why="an adapter is trained further by the run that it belongs to, and is no model by itself",
            fix="continue that run with --resume, or merge it first: peft.AutoPeftModelForCausalLM.from_pretrained("
            f"{str(folder)!r}).merge_and_unload().save_pretrained(FOLDER), with --tokenizer {folder}",
        )
    if checkpoints := checkpoint_folders(given):
        raise ModelError(
            "the folder holds a run, not a model",
            got=spec,
            why="each of its checkpoints is a model of its own",
            fix=f"name one of them; the newest is {checkpoints[-1]}",
        )
    return str(folder)


def unreachable() -> str:
    """Why the hub cannot be asked for a model; empty: it answers."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so that nobody asks"
    try:
        get_session().head(constants.ENDPOINT, timeout=WAIT)
    except Exception as error:  # that of requests or of httpx, as the version has it
        return f"{constants.ENDPOINT} does not answer: {type(error).__name__}: {str(error)[:200]}"
    return ""


def loadable(spec: str, what: str) -> str:
    """What a loader can be given for a name: a folder, or an id of a hub that answers.

    Where the hub does not answer, the folder of its cache stands for the id: a loader would try for most of a minute.

    Args:
        spec: a folder or a hub id.
        what: what is looked for, for the error.

    Raises:
        ModelError: there is no such folder, and no such id either, or none that could be had.
    """
    if Path(spec).is_dir():
        return spec
    if Path(spec).exists():
        raise ModelError(f"{spec} is no folder", why=f"{what} is a folder or a hub id", fix="pass the folder")
    if not HUB_ID.fullmatch(spec):
        raise ModelError(
            f"cannot load {what}",
            got=spec,
            why="there is no folder of that name, and an id of the hub reads OWNER/NAME",
            fix="check the path; a relative one starts at the working directory",
        )
    silent = unreachable()
    return _cached(spec, what, silent) if silent else spec


def _cached(spec: str, what: str, silent: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(spec, local_files_only=True)
    except Exception as error:  # a dozen types; all mean that there is no copy
        raise ModelError(
            f"cannot load {what}: the hub cannot be reached",
            got=spec,
            why=f"there is no folder of that name, nor a copy in the hub's cache; {silent}",
            fix="pass a folder, or go online (a mirror: HF_ENDPOINT=https://...); builtin and smollm2 need no hub",
        ) from error
