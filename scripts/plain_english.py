"""Reports text of src/klamp and of the pages that is hard to read: `python -m scripts.plain_english`.

Reads docstrings, comments, string literals of three words or more, and the prose of the pages. Code, quotations in
backticks and generated records are left out. Exits with 1 if a pattern matches.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md")
PATTERNS = {
    r"\b(is|are|was|were) none\b": "has no X; there is no X",
    r"\bwhere (there )?(is|are) no\b": "if there is no X",
    r"\b(is|are) no \w+ of\b": "is not X of Y",
    r"\b(that|those) of\b": "name the thing again",
    r"(?<!one |any |all )(?<!none |some |each |both |most |many |part )\bof (it|them)\b": "name the thing",
    r"\bsuch (a one|ones|a \w+ (has|is|lacks))\b": "name the thing",
    r"\bthe same\b(?=[.,;:)]| as it| as they|$)": "name what is equal",
    r"\b(tells|told)\b": "reports, logs, warns, shows",
    r"\b(says|speaks?|spoke|said) of\b": "describes, names",
    r"\b(stands?|stood) (in|on|for|at|beside|there|above|below|under)\b": "is in, means, is listed in",
    r"\b(lies|lie|lay) (in|on|at|there|beside|above|below|under|between)\b": "is in, is between",
    r"\bcarries (?!are|(the|a|no) KL)": "has, contains",
    r"\bis heard\b|\bhears\b": "is read",
    r"\bknows\b": "reads, has",
    r"\bof (whom|whose)\b|\bin whose\b": "split the sentence",
    r"\bwhatever\b": "any",
    r"\b(has|have|had) not\b(?! (been|\w+ed\b|\w+en\b|yet|run|begun|come|read|put|left|got|had))": "lacks, has no X",
    r"\b(pulls|holds|knows|needs|reaches|gives|takes|moves|counts|matters|helps) not\b": "does not",
    r", nor\b|\bnor (is|has|does|are|was|can)\b": "and ... not",
    r"\bin the place of\b|\bin its place\b": "instead of X",
    r"\bfor ever\b|\bever after\b|\bhitherto\b|\bthereof\b|\bhenceforth\b|\bwherein\b|\bthereby\b": "plain word",
    r"\b(is|are) back\b|\bused to be\b|\bformerly\b|\bas before\b": "no history in text",
    r"\blet be\b|\bleft alone\b|\bas (it|they) (is|are)\b": "leaves X unchanged",
    r"\bwithout a word\b|\bby itself\b": "silently; alone",
    r"\bwhat (it|they|he) (is|are|was|were|has|have)\b(?= (of|not|in)\b)": "name the thing",
}
"""What is hard to read -> what to write instead."""


class Text(NamedTuple):
    """A piece of text that somebody reads."""

    file: Path
    line: int
    words: str


def texts_in_code(file: Path) -> Iterator[Text]:
    """Docstrings, messages and comments of a module."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            yield Text(file, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(file, token.start[0], token.string.lstrip("# "))


def texts_in_page(file: Path) -> Iterator[Text]:
    """The lines of a page outside its blocks of code."""
    is_code = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield Text(file, number, line)


def findings() -> Iterator[tuple[Text, str, str]]:
    """Every match: the text, what matched, what to write instead."""
    texts = [text for file in sorted((ROOT / "src").rglob("*.py")) for text in texts_in_code(file)]
    texts += [text for glob in PAGES for file in sorted(ROOT.glob(glob)) for text in texts_in_page(file)]
    texts += [
        Text(file, number, line)
        for file in sorted((ROOT / "src").rglob("*.yaml"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
    ]
    for text in texts:
        words = re.sub(r"`[^`]*`", "`x`", text.words)
        for pattern, advice in PATTERNS.items():
            for match in re.finditer(pattern, words, re.IGNORECASE):
                yield text, words[max(0, match.start() - 40) : match.end() + 30].replace("\n", " "), advice


def main() -> int:
    matches = list(findings())
    for text, words, advice in matches:
        print(f"{text.file.relative_to(ROOT)}:{text.line}: ...{words}...  ({advice})")
    if matches:
        print(f"{len(matches)} places are hard to read; write what the brackets say")
    return bool(matches)


if __name__ == "__main__":
    sys.exit(main())
