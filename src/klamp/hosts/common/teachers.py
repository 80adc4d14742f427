"""What every loop with a teacher has to know of it: its KL at each prefix, its prompt, whether its tokens are ours."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from klamp.config.teacher import TeacherConfig
from klamp.errors import DataError, KLWarning, ModelError
from klamp.scoring.model_parts import PrefixKL


def prefix_kl(config: TeacherConfig) -> PrefixKL | None:
    """The KL that is summed at each prefix; None where the sampled token's log-ratio is all that it needs."""
    if config.teacher_estimator not in ("exact", "topk"):
        return None
    return PrefixKL(
        direction=config.teacher_direction,
        top_k=config.head_size,
        head=config.teacher_head,
        tail=config.teacher_tail,
    )


def no_prompt(column: str, given: Collection[str]) -> DataError:
    """The error for a row of the data that does not say what the teacher sees."""
    return DataError(
        f"a prompt has no {column!r} for the teacher",
        got=f"the columns {', '.join(sorted(given)) or 'none'}",
        why="teacher_prompt names the column with the prompt that the teacher sees",
        fix="name a column of the data, or leave teacher_prompt out",
    )


def check_tokens(theirs: Any, ours: Any, *, name: str, who: str = "teacher") -> None:
    """Refuse an anchor whose tokenizer gives other ids to the policy's tokens; warn of another end, or of no tokenizer.

    Args:
        theirs: the anchor's tokenizer; None: it has none.
        ours: the policy's.
        name: of the anchor.
        who: what it is.

    Raises:
        ModelError: its ids are others.
    """
    if theirs is None:
        text = f"The {who} {name} has no tokenizer beside it: whether its token ids are the policy's is not known."
        warnings.warn(text, KLWarning, stacklevel=2)
        return
    own, other = ours.get_vocab(), theirs.get_vocab()
    if wrong := sorted(token for token, i in own.items() if other.get(token) != i):
        raise ModelError(
            f"the {who} has another tokenizer than the policy",
            got=f"{len(wrong)} of {len(own)} tokens have another id at {name}, the first {wrong[0]!r}",
            why="log-probabilities of the same token ids would speak of different tokens",
            fix=f"use a {who} of the same model family; methods that align two tokenizers (GOLD, ULD) are not klamp's",
        )
    if ours.eos_token_id != theirs.eos_token_id:
        warnings.warn(
            f"The {who} ends an answer with {theirs.eos_token!r} and the policy with {ours.eos_token!r}: the {who} "
            "may pull the policy's end away, and answers then grow until they are cut. Give both the same end token.",
            KLWarning,
            stacklevel=2,
        )
