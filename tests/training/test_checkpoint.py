"""Checkpoints: whole or not there, loadable anywhere, nothing in them that runs code, and clear words when damaged."""

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.training.conftest import TINY, disturb, refused, rows_of, sample, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from klamp.errors import RunFolderError
from klamp.lab import checkpoint
from klamp.lab.ablate.one_run import measured
from klamp.lab.backends import train_run
from klamp.lab.checkpoint import SEAL, seal
from klamp.lab.config import TrainConfig
from klamp.lab.models import check_weights, load_model, with_adapter
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer
from klamp.scoring.scorer import score


@pytest.fixture(params=[{}, {"lora_r": 2}], ids=["full", "adapter"])
def run(run_once, llama, request, tmp_path):
    changes = {"save_every": 1, "keep_checkpoints": 3, "log_completions_every": 1, **request.param}
    folder = Path(shutil.copytree(run_once(**changes), tmp_path / "copy"))
    resumed = {"model": llama, **TINY, **changes, "output_dir": str(folder), "resume": True, "max_steps": 5}
    newest = checkpoint.checkpoints(folder)[-1]
    return SimpleNamespace(folder=folder, newest=newest, config=TrainConfig.from_flat(resumed))


def test_a_checkpoint_holds_safetensors_json_and_tensors_only(run):
    files = [p for p in run.newest.rglob("*") if p.is_file()]
    assert {p.suffix for p in files if p.name != "README.md"} == {".safetensors", ".json", ".pt"}
    assert [p.name for p in files if p.suffix == ".pt"] == ["optimizer.pt"]
    state = torch.load(run.newest / "optimizer.pt", weights_only=True)
    assert {"exp_avg", "exp_avg_sq", "step"} == state["state"][0].keys()
    assert float(state["state"][0]["step"]) == 4
    settings = json.loads((run.newest / "state.json").read_text())
    assert settings["step"] == 4 and settings["controller"]["value"] == 0.01


@pytest.fixture
def parts(context_of):
    context = context_of()
    optimizer = torch.optim.AdamW(context.policy.parameters())
    weights = checkpoint.Weights(context.policy, context.tokenizer, optimizer, {})
    return {"weights": weights, "documents": {"state.json": {"step": 1}}}


def test_a_checkpoint_loads_anywhere_and_scores_as_the_policy_did(parts, tmp_path):
    policy = parts["weights"].policy
    disturb(policy)
    folder = checkpoint.save(tmp_path, 7, **parts, keep=1)
    assert folder.name == "step-000007"
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    assert tokenizer("12+3= rev")["input_ids"] == arithmetic_tokenizer()("12+3= rev")["input_ids"]
    completions = sample(policy)
    with torch.no_grad():
        ours = score(policy, completions, temperature=1.0)
        theirs = score(model.eval(), completions, temperature=1.0)
    assert torch.equal(ours.logprobs, theirs.logprobs)
    assert model.generation_config.eos_token_id == policy.generation_config.eos_token_id


def test_a_checkpoint_is_on_the_disk_before_it_is_in_its_place(parts, tmp_path, monkeypatch):
    synced, rename = [], Path.rename
    (tmp_path / "metrics.jsonl").touch()

    def moved(part, folder):
        assert {tmp_path / "metrics.jsonl", tmp_path} <= {*synced}
        assert {part, *part.rglob("*")} - {*synced} == {part / SEAL}, "which is on the disk before it has its name"
        return rename(part, folder)

    monkeypatch.setattr(checkpoint, "sync", synced.append)
    monkeypatch.setattr(Path, "rename", moved)
    folder = checkpoint.save(tmp_path, 1, **parts, keep=1)
    assert synced[-1] == folder.parent and folder.is_dir()
    assert checkpoint.whole_newest(tmp_path) == folder


def removed(folder: Path, name: str) -> None:
    (folder / name).unlink()


def with_state(folder: Path, text: str) -> None:
    (folder / "state.json").write_text(text)


def changed_state(folder: Path, **changes: object) -> None:
    with_state(folder, json.dumps(json.loads((folder / "state.json").read_text()) | changes))


def flipped(folder: Path, name: str) -> None:
    """One bit of a file's last byte is turned, as a disk does: all formats still read it."""
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


def unnoted(folder: Path, names: tuple[str, ...]) -> None:
    """A larger beta, and the checksums of these files are gone; of all, where none is named."""
    changed_state(folder, controller={"value": 10.0})
    sums = json.loads((folder / SEAL).read_text())
    left = {name: noted for name, noted in sums.items() if names and name not in names}
    (folder / SEAL).write_text(json.dumps(left))


