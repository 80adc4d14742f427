"""Whether a model's weights are all from its files: a loader fills with random numbers what is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from klamp.errors import ModelError, brief


def check_whole(found: Mapping[str, Iterable[str]], *, folder: str, spare: bool = True) -> None:
    """Refuse weights that are not all those of the model, once a loader has told which are not.

    Args:
        found: as transformers has it: under `missing_keys` the model's tensors that are not in the files (what is tied
            to another one, or computed, is none), under `unexpected_keys` those that the model has no place for.
        folder: where the files lie, or their hub id.
        spare: whether a file may hold those, as of a head that the model does not use.

    Raises:
        ModelError: names the tensors.
    """
    lacks, left = (sorted(found.get(name, ())) for name in ("missing_keys", "unexpected_keys"))
    if lacks or (left and not spare):
        parts = {"missing": lacks, "without a place in the model": left}
        told = (f"{what}: {brief(', '.join(names))}" for what, names in parts.items() if names)
        raise ModelError(
            "the weights are not those of the model",
            got="; ".join((folder, *told)),
            why="a missing tensor would be random numbers, trained and measured as if they were the model's",
            fix="get the whole folder again; a tensor under another name has to have the one that the model gives it",
        )
