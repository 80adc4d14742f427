"""What the commands print to stderr about a plain run: nothing."""

import shlex
import warnings
from pathlib import Path

from tests.cli.test_verify import captured
from tests.training.conftest import TINY, llama  # noqa: F401  (llama: a fixture)
from transformers.utils import logging

from klamp.cli import main
from klamp.cli.commands import COMMANDS

CALLS = (
    "train {flags} --output_dir run",
    "train --resume run --max_steps 3",
    "train {flags} --dry_run",
    "evaluate --checkpoint run",
    "evaluate --checkpoint run/checkpoints/step-000002/policy {flags_of_task} --ref_model {llama}",
    "report run",
    "doctor run",
    "ablate --runs run --output_dir compared",
    "ablate {flags} --seeds 1 --workers 1 --output_dir ablation",
    "report ablation",
    "explain run/config.yaml",
    "explain recommended",
    "verify direction",
    "audit tests.cli.test_stderr:k2",
    "check capture.safetensors",
)


def k2(policy, ref):
    return (policy - ref).square() / 2


def test_no_command_prints_to_stderr_about_a_plain_run(llama, tmp_path: Path, monkeypatch, capsys) -> None:  # noqa: F811
    captured(tmp_path / "capture.safetensors", "sound")
    monkeypatch.chdir(tmp_path)
    values = {"model": llama, **TINY, "max_steps": 2, "report_to": "none"}
    words = {name: f"--{name} {value}" for name, value in values.items()}
    of_task = " ".join(words[name] for name in ("reward", "eval_size", "max_completion_length", "cpu"))
    errors = dict[str, str]()
    for call in CALLS:
        logging.enable_progress_bar()  # an earlier command in this process turned the bars off
        command = call.format(flags=" ".join(words.values()), flags_of_task=of_task, llama=llama)
        with warnings.catch_warnings(record=True) as others:
            warnings.simplefilter("default")
            for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", hidden)
            assert main(shlex.split(command)) in (0, 1), (call, capsys.readouterr().err)
        errors[call] = "\n".join([capsys.readouterr().err, *(str(warning.message) for warning in others)]).strip()
    assert {call: text for call, text in errors.items() if text} == {}
    assert {call.split()[0] for call in CALLS} == {*COMMANDS}
