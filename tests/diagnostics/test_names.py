"""The table of metrics, and the names of other trainers."""

import re
from pathlib import Path
from typing import get_args

import pytest

from klamp.doctor.metrics import (
    METRICS,
    Better,
    averaged_over,
    check_metrics,
    evaluations,
    own_name,
    read_pairs,
    settings_of,
    step_of,
    translate,
    verifier_of,
)
from klamp.errors import ConfigError, UnknownNameError
from klamp.names import SHORT_METRICS


def test_a_row_is_a_family_and_a_word_a_sentence_and_a_unit_that_belongs_to_its_reduction() -> None:
    for row in METRICS.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*(/[a-z0-9_]+){0,2}", row.name)
        assert not row.text[0].islower() or row.text.startswith(("k1", "k3", "log ")), row
        assert row.unit and row.reduction and row.text.endswith(".") and "\n" not in row.text, row
        assert row.better in get_args(Better), row
        over = {"nats/token": "tokens", "nats/sequence": "completions"}.get(row.unit)
        mean_of = row.reduction.removesuffix("KL tokens").removesuffix(over or "")
        assert over is None or row.reduction == "value" or mean_of != row.reduction, row
        assert row.unit != "share" or row.reduction.startswith("mean over "), "a share is a mean of zeros and ones"
        assert not row.name.endswith("_max") or row.reduction.startswith("maximum"), row


def test_a_name_without_a_row_has_no_reduction_and_is_refused() -> None:
    assert averaged_over("kl/k3") == "KL tokens"
    assert averaged_over("policy/logp_mean") == "tokens"
    check_metrics(["kl/k3", "teacher/kl.math"])
    with pytest.raises(ConfigError, match=r"maximum.*means of parts do not give that"):
        averaged_over("kl/log_ratio_max")
    with pytest.raises(ConfigError, match="no row in metrics.yaml"):
        check_metrics(["kl/new"])


def test_known_names() -> None:
    names = ("kl", "train/kl", "grad_norm", "actor/kl_loss", "actor/ppo_kl")  # the last one: to the old policy
    assert [own_name(name) for name in names] == ["kl/k3", "kl/k3", "train/grad_norm", "kl/k3", None]


def test_a_row_is_translated_number_by_number_and_klamps_own_name_wins_in_whatever_order() -> None:
    row = {"kl": 0.25, "train/kl": 9.0, "reward": None, "completions/mean_length": 7, "flag": True, "note": "x"}
    assert translate(row) == {"kl/k3": 0.25, "length/mean": 7.0}
    for row in ({"kl_penalty": 9.0, "kl/k1": 0.5}, {"kl/k1": 0.5, "kl_penalty": 9.0}):
        assert translate(row) == {"kl/k1": 0.5}, "the loop's kl_penalty is beta times that"


def test_names_that_are_given_win_and_mean_nothing_else() -> None:
    row = {"kl": 0.25, "reward": 1.0, "my_reward": 2, "note": "x", "kl/k1": 3.0}
    names = {"kl/k1": "kl", "reward": "my_reward", "beta": "note", "train/loss": "kl"}
    assert translate(row, names) == {"kl/k1": 0.25, "reward": 2.0, "train/loss": 0.25}
    assert translate({"reward": 1.0, "grad_norm": 3.0}, names) == {"train/grad_norm": 3.0}, "two curves are not mixed"
    assert translate(row, {}) == translate(row) == {"kl/k3": 0.25, "kl/k1": 3.0, "reward": 1.0}


def test_pairs_of_names() -> None:
    assert read_pairs([]) == {}
    found = read_pairs(["kl=my_kl", "reward=a=b", "kl/exact=x y"])
    assert found == {"kl/k3": "my_kl", "reward": "a=b", "kl/exact": "x y"}
    assert set(SHORT_METRICS.values()) <= METRICS.keys()
    assert not SHORT_METRICS.keys() & METRICS.keys()
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert all(f"| `{short}` | `{full}` |" in page for short, full in SHORT_METRICS.items())


@pytest.mark.parametrize(
    ("pairs", "kind", "words"),
    [
        (["kl"], ConfigError, "there is no = with a name"),
        (["kl="], ConfigError, "there is no ="),
        (["=my_kl"], ConfigError, "there is no ="),
        (["rewrd=x"], UnknownNameError, "did you mean 'reward'"),
        (["lenght=x"], UnknownNameError, "did you mean 'length'"),
        (["kl/k4=x"], UnknownNameError, r"short names: kl \(kl/k3\), k1 \(kl/k1\), length"),
        (["kl=a", "kl/k3=b"], ConfigError, "kl/k3 has two names"),
    ],
)
def test_pairs_that_cannot_be_used(pairs: list[str], kind: type[ConfigError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        read_pairs(pairs)
    assert caught.value.got and caught.value.why and caught.value.fix


def test_evaluations_are_scores() -> None:
    row = {
        "eval_reward": 0.5,
        "eval_reward_std": 0.1,
        "eval_rewards/accuracy_reward/mean": 0.25,
        "eval_runtime": 12.0,
        "eval/loss": 3.0,
        "val-core/gsm8k/acc/mean@8": 0.75,
        "reward": 1.0,
    }
    assert evaluations(row) == {"reward": 0.5, "rewards/accuracy_reward/mean": 0.25, "gsm8k/acc/mean@8": 0.75}
    assert evaluations({"eval/subtraction": 0.5, "reward": 1.0}, every=True) == {"subtraction": 0.5}


def test_steps_rules_by_their_names_and_settings() -> None:
    steps = ({"train/global_step": 7, "_step": 3}, {"_step": 3}, {"loss": 3})
    assert [step_of(row) for row in steps] == [7, 3, None]
    rule, other = "rewards/accuracy_reward/mean", {"rewards/reward-model-7b/mean"}
    assert verifier_of({rule, "train/rewards/think_format_reward/mean", "rewards/helpful/std"}) == "rules"
    assert verifier_of({rule, *other}) is verifier_of({"reward"}) is None
    for given, scale in (("group", "std"), (True, "std"), (False, "none"), ("none", "none"), (None, None)):
        settings = settings_of({"beta": 0, "loss_type": "dr_grpo", "scale_rewards": given}, {"rewards/math/mean"})
        assert (settings.beta, settings.loss_type, settings.scale_rewards) == (0.0, "dr_grpo", scale)
        assert settings.verifier == "rules"


def test_a_teacher_of_the_arguments_counts_where_no_kl_to_it_is_logged() -> None:
    asked = {"teacher_coef": 0.1, "teacher_top_k": 4}
    assert settings_of(asked, {"loss", "teacher_requests"}).teacher_coef == 0.1
    assert settings_of(asked, {"loss", "train/teacher_kl"}).teacher_coef is None
    assert settings_of({}, {"loss"}).teacher_coef is None


def test_a_kl_over_all_updates_of_a_step_is_known_as_one() -> None:
    assert settings_of({}, {"actor/kl_loss", "actor/lr"}).k3_over_updates
    assert not settings_of({}, {"kl", "actor/reward_kl_penalty"}).k3_over_updates
    assert not settings_of({}, {"actor/kl_loss", "mine"}, {"kl/k3": "mine"}).k3_over_updates
    assert settings_of({}, {"actor/kl_loss"}, {"kl/k3": "actor/kl_loss"}).k3_over_updates
