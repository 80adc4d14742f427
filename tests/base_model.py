"""The built-in base model, taught at most once per checkout, however many workers ask: `python -m tests.base_model`."""

from pathlib import Path

from filelock import FileLock

from klamp.lab.tasks.arithmetic import base_model_folder, load_base_model


def taught() -> Path:
    folder = base_model_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        load_base_model()
    return folder


if __name__ == "__main__":
    taught()
