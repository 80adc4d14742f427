"""Checkpoints: whole or not there, loadable anywhere, nothing in them that runs code, and clear words when damaged."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.training.conftest import TINY, disturb, rows_of, sample, tiny_llama
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

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    finished = {}
    for name, changes in {"full": {}, "adapter": {"lora_r": 2}}.items():
        folder = tmp_path_factory.mktemp("runs") / name
        values = {"model": llama, "output_dir": str(folder), **TINY, "save_every": 1, "keep_checkpoints": 3, **changes}
        values |= {"log_completions_every": 1}
        train_run(TrainConfig.from_flat(values))
        finished[name] = SimpleNamespace(folder=folder, values=values)
    return finished


@pytest.fixture(params=["full", "adapter"])
def run(runs, request, tmp_path):
    source = runs[request.param]
    folder = Path(shutil.copytree(source.folder, tmp_path / "copy"))
    resumed = source.values | {"output_dir": str(folder), "resume": True, "max_steps": 5}
    return SimpleNamespace(
        folder=folder, newest=checkpoint.checkpoints(folder)[-1], config=TrainConfig.from_flat(resumed)
    )


def test_a_checkpoint_holds_safetensors_json_and_tensors_only(run):
    files = [p for p in run.newest.rglob("*") if p.is_file()]
    suffixes = {p.suffix for p in files if p.name != "README.md"}
    assert suffixes == {".safetensors", ".json", ".pt"}
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


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def with_state(text: str) -> Damage:
    return lambda folder: (folder / "state.json").write_text(text)


def flipped(name: str) -> Damage:
    """One bit of a file's last byte is turned, as a disk does: all formats still read it."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)

    return damage


def unnoted(*names: str) -> Damage:
    """A larger beta, and the checksums of these files are gone; of all, where none is named."""

    def damage(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        state["controller"]["value"] *= 1000
        (folder / "state.json").write_text(json.dumps(state))
        sums = json.loads((folder / SEAL).read_text())
        left = {name: noted for name, noted in sums.items() if names and name not in names}
        (folder / SEAL).write_text(json.dumps(left))

    return damage


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


def resealed(damage: Damage) -> Damage:
    """The damage of who writes a checkpoint anew: its checksums are right, and what it holds is not."""

    def done(folder: Path) -> None:
        damage(folder)
        checkpoint.seal(folder)

    return done


def another(**changes) -> Damage:
    def damage(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | changes))

    return resealed(damage)


def other_weights(folder: Path) -> None:
    tiny_llama(num_hidden_layers=1).save_pretrained(folder / "policy")


def other_optimizer(folder: Path) -> None:
    torch.save(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).state_dict(), folder / "optimizer.pt")


@pytest.mark.parametrize(
    "damage",
    [
        *map(without, ("state.json", "optimizer.pt", SEAL)),
        *map(flipped, ("policy/model.safetensors", "optimizer.pt", "policy/tokenizer.json", SEAL)),
        *(unnoted("none of them"), unnoted("state.json"), unnoted()),
        *(resealed(with_state(text)) for text in ('{"step": 4, "contr', '{"step": 4}', "[" * 100_000, "[4]")),
        *map(resealed, (half_optimizer, evil_optimizer, other_optimizer, other_weights)),
        *(another(step=3), another(step=4.0), another(reference_length=-3)),
        *(another(controller={"value": []}), another(reference_length=[1])),
    ],
)
@pytest.mark.parametrize("run", ["full"], indirect=True)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_works(run, damage):
    before = rows_of(run.folder)
    damage(run.newest)
    with pytest.raises(RunFolderError, match="damaged") as caught:
        train_run(run.config)
    error = caught.value
    assert error.got == str(run.newest) and error.why and "delete that folder" in error.fix
    assert f"the checkpoint before it is {run.newest.with_name('step-000003')}" in error.fix
    assert rows_of(run.folder) == before, "and nothing of the run was touched"
    assert not (run.newest / "code-was-run").exists(), "nothing in a checkpoint is executed"
    shutil.rmtree(run.newest)  # as the message says
    summary = train_run(run.config)
    assert summary.steps == 5
    assert [row for row in rows_of(run.folder) if row["step"] <= 3] == [row for row in before if row["step"] <= 3]


def test_a_run_without_checkpoints_cannot_be_resumed(run):
    shutil.rmtree(run.folder / "checkpoints")
    with pytest.raises(RunFolderError, match="no checkpoint to continue from") as caught:
        train_run(run.config)
    assert caught.value.got and caught.value.why and caught.value.fix


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "inner" / "optimizer.pt").write_bytes(b"moments")
    return tmp_path


def test_a_seal_is_the_checksums_of_every_file(folder):
    seal(folder)
    assert json.loads((folder / SEAL).read_text()) == {
        "inner/optimizer.pt": hashlib.sha256(b"moments").hexdigest(),
        "model.safetensors": hashlib.sha256(b"weights").hexdigest(),
    }


@pytest.mark.parametrize("damage", [lambda f: f.write_bytes(b"Weights"), Path.unlink, lambda f: f.write_bytes(b"")])
def test_a_file_that_is_another_one_is_named(folder, damage):
    seal(folder)
    (folder / ".DS_Store").touch()  # as a file manager leaves it
    checkpoint.check(folder)
    (folder / "later").touch()
    damage(folder / "model.safetensors")
    with pytest.raises(RunFolderError, match="later, model.safetensors changed on the disk"):
        checkpoint.check(folder)


def test_weights_that_changed_are_loaded_by_nobody(run, tmp_path):
    """Neither to go on training, nor to start from, nor to compare with."""
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
