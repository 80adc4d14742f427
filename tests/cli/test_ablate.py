"""klamp ablate: the plan and the runs; with --runs, the comparison of runs that are there."""

import json
import re
from pathlib import Path

import pytest
from tests.ablation.outcomes import sweep
from tests.cli.fake_trainer import write_files
from tests.training.conftest import TINY, llama, stored, tiny_llama  # noqa: F401  (llama: a fixture)

from klamp.cli import ablate, main
from klamp.cli.ablate import DEFAULTS, parse_ablate, summary_lines
from klamp.config import PRESETS
from klamp.errors import ConfigError, TrainingStopped
from klamp.lab.ablate import results
from klamp.lab.ablate.plan import Arm, plan_text, run_folder, runs
from klamp.lab.ablate.results import Outcome, summarise, write_outcome
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig


class Fake:
    """Leaves outcomes that look like runs'; fails one, or stops."""

    def __init__(self, *, fail: str = "", stop: bool = False) -> None:
        self.fail, self.stop, self.ran = fail, stop, []

    def describe(self) -> str:
        return "nowhere"

    def run(self, runs, folder, tell) -> None:
        for run in runs:
            if self.stop:
                raise TrainingStopped("the ablation was stopped", got="an interrupt") from KeyboardInterrupt()
            self.ran.append(run.name)
            tell(run, None)
            beta = run.config.kl.beta
            ids = {"run": run.name, "arm": run.arm.name, "seed": run.seed, "values": run.arm.values}
            if self.fail == run.name:
                outcome = Outcome(**ids, state="failed", error="it broke\n  why: it was bad\nlog: there/log.txt")
            else:
                numbers = {"reward": 0.5, "kl/reverse": 0.1 - beta, "kl/reverse_sequence": 0.4, "length": 4.0}
                scores = {"addition": 0.7, "reversal": 0.9}
                after = {"addition": 0.8 + 0.01 * run.seed, "reversal": 0.85 + beta}
                outcome = Outcome(**ids, rl_skill="addition", before=scores, after=after, numbers=numbers)
            own = run_folder(folder, run)
            own.mkdir(parents=True, exist_ok=True)
            write_outcome(own, outcome)
            tell(run, outcome)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    stored(tiny_llama(), tmp_path / "tiny")

    def put(executor: Fake, *, draw: bool = False) -> Fake:
        monkeypatch.setattr(ablate, "_executor", lambda options, every: executor)
        if not draw:  # pictures take their time
            monkeypatch.setattr(results, "draw_frontier", lambda outcomes: None)
        return executor

    return put


FLAGS = ["--model", "tiny", "--beta", "0", "0.05", "--seeds", "2", "--max_steps", "2", "--eval_size", "2"]


def test_from_start_to_table(use, capsys) -> None:
    use(Fake(), draw=True)
    assert main(["ablate", *FLAGS]) == 0
    out = capsys.readouterr().out
    order = ["2 arms x 2 seeds in runs/ablation-beta-001; nowhere", "beta=0, seed 0: started"]
    order += ["[1/4 ended] beta=0, seed 0: done"]
    positions = [out.index(part) for part in [*order, "means over seeds", "table.md, table.json, frontier.png"]]
    assert positions == sorted(positions) and "\x1b" not in out
    row = next(line for line in out.splitlines() if line.strip().startswith("beta=0.05  2"))
    assert "0.805" in row
    folder = Path("runs/ablation-beta-001")
    assert {"plan.yaml", "table.md", "table.json", "frontier.png", "runs"} <= {file.name for file in folder.iterdir()}
    assert out.endswith(f"report {folder}\n")


