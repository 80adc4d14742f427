"""Records: what is written, what the tables and verdicts say, and that committed records and page belong together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks import made_up

from benchmarks import exact, gpu, head_cases, heads, overhead, page, scale, step
from benchmarks.__main__ import BENCHMARKS
from benchmarks.records import RESULTS, highest_load, markdown, newest, save, table, verdict

pytestmark = pytest.mark.slow


RECORDED = [name for name in BENCHMARKS if newest(name) is not None]


def record(name: str, *, quick: bool = False, date: str = "2026-11-21") -> dict[str, Any]:
    """The newest committed record of a benchmark, as of another run."""
    found = newest(name)
    assert found is not None
    return found | {"date": date, "command": f"python -m benchmarks {name}" + (" --quick" if quick else "")}


def keep(name: str, folder: Path, *, quick: bool = False, date: str = "2026-11-21") -> None:
    """A record in a folder, without its picture."""
    save(record(name, quick=quick, date=date), replace(BENCHMARKS[name], plot=None), folder)


@pytest.mark.parametrize("name", RECORDED)
def test_a_record_is_written_as_json_markdown_and_picture(name: str, tmp_path: Path) -> None:
    given = record(name)
    files = save(given, BENCHMARKS[name], tmp_path)
    assert files[0].name == f"{name}_cpu2_202611.json"
    assert json.loads(files[0].read_text()) == given
    text = files[1].read_text()
    assert f"`python -m benchmarks {name} --record`, {given['threads']} threads, on " in text and ", 2 cores" in text
    if BENCHMARKS[name].plot is not None:
        assert f"]({name}_cpu2_202611.png)" in text
        assert files[2].read_bytes().startswith(b"\x89PNG") and files[2].stat().st_size > 10_000


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_markdown_is_that_of_its_record(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    if "benchmark" not in found:
        pytest.skip("a record from before they named their benchmark")
    expected = markdown(found, BENCHMARKS[found["benchmark"]])
    assert file.with_suffix(".md").read_text(encoding="utf-8") == expected, (
        f"run: python -m benchmarks {found['benchmark']} --render benchmarks/results/{file.name}"
    )


def test_the_committed_page_is_that_of_the_records() -> None:
    expected = page.docs_page(list(BENCHMARKS.values()))
    assert page.PAGE.read_text(encoding="utf-8") == expected, "run: python -m benchmarks page"
    readme = page.README.read_text(encoding="utf-8")
    if page.BEGIN in readme:
        assert readme == page.with_part(readme, page.readme_part()), "run: python -m benchmarks page"


def test_every_case_of_a_head_is_in_the_table_with_its_ratio() -> None:
    results = made_up.head_results({"linear_logprobs": 1.3, "naive kl": 3.0, "products, frozen head": 0.5})
    text = heads.text(results)
    assert set(heads.CASES) == set(head_cases.CASES) - {gpu.TILES}
    assert "| float32 | `linear_logprobs` | 1024 | 1.30 (0.65 to 2.60) | 2.60 | 1.30× | 100 |" in text
    assert "| float32 | `linear_logprobs`, frozen head | 1024 | 1.00 (0.50 to 2.00) | 2.00 | 2.00× | 100 |" in text
    assert "| float32 | naive kl | 512 | 3.00 (1.50 to 6.00) | 6.00 | 6.00× | 100 |" in text
    assert "- float32: `linear_logprobs` over the products alone: 1.30 (target at most 1.25: **missed**)" in text
    assert "- bfloat16: `linear_logprobs` over the products alone: 1.30 (target at most 2.00: met)" in text
    assert "- float32: `linear_kl` over `linear_logprobs`: 0.77 (target at most 1.60: met)" in text


def test_a_head_is_compared_with_the_best_of_trl_and_liger() -> None:
    results = made_up.head_results({"TRL": 4.0, "Liger, log-probabilities": 0.5, "Liger, GRPO loss": 3.0})
    assert "those of the best of TRL and Liger (Liger, log-probabilities): 2.00 (target at most" in heads.text(results)


def test_throughput_and_its_targets() -> None:
    text = step.text(made_up.whole_steps())
    assert "| 3M | 8 | klamp train | 1.00 (0.50 to 2.00) | 1,024 | 2.00× | 1.25× | 2.00 | 50 |" in text
    assert "- 3M, prompts of 8: klamp's throughput over TRL's: 2.00 (target at least 1.30: met)" in text
    assert "- 3M, prompts of 512: klamp's throughput over TRL's: 2.00 (target at least 2.50: **missed**)" in text
    assert "- 3M, prompts of 8: klamp's seconds over the products alone: 1.25 (target at most 1.40: met)" in text
    assert "- 3M, prompts of 8: fast_scoring in TRL, throughput over TRL's: 1.60 (target at least 1.40: met)" in text


def test_an_old_record_of_steps_has_no_floor() -> None:
    results = made_up.whole_steps()
    results["runs"] = [run for run in results["runs"] if run["trainer"] in ("trl", "klamp")]
    text = step.text(results)
    assert "| 3M | 8 | klamp train | 1.00 (0.50 to 2.00) | 1,024 | 2.00× |  | 2.00 | 50 |" in text
    assert "products alone:" not in text and "fast_scoring" not in text


def test_the_cost_of_the_kl_is_the_difference_within_a_round() -> None:
    results = made_up.step_results(kl=(0.3, 0.4))
    text = overhead.text(results)
    assert "| 1.00 (0.50 to 2.00) | 0.70 (0.35 to 1.40) | +0.300 (+43%) | +0.30, +0.60, +0.15 | +0.600 | +0 |" in text
    assert "klamp's overhead over TRL's, seconds: 0.75 (target at most 0.67: **missed**); 95 % interval 0.75 to" in text
    assert "CPU seconds: 0.75" in text
    for seen in results["runs"]:  # a drift of the machine that both steps of a round share
        seen["seconds"] = [s + 100 * i for i, s in enumerate(seen["seconds"])]
    assert all(f"{row['seconds'][1]:.1f}" in ("0.6", "0.8") for row in overhead.costs(results))


def test_the_interval_of_a_ratio_is_that_of_its_rounds() -> None:
    own, other = [1.0, 2.0, 3.0] * 10, [2.0, 4.0, 6.0] * 10
    assert overhead.ratio(own, other) == pytest.approx((0.5, 0.5, 0.5))
    value, low, high = overhead.ratio(own, list(reversed(other)))
    assert (value, low < 0.5 < high) == (0.5, True)


def test_growth_is_the_exponent_at_the_upper_end() -> None:
    points = [{"x": x, "seconds": [float(y)], "extra_mib": 7.0} for x, y in ((1, 5), (10, 1), (40, 16))]
    assert scale.exponent(points, "seconds") == pytest.approx(2.0)
    assert scale.exponent(points, "extra_mib") == 0.0


def test_the_kl_is_held_against_the_log_probabilities_of_the_same_rows() -> None:
    results = record("exact")["results"]
    for point in results["points"]:
        slower = {"linear_kl": 1.7, "linear_logprobs": 1.0}.get(point["case"])
        point["seconds"] = [slower or seconds for seconds in point["seconds"]]
    found = exact.text(results)
    assert "- `linear_kl` over `linear_logprobs`, N = 512: 1.70 (target at most 1.60: **missed**)" in found
    assert "| 1.70× |" in found


def test_the_newest_whole_record_counts(tmp_path: Path) -> None:
    for date, quick in (("2026-10-02", False), ("2026-11-01", False), ("2026-12-01", True)):
        keep("heads", tmp_path, quick=quick, date=date)
    found = newest("heads", tmp_path)
    assert found is not None and found["date"] == "2026-11-01"
    assert newest("step", tmp_path) is None


def test_the_readme_shows_steps_and_the_cost_of_the_kl(tmp_path: Path) -> None:
    part = page.readme_part()
    assert "| 3M parameters, prompts of 8 |" in part and part.count(" s |") >= 2
    readme = f"# x\n\n{page.BEGIN}\nold\n{page.END}\n\nafter\n"
    assert page.with_part(readme, part) == f"# x\n\n{page.BEGIN}\n\n{part}\n\n{page.END}\n\nafter\n"
    assert page.readme_part(tmp_path) == ""


def test_the_page_shows_every_record_and_demotes_its_headings(tmp_path: Path) -> None:
    found = page.docs_page(list(BENCHMARKS.values()))
    assert all((f"\n## {each.title}\n" in found) == (name in RECORDED) for name, each in BENCHMARKS.items())
    assert "\n### Heads against the tokens N\n" in found and "\n## Heads against" not in found


def test_verdicts_and_tables() -> None:
    assert verdict("x", 1.3, 1.3, at_least=True) == "- x: 1.30 (target at least 1.30: met)"
    assert verdict("x", 1.31, 1.3) == "- x: 1.31 (target at most 1.30: **missed**)"
    assert table(("a", "b"), [(1, "c")]) == "| a | b |\n| --- | --- |\n| 1 | c |"
    assert highest_load({"a": [{"load": 1.0}, {"b": {"load": 3.0}}], "load": 2}) == 3.0
