"""From a command line and a YAML file to the configuration of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.reliability.drawn import BOMBS

from klamp.cli.arguments import parse_train, read_file
from klamp.cli.flags import read_options
from klamp.cli.options import DoctorOptions
from klamp.config import PRESETS
from klamp.errors import ConfigError, UnknownNameError
from klamp.training.config import TrainConfig

DEMO = Path(__file__).resolve().parents[2] / "examples" / "config_demo.yaml"


@pytest.fixture
def write(tmp_path: Path):
    def save(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return save


def test_no_arguments_are_the_defaults() -> None:
    request = parse_train([])
    assert request.config == TrainConfig()
    assert not request.given
    assert not request.options.dry_run


def test_the_command_line_of_the_grpo_tutorial() -> None:
    argv = ["--config", str(DEMO), "--kl_penalty", "0.04", "--output_dir", "out", "--max_steps", "500"]
    request = parse_train(argv)
    config = request.config
    assert (config.kl.beta, config.kl.target_kl, config.kl.controller_name) == (0.04, 0.05, "hold")
    assert (config.run.output_dir, config.run.max_steps) == ("out", 500)
    assert request.given == {"beta", "target_kl", "output_dir", "max_steps"}


@pytest.mark.parametrize("beta", ["0.0", "0.001", "0.01", "0.1"])
def test_the_ablation_loop_of_the_grpo_tutorial_with_its_beta_of_zero(beta: str) -> None:
    argv = ["--config", str(DEMO), "--kl_penalty", beta, "--output_dir", f"output_beta_{beta}", "--max_steps", "5000"]
    kl = parse_train(argv).config.kl
    assert kl.beta == float(beta)
    assert kl.controller_name == ("fixed" if beta == "0.0" else "hold"), "beta 0 means: without KL"


def test_the_flags_of_the_k3_bug_report() -> None:
    argv = ["--kl-beta", "0.0", "--num-generations", "8", "--max-steps", "100"]
    config = parse_train(argv).config
    assert (config.kl.beta, config.rollout.num_generations, config.run.max_steps) == (0.0, 8, 100)


def test_flags_win_over_the_file_and_the_file_over_the_preset(write) -> None:
    file = write("kl_gradient: reverse\nepsilon: 0.1\nmax_steps: 7\n")
    request = parse_train(["--preset", "grpo", "--config", str(file), "--epsilon", "0.3"])
    assert request.config.kl.beta == PRESETS["grpo"].kl.beta == 0.04
    assert PRESETS["grpo"].kl.kl_gradient == "forward"
    assert request.config.kl.kl_gradient == "reverse"
    assert request.config.loss.epsilon == 0.3
    assert request.config.run.max_steps == 7
    assert request.given >= {"beta", "kl_gradient", "loss_type", "epsilon", "max_steps"}


def test_a_run_that_goes_on_is_as_it_was_but_for_what_is_named(write, tmp_path: Path, monkeypatch) -> None:
    folder = write("beta: 0.3\nlearning_rate: 1e-5\noutput_dir: moved\nhistory: [{until: 2, beta: 0.1}]\n").parent
    (folder / "run.yaml").rename(folder / "config.yaml")
    config = parse_train(["--resume", str(folder), "--beta", ".5"]).config
    assert (config.kl.beta, config.optim.learning_rate, config.run.resume) == (0.5, 1e-5, True)
    assert config.run.output_dir == str(folder)
    assert parse_train(["--beta", ".5", "--output_dir", str(folder), "--resume"]).config == config
    monkeypatch.setenv("HOME", str(folder.parent))
    assert parse_train([f"--resume=~/{folder.name}", "--beta", ".5"]).config == config
    with pytest.raises(ConfigError, match="two folders are named"):
        parse_train(["--resume", str(folder), "--output_dir", "other"])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_gives_its_recipe(name: str) -> None:
    config = parse_train(["--preset", name]).config
    assert (config.kl, config.loss) == (PRESETS[name].kl, PRESETS[name].loss)


def test_a_preset_may_stand_in_the_file_and_a_flag_replaces_it(write) -> None:
    file = write("preset: dapo\n")
    assert parse_train(["--config", str(file)]).config.loss.loss_type == "dapo"
    assert parse_train(["--config", str(file), "--preset", "grpo"]).config.loss.loss_type == "grpo"
    assert parse_train(["--config", str(file), "--preset", "None"]).config.loss.loss_type == "dr_grpo"

    with pytest.raises(UnknownNameError, match="dapo"):
        parse_train(["--preset", "dappo"])


def test_only_the_whole_is_checked_not_its_parts(write) -> None:
    """A controller without its target in the file is fine where the flags give the target."""
    file = write("kl_controller: proportional\n")
    with pytest.raises(ConfigError, match="needs target_kl"):
        parse_train(["--config", str(file)])
    config = parse_train(["--config", str(file), "--target_kl", "0.1"]).config
    assert (config.kl.controller_name, config.kl.target_kl) == ("proportional", 0.1)


def test_the_demo_file_says_what_the_grpo_tutorial_prints() -> None:
    assert read_file(DEMO) == {"beta": 0.01, "target_kl": 0.05}


def test_values_are_typed_as_their_fields(write) -> None:
    text = """
