"""What every loop with a teacher has to know of it: its KL at each prefix, its prompt, whether its tokens are ours."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from klamp.audit.pair import PROBE, check_pair
from klamp.config.teacher import TeacherConfig
from klamp.errors import DataError, KLWarning, ModelError
from klamp.scoring.model_parts import PrefixKL
from klamp.scoring.vllm_reference import Who


def prefix_kl(config: TeacherConfig) -> PrefixKL | None:
    """The KL that is summed at each prefix; None where the sampled token's log-ratio is all that it needs."""
    if config.teacher_estimator not in ("exact", "topk"):
        return None
    return PrefixKL(
        direction=config.teacher_direction, top_k=config.head_size, head=config.teacher_head, tail=config.teacher_tail
    )


def no_prompt(column: str, given: Collection[str]) -> DataError:
    """The error for a row of the data that does not say what the teacher sees."""
    return DataError(
        f"a prompt has no {column!r} for the teacher",
        got=f"the columns {', '.join(sorted(given)) or 'none'}",
        why="teacher_prompt names the column with the prompt that the teacher sees",
        fix="name a column of the data, or leave teacher_prompt out",
    )


def check_tokens(theirs: Any, ours: Any, *, name: str, who: Who = "teacher") -> None:
    """Refuse an anchor whose tokenizer gives other ids to the policy's tokens; warn of another end or chat template."""
    if theirs is None:
        text = f"The {who} {name} has no tokenizer beside it: whether its token ids are the policy's is not known."
        warnings.warn(text, KLWarning, stacklevel=2)
        return
    for finding in check_pair(ours, theirs, PROBE, who=who).findings:
        numbers = finding.evidence
        if finding.code in ("other-tokenizer", "extra-tokens") and numbers["tokens"]:  # a run may write any of them
            raise ModelError(
                f"the {who} has another tokenizer than the policy",
                got=f"{numbers['tokens']} of {numbers['of']} tokens have another id at {name}, the first "
                f"{numbers['first']!r}",
                why="log-probabilities of the same token ids would speak of different tokens",
                fix=finding.fix or f"use a {who} of the same model family",
            )
        if finding.code in ("end-id", "templates-differ"):
            fix = finding.fix if finding.code == "end-id" else "use a teacher with the policy's chat template"
            text = f"{finding.what[0].upper()}{finding.what[1:]}. For {name}: {fix}."
            warnings.warn(text, KLWarning, stacklevel=2)
