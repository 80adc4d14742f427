"""From argv and YAML to options and configurations: types, spellings, switches, files, presets, resumes."""

from pathlib import Path
from typing import Any

import pytest
from tests.reliability.drawn import BOMBS

from klamp.cli.arguments import parse_train, read_file
from klamp.cli.commands import fields_after, read_command
from klamp.cli.flags import configured_fields, read_argv
from klamp.config import ALIASES, PRESETS, TEACHER_ALIASES
from klamp.errors import ConfigError, UnknownNameError
from klamp.lab.config import TrainConfig, field_owners

DEMO = Path(__file__).resolve().parents[2] / "examples" / "config_demo.yaml"


def read_train(*argv: str) -> dict[str, Any]:
    return read_argv(fields_after("train"), argv, command="klamp train")


@pytest.fixture
def write(tmp_path: Path):
    def save(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return save


@pytest.mark.parametrize("name", sorted(configured_fields()))
def test_every_field_is_a_flag_in_both_spellings_and_its_default_survives_its_own_text(name: str) -> None:
    known = configured_fields()[name]
    words = [*map(str, known.default if isinstance(known.default, tuple) else (known.default,))]
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        (value,) = read_train(flag, *words).values()
        assert value == known.default and type(value) is type(known.default)


def test_the_fields_are_those_of_the_configuration() -> None:
    assert {name: field.section for name, field in configured_fields().items()} == field_owners()
    assert {name: field.default for name, field in configured_fields().items()} == TrainConfig().flat()
    assert [name for name, field in configured_fields().items() if len(field.text) < 10] == []


@pytest.mark.parametrize(("alias", "name"), (ALIASES | TEACHER_ALIASES).items())
def test_aliases_lead_to_their_field(alias: str, name: str) -> None:
    for flag in (f"--{alias}", f"--{alias.replace('_', '-')}"):
        assert [*read_train(flag, "2")] == [*read_train(f"{flag}=2")] == [name]


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        ("--learning_rate 1e-6 --beta 1", {"learning_rate": 1e-6, "beta": 1.0}),
        ("--kl_coef 0.1 --beta 0.2", {"beta": 0.2}),
        ("--target_kl none --scale_rewards none", {"target_kl": None, "scale_rewards": "none"}),
        ("--resume", {"resume": True}),
        ("--resume runs/a --no_cpu", {"resume": "runs/a", "cpu": False}),
        ("--kl-monitor --chat_template NO", {"kl_monitor": True, "chat_template": False}),
        ("--kl_monitor=0 --chat_template null", {"kl_monitor": False, "chat_template": None}),
        ("--kl_exclude_tokens 7 special --report-to", {"kl_exclude_tokens": (7, "special"), "report_to": ()}),
        ("--kl_controller_factors 2 0.5 1 1", {"kl_controller_factors": (2.0, 0.5, 1.0, 1.0)}),
        ("--report_to a --report_to b", {"report_to": ("a", "b")}),
        ("--system_prompt=--think --seed -1", {"system_prompt": "--think", "seed": -1}),
    ],
)
def test_values_are_typed_as_their_fields(argv: str, given: dict[str, Any]) -> None:
    assert read_train(*argv.split()) == given
    assert [*map(type, read_train(*argv.split()).values())] == [*map(type, given.values())]


def test_words_and_flags_of_a_command_come_in_any_order() -> None:
    for words in ("--json log --fail_on a b --map x=y", "log --map x=y --fail-on a --fail-on b --json"):
        options, rest = read_command("doctor", words.split())
        assert (options.path, options.json, options.fail_on, options.map) == (Path("log"), True, ("a", "b"), ("x=y",))
        assert rest == {}
    assert read_command("explain", ["--beta", "1", "a", "b"])[0].names == ("a", "b")


