"""The studies: cells and pages of the target map, the arms of the language study."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from klamp.cli.ablate import parse_ablate
from klamp.lab.ablate.plan import runs
from studies import command
from studies.language import KL_PROMPTS, NO_KL, language_plan
from studies.target_map import MARK, RECORD, TARGETS, judged, read, share, text


def found(**changes: Any) -> dict[str, Any]:
    return {"in_band": 1.0, "last": 1.0, "moved": 1.1, **changes}


def test_a_seed_below_four_fifths_makes_its_cell_red_and_what_was_not_run_says_so() -> None:
    one, other = (f"{target:g}" for target in TARGETS)
    lines = text({(one, 42): found(), (one, 43): found(in_band=0.79), (other, 42): found(in_band=0.8)}).splitlines()
    signs = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in lines}
    assert (signs[one], signs[other], signs["0.02"]) == ("🟥 fails, 2 of 5 seeds", "🟩 held, 1 of 5 seeds", "not run")
    assert share(found(in_band=None, last=0.6)) == 0.0, "it ended outside of the band without reaching the target"


def test_a_run_is_judged_from_20_steps_after_it_first_reached_its_target() -> None:
    kl = [0.01] * 10 + [0.19] * 10 + [0.1] * 40
    run = judged(kl, [1.0] * 40 + [4.0] * 20, 0.1)
    assert (run["reached"], run["moved"], run["last_beta"]) == (10, 4.0, 4.0)
    assert run["peak"] == pytest.approx(1.9) and run["last"] == pytest.approx(1.0)
    # 9 of the 0.19 are in the mean at step 30, which is 1.405, then one less each: 1.27 at the fourth
    assert run["in_band"] == pytest.approx(27 / 30)
    never = judged([0.01] * 60, [1.0] * 60, 0.1)
    assert (never["reached"], never["in_band"], never["moved"]) == (None, None, None)


def test_the_page_is_what_the_record_says() -> None:
    page = RECORD.with_suffix(".md").read_text(encoding="utf-8")
    assert page.partition(MARK)[2].strip() == text(read(RECORD)), "run: python -m studies.target_map --cells"


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_arms_differ_in_the_kl_and_in_nothing_else() -> None:
    arms = {run.arm.name: run for run in runs(language_plan(seeds=(0,)))}
    settings = [run.config.flat() for run in arms.values()]
    differing = {name for one, other in combinations(settings, 2) for name in one if one[name] != other[name]}
    assert differing == {"beta", "kl_monitor", "kl_estimator", "kl_gradient"}
    assert {run.kl_prompts for run in arms.values()} == {KL_PROMPTS}
    control = arms[NO_KL.name].config.kl
    assert control.beta == 0 and control.needs_reference, "its KL is measured"


def test_the_plan_is_in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "klamp", lambda argv: asked.append(argv) or 0)
    code, folder = command.ablate(language_plan(), ["--seeds", "0", "1", "--workers", "2"])
    assert (code, folder) == (0, Path("runs/ablation-language-001"))
    plan = language_plan(seeds=(0, 1))
    assert parse_ablate(["--plan", str(folder / "plan.yaml")])[0] == plan
    assert asked == [["ablate", "--plan", f"{folder}/plan.yaml", "--output_dir", str(folder), "--workers", "2"]]