learning_rate: 1e-5        # YAML itself reads this as a text
max-steps: 500
beta: 1
resume: yes
target_kl: null
report_to: [tensorboard, wandb]
kl_exclude_tokens: 7
kl_controller_factors: [2, 0.5, 1, 1]
scale_rewards: none
chat_template: ~
preset: grpo
"""
    assert read_file(write(text)) == {
        "learning_rate": 1e-5,
        "max_steps": 500,
        "beta": 1.0,
        "resume": True,
        "target_kl": None,
        "report_to": ("tensorboard", "wandb"),
        "kl_exclude_tokens": (7,),
        "kl_controller_factors": (2.0, 0.5, 1.0, 1.0),
        "scale_rewards": "none",
        "chat_template": None,
        "preset": "grpo",
    }


@pytest.mark.parametrize(
    ("text", "got", "fix"),
    [
        ("lr: 3", "lr", "did you mean learning_rate?"),
        ("kl_pnalty: 3", "kl_pnalty", "did you mean kl_penalty?"),
        ("kl: {betta: 1}", "betta", "did you mean beta?"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_the_file(write, text: str, got: str, fix: str) -> None:
    path = write(text)
    with pytest.raises(UnknownNameError) as caught:
        read_file(path)
    assert (caught.value.got, caught.value.fix) == (got, fix)
    assert str(path) in caught.value.what


@pytest.mark.parametrize("key", ["config", "dry_run"])
def test_options_of_the_command_line_are_no_keys(write, key: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_file(write(f"{key}: true"))
    assert "option of the command line" in caught.value.why


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_steps: true", "a whole number"),
        ("max_steps: null", "a whole number"),
        ("kl_exclude_tokens: [a, null]", "each a whole number or a text"),
        ("kl_exclude_tokens: [{a: 1}]", "each a whole number or a text"),
        ("max_steps: [1, 2]", "a whole number"),
        ("beta: {x: 1}", "a number"),
        ("cpu: maybe", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_and_file(write, text: str, part: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert caught.value.what == f"{text.partition(':')[0]} in {path} cannot be read"
    assert part in caught.value.why


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("beta: 0.1\nkl_penalty: 0.2", "beta is given twice"),
        ("beta: 0.1\nkl: {beta: 0.2}", "beta is given twice"),
        ("beta: 0.1\nbeta: 0.2", "not valid YAML"),
        ("beta: [0.1", "not valid YAML"),
        ("- beta", "holds no names"),
        ("beta", "holds no names"),
    ],
)
def test_files_that_cannot_be_meant(write, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(write(text))
    assert part in caught.value.what


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_stands_for_billions_of_values_is_refused(write, bomb: str) -> None:
    for text in (BOMBS[bomb], f"{BOMBS[bomb]}task: *last\n"):
        with pytest.raises(ConfigError, match=r"(?s)not valid YAML.*(aliases|too deeply)"):
            read_file(write(text))
    shared = read_file(write("kl: &kl {beta: 0.1}\nkl_estimator: k1\n"))
    assert shared == {"beta": 0.1, "kl_estimator": "k1"}, "an alias is no fault"


def test_the_home_folder_stands_for_its_sign(write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("output_dir: ~/runs/x\n")
    monkeypatch.setenv("HOME", str(file.parent))
    for argv in (["--config", "~/run.yaml"], ["--output_dir=~/runs/x"]):
        assert parse_train(argv).config.run.output_dir == str(file.parent / "runs" / "x")
    assert parse_train(["--output_dir", "~klamp-nobody/x"]).config.run.output_dir == "~klamp-nobody/x", (
        "as a shell has it"
    )
    assert read_options(DoctorOptions, ["~/x"], command="klamp doctor").path == file.parent / "x"