@pytest.mark.parametrize(
    ("command", "argv", "said"),
    [
        ("train", "--max_stepz 1", "did you mean '--max_steps'"),
        ("train", "--kl-bets 1", "did you mean '--kl_beta'"),
        ("train", "--no-resumee", "did you mean '--no_resume'"),
        ("train", "--lr 1", "did you mean '--learning_rate'"),
        ("train", "--batch-size 8", "did you mean '--prompts_per_step'"),
        ("train", "--qqqqqqqq", "`klamp train --help`"),
        ("train", "a.yml --seed 1", "'a.yml'"),
        ("train", "--beta x", "--beta: 'x' is no FLOAT"),
        ("train", "--beta", "expected one argument"),
        ("train", "--kl_estimator k9", "did you mean"),
        ("train", "--no_cpu=1", "--no_cpu"),
        ("doctor", "", "PATH"),
        ("doctor", "a --path b", "unknown flag"),
        ("doctor", "a --beta -3", "0 or more"),
        ("doctor", "a --beta nan", "0 or more"),
        ("evaluate", "--kl_prompts 3", "--checkpoint"),
        ("evaluate", "--checkpoint x --beta 0.1", "unknown flag"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(command: str, argv: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_command(command, argv.split())
    assert said in str(caught.value) and caught.value.fix


@pytest.mark.parametrize("beta", ["0.0", "0.01"])
def test_the_command_lines_of_the_grpo_tutorial(beta: str) -> None:
    argv = ["--config", str(DEMO), "--kl_penalty", beta, "--output_dir", f"output_beta_{beta}", "--max_steps", "5000"]
    config = parse_train(argv)[0]
    assert (config.kl.beta, config.kl.target_kl, config.run.max_steps) == (float(beta), 0.05, 5000)
    assert config.kl.controller_name == ("fixed" if beta == "0.0" else "hold"), "beta 0 means: without KL"
    assert read_file(DEMO) == {"beta": 0.01, "target_kl": 0.05}


def test_flags_win_over_the_file_and_the_file_over_the_preset(write) -> None:
    file = write("kl_gradient: reverse\nepsilon: 0.1\nmax_steps: 7\n")
    config = parse_train(["--preset", "grpo", "--config", str(file), "--epsilon", "0.3"])[0]
    assert config.kl.beta == PRESETS["grpo"].kl.beta == 0.04
    assert (config.kl.kl_gradient, config.loss.epsilon, config.run.max_steps) == ("reverse", 0.3, 7)
    file = write("preset: dapo\n")
    assert parse_train(["--config", str(file)])[0].loss.loss_type == "dapo"
    for name, preset in PRESETS.items():
        config = parse_train(["--config", str(file), "--preset", name])[0]
        assert (config.kl, config.loss) == (preset.kl, preset.loss), name
    with pytest.raises(UnknownNameError, match="dapo"):
        parse_train(["--preset", "dappo"])


def test_a_run_that_goes_on_is_as_it_was_but_for_what_is_named(write, monkeypatch) -> None:
    folder = write("beta: 0.3\nlearning_rate: 1e-5\noutput_dir: moved\nhistory: [{until: 2, beta: 0.1}]\n").parent
    (folder / "run.yaml").rename(folder / "config.yaml")
    config = parse_train(["--resume", str(folder), "--beta", ".5"])[0]
    assert (config.kl.beta, config.optim.learning_rate, config.run.resume) == (0.5, 1e-5, True)
    assert config.run.output_dir == str(folder)
    assert parse_train(["--beta", ".5", "--output_dir", str(folder), "--resume"])[0] == config
    monkeypatch.setenv("HOME", str(folder.parent))
    assert parse_train([f"--resume=~/{folder.name}", "--beta", ".5"])[0] == config
    with pytest.raises(ConfigError, match="two folders are named"):
        parse_train(["--resume", str(folder), "--output_dir", "other"])


def test_only_the_whole_is_checked_not_its_parts(write) -> None:
    """A controller without its target in the file is fine where the flags give the target."""
    file = write("kl_controller: proportional\n")
    with pytest.raises(ConfigError, match="needs target_kl"):
        parse_train(["--config", str(file)])
    assert parse_train(["--config", str(file), "--target_kl", "0.1"])[0].kl.controller_name == "proportional"


def test_a_file_is_read_as_flags_would_be(write) -> None:
    text = """
learning_rate: 1e-5        # YAML itself reads this as a text
max-steps: 500
kl: {beta: 1, kl_exclude_tokens: 7}
resume: yes
target_kl: null
report_to: [tensorboard, wandb]
kl_controller_factors: [2, 0.5, 1, 1]
system_prompt: "- be brief"
preset: grpo
"""
    assert read_file(write(text)) == {
        "learning_rate": 1e-5,
        "max_steps": 500,
        "beta": 1.0,
        "kl_exclude_tokens": (7,),
        "resume": True,
        "target_kl": None,
        "report_to": ("tensorboard", "wandb"),
        "kl_controller_factors": (2.0, 0.5, 1.0, 1.0),
        "system_prompt": "- be brief",
        "preset": "grpo",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: 3", "did you mean '--learning_rate'"),
        ("kl: {betta: 1}", "did you mean '--beta'"),
        ("dry_run: true", "unknown flag"),
        ("config: a", "unknown flag"),
        ("max_steps: true", "--max_steps"),
        ("max_steps: null", "--max_steps"),
        ("max_steps: [1, 2]", "'2'"),
        ("kl_exclude_tokens: [{a: 1}]", "kl_exclude_tokens cannot be read"),
        ("beta: {x: 1}", "beta cannot be read"),
        ("beta: 0.1\nkl_penalty: 0.2", "kl_penalty cannot be read"),
        ("beta: 0.1\nkl: {beta: 0.2}", "beta cannot be read"),
        ("beta: 0.1\nbeta: 0.2", "not valid YAML"),
        ("beta: [0.1", "not valid YAML"),
        ("- beta", "holds no names"),
        ("beta", "holds no names"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_with_its_name(write, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(write(text))
    whole = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert said in whole and "run.yaml" in whole


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_stands_for_billions_of_values_is_refused(write, bomb: str) -> None:
    for text in (BOMBS[bomb], f"{BOMBS[bomb]}task: *last\n"):
        with pytest.raises(ConfigError, match=r"(?s)not valid YAML.*(aliases|too deeply)"):
            read_file(write(text))
    assert read_file(write("kl: &kl {beta: 0.1}\nkl_estimator: k1\n")) == {"beta": 0.1, "kl_estimator": "k1"}


def test_the_home_folder_stands_for_its_sign(write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("output_dir: ~/runs/x\n")
    monkeypatch.setenv("HOME", str(file.parent))
    for argv in (["--config", "~/run.yaml"], ["--output_dir=~/runs/x"]):
        assert parse_train(argv)[0].run.output_dir == str(file.parent / "runs" / "x")
    assert parse_train(["--output_dir", "~klamp-nobody/x"])[0].run.output_dir == "~klamp-nobody/x", "as a shell"
    assert read_command("doctor", ["~/x"])[0].path == file.parent / "x"
