"""`klamp report`: what it reads, where it writes, what it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from tests.report.pages import Node, parse

from klamp.cli import main
from klamp.lab.config import TrainConfig
from klamp.lab.folders import plain


def lines(file: Path, *rows: dict) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def klamp_run(folder: Path, **changes) -> Path:
    kl = [0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7]
    rows = [{"step": i + 1, "kl/k3": value, "reward": 0.5} for i, value in enumerate(kl)]
    lines(folder / "metrics.jsonl", {"step": 0, "eval/addition": 0.5}, *rows, {"step": 7, "eval/addition": 0.75})
    row = {"step": 7, "prompt": "2+2=", "tokens": ["4"], "policy_logprobs": [-0.1], "ref_logprobs": [-2.1], "reward": 1}
    lines(folder / "completions.jsonl", row)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(TrainConfig.from_flat(changes))))
    (folder / "versions.json").write_text(json.dumps({"klamp": "0.1.0", "torch": "2.13.0"}))
    (folder / "summary.json").write_text(json.dumps({"rl_skill": "addition"}))
    return folder


def names_in(made: Node) -> list[str]:
    return [name.text for name in made.one("table", of="headlines").one("thead").all("b")]


def page(file: Path) -> Node:
    return parse(file.read_text(encoding="utf-8"))


def test_a_klamp_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = klamp_run(tmp_path / "run-1", beta=0.04, target_kl=0.05)
    assert main(["report", str(folder)]) == 0
    file = folder / "report.html"
    size = f"{file.stat().st_size / 1000:.0f} kB"
    assert capsys.readouterr().out == f"{file}: 1 run, 1 alarm, {size}\n"
    made = page(file)
    assert made.one("h1").text == "run-1"
    tiles = {tile.one("dt").text: tile.one(of="big").text for tile in made.all(of="tile")}
    assert tiles["addition, trained"] == "75.0" and tiles["KL (k3)"] == "0.253"
    assert made.one(of="words").text == "2+2="
    assert [finding.attributes["id"] for finding in made.all(of="finding")] == ["alarm-1"]
    table = {row[0]: row[1:] for row in made.one(id="configuration").all("table")[0].rows()}
    assert (table["beta"], table["target_kl"]) == (["0.04"], ["0.05"])
    assert ["torch", "2.13.0"] in made.one(id="configuration").all("table")[1].rows()
    assert "target 0.05" in made.one("figure", id="chart-kl").one("ul").text
    first = file.read_bytes()
    assert main(["report", str(folder)]) == 0
    assert file.read_bytes() == first, "it is written again"


def test_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(klamp_run(tmp_path / "a", beta=0.1)), str(klamp_run(tmp_path / "b"))]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *runs]) == 0
    made = page(tmp_path / "report.html")
    assert names_in(made) == ["a", "b"]
    rows = made.one(id="configuration").all("table")[0].rows()
    assert rows[0] == ["field", "a", "b"] and ["beta", "0.1", "0.01"] in rows
    assert main(["report", runs[0], "--output", str(tmp_path / "one.html"), runs[1]]) == 0
    assert page(tmp_path / "one.html").one("h1").text == "2 runs compared"


def test_the_runs_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["beta-0_seed-0", "beta-0_seed-1", "beta-0.1_seed-0"]
    for name in names:
        klamp_run(tmp_path / "sweep" / "runs" / name)
    (tmp_path / "sweep" / "runs" / "beta-1_seed-0").mkdir()
    assert main(["report", str(tmp_path / "sweep")]) == 0
    captured = capsys.readouterr()
    assert "beta-1_seed-0 is left out: it holds no record of a run" in captured.err
    made = page(tmp_path / "sweep" / "report.html")
    assert names_in(made) == names
    keys = made.one("figure", id="chart-reward-0").one("ul", of="legend").all("path", of="curve")
    assert [key.classes[1] for key in keys] == ["s0", "s1"], "seeds of one arm share a colour"


def test_nothing_else_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = klamp_run(tmp_path / "run-1")
    mine = folder / "report.html"
    mine.write_text("<html>my thesis</html>")
    assert main(["report", str(folder)]) == 1
    assert "the file exists and is no report" in capsys.readouterr().err
    assert mine.read_text() == "<html>my thesis</html>"


def test_what_is_refused_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "missing"]) == 1 and main(["report", "--output", "x.html"]) == 2
    captured = capsys.readouterr()
    assert "there is nothing to examine" in captured.err and captured.out == ""
    assert not list(tmp_path.iterdir())
