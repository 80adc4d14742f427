"""Files that travel to where a run runs: packed once, unpacked whole, never outside their folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from klamp.ablation.ray_files import FOLDER, Packed, is_here, pack, pack_all, safe_name, unpack, unpack_all
from klamp.errors import DataError
from klamp.tasks import BaseModelConfig, base_model_folder


class Store:
    """An object store: bytes for a number."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.fetched: list[int] = []

    def put(self, content: bytes) -> int:
        self.held.append(content)
        return len(self.held) - 1

    def fetch(self, reference: int) -> bytes:
        self.fetched.append(reference)
        return self.held[reference]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """klamp's cache on the worker's machine."""
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, with a folder in it."""
    folder = tmp_path / "models" / "mine"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights.safetensors").write_bytes(b"\0\1\2")
    return folder


def moved(parcel: Any) -> Any:
    """The parcel as another machine gets it, which has nothing at that path."""
    return replace(parcel, path=f"/no/such/disk{parcel.path}")


def test_files_arrive_as_they_were(model: Path, tmp_path: Path) -> None:
    store = Store()
    parcel = pack(model, store.put)
    unpack(parcel, tmp_path / "there", store.fetch)
    found = {str(file.relative_to(tmp_path / "there")): file.read_bytes() for file in (tmp_path / "there").rglob("*.*")}
    assert found == {"config.json": b"{}", "sub/weights.safetensors": b"\0\1\2"}
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == [], "nothing half done is left"


def test_the_digest_follows_names_and_contents(model: Path) -> None:
    digests = {pack(model, len).digest, pack(model, len).digest}
    assert len(digests) == 1
    (model / "config.json").write_text("[]")
    digests.add(pack(model, len).digest)
    (model / "config.json").rename(model / "konfig.json")
    digests.add(pack(model, len).digest)
    assert len(digests) == 3


def test_each_path_is_packed_once_and_what_is_no_file_is_not(model: Path, tmp_path: Path) -> None:
    data, judge = tmp_path / "rows.jsonl", tmp_path / "judge.py"
    data.write_text("{}\n")
    judge.write_text("")
    store = Store()
    config = {"model": str(model), "ref_model": str(model), "task": str(data), "reward": f"{judge}:rate"}
    parcels = pack_all(
        [config, config, {"model": "some/hub-id", "task": "arithmetic", "reward": "exact_match"}], store.put
    )
    assert set(parcels) == {str(model), str(data), f"{judge}:rate"}
    assert len(store.held) == 4
    assert [parcel.single for parcel in parcels.values()] == [False, True, True]


def test_on_the_same_disk_nothing_is_fetched(model: Path, cache: Path) -> None:
    store = Store()
    config = {"model": str(model), "task": "arithmetic", "seed": 3}
    local = unpack_all(config, pack_all([config], store.put), store.fetch)
    assert local == {"model": str(model), "task": "arithmetic", "seed": 3}
    assert store.fetched == []
    assert not cache.exists()


def test_a_file_that_was_changed_since_is_not_the_same(model: Path) -> None:
    parcel = pack(model, len)
    assert is_here(parcel)
    (model / "config.json").write_text("[]")
    assert not is_here(parcel)
    assert not is_here(moved(parcel))


def test_on_another_machine_the_paths_lead_into_the_cache(model: Path, cache: Path, tmp_path: Path) -> None:
    data, judge = tmp_path / "rows.jsonl", tmp_path / "judge.py"
    data.write_text("{}\n")
    judge.write_text("pass")
    store = Store()
    config = {"model": str(model), "tokenizer": None, "task": str(data), "reward": f"{judge}:rate"}
    parcels = {key: moved(parcel) for key, parcel in pack_all([config], store.put).items()}
    local = unpack_all(config, parcels, store.fetch)
    again = unpack_all(config, parcels, store.fetch)
    assert local == again
    assert len(store.fetched) == 4, "the second run finds everything there"
    assert (Path(local["model"]) / "sub" / "weights.safetensors").read_bytes() == b"\0\1\2"
    assert Path(local["model"]) == cache / FOLDER / parcels[str(model)].digest / "mine"
    assert Path(local["task"]).name == "rows.jsonl", "a data file's name is the task's"
    assert Path(local["task"]).read_text() == "{}\n"
    file, _, function = local["reward"].rpartition(":")
    assert (Path(file).read_text(), function) == ("pass", "rate")
    assert local["tokenizer"] is None


def test_the_built_in_model_is_put_where_klamp_looks_for_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = base_model_folder(BaseModelConfig())
    own.mkdir(parents=True)
    (own / "model.safetensors").write_bytes(b"weights")
    store = Store()
    config = {"model": "builtin", "tokenizer": None, "task": "arithmetic"}
    parcels = pack_all([config], store.put)
    assert len(parcels) == 1
    monkeypatch.setenv("KLAMP_CACHE", str(cache / "elsewhere"))
    assert unpack_all(config, parcels, store.fetch) == config
    assert (base_model_folder(BaseModelConfig()) / "model.safetensors").read_bytes() == b"weights"
    assert base_model_folder(BaseModelConfig()).is_relative_to(cache / "elsewhere")


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", ".", "a\\..\\b", "C:evil", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leads out of its folder"):
        safe_name(name)
    parcel = replace(pack(model, len), files=(Packed(name, 1, 0, b"x"),))
    with pytest.raises(DataError):
        unpack(parcel, tmp_path / "there", bytes)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["models"], "nothing was written"


def test_plain_names_are_kept() -> None:
    assert [str(safe_name(name)) for name in ("a", "a/b.json", "..a", "a..b")] == ["a", "a/b.json", "..a", "a..b"]
