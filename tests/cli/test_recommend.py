"""`klamp recommend`: what it prints is a file that train and explain take; what it writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import yaml

from klamp.cli import main
from klamp.cli.arguments import parse_train
from klamp.cli.options import Keep, RecommendOptions
from klamp.cli.recommend import MARK, situation_of
from klamp.config.choices import SMALL_VOCABULARY
from klamp.config.recommend import Situation, recommend

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["recommend", *flags]) == 0
    return capsys.readouterr().out


def test_what_is_printed_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--length", "1000", "--verifier", "rules", "--group_size", "8")
    assert text.startswith(f"{MARK} --length 1000 --verifier rules --group_size 8\n")
    assert max(map(len, text.splitlines())) <= 100
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    config = parse_train(["--config", str(file)]).config
    assert (config.kl.beta, config.kl.target_kl, config.rollout.max_completion_length) == (0.01, 0.05, 1000)
    assert yaml.safe_load(text) == recommend(Situation(gamed=False)).values


def test_price_reasons_and_records_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, "--length", "200", "--keep", "nothing").replace("\n#  ", "").split())
    assert (
        "# Price of beta: 0.05 reward per nat of a whole completion; of the mean per token, at 200 tokens: 10 per"
        in text
    )
    assert "[docs/language.md#what-a-kl-keeps-the-study] beta: 0.05" in text
    assert "# Caution: The longest completions in the records" in text
    assert "# No KL, and no price." in printed(capsys, "--verifier", "rules", "--keep", "nothing")


def test_explain_takes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    said = printed(capsys, "--steady_length", "--output", str(file))
    assert said.startswith(f"{file}: ") and said.endswith(f"klamp train --config {file}\n")
    assert main(["explain", str(file)]) == 0
    assert "over whole completions" in " ".join(capsys.readouterr().out.split())
    assert main(["recommend", "--output", str(file)]) == 0, "it is written again"


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "--json", "--updates", "2"))
    expected = recommend(Situation(updates=2))
    assert found["config"] == expected.values and found["price"] == expected.price
    assert set(found["reasons"]) == set(found["config"])
    assert found["reasons"]["target_kl"]["rests_on"][0].startswith("docs/controllers.md")
    file = tmp_path / "mine.json"
    for _ in range(2):
        assert main(["recommend", "--json", "--output", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["command"].startswith("klamp recommend --json")


def test_every_flag_reaches_the_situation() -> None:
    told = RecommendOptions(
        length=5,
        max_length=9,
        verifier="rules",
        keep="nothing",
        group_size=4,
        updates=2,
        engine=True,
        reward_range=2.0,
        free_kl=0.1,
        exact_optimum=True,
        steady_length=True,
        vocab=SMALL_VOCABULARY,
        low_precision=True,
    )
    assert situation_of(told) == Situation(
        length=5,
        max_length=9,
        group_size=4,
        updates=2,
        gamed=False,
        keeps=False,
        reward_range=2.0,
        lags=True,
        ends_where_beta_says=True,
        steady_length=True,
        free_kl=0.1,
        small_vocabulary=True,
        low_precision=True,
    )
    assert situation_of(RecommendOptions()) == Situation()
    assert get_args(Keep) == ("skills", "nothing")


def test_nothing_else_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("beta: 0.3\n", encoding="utf-8")
    assert main(["recommend", "--output", str(mine)]) == 1
    assert "is no recommendation" in capsys.readouterr().err and mine.read_text() == "beta: 0.3\n"
    assert main(["recommend", "--output", str(tmp_path)]) == 1
    assert main(["recommend", "--output", str(tmp_path / "no" / "mine.yaml")]) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--verifier", "rulse"], "did you mean 'rules'"),
        (["--lenght", "5"], "did you mean --length"),
        (["--group_size", "1"], "takes 2 or more"),
        (["--reward_range", "0"], "teaches nothing"),
        (["--length", "9", "--max_length", "5"], "shorter than the mean"),
        (["grpo"], "belongs to no flag"),
    ],
)
def test_what_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
