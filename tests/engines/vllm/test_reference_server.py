"""A real vLLM server as the reference: the numbers of a local one, and its mismatches refused before any work."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.vllm.servers import vllm_server
from tests.training.conftest import TINY, disturb, steps_of, stored, tiny_llama

from klamp.cli import main
from klamp.core.types import Direction
from klamp.errors import ConfigError, ModelError, UnknownNameError
from klamp.lab.anchors import connect
from klamp.lab.config import TrainConfig
from klamp.lab.models import load_model, load_tokenizer
from klamp.lab.tasks import load_task
from klamp.scoring.completions import Completions
from klamp.scoring.model_parts import PrefixKL
from klamp.scoring.scorer import Ask, Scorer, TeacherKL, score
from klamp.scoring.vllm_reference import KEY, VLLMReference

SECRET = "a-key-of-this-test"
COUNT, PROMPT, LENGTH = 72, 9, 30
TEXTS = (".json", ".jsonl", ".yaml", ".txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama whose heads vLLM has on a CPU; its small weights keep float32 within 2e-5 nats of float64."""
    model = tiny_llama(hidden_size=128, intermediate_size=256, initializer_range=0.1)
    return stored(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """It serves the model under two names, to those with a key; it samples at temperature .6 where none is asked."""
    flags = ("--served-model-name", "start", "alias", "--max-model-len", "48", "--api-key", SECRET)
    tempered = ("--override-generation-config", '{"temperature": 0.6, "repetition_penalty": 1.3}')
    with vllm_server(Path(folder), tmp_path_factory.mktemp("log") / "server.log", *flags, *tempered) as url:
        yield url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)


@pytest.fixture
def connected(server: str, folder: str) -> Callable[..., VLLMReference]:
    """The reference of a run on that server."""

    def connecting(**changes: Any) -> VLLMReference:
        given = {"model": folder, "reference": "remote", "reference_url": server, "reference_name": "start"}
        config = TrainConfig.from_flat({**TINY, **given, **changes})
        tokenizer = load_tokenizer(folder)
        found = connect(config, load_task(config.task, tokenizer), tokenizer)
        assert isinstance(found, VLLMReference)
        return found

    return connecting


def random_completions(size: int) -> Completions:
    """Prompts and completions of all lengths."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, size, (COUNT, PROMPT + LENGTH), generator=generator)
    before = torch.arange(PROMPT).expand(COUNT, -1) >= torch.arange(COUNT)[:, None] % PROMPT
    mask = torch.arange(LENGTH).expand(COUNT, -1) <= torch.arange(COUNT)[:, None] % LENGTH
    return Completions(
        prompt_ids=ids[:, :PROMPT],
        prompt_mask=before.long(),
        ids=ids[:, PROMPT:],
        mask=mask,
        sampler_logprobs=torch.zeros(COUNT, LENGTH),
        ended=torch.ones(COUNT, dtype=torch.bool),
    )


@pytest.mark.gate
@torch.no_grad()
def test_the_numbers_are_those_of_a_local_reference(connected: Callable[..., VLLMReference], folder: str) -> None:
    model = load_model(folder)
    completions = random_completions(model.config.vocab_size)
    away = connected().score(completions, temperature=1.0).logprobs
    here = score(model, completions, temperature=1.0).logprobs
    mask = completions.mask
    largest = float((away - here)[mask].abs().max())
    print(f"{int(mask.sum())} tokens, largest difference {largest:.1e} nats")
    assert largest < 1e-5
    other = copy.deepcopy(model)
    disturb(other)
    assert float((away - score(other, completions, temperature=1.0).logprobs)[mask].abs().max()) > 0.1


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_head_equals_the_local_one(
    connected: Callable[..., VLLMReference], folder: str, direction: Direction
) -> None:
    """The teacher's eight likeliest tokens and a sampled tail; the policy is another model."""
    away = connected(reference_name="alias")
    away.head, away.top_k = True, 8
    teacher, policy = load_model(folder), load_model(folder)
    disturb(policy)
    completions = random_completions(policy.config.vocab_size)
    every = torch.ones(COUNT, dtype=torch.bool)
    with torch.no_grad():
        here = Scorer(teacher)(completions, Ask(temperature=1.0, keep=every)).predictions
    found = {}
    for name, anchor in (("here", here), ("away", away.score(completions, temperature=1.0).predictions)):
        assert anchor is not None
        how = PrefixKL(direction=direction, top_k=8, head="teacher")
        asked = Ask(temperature=1.0, taught=(TeacherKL(rows=every, anchor=anchor.padded(LENGTH), how=how),))
        scores = Scorer(policy)(completions, asked)
        assert scores.teacher is not None
        kl = scores.teacher[completions.mask]
        policy.zero_grad()
        kl.sum().backward()
        found[name] = kl.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    for here_is, away_is in zip(*found.values(), strict=True):
        far = float((here_is - away_is).norm() / here_is.norm())
        print(f"{direction}: {len(here_is)} numbers, {far:.1e} apart")
        assert far < 1e-4


def test_what_does_not_fit_is_refused(connected: Callable[..., VLLMReference], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="it names alias, start"):
        connected(reference_name=None)
    with pytest.raises(UnknownNameError, match="did you mean 'start'"):
        connected(reference_name="start-2")
    with pytest.raises(ModelError, match="maximum context length|max_model_len"):
        connected(max_completion_length=44)
    away = connected()
    away.top_k = 21
    with pytest.raises(ModelError, match="greater than max allowed: 20"):
        away.score_tokens([[3, 4]], [[5]], temperature=1.0)
    monkeypatch.setenv(KEY, "another")
    with pytest.raises(ModelError, match=KEY) as error:
        connected()
    assert "another" not in str(error.value)


def test_a_run_equals_the_run_with_a_frozen_reference(server: str, folder: str, tmp_path: Path) -> None:
    values = {**TINY, "model": folder, "beta": 0.1, "eval_every": 0, "report_to": "none"}
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value)) if name != "cpu"]
    away = ["--reference", "remote", "--reference_url", f"{server}/v1", "--reference_name", "alias"]
    for name, more in (("here", []), ("away", away)):
        assert main(["train", "--cpu", "--output_dir", str(tmp_path / name), *flags, *more]) == 0
    here, there = steps_of(tmp_path / "here"), steps_of(tmp_path / "away")
    assert len(here) == len(there) == 4
    assert there[0]["kl/k3"] < 1e-9
    assert there[-1]["kl/k3"] > 1e-3
    for a, b in zip(here, there, strict=True):
        for name in ("reward", "train/loss", "kl/k1", "kl/k3", "train/kl_penalty"):
            assert b[name] == pytest.approx(a[name], abs=1e-5), name
    said = "".join(
        path.read_text(errors="replace") for path in (tmp_path / "away").rglob("*.*") if path.suffix in TEXTS
    )
    assert "alias" in said
    assert SECRET not in said