def test_the_same_command_again_does_what_is_left(use, capsys) -> None:
    fake = use(Fake(fail="beta-0.05_seed-0"))
    assert main(["ablate", *FLAGS]) == 1, "a run failed"
    captured = capsys.readouterr()
    assert "failed: beta=0.05, seed 0: it broke\n  why: it was bad\nlog: there/log.txt" in captured.out
    assert "1, 1 failed" in captured.out
    command = next(line for line in captured.out.splitlines() if line.strip().startswith("try again"))
    assert " ".join(FLAGS) in " ".join(captured.out.split()) and "ablate --model tiny" in command
    assert len(fake.ran) == 4
    same = ["--output_dir", "runs/ablation-beta-001"]
    for left in (["beta-0.05_seed-0"], []):
        again = use(Fake())
        assert main(["ablate", *FLAGS, *same]) == 0 and again.ran == left
    assert list(Path("runs").iterdir()) == [Path("runs/ablation-beta-001")]
    assert capsys.readouterr().out.count("means over seeds") == 2, "the table is shown all the same"
    assert main(["ablate", *FLAGS, *same, "--learning_rate", "1e-3"]) == 1
    assert "holds another ablation" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(use, capsys) -> None:
    use(Fake(stop=True))
    assert main(["ablate", *FLAGS]) == 130
    captured = capsys.readouterr()
    assert "klamp: stopped: the ablation was stopped" in captured.err and "means over seeds" not in captured.out
    assert captured.err.rstrip().endswith(f"ablate {' '.join(FLAGS)} --output_dir runs/ablation-beta-001")


def test_a_dry_run_prints_a_plan_that_can_be_run_and_does_nothing(use, capsys) -> None:
    fake = use(Fake())
    words = [*FLAGS, "--kl_clip_method", "none", "hard"]
    assert main(["ablate", *words, "--dry_run"]) == 0
    first, count, where, plan = capsys.readouterr().out.replace("\n\n", "\n", 1).split("\n", 3)
    assert "nothing is started" in first and where == "nowhere"
    assert count == "4 arms x 2 seeds in runs/ablation-beta-kl_clip_method-001, 0 of 8 done; 16 steps"
    assert not fake.ran and not Path("runs").exists()
    Path("plan.yaml").write_text(plan)
    assert plan_of("--plan plan.yaml") == plan_of(" ".join(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kl_placement loss reward", "the arm 'kl_placement=reward'"),
        ("--reference frozen adapter_off", "the arm 'reference=adapter_off'"),
        ("--kl_controller fixed step", "needs target_kl"),
        ("--beta -1 0", "beta must be a number >= 0"),
        ("--backend local trl --model tiny", "klamp's own loop only"),
    ],
)
def test_bad_combinations_are_refused_before_any_work(use, capsys, words, said) -> None:
    fake = use(Fake())
    for more in ([], ["--dry_run"]):
        assert main(["ablate", *words.split(), *more]) == 2
        err = capsys.readouterr().err
        assert said in err and "fix:" in err
    assert not fake.ran and not Path("runs").exists()


@pytest.mark.slow
def test_from_runs_to_table_pictures_and_lines(llama, tmp_path, monkeypatch, capsys) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    names = ["output_beta_0.0", "output_beta_0.05"]
    for name in names:
        values = {"model": llama, **TINY, "eval_size": 3, "max_steps": 2, "beta": float(name.rpartition("_")[2])}
        train_run(TrainConfig.from_flat({**values, "output_dir": name}))
    assert main(["ablate", "--runs", *names]) == 0
    out = capsys.readouterr().out
    order = ["2 runs are compared in runs/comparison-001; nothing is trained", "measuring beta-0_seed-0"]
    order += ["means over seeds", "frontier.png", "beta=0: Acc="]
    positions = [out.index(part) for part in order]
    assert positions == sorted(positions)
    folder = Path("runs/comparison-001")
    table = json.loads((folder / "table.json").read_text())
    assert [arm["arm"] for arm in table["rows"]] == ["beta=0", "beta=0.05"]
    accuracy, kl, kept = (table["rows"][1]["cells"][x]["mean"] for x in ("rl/after", "kl/reverse", "retained/after"))
    line = next(line for line in out.splitlines() if line.startswith("beta=0.05: "))
    assert line == f"beta=0.05: Acc={accuracy:.1%}, KL={kl:.4g}, retention={kept:.1%}"


