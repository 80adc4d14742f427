"""`klamp doctor`: its words, its JSON, its exit codes."""

import json
from pathlib import Path

import pytest

from klamp.cli import main


def state(folder: Path, *kl: float) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    log = [{"step": i + 1, "kl": value, "rewards/accuracy/mean": 0.5} for i, value in enumerate(kl)]
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"log_history": log}), encoding="utf-8")
    return str(file)


def lines(file: Path, rows: list[dict]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


SOUND, SPIKE = (0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.04), (0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7)


def test_a_sound_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = state(tmp_path, *SOUND)
    assert main(["doctor", path]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{path}: TRL trainer state, 7 logged steps up to step 7"
    assert "no alarm; 6 of 24 alarms were checked, 18 could not be" in out and "teacher" not in out
    assert "sampler-mismatch       not checked, needs sampler/k3 or" in out


def test_a_run_with_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", state(tmp_path, *SPIKE)]) == 1
    out = capsys.readouterr().out
    assert "alarm: kl-spike: the KL jumped (step 7)" in out
    assert "seen         kl/k3 jumped to 0.7 nats per token, 0.03 was the highest of 6 before" in out
    assert "likely       the learning rate, if the KL stays there: the KL rose by 0.67" in out
    assert "next step    Look at the tokens" in out
    assert "1 alarm;" in out
    assert max(map(len, out.splitlines()[1:])) <= 110


def test_which_findings_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = state(tmp_path, *SPIKE)
    assert main(["doctor", path, "--fail-on", "retention", "huge-values"]) == 0
    assert main(["doctor", path, "--fail-on", "retention", "kl-spike"]) == 1
    far = state(tmp_path / "far", *[0.25] * 8)
    assert main(["doctor", far]) == 1, "and step zero"
    capsys.readouterr()
    assert main(["doctor", far, "--fail-on", "kl-high"]) == 1
    assert "note: kl-high: KL above 0.2, a tutorial's warning sign (step 5, and 3 more)" in capsys.readouterr().out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = state(tmp_path, *SPIKE)
    assert main(["doctor", path, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["source"], found["steps"], found["healthy"]) == (path, "TRL trainer state", 7, False)
    assert found["failed"] == ["kl-spike"] == [finding["name"] for finding in found["findings"]]
    assert found["findings"][0]["first_step"] == 7
    assert found["not_checked"]["retention"] == "evaluations"
    assert main(["doctor", state(tmp_path, *SOUND), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True


def test_tokens_to_blame_stand_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"step": step, "tokens": ["4", "2"], "policy_logprobs": [-0.5, -1.0], "ref_logprobs": [-0.5, ref]}
        for step, ref in enumerate([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -5.5], start=1)
    ]
    assert main(["doctor", lines(tmp_path / "completions.jsonl", rows)]) == 1
    out = capsys.readouterr().out
    assert "tokens to blame, step 7\n" in out
    (line,) = [line for line in out.splitlines() if line.startswith("  '2'")]
    assert line.split() == ["'2'", "0", "1", "-1.000", "-5.500", "100", "%"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["missing"], "there is nothing to examine"),
        (["missing", "--fail-on", "kl-spikes"], "did you mean 'kl-spike'"),
        (["missing", "--verifier", "rule"], "did you mean 'rules'"),
        (["missing", "--map", "rewrd=x"], "did you mean 'reward'"),
    ],
)
def test_what_cannot_be_read_or_understood_is_2(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == ""


@pytest.mark.parametrize(("rows", "why"), [([], "no step was logged"), ([{"step": 1, "epoch": 0.1}], "")])
def test_nothing_to_check_is_not_sound(tmp_path: Path, capsys, rows: list[dict], why: str) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}), encoding="utf-8")
    assert main(["doctor", str(tmp_path / "trainer_state.json")]) == 2
    err = capsys.readouterr().err
    assert "nothing in the record can be checked" in err and why in err


def test_names_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": i + 1, "my_kl": kl, "kl": 0.0, "my_reward": 0.5} for i, kl in enumerate(SPIKE)]
    file = lines(tmp_path / "log.jsonl", rows)
    assert main(["doctor", file]) == 0
    for flags in (["--map", "kl=my_kl", "reward=my_reward"], ["--map=kl=my_kl", "--map", "reward=my_reward"]):
        capsys.readouterr()
        assert main(["doctor", file, *flags]) == 1
        out = capsys.readouterr().out
        assert "alarm: kl-spike: the KL jumped (step 7)" in out
        assert "detached-reference" not in out, "it was checked: there is a reward"
    assert main(["doctor", str(tmp_path), "--map", "kl=your_kl"]) == 2
    assert "did you mean 'my_kl'" in capsys.readouterr().err


def test_what_the_run_was_warned_of_stands_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("beta: 0.1\n", encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "kl/k3": 0.0}\n', encoding="utf-8")
    (tmp_path / "cautions.jsonl").write_text('{"step": 0, "text": "no chat template"}\n', encoding="utf-8")
    assert main(["doctor", str(tmp_path)]) == 0
    assert "caution      no chat template" in capsys.readouterr().out.splitlines()[1]
    main(["doctor", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["cautions"][0] == "no chat template"
    (tmp_path / "config.yaml").write_text("beta: 0.1\nhistory: [{until: 3, beta: 0.5}]\n", encoding="utf-8")
    assert main(["doctor", str(tmp_path)]) == 0
    assert "changed      after step 3: beta 0.5 -> 0.1" in capsys.readouterr().out.splitlines()[1]


def log(folder: Path, **columns: object) -> str:
    lines(folder / "log.jsonl", [{"step": step, "reward": 0.5, **columns} for step in range(1, 9)])
    return str(folder)


def test_no_alarm_is_not_green_where_no_kl_was_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blind = log(tmp_path, my_kl=0.001, grad_norm=0.2)
    assert main(["doctor", blind]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot tell: no alarm in what was looked at;" in out and "the KL NOT looked at: no KL to the" in out
    assert "--beta 0" in out and "not read my_kl: what it is can be said, as --map kl=my_kl (a k3) or k1=my_kl" in out
    assert main(["doctor", blind, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["healthy"] and found["kl_not_seen"] and found["not_read"] == {"my_kl": ""}
    for said in (["--beta", "0"], ["--map", "k1=my_kl"], ["--fail-on", "huge-values"]):
        assert main(["doctor", blind, *said]) == 0, said
        assert "actor/ppo_kl" not in capsys.readouterr().out
    main(["doctor", log(tmp_path / "verl", **{"actor/kl_loss": 0.0, "actor/ppo_kl": 0.0})])
    assert "actor/ppo_kl: between the policy and the one that sampled" in " ".join(capsys.readouterr().out.split())
