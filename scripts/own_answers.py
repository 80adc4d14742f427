"""Writes klamp/tasks/words/own-answers.tsv: what SmolLM2-135M-Instruct answers greedily to general questions.

The task `describe` reads them again and again to see whether a policy still finds them likely. Run it again when the
questions change: `.venv/bin/python scripts/own_answers.py`. The first sentence of an answer is kept; an answer without
a whole one, or of fewer than three words, is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from klamp.tasks import TaskConfig
from klamp.tasks.prompts import prompt_text
from klamp.training.models import load_model, load_tokenizer
from klamp.training.sampling import encode_prompts

WORDS = Path(__file__).resolve().parents[1] / "src" / "klamp" / "tasks" / "words"
LONGEST = 48
"""Tokens of an answer."""
SENTENCE = re.compile(r"(?:[^\s]+[ ]){2,}?[^\s]*[.!?](?=\s|$)")
"""Three words or more on one line, up to the end of a sentence."""


def main() -> None:
    """Ask every question and write the answers that end."""
    model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
    questions = (WORDS / "questions.txt").read_text(encoding="utf-8").splitlines()
    config = TaskConfig(task="describe")
    prompts = [prompt_text(question, config, tokenizer, where=question) for question in questions]
    rows = []
    for first in range(0, len(prompts), 32):
        ids, mask = encode_prompts(prompts[first : first + 32], tokenizer, torch.device("cpu"))
        found = model.generate(ids, attention_mask=mask, max_new_tokens=LONGEST, do_sample=False)
        for question, row in zip(questions[first:], found[:, ids.shape[1] :], strict=False):
            text = tokenizer.decode(row, skip_special_tokens=True).strip()
            sentence = SENTENCE.match(text)
            print(question, "->", sentence[0] if sentence else f"(left out) {text}")
            if sentence:
                rows.append(f"{question}\t{sentence[0]}")
    (WORDS / "own-answers.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
