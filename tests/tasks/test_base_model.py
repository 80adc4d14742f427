"""The built-in task and the model that is trained for it once: answers, splits, its cache and what it can do."""

import os
import random
import string
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from klamp.errors import ConfigError, ModelError
from klamp.lab.tasks import TaskConfig, arithmetic, arithmetic_tokenizer, load_base_model, load_task
from klamp.lab.tasks.base import is_held_out

TINY = {"hidden_size": 16, "layers": 1, "heads": 2, "steps": 6, "batch_size": 8}


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda **changes: monkeypatch.setattr(arithmetic, "RECIPE", {**arithmetic.RECIPE, **changes})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Callable[..., None]) -> Path:
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    changed(**TINY)
    return tmp_path / "cache"


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def test_the_second_load_trains_nothing_and_gives_identical_bits(cache: Path) -> None:
    calls: list[Any] = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    arithmetic.cached_base_model(progress=lambda *call: calls.append(call))
    model, tokenizer = load_base_model()
    assert torch.equal(torch.rand(3), expected), "the caller's random state is left alone"
    assert [(step, steps) for _, step, steps, _ in calls] == [(i, 6) for i in range(1, 7)]
    assert all(0 < loss < 10 for *_, loss in calls)
    arithmetic.cached_base_model(progress=lambda *call: calls.append(call))
    again, tokenizer_again = load_base_model()
    assert len(calls) == 6
    assert bits(again) == bits(model)
    assert tokenizer_again.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_again.padding_side == "left"
    assert not model.training
    assert [p.name for p in cache.iterdir()] == [arithmetic.base_model_folder().name]


@pytest.mark.usefixtures("cache")
def test_the_seed_decides_the_weights(changed: Callable[..., None]) -> None:
    first = bits(arithmetic.train_base_model())
    assert bits(arithmetic.train_base_model()) == first
    changed(seed=1)
    assert bits(arithmetic.train_base_model()) != first


def test_another_recipe_has_another_folder(changed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [arithmetic.base_model_folder(), arithmetic.base_model_folder()]
    monkeypatch.setitem(arithmetic.SKILLS, "reversal", lambda rng: ("rev ab=", "ba"))
    found.append(arithmetic.base_model_folder())
    for change in ({"recipe": 2}, {"steps": 7}):
        changed(**change)
        found.append(arithmetic.base_model_folder())
    assert len({*found}) == 4


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("damage", ["cut", "garbage", "lacking"])
def test_a_damaged_cache_says_which_folder_to_delete(damage: str) -> None:
    load_base_model()
    folder = arithmetic.base_model_folder()
    weights = next(folder.glob("*.safetensors"))
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "lacking":
        tensors = load_file(weights)
        save_file({name: x for name, x in tensors.items() if "up_proj" not in name}, weights, metadata={"format": "pt"})
    else:
        (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=f"(?s)cannot be read.*{folder.name}.*delete this folder"):
        load_base_model()


@torch.no_grad()
def accuracies(model: Any, tokenizer: Any, *, sample: bool) -> dict[str, float]:
    found = {}
    for skill in arithmetic.SKILLS:
        rows = arithmetic.examples(skill, 256, seed=11, held_out=True)
        batch = tokenizer([e.prompt for e in rows], return_tensors="pt", padding=True)
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=arithmetic.MAX_COMPLETION_LENGTH,
            do_sample=sample,
            **({"temperature": 1.0, "top_k": 0} if sample else {}),
        )
        texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        found[skill] = sum(t == e.answer for e, t in zip(rows, texts, strict=True)) / len(rows)
    return found


