"""`python -m benchmarks heads|references [--json] [--quick]`"""

from __future__ import annotations

import argparse

from benchmarks import heads, references

BENCHMARKS = {"heads": heads.main, "references": references.main}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="smaller sizes; ends within a minute")
    given = parser.parse_args()
    BENCHMARKS[given.name](as_json=given.json, quick=given.quick)


if __name__ == "__main__":
    main()