def test_the_lines_of_the_tutorial() -> None:
    lines = summary_lines(summarise(sweep([{"beta": 0.0}, {"beta": 0.1}], seeds=2)))
    assert [line.partition(":")[0] for line in lines] == ["beta=0.0", "beta=0.1"]
    assert all(", KL=" in line and line.count("%") == 2 for line in lines)


@pytest.mark.parametrize(("names", "said"), [(["run", "empty"], "empty"), (["run", "run"], "a run is named twice")])
def test_what_is_no_two_runs_is_refused(names, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(TrainConfig(), Path("run"))
    Path("empty").mkdir()
    assert main(["ablate", "--runs", *names]) == 1
    assert said in capsys.readouterr().err and not Path("runs").exists()


def plan_of(words: str):
    return parse_ablate(words.split())[0]


def test_several_values_are_swept_and_one_is_for_all() -> None:
    plan = plan_of("--beta 0 0.001 0.01 0.1 --seeds 3 --max-steps 5 --cpu --kl_estimator k1")
    assert [arm.values for arm in plan.arms] == [{"beta": b} for b in (0.0, 0.001, 0.01, 0.1)]
    assert plan.seeds == (0, 1, 2) and plan.name == "beta"
    assert plan.base == {**DEFAULTS, "max_steps": 5, "cpu": True, "kl_estimator": "k1"}
    assert len(runs(plan)) == 12 and runs(plan)[0].config.run.report_to == ()
    plan = plan_of("--kl-coef 0 0.1 --use_per_token_kl_threshold True False --kl_clip_method none hard soft")
    assert len(plan.arms) == 12 and plan.name == "beta-use_per_token_kl_threshold-kl_clip_method"
    assert plan.arms[-1].values == {"beta": 0.1, "use_per_token_kl_threshold": False, "kl_clip_method": "soft"}
    plan = plan_of("--beta 0 0.1 --kl_exclude_tokens special 3 --report_to tensorboard")
    assert len(plan.arms) == 2 and plan.base["kl_exclude_tokens"] == ("special", 3)
    assert plan.base["report_to"] == ("tensorboard",), "trackers are off only where nobody asks for them"


@pytest.mark.parametrize(
    ("words", "seeds"), [("", (0, 1, 2)), ("--seeds 5", (0, 1, 2, 3, 4)), ("--seeds 5 7 11", (5, 7, 11))]
)
def test_one_number_of_seeds_is_how_many_several_are_those_and_one_arm_is_enough(words, seeds) -> None:
    plan = plan_of(f"--beta 0.1 {words}")
    assert plan.seeds == seeds and plan.name == "arithmetic"
    assert [(arm.name, arm.values) for arm in plan.arms] == [("base", {})]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--bta 0 1", "--beta"),
        ("--seed 1", "--seeds"),
        ("--beta 0 x", "--beta: 'x'"),
        ("--beta 0 1 --seeds 0", "seeds 0, 1 and 2"),
        ("--beta 0 1 --workers 0", "1 or more"),
        ("--gpus_per_run 1", "--gpus_per_run has no meaning without --ray"),
        ("--ray local --workers 2", "--workers has no meaning with --ray"),
        ("--runs a b --beta 0 0.1", "--beta has no meaning with --runs"),
        ("--runs a b --dry_run", "--dry_run has no meaning with --runs"),
        ("--plan nowhere.yaml", "cannot be read"),
        ("--preset nothing", "unknown preset"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, said) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_ablate(words.split())
    assert said in str(caught.value)


def test_presets_are_for_all_arms_or_swept_and_give_way_to_flags(tmp_path) -> None:
    """Of a recipe in the base nothing is left in an arm with its own."""
    plan = plan_of("--preset dr_grpo --beta 0 0.1 --kl_estimator k1")
    (off, on) = (run.config for run in runs(plan)[:2])
    assert on.loss == PRESETS["dr_grpo"].loss and (off.kl.beta, on.kl.beta) == (0, 0.1)
    assert on.kl.kl_estimator == "k1"
    for run in runs(plan_of("--preset grpo dr_grpo recommended --max_steps 7"))[:3]:
        preset = PRESETS[run.arm.name.partition("=")[2]]
        assert (run.config.kl, run.config.loss, run.config.run.max_steps) == (preset.kl, preset.loss, 7)
    file = write(tmp_path, "base: {preset: dr_grpo}\narms: {a: {}, b: {preset: grpo}, c: {preset: grpo, beta: 0.7}}\n")
    a, b, c = (run.config for run in runs(plan_of(f"--plan {file}"))[:3])
    assert (a.loss, b.loss, c.loss) == (PRESETS["dr_grpo"].loss, PRESETS["grpo"].loss, PRESETS["grpo"].loss)
    assert b.kl == PRESETS["grpo"].kl and c.kl.beta == 0.7


def write(folder: Path, text: str, name: str = "plan.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_plan_file_with_flags_over_it_and_a_configuration_below(tmp_path) -> None:
    text = "name: mine\nbase: {kl: {beta: 0.2}, max-steps: 9}\nseeds: [4, 5]\nkl_prompts: 12\n"
    text += "arms: {free: , hard clip: {kl: {kl_clip_method: hard}, kl_clip_threshold: 0.05}}\n"
    file = write(tmp_path, text)
    plan = plan_of(f"--plan {file}")
    values = {"kl_clip_method": "hard", "kl_clip_threshold": 0.05}
    assert plan.arms == (Arm(name="free"), Arm(name="hard clip", values=values))
    assert (plan.name, plan.seeds, plan.kl_prompts) == ("mine", (4, 5), 12)
    assert plan.base == {**DEFAULTS, "beta": 0.2, "max_steps": 9}
    over = plan_of(f"--plan {file} --max_steps 3 --seeds 1")
    assert over.base == {**DEFAULTS, "beta": 0.2, "max_steps": 3} and over.seeds == (0,)
    text = "max_steps: 1\nnum_generations: 4\npreset: dapo\nseed: 9\noutput_dir: there\n"
    config = write(tmp_path, text, "config.yaml")
    below = plan_of(f"--plan {file} --config {config}")
    assert (below.base["max_steps"], below.base["num_generations"]) == (9, 4)
    assert runs(below)[0].config.loss == PRESETS["dapo"].loss and runs(below)[0].config.run.seed == 4
    with pytest.raises(ConfigError, match="named arms cannot also sweep"):
        plan_of(f"--plan {file} --beta 0.1 0.3")
    with pytest.raises(ConfigError, match="--kl_clip_method has no effect"):
        plan_of(f"--plan {write(tmp_path, 'arms: {a: {kl_clip_method: none}}')} --kl_clip_method soft")
    swept = plan_of(f"--plan {write(tmp_path, 'sweep: {beta: [0, 1], kl_estimator: [k1, k3]}')} --kl_estimator k2")
    assert [arm.name for arm in swept.arms] == ["beta=0", "beta=1"] and swept.base["kl_estimator"] == "k2"


def test_the_plan_that_an_ablation_writes_can_be_read(tmp_path) -> None:
    plan = plan_of("--beta 0 1e-05 --kl_exclude_tokens special --max_steps 3 --reward exact_match --seeds 2")
    (tmp_path / "plan.yaml").write_text(plan_text(plan))
    assert plan_of(f"--plan {tmp_path / 'plan.yaml'}") == plan


@pytest.mark.parametrize(
    "text",
    [
        *("arm: {}", "beta: 0.1", "base: {bta: 1}", "base: 3", "arms: [a, b]", "arms: {a: 3}"),
        *("arms: {a: {kl_estimator: k9}}", "sweep: {beta: [x]}", "sweep: {bta: [1]}", "kl_prompts: 0", "a: ["),
        *("seeds: 0", "seeds: [1, -2]", "seeds: true", "seeds: 1000000", "seeds: []"),
    ],
)
def test_what_is_wrong_in_a_plan_is_refused(tmp_path, text) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(f"--plan {write(tmp_path, text)}")
    assert re.search("seeds cannot|plan.yaml", f"{caught.value} {getattr(caught.value, '__notes__', '')}")
