"""Every finding of `klamp.check` by its code: the table is findings.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from klamp.audit.verdict import Finding


@cache
def table() -> dict[str, dict[str, str]]:
    """Code -> level, sentence (what) and way out (fix)."""
    import yaml

    return yaml.safe_load((Path(__file__).parent / "findings.yaml").read_text(encoding="utf-8"))


def finding(code: str, **evidence: Any) -> Finding:
    """The finding of this code, its sentence filled with the evidence."""
    row = table()[code]
    what = row["what"].format_map(evidence)
    return Finding(code=code, level=row["level"], what=what, evidence=evidence, fix=row.get("fix", ""))  # type: ignore[arg-type]
