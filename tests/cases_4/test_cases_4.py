"""Public reports about other trainers' runs: what `klamp doctor` finds in each log, and what it reads."""

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.hosts.trl.hosts import arguments, klamp_trainer, model, stock_trainer
from tests.records.test_foreign import examined
from torch.nn import Dropout

from klamp.cli import main
from klamp.config import KLConfig
from klamp.doctor.readers import read_record
from klamp.errors import ConfigError, KLWarning
from klamp.trl import GRPOConfig, attach


class Right(NamedTuple):
    """The right answer to a log: alarm -> its first step, the exit code, metrics that are read, some of the text."""

    alarms: dict[str, int]
    code: int
    read: str
    texts: tuple[str, ...] = ()


COLLAPSE, MISMATCH, KL_GROWING = "reward-collapse", "sampler-mismatch", "kl-growing"
CASES: dict[str, Right] = {
    "art-kl-policy-ref.jsonl": Right(
        {"kl-spike": 23, COLLAPSE: 26, KL_GROWING: 29}, 1, "kl/k1 reward policy/entropy", ("not read loss/kl_div:",)
    ),
    "entropy-explodes-beta-0.json": Right(
        {COLLAPSE: 240}, 1, "policy/entropy length/truncated", ("the entropy rose from 0.391 to 2.03", "into noise")
    ),
    "entropy-rises-sound.json": Right({}, 3, "policy/entropy", ("no alarm in what was looked at",)),
    "entropy-rises-sound.json --beta 0": Right({}, 0, "policy/entropy", ("no alarm; 7 of 24",)),
    "kl-coef-negative.jsonl": Right(
        {"negative-beta": 1, KL_GROWING: 50, "entropy-collapse": 95}, 1, "beta kl/k3", ("beta is -0.001: a bonus",)
    ),
    "logprob-one-masked-ones.jsonl": Right({}, 0, "kl/k3 sampler/k3", ("no alarm",)),
    "nemo-moe-invalid-steps.jsonl": Right(
        {MISMATCH: 3}, 1, "sampler/k3 kl/k3", ("(step 3, and 3 more)", "this step alone, so far", "(MoE)")
    ),
    "one-word-from-step-5.jsonl": Right(
        {"kl-far": 9, "repetition": 10}, 1, "length/repeated kl/k1", ("93 % of the tokens repeat a pair", ", 0 % in")
    ),
    "openinstruct-lr0-drift.jsonl": Right(
        {"not-trained": 20, MISMATCH: 43}, 1, "sampler/abs kl/k1 kl/k3", ("train/learning_rate is 0 in its last 20",)
    ),
    "retokenised-turns.jsonl": Right(
        {MISMATCH: 1}, 1, "sampler/k1 sampler/k3", ("sampler/k1 is 1.3", "tokens to blame, step 1", "'t4'", "'t11'")
    ),
    "reward-minimised.json": Right(
        {COLLAPSE: 19}, 1, "kl/k3 reward", ("falls from the first steps on", "the sign of the loss, of the advantage")
    ),
    "rollout-shifted-by-one.jsonl": Right({MISMATCH: 1}, 1, "kl/k3", ("the lists are shifted by one position",)),
    "slime-opd-grows.jsonl": Right(
        {"truncated": 22, "teacher-not-reached": 49}, 1, "teacher/kl length/truncated", ("teacher/kl was 0.32 nats",)
    ),
    "swift-saturated-vl.jsonl": Right(
        {"saturated": 8380}, 1, "sampler/k3 kl/k3", ("equal rewards at 1", "end the run", "rollout_correction/kl: ms-")
    ),
    "trl-ppo-old-grows.jsonl": Right(
        {KL_GROWING: 30, COLLAPSE: 53, "kl-far": 80}, 1, "kl/k1 kl/k1_sequence", ("kl/k1 grew from 0.0866",)
    ),
    "verl-kl-ctrl-runs-away.jsonl": Right(
        {"beta-runaway": 49, COLLAPSE: 110}, 1, "beta kl/k1", ("from 0.00109 to 0.0525; the KL of a completion costs",)
    ),
    "verl-opd-k1-sound.jsonl": Right({}, 0, "teacher/kl reward", ("not read actor/distillation/abs_loss: the size",)),
    "verl-opd-k1-sound.jsonl --teacher_coef 1": Right({}, 0, "teacher/kl", ("no alarm",)),
}  # fmt: skip
"""File and options -> the right answer."""
NO_RATE = ("nemo-moe-invalid-steps.jsonl", "reward-minimised.json", "swift-saturated-vl.jsonl")
"""Files in whose causes the learning rate would be wrong."""


@pytest.mark.parametrize("name", CASES)
def test_a_log_of_a_public_report(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, *options = name.split()
    right, path = CASES[name], Path(__file__).parent / file
    alarms, code, out = examined(capsys, path, *options)
    assert (alarms, code) == (right.alarms, right.code)
    assert not {*right.read.split()} - read_record(path, {}).names
    assert not [text for text in right.texts if text not in out]
    assert file not in NO_RATE or not re.search(r"likely (\d )?the learning rate", out)


CUTS: list[tuple[dict[str, Any], str]] = [
    ({"generation_kwargs": {"min_new_tokens": 6}}, "min_new_tokens"),
    ({"generation_kwargs": {"no_repeat_ngram_size": 2, "temperature": 0.5}}, "no_repeat_ngram_size and temperature"),
    ({"repetition_penalty": 1.5}, "repetition_penalty"),
    ({"top_p": 0.5, "top_k": 3}, "top_p and top_k"),
    ({"temperature": 0.7, "top_k": -1, "generation_kwargs": {"max_new_tokens": 9, "min_p": None}}, ""),
]


@pytest.mark.parametrize(("options", "names"), CUTS, ids=[names or "none" for _, names in CUTS])
def test_a_sampler_that_is_not_the_policy_is_a_caution_beside_a_kl(options: Any, names: str, tmp_path: Path) -> None:
    taught = {"teacher_model": "DIR", "teacher_coef": 0.3}
    doors = [
        lambda: arguments(beta=0.1, kl_estimator="k3", **options),
        lambda: arguments(**taught, **options),
        lambda: attach(stock_trainer(model(), tmp_path, **options), KLConfig(beta=0.1)),
    ]
    for door, field in zip(doors, ("kl", "teacher", "kl"), strict=True):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            door()
        texts = [str(x.message) for x in told if "the sampler is not the policy" in str(x.message)]
        assert [text.split(" the sampler")[0] for text in texts] == ([f"With {names}"] if names else [])
        assert all(f"({field}_estimator=" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        arguments(beta=0.1, kl_estimator="exact", **options)
        arguments(beta=0.1, **options)  # TRL's own KL


def test_a_negative_coefficient_is_refused_and_dropout_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="beta must be a number >= 0"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, beta=-0.001)
    assert main(["explain", "--beta", "-0.001"]) == 2 and "beta must be a number >= 0" in capsys.readouterr().err
    dropping = model("gpt2")
    for layer in dropping.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.1
    with pytest.warns(KLWarning, match=r"before the first update .* Likely reason: dropout \("):
        klamp_trainer(dropping, tmp_path, beta=0.1, kl_estimator="k3", max_steps=1).train()
