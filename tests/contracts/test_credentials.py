"""User, password, query and key of every server that klamp asks: found nowhere else, refused where they would be."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.training import rewards
from tests.training.answering import VLLMServer, answering
from tests.training.conftest import TINY, stored, tiny_llama

from klamp.cli import main
from klamp.lab.folders import read_config
from klamp.lab.tasks import arithmetic_tokenizer
from klamp.scoring.vllm_reference import KEY

pytestmark = pytest.mark.slow

SECRETS = ("se%63ret", "secret", "m%65", "sesame")
WHOLE = "http://m%65:se%63ret@host:8000/deep?token=sesame"
ASKED = {("/v1/models", "Bearer sesame"), ("/v1/completions", "Bearer sesame")}
REMOTE = ("--reference", "remote", "--reference_url")

Program = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def klamp(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Program:
    """The program: its words as the process was given them -> its exit code, and all that it said."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["klamp", *words])
        code = main()
        said = "".join(capfd.readouterr())
        assert leaks(said.encode()) == []
        left = " ".join(sys.argv)  # noqa: TID251 - trackers read it
        assert code == 2 or leaks(left.encode()) == []
        return code, said

    return run


@pytest.fixture
def asked() -> set[tuple[str, str | None]]:
    """The paths that the server was asked for, and with what authorization."""
    return set()


@pytest.fixture
def server(asked: set[tuple[str, str | None]]) -> Iterator[str]:
    """The address of a remote reference, which wants a key."""
    known = VLLMServer(tiny_llama(), arithmetic_tokenizer(), key="sesame")

    def answer(path: str, content: Any, headers: dict[str, str]) -> tuple[int, object]:
        asked.add((path, headers.get("Authorization")))
        return known.answer(path, content, headers)

    with answering(answer) as url:
        yield url


@pytest.fixture
def small(elsewhere: Path) -> str:
    values = {**TINY, "reward": f"{rewards.__file__}:digits", "model": stored(tiny_llama(), elsewhere / "tiny")}
    values |= {"max_steps": 1, "beta": 0.1}
    file = elsewhere / "small.yaml"
    file.write_text(yaml.safe_dump({name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}))
    return str(file)


def leaks(content: bytes) -> list[str]:
    return [secret for secret in SECRETS if secret.encode() in content]


def leaking(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(file) for file in files if leaks(str(file).encode() + file.read_bytes())]


def test_a_run_its_trackers_its_report_and_its_continuation(
    klamp: Program, server: str, asked: set[Any], small: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(KEY, "sesame")
    run, given = elsewhere / "run", (*REMOTE, server)
    code, said = klamp(
        "train", "--config", small, *given, "--output_dir", str(run), "--report_to", "tensorboard", "wandb"
    )
    assert code == 0 and server in said and "--resume" in said
    assert asked == ASKED
    assert {"config.yaml", "metrics.jsonl", "tracking", "wandb"} <= {each.name for each in run.iterdir()}
    assert any("tfevents" in file.name for file in run.rglob("*"))
    assert any(file.suffix == ".wandb" for file in run.rglob("*"))

    asked.clear()
    again = ("--config", str(run / "config.yaml"), "--output_dir", str(run), "--resume", "--max_steps", "2")
    assert klamp("train", *again)[0] == 0
    assert asked == ASKED
    values, config = read_config(run)
    assert values["reference_url"] == server == config.kl.reference_url
    assert klamp("doctor", str(run))[0] in (0, 1)
    assert klamp("report", str(run))[0] == 0
    assert leaking(run) == []


def test_an_ablation_its_plan_and_its_runs(
    klamp: Program, server: str, asked: set[Any], small: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two arms whose names are made of their addresses, by the processes that `klamp ablate` starts."""
    monkeypatch.setenv(KEY, "sesame")
    base = yaml.safe_load(Path(small).read_text())
    given = [f"--{name}={value}" for name, value in base.items() if name not in ("report_to", "cpu")]
    urls = [server, f"{server}/v1"]
    words = ("ablate", *given, "--cpu", "--report_to", "tensorboard", *REMOTE, *urls, "--seeds", "1")
    code, said = klamp(*words, "--workers", "1", "--output_dir", "out")
    assert code == 0 and f"reference_url={server}" in said
    assert asked == ASKED
    found = {each.name for each in (elsewhere / "out").rglob("*")}
    assert {"plan.yaml", "config.yaml", "table.json", "outcome.json"} <= found
    assert leaking(elsewhere / "out") == []
    asked.clear()
    assert klamp(*words, "--workers", "1", "--output_dir", "out")[0] == 0
    assert not asked, "it was done"


REFUSED = {
    "cluster": ("train", "--backend", "verl", "--ray_address", "ray://me:secret@head:10001"),
    "arguments_of_verl": ("train", "--backend", "verl", "--verl_args", "a=1", "b=http://me:secret@host/c"),
    "model": ("train", "--model", "https://me:secret@hub/model"),
    "data": ("train", "--task", "https://me:secret@host/data.jsonl"),
    "reference": ("train", *REMOTE, WHOLE),
    "sampler": ("train", "--backend", "trl", "--sampler_url", WHOLE.partition("?")[0]),
    "ablation": ("ablate", *REMOTE, WHOLE, "--beta", "0.1", "0.2"),
    "arms": ("ablate", *REMOTE, WHOLE, WHOLE.replace("deep", "deeper")),
    "cluster_of_an_ablation": ("ablate", "--ray", "ray://me:secret@head:10001", "--beta", "0.1", "0.2"),
    "base_of_an_ablation": ("ablate", "--model", "https://me:secret@hub/model", "--beta", "0.1", "0.2"),
    "arms_of_an_ablation": ("ablate", "--backend", "trl", "--sampler_url", "u://me:secret@a", "u://me:secret@b"),
}


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry_run"])
@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_shown_alone_they_are_refused(words: tuple[str, ...], more: list[str], klamp: Program, elsewhere: Path) -> None:
    code, said = klamp(*words, *more)
    assert code == 2 and "why:" in said and "fix:" in said
    assert not list(elsewhere.iterdir())
