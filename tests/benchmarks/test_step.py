"""The steps that are compared: one model that never ends early, the same numbers of tokens, both trainers for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_runs
from benchmarks.step_model import END, HELD, PAD, TOKENIZER, make_tokenizer, mean_word
from benchmarks.step_runs import Seen, Setting, one, write_setting
from benchmarks.turns import in_turn

pytestmark = pytest.mark.slow

VOCABULARY = 512


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_setting(tmp_path_factory.mktemp("step"), "tiny", 8, count=4)


def test_neither_end_nor_padding_is_ever_sampled(written: tuple[str, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(written[0], dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(f"{written[0]}/{TOKENIZER}")
    ids = torch.randint(2, VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    logprobs = out.logits.log_softmax(-1)
    assert bool((out.hidden_states[-2][..., 0] == HELD).all())  # the layers leave the coordinate alone
    for word in (END, PAD):
        assert float(logprobs[..., tokenizer.convert_tokens_to_ids(word)].max()) < -100
    others = logprobs[..., 2:]
    assert float(others.exp().sum(-1).min()) == pytest.approx(1.0, abs=1e-12)
    assert float(-(others.exp() * others).sum(-1).mean()) > 5  # and the others stay open: log(510) is 6.2


def test_prompts_have_the_length_that_was_asked_for(written: tuple[str, str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(f"{written[0]}/{TOKENIZER}")
    lines = [json.loads(line)["prompt"] for line in Path(written[1]).read_text().splitlines()]
    assert [len(ids) for ids in tokenizer(lines)["input_ids"]] == [8] * 4
    assert len(set(lines)) == 4


def test_the_tokenizer_reads_what_it_writes() -> None:
    tokenizer = make_tokenizer(VOCABULARY)
    assert len(tokenizer) == VOCABULARY
    ids = tokenizer("w0 w17 w509")["input_ids"]
    assert ids == [2, 19, 511]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "w0w17w509"


def test_the_reward_is_the_mean_number_in_thousands() -> None:
    assert mean_word(["w100 w300", "w100w301", ""]) == [0.2, 0.2005, 0.0]


def test_runs_in_turn_take_their_steps_one_after_the_other(written: tuple[str, str]) -> None:
    common: dict[str, Any] = {"model": written[0], "prompts": written[1], "group": 4, "completion": 6, "steps": 3}
    settings = {trainer: Setting(trainer=trainer, warmup=1, **common) for trainer in ("klamp", "trl")}
    found = in_turn(settings)
    assert list(found) == list(settings)
    assert all(len(seen["seconds"]) == len(seen["cpu_seconds"]) == 2 for seen in found.values())
    assert all(seen["tokens"] == 2 * 4 * 6 and seen["extra_mib"] > 0 for seen in found.values())


def test_a_run_that_fails_in_its_turn_says_why(written: tuple[str, str]) -> None:
    setting = Setting(trainer="nobody", model=written[0], prompts=written[1])
    with pytest.raises(RuntimeError, match=r"the run a failed:(.|\n)*KeyError: 'nobody'"):
        in_turn({"a": setting})


def test_waiting_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(step_runs.time, "perf_counter", lambda: float(next(clock)))

    def wait() -> None:
        for _ in range(10):
            next(clock)

    seen = Seen(turn=wait)
    seen.start()
    seen.end(1)
    seen.end(1)
    assert [seconds for seconds, _ in seen.took] == [1.0, 1.0]


def test_steps_of_other_sizes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended_early(setting: Setting, folder: str, seen: Seen) -> None:
        seen.start()
        seen.end(48)
        seen.end(47)

    monkeypatch.setitem(step_runs.TRAINERS, "klamp", ended_early)
    setting: dict[str, Any] = Setting(
        trainer="klamp", model="", prompts="", group=4, completion=6, steps=2, warmup=1
    ).to_dict()
    with pytest.raises(RuntimeError, match=r"processed \[48, 47\] completion tokens, not 48"):
        one(setting)
