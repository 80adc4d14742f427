"""Names of models: a checkpoint's folder is its weights', and a hub that does not answer is said, at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from tests.training.conftest import stored, tiny_llama

from klamp.errors import ModelError
from klamp.training import hub
from klamp.training.hub import loadable, weights_folder
from klamp.training.models import describe_folder, load_model, load_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(stored(tiny_llama(), tmp_path_factory.mktemp("hub") / "llama"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that does not answer; the list holds what was asked."""
    asked: list[str] = []

    class Session:
        def head(self, url: str, *, timeout: float) -> None:
            asked.append(url)
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    return asked


def test_a_checkpoint_of_klamps_is_a_model(llama: Path, tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    shutil.copytree(llama, step / "policy")
    assert weights_folder(str(step)) == weights_folder(str(step / "policy")) == str(step / "policy")
    assert load_model(str(step)).config.model_type == "llama"
    assert load_tokenizer(str(step)).eos_token_id is not None
    assert describe_folder(str(step))[0] == describe_folder(str(llama))[0]


def test_a_run_names_its_newest_checkpoint(llama: Path, tmp_path: Path) -> None:
    for step in (2, 10):
        shutil.copytree(llama, tmp_path / "checkpoints" / f"step-{step:06d}" / "policy")
    with pytest.raises(ModelError, match="holds a run") as caught:
        load_model(str(tmp_path))
    assert "step-000010" in caught.value.fix


@pytest.mark.parametrize("inside", [".", "policy"])
def test_an_adapter_is_no_model(tmp_path: Path, inside: str) -> None:
    (tmp_path / inside).mkdir(exist_ok=True)
    (tmp_path / inside / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="LoRA adapter") as caught:
        load_model(str(tmp_path))
    assert "--resume" in caught.value.fix and "merge_and_unload" in caught.value.fix


def test_other_names_stay_as_they_are(llama: Path) -> None:
    assert weights_folder(str(llama)) == str(llama)
    assert weights_folder("owner/name") == "owner/name"


def test_a_hub_that_does_not_answer_is_said_at_once(offline: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object, **options: object) -> None:
        raise AssertionError("the loader was asked, which tries for most of a minute")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", never)
    with pytest.raises(ModelError, match="the hub cannot be reached") as caught:
        load_model("nobody/nothing")
    assert "does not answer: ConnectionError" in caught.value.why and "HF_ENDPOINT" in caught.value.fix
    assert len(offline) == 1


def test_a_hub_that_nobody_may_ask_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="the hub cannot be reached") as caught:
        load_tokenizer("nobody/nothing")
    assert "HF_HUB_OFFLINE" in caught.value.why


def test_the_hubs_cache_is_read_where_the_hub_is_silent(
    offline: list[str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    shutil.copytree(llama, snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("abc", encoding="utf-8")
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda spec, **o: real(spec, cache_dir=tmp_path, **o))
    assert Path(loadable("owner/name", "a model")) == snapshot
    assert load_model("owner/name").config.model_type == "llama"


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c"])
def test_a_path_is_not_asked_of_the_hub(name: str, offline: list[str]) -> None:
    with pytest.raises(ModelError, match="cannot load a model") as caught:
        loadable(name, "a model")
    assert "no folder" in caught.value.why and not offline


def test_a_hub_that_answers_is_left_to_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    assert loadable("owner/name", "a model") == "owner/name"
