"""The file that --output names: what is written over, what is refused, and the words for what the system refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from klamp.cli.output_file import LOOKED_AT, check_output, write_output
from klamp.errors import RunFolderError


def checked(file: Path) -> None:
    check_output(file, example="mine.txt", refused="it is none of ours", is_one=lambda text: text.startswith("# ours"))


def test_one_of_its_kind_and_a_new_one_may_be_written(tmp_path: Path) -> None:
    checked(tmp_path / "new.txt")
    (tmp_path / "old.txt").write_text("# ours\nand more\n")
    checked(tmp_path / "old.txt")


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/such/new.txt", "the folder of --output does not exist"), ("", "--output names a folder")],
)
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        checked(tmp_path / name)


@pytest.mark.parametrize("content", [b"letters to my aunt", b"\xff\xfe", b" " * LOOKED_AT + b"# ours"])
def test_a_file_of_another_kind_stays(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "aunt.txt"
    file.write_bytes(content)
    with pytest.raises(RunFolderError, match="it is none of ours") as caught:
        checked(file)
    assert caught.value.got == str(file) and file.read_bytes() == content


def test_what_the_system_refuses_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="the text cannot be written"):
        write_output(tmp_path, "x", what="the text")
    write_output(tmp_path / "new.txt", "é\n", what="the text")
    assert (tmp_path / "new.txt").read_bytes() == "é\n".encode()