@pytest.mark.slow
def test_the_default_model_can_gain_and_lose(default_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLAMP_CACHE", str(default_base_model.parent))
    model, tokenizer = load_base_model()
    sampled, greedy = (accuracies(model, tokenizer, sample=s) for s in (True, False))
    assert 0.4 <= sampled["addition"] <= 0.8
    assert 0.5 <= greedy["addition"] <= 0.85  # room to gain 15 points
    for skill in ("subtraction", "reversal"):
        assert sampled[skill] >= 0.9
        assert greedy[skill] >= 0.92


def share(left: int, right: int, value: int) -> float:
    rng = random.Random(0)
    return sum(arithmetic.careless_sum(left, right, rng) == value for _ in range(4000)) / 4000


def test_carries_are_forgotten_as_often_as_documented() -> None:
    # a heavy column, 7 + 7: the carry is lost with the full odds; a light one, 6 + 7: with half; the tens likewise
    for left, right, slip, odds in ((17, 27, 34, 0.6), (16, 27, 33, 0.3), (70, 70, 40, 0.6), (60, 70, 30, 0.3)):
        assert share(left, right, slip) == pytest.approx(odds, abs=0.03)
        assert share(left, right, left + right) == pytest.approx(1 - odds, abs=0.03)
    assert share(14, 25, 39) == 1.0, "without a carry it is never wrong"


def test_rows_come_from_the_training_side_in_the_mixture_that_was_asked_for(changed: Callable[..., None]) -> None:
    changed(carelessness=0.0)
    rows = list(arithmetic.corpus(4000))
    assert not any(is_held_out(prompt, arithmetic.HELD_OUT_SHARE) for prompt, _ in rows)
    sums = [(p, a) for p, a in rows if "+" in p]
    assert len(sums) / len(rows) == pytest.approx(0.46, abs=0.03)
    assert sum(p.startswith("rev") for p, _ in rows) / len(rows) == pytest.approx(0.13, abs=0.03)
    assert all(eval(p[:-1]) == int(a) for p, a in sums)


def test_labels_are_the_next_tokens_of_the_completion_alone() -> None:
    tokenizer = arithmetic_tokenizer()
    tokens, labels = arithmetic.training_tensors(iter([("1+2=", "3"), ("rev abcd=", "dcba")]))
    assert tokens.shape == labels.shape
    text = [tokenizer.decode(row[row != arithmetic.IGNORED]) for row in labels]
    assert text == ["3<eos>", "dcba<eos>"]
    # the first label stands at the prompt's last token, and no token of the input comes after its own label
    assert [int((row != arithmetic.IGNORED).nonzero()[0]) for row in labels] == [3, 8]
    for row, target in zip(tokens, labels, strict=True):
        known = target[:-1] != arithmetic.IGNORED
        shifted = row[1:][known]
        assert ((shifted == target[:-1][known]) | (shifted == tokenizer.pad_token_id)).all()


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"

    def write(empty: Path) -> None:
        assert list(empty.iterdir()) == [] and not folder.exists()
        (empty / "weights").write_text("all of them")

    assert arithmetic.stored(folder, write) == arithmetic.stored(folder, lambda _: pytest.fail("it is there")) == folder
    assert (folder / "weights").read_text() == "all of them"
    assert [each.name for each in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_a_model_is_as_readable_as_other_files(tmp_path: Path, umask: int) -> None:
    def write(empty: Path) -> None:
        save_file({"weight": torch.zeros(1)}, empty / "model.safetensors")
        (empty / "inner").mkdir(0o700)
        (empty / "program").touch(0o700)
        (empty / "inner" / "link").symlink_to("/proc/version")

    before = os.umask(umask)
    try:
        arithmetic.stored(tmp_path / "model", write)
    finally:
        os.umask(before)
    modes = {path.name: S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.name != "link"}
    file, folder = 0o666 & ~umask, 0o777 & ~umask
    assert modes == {"model": folder, "inner": folder, "model.safetensors": file, "program": file | 0o700}


def test_what_is_killed_on_the_way_or_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def write(empty: Path) -> None:
        (empty / "weights").write_text("half of th")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arithmetic.stored(tmp_path / "model", write)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="(?s)cannot be written.*KLAMP_CACHE"):
        arithmetic.stored(tmp_path / "file" / "model", lambda empty: pytest.fail("there was work"))


def test_the_quicker_process_wins(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def write(empty: Path) -> None:
        (empty / "weights").write_text("ours")
        folder.mkdir()
        (folder / "weights").write_text("theirs")

    arithmetic.stored(folder, write)
    assert (folder / "weights").read_text() == "theirs"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def expected_answer(prompt: str) -> str:
    """The answer by another way than the task's own: parse the prompt."""
    if prompt.startswith("rev "):
        return "".join(reversed(prompt[4:-1]))
    return str(eval(prompt[:-1]))  # digits, + and - only: these prompts are ours


@pytest.mark.parametrize("skill", arithmetic.SKILLS)
def test_answers_are_right_and_fit_the_declared_lengths(skill: str) -> None:
    for prompt, answer in islice(arithmetic.pairs(skill, random.Random(3), held_out=False), 500):
        assert answer == expected_answer(prompt)
        assert len(prompt) <= arithmetic.MAX_PROMPT_LENGTH
        assert len(answer) + 1 <= arithmetic.MAX_COMPLETION_LENGTH
        assert set(prompt + answer) <= set(arithmetic.ALPHABET)
    assert arithmetic.MAX_PROMPT_LENGTH + arithmetic.MAX_COMPLETION_LENGTH <= arithmetic.MAX_MODEL_LENGTH


@pytest.mark.parametrize("skill", arithmetic.SKILLS)
def test_same_seed_same_examples_and_another_seed_others(skill: str) -> None:
    first = arithmetic.examples(skill, 50, seed=1, held_out=False)
    assert first == arithmetic.examples(skill, 50, seed=1, held_out=False)
    assert first != arithmetic.examples(skill, 50, seed=2, held_out=False)
    assert len({e.prompt for e in first}) == 50
    # a longer draw starts with the shorter one: a bigger run sees the same prompts first
    assert arithmetic.examples(skill, 80, seed=1, held_out=False)[:50] == first


def test_held_out_prompts_never_turn_up_in_training_whatever_the_seed() -> None:
    task = load_task(TaskConfig(train_size=3000, eval_size=200, task_seed=5), arithmetic_tokenizer())
    held_out = {e.prompt for rows in task.evaluation.values() for e in rows}
    for seed in (5, 6):
        train = arithmetic.examples(arithmetic.RL_SKILL, 3000, seed=seed, held_out=False)
        assert held_out.isdisjoint(e.prompt for e in train)
    assert held_out.isdisjoint(e.prompt for e in task.train)
    assert all(is_held_out(prompt, arithmetic.HELD_OUT_SHARE) for prompt in held_out)


def test_the_task_trains_addition_and_watches_the_rest() -> None:
    task = load_task(TaskConfig(train_size=20, eval_size=7), arithmetic_tokenizer())
    assert task.rl_skill == arithmetic.RL_SKILL
    assert list(task.evaluation) == list(arithmetic.SKILLS) and next(iter(task.evaluation)) == arithmetic.RL_SKILL
    assert [len(rows) for rows in task.evaluation.values()] == [7] * len(arithmetic.SKILLS)
    assert [e.skill for e in task.train] == [arithmetic.RL_SKILL] * 20
    assert len(load_task(TaskConfig(), arithmetic_tokenizer()).train) == 4096


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"system_prompt": "be brief"}, "system_prompt"),
        ({"eval_split": "held.jsonl"}, "eval_split"),
        ({"skill_column": "s"}, "skill_column"),
        ({"chat_template": True}, "chat_template"),
        ({"task": "arithmetics"}, "did you mean 'arithmetic'"),
        ({"train_size": -1}, "train_size"),
        ({"eval_size": 0}, "eval_size"),
    ],
)
def test_options_that_cannot_be_or_would_do_nothing_are_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_task(TaskConfig(**option), arithmetic_tokenizer())


def test_one_character_is_one_token_and_text_survives_the_round_trip() -> None:
    tokenizer = arithmetic_tokenizer()
    ids = tokenizer(arithmetic.ALPHABET)["input_ids"]
    assert len(ids) == len(arithmetic.ALPHABET) == len(set(ids))  # pyright: ignore
    for text in ("47+85=", "71-38=", "rev abcd=", "a  b "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text  # pyright: ignore
    assert tokenizer(string.digits + "<eos>")["input_ids"][-1] == tokenizer.eos_token_id  # pyright: ignore
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    padded: Any = [tokenizer.pad_token_id, *ids[:2], tokenizer.eos_token_id]
    assert tokenizer.decode(padded, skip_special_tokens=True) == "01"