def half_optimizer(folder: Path) -> None:
    content = (folder / "optimizer.pt").read_bytes()
    (folder / "optimizer.pt").write_bytes(content[: len(content) // 2])


class Evil:
    """Makes a folder when it is unpacked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def evil_optimizer(folder: Path) -> None:
    torch.save({"state": Evil(folder / "code-was-run"), "param_groups": []}, folder / "optimizer.pt")


def other_weights(folder: Path) -> None:
    tiny_llama(num_hidden_layers=1).save_pretrained(folder / "policy")


def other_optimizer(folder: Path) -> None:
    torch.save(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).state_dict(), folder / "optimizer.pt")


ON_THE_DISK = [
    *(partial(removed, name=name) for name in ("state.json", "optimizer.pt", SEAL)),
    *(
        partial(flipped, name=name)
        for name in ("policy/model.safetensors", "optimizer.pt", "policy/tokenizer.json", SEAL)
    ),
    *(partial(unnoted, names=names) for names in (("none of them",), ("state.json",), ())),
]
WRITTEN = [
    *(partial(with_state, text=text) for text in ('{"step": 4, "contr', '{"step": 4}', "[" * 100_000, "[4]")),
    *(half_optimizer, evil_optimizer, other_optimizer, other_weights),
    *(partial(changed_state, step=step) for step in (3, 4.0)),
    *(partial(changed_state, reference_length=length) for length in (-3, [1])),
    partial(changed_state, controller={"value": []}),
]
"""The damage of who writes a checkpoint anew: its checksums are right, and what it holds is not."""


@pytest.mark.parametrize("damage", [*ON_THE_DISK, *WRITTEN])
@pytest.mark.parametrize("run", [{}], indirect=True)
def test_a_damaged_checkpoint_is_refused_with_the_one_before_it(run, damage):
    before = (run.folder / "metrics.jsonl").read_bytes()
    damage(run.newest)
    if damage in WRITTEN:
        seal(run.newest)
    with refused(
        RunFolderError, f"(?s)damaged.*delete that folder.*it is {run.newest.with_name('step-000003')}"
    ) as caught:
        train_run(run.config)
    assert caught.value.got == str(run.newest)
    assert (run.folder / "metrics.jsonl").read_bytes() == before, "and nothing of the run was touched"
    assert not (run.newest / "code-was-run").exists(), "nothing in a checkpoint is executed"


@pytest.mark.parametrize("run", [{}], indirect=True)
def test_without_its_newest_checkpoint_a_run_goes_on_from_the_one_before_or_is_refused(run):
    before = rows_of(run.folder)
    shutil.rmtree(run.newest)
    assert train_run(run.config).steps == 5
    assert [row for row in rows_of(run.folder) if row["step"] <= 3] == [row for row in before if row["step"] <= 3]
    shutil.rmtree(run.folder / "checkpoints")
    with refused(RunFolderError, "no checkpoint to continue from"):
        train_run(run.config)


def test_a_seal_is_the_checksums_of_every_file_and_names_those_that_changed(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "inner" / "optimizer.pt").write_bytes(b"moments")
    seal(tmp_path)
    assert json.loads((tmp_path / SEAL).read_text()) == {
        "inner/optimizer.pt": hashlib.sha256(b"moments").hexdigest(),
        "model.safetensors": hashlib.sha256(b"weights").hexdigest(),
    }
    (tmp_path / ".DS_Store").touch()  # as a file manager leaves it
    checkpoint.check(tmp_path)
    (tmp_path / "later").touch()
    for damage in (lambda file: file.write_bytes(b"Weights"), lambda file: file.write_bytes(b""), Path.unlink):
        damage(tmp_path / "model.safetensors")
        with pytest.raises(RunFolderError, match="later, model.safetensors changed on the disk"):
            checkpoint.check(tmp_path)


def test_weights_that_changed_are_loaded_by_nobody(run, tmp_path):
    config, policy = run.config, run.newest / "policy"
    elsewhere = shutil.copytree(run.newest, tmp_path / "best")
    for folder in (*(step / "policy" for step in checkpoint.checkpoints(run.folder)), elsewhere / "policy"):
        (file,) = folder.glob("*.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[:-400] + bytes(400))
    loads = [lambda: measured(config, run.newest / "policy")]
    if config.model.lora_r:
        loads += [lambda: with_adapter(tiny_llama(), config.model, elsewhere / "policy")]
    else:
        loads += [lambda name=str(name): load_model(name) for name in (policy, run.newest, elsewhere)]
        loads += [lambda: check_weights(str(policy))]
    for load in loads:
        with pytest.raises(RunFolderError, match=r"model\.safetensors changed on the disk"):
            load()
