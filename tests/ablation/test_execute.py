"""Ablations of real runs: what they leave, how they go on, one run, earlier runs, the KL at the end."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tests.ablation.rewards import FOLDER
from tests.training import rewards
from tests.training.conftest import TINY, disturb, rows_of, scores_of, steps_of, stored, tiny_llama
from tests.waiting import wait_for, wait_until

from klamp.cli.ablate import parse_ablate
from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped
from klamp.lab import checkpoint
from klamp.lab.ablate import one_run
from klamp.lab.ablate.execute import PLAN, LocalExecutor, check_folder, compare, execute, load_shared
from klamp.lab.ablate.one_run import evaluate, measured, numbers_of, perform
from klamp.lab.ablate.plan import Arm, Plan, Run, as_runs, grid, plan_text, run_folder, runs
from klamp.lab.ablate.results import read_outcome
from klamp.lab.anchors import LocalReference
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.folders import newest_policy, plain
from klamp.lab.models import load_model
from klamp.lab.setup import Context
from klamp.lab.tasks import arithmetic_tokenizer
from klamp.lab.tasks.base import Example, Task
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Scorer

pytestmark = pytest.mark.slow

ABLATION = "tests.ablation.rewards"


class InThisProcess:
    def run(self, runs, folder, tell) -> None:
        self.ran = [run.name for run in runs]
        for run in runs:
            perform(run, folder)


def test_runs_that_are_killed_or_stopped_are_done_by_the_next_call(plan_with, tmp_path, monkeypatch) -> None:
    """Real processes: one run is done, one is killed with SIGKILL in its third step, and Ctrl-C stops the last one."""
    judges = {"fine": "digits", "killed": "kills_once", "stopped": "waits"}
    arms = tuple(Arm(name=name, values={"reward": f"{ABLATION}:{judge}"}) for name, judge in judges.items())
    plan = replace(plan_with(seeds=(2,), eval_size=2, save_every=1, eval_every=0, max_steps=3), arms=arms)
    folders = [run_folder(tmp_path, run) for run in runs(plan)]
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def interrupt() -> None:
        for file in (folders[0] / "outcome.json", folders[1] / "outcome.json", tmp_path / "waiting"):
            wait_for(file)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(TrainingStopped):
        execute(plan, tmp_path, LocalExecutor(at_once=2))
    done, killed, stopped = map(read_outcome, folders)
    assert done is not None and done.state == "done" and stopped is None
    assert killed is not None and "SIGKILL" in killed.error and str(folders[1] / "log.txt") in killed.error
    saved = [checkpoint.checkpoints(own)[-1].name for own in folders]
    assert saved == ["step-000003", "step-000002", "step-000002"], "what was stopped has finished its step"

    here = InThisProcess()
    again = execute(plan, tmp_path, here)
    assert here.ran == ["killed_seed-2", "stopped_seed-2"]
    assert [outcome.state for outcome in again.outcomes] == ["done"] * 3 and again.outcomes[0] == done
    for run, own in zip(runs(plan), folders, strict=True):
        assert read_outcome(own) == perform(run, tmp_path / "whole"), "never troubled, in another process"
        assert rows_of(own) == rows_of(run_folder(tmp_path / "whole", run))
    assert {file.name for file in again.files} == {"table.md", "table.json", "frontier.png"}


PLAN_A = Plan(name="a", base={"max_steps": 5, "report_to": ()}, arms=grid({"beta": [0.0, 0.1]}), seeds=(0, 1))


def test_a_folder_holds_its_plan_and_takes_it_again(tmp_path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / PLAN).write_text(plan_text(PLAN_A))
    check_folder(folder, replace(PLAN_A, base={"report_to": (), "max_steps": 5}))
    assert parse_ablate(["--plan", str(folder / PLAN)])[0].arms == PLAN_A.arms
    for change in ({"base": {"max_steps": 6}}, {"seeds": (0,)}, {"arms": grid({"beta": [0.0, 0.2]})}):
        with pytest.raises(RunFolderError, match="another ablation") as caught:
            check_folder(folder, replace(PLAN_A, **change))
        assert caught.value.got == str(folder) and "--output_dir" in caught.value.fix


def test_other_files_are_never_written_over(tmp_path) -> None:
    for name, file, text in (("full", "thesis.tex", ""), ("damaged", PLAN, "a: [")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    for folder in (tmp_path / "full", tmp_path / "full" / "thesis.tex", tmp_path / "damaged"):
        with pytest.raises(KlampError):
            check_folder(folder, PLAN_A)
    (tmp_path / "empty").mkdir()
    check_folder(tmp_path / "empty", PLAN_A)
    check_folder(tmp_path / "none", PLAN_A)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"task": "missing.jsonl"}, DataError), ({"reward": "tests.training.rewards:nowhere"}, ConfigError)],
)
def test_inputs_that_cannot_be_used_are_refused_before_any_run(plan_with, change, error) -> None:
    arms = (Arm(name="fine"), Arm(name="wrong", values=change))
    with pytest.raises(error, match="the arm 'wrong'"):
        load_shared(runs(replace(plan_with(seeds=(0,)), arms=arms)))


@pytest.fixture
def run(plan_with) -> Run:
    return runs(plan_with())[1]


def test_a_run_leaves_its_files_and_its_outcome_and_is_trained_once(run, tmp_path) -> None:
    outcome = perform(run, tmp_path)
    own = run_folder(tmp_path, run)
    assert read_outcome(own) == outcome and outcome.state == "done" and not outcome.error
    assert (outcome.run, outcome.arm, outcome.seed, outcome.values) == (run.name, "beta=0.05", 0, {"beta": 0.05})
    summary = json.loads((own / "summary.json").read_text())
    assert outcome.before == summary["before"] and outcome.after == summary["after"]
    assert set(outcome.after) == {"addition", "subtraction", "reversal"} and outcome.rl_skill == "addition"
    measurement = numbers_of(measured(run.config, newest_policy(own)))
    assert outcome.numbers == {**measurement, "beta": summary["final_metrics"]["beta"]}

    (own / "outcome.json").unlink()  # as if it was interrupted while it was measured
    trained = (own / "metrics.jsonl").read_text()
    assert perform(run, tmp_path) == outcome and (own / "metrics.jsonl").read_text() == trained, "not trained again"


def test_a_reward_that_fails_is_the_runs_outcome_and_is_tried_again(plan_with, tmp_path) -> None:
    (run,) = runs(plan_with(sweep={"beta": [0.05]}, seeds=(0,), reward="tests.training.rewards:breaks"))
    # 9 held-out prompts before, then 12 completions a step: the third step's
    rewards.STATE.update(calls=0, break_at=9 + 12 + 12 + 9 + 5)
    outcome = perform(run, tmp_path)
    assert outcome.state == "failed" and not outcome.numbers and not outcome.after
    first, *rest = outcome.error.splitlines()
    assert first == "the reward function tests.training.rewards:breaks raised RuntimeError"
    assert "the judge is out to lunch" in outcome.error and "the state after step 2 is saved" in rest[-1]
    assert read_outcome(run_folder(tmp_path, run)) == outcome
    rewards.STATE.update(calls=0, break_at=-1)
    assert perform(run, tmp_path).state == "done"


def test_any_error_is_an_outcome_that_says_what_it_was(run, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(one_run, "train_run", lambda *_: 1 / 0)
    assert perform(run, tmp_path).error == "ZeroDivisionError: division by zero"
    assert "Traceback" in caplog.text, "the log has the rest"


def test_a_run_whose_command_has_died_stops_and_can_be_continued(plan_with, tmp_path) -> None:
    (run,) = runs(plan_with(sweep={"beta": [0.05]}, seeds=(0,), max_steps=200, save_every=1, eval_every=0))
    own = run_folder(tmp_path, run)
    own.mkdir(parents=True)
    command = [sys.executable, "-m", "klamp.lab.ablate.one_run", str(own)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(run))
    process.stdin.flush()
    wait_until(lambda: newest_policy(own) is not None)
    process.stdin.close()
    assert process.wait() == 130 and read_outcome(own) is None
    assert steps_of(own)[-1]["step"] < 200


def configured(**changes) -> TrainConfig:
    return TrainConfig.from_flat({"max_steps": 2, **changes})


def finished_run(folder: Path, *, steps: int = 2, **changes) -> tuple[Path, TrainConfig]:
    (folder / "checkpoints" / f"step-{steps:06d}" / "policy").mkdir(parents=True)
    summary = {"steps": steps, "rl_skill": "addition", "before": {}, "after": {}, "final_metrics": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    config = configured(**changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    return folder, config


def test_it_has_the_numbers_of_an_ablation_that_ran_them(llama, tmp_path) -> None:
    base = {"model": llama, **TINY, "eval_size": 3, "max_steps": 3}
    given = []
    for beta in (0.0, 0.05):
        folder = tmp_path / f"output_beta_{beta}"
        config = TrainConfig.from_flat({**base, "beta": beta, "output_dir": str(folder), "save_every": 1})
        train_run(config)
        given.append((folder, config))
    before = {path: path.stat().st_mtime_ns for folder, _ in given for path in folder.rglob("*")}
    told = []
    result = compare(as_runs(given), tmp_path / "out", lambda run: told.append(run.name))
    assert told == ["beta-0_seed-0", "beta-0.05_seed-0"]
    made = runs(Plan(base=base, arms=grid({"beta": [0.0, 0.05]}), seeds=(0,)))
    assert result.outcomes == tuple(perform(run, tmp_path / "ablated") for run in made)
    assert {"table.md", "table.json", "frontier.png"} <= {file.name for file in result.files}
    assert before == {path: path.stat().st_mtime_ns for folder, _ in given for path in folder.rglob("*")}


def test_arms_are_named_by_what_differs_and_seeds_are_no_difference(tmp_path) -> None:
    given = [
        finished_run(tmp_path / "a", beta=0.0, seed=0, eval_every=1, output_dir="a"),
        finished_run(tmp_path / "b", beta=0.01, seed=0, output_dir="b"),
        finished_run(tmp_path / "c", beta=0.01, seed=4, report_to=()),
    ]
    found = as_runs(given, kl_prompts=7)
    assert [run.name for run in found.values()] == ["beta-0_seed-0", "beta-0.01_seed-0", "beta-0.01_seed-4"]
    assert [run.arm.values for run in found.values()] == [{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.01}]
    assert {run.kl_prompts for run in found.values()} == {7}
    seeds = as_runs(given[1:])
    assert [run.arm.name for run in seeds.values()] == ["base", "base"]


def test_runs_that_no_table_can_compare_are_refused(tmp_path) -> None:
    one, other, equal = finished_run(tmp_path / "a"), finished_run(tmp_path / "b", task="describe"), tmp_path / "c"
    with pytest.raises(DataError, match="different tasks") as caught:
        as_runs([one, other])
    assert f"task is 'arithmetic' in {one[0]}" in caught.value.got and "describe" in caught.value.got
    fewer = finished_run(tmp_path / "d", train_size=9)
    assert [run.arm.name for run in as_runs([one, fewer]).values()] == ["train_size=0", "train_size=9"]
    with pytest.raises(DataError, match="the same variant with the same seed") as caught:
        as_runs([one, fewer, finished_run(equal)])
    assert str(one[0]) in caught.value.got and str(equal) in caught.value.got


def test_a_run_that_is_not_finished_is_refused_before_anything_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(one_run, "outcome_of", lambda *_: 1 / 0)
    done = finished_run(tmp_path / "a")
    half, empty = finished_run(tmp_path / "b", steps=1, beta=0.1), (tmp_path / "c", configured(beta=0.2))
    damaged = finished_run(tmp_path / "d", beta=0.3)
    (damaged[0] / "summary.json").write_text('{"steps": ')
    for other in (half, empty, damaged):
        with pytest.raises(DataError, match="not finished") as caught:
            compare(as_runs([done, other]), tmp_path / "out")
        assert str(other[0]) == caught.value.got and f"--resume {other[0]}" in caught.value.fix
    with pytest.raises(RunFolderError, match="not empty"):
        compare(as_runs([done, finished_run(tmp_path / "e", beta=0.5)]), tmp_path)


TEMPERATURE = 0.8


def moved(size: float = 0.03) -> torch.nn.Module:
    model = tiny_llama()
    disturb(model, size=size)
    return model


def pair_of(policy, start, *, length: int, prompts: dict[str, list[str]], rows: int = 10**6) -> Context:
    tokenizer = arithmetic_tokenizer()
    evaluation = {skill: [Example(prompt=p) for p in texts] for skill, texts in prompts.items()}
    first = next(iter(evaluation))
    task = Task(name="t", train=(), evaluation=evaluation, rl_skill=first, score=lambda e, text: rewards.digits(text))
    rollout = {"temperature": TEMPERATURE, "max_completion_length": length, "num_generations": 2}
    return Context(
        config=TrainConfig.from_flat({**rollout, "prompts_per_step": rows // 2, "cpu": True}),
        scorer=Scorer(policy, probe(policy)),
        reference=LocalReference(start),
        tokenizer=tokenizer,
        task=task,
    )


def log_probabilities(model, ids: torch.Tensor, temperature: float = TEMPERATURE) -> torch.Tensor:
    with torch.no_grad():
        return (model(ids).logits.double() / temperature).log_softmax(-1)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def enumerated(model, other, prompt: str, stop: list[int]) -> tuple[float, float]:
    """Exact KL(model||other) over completions of at most two tokens, and their mean length, by going through all."""
    tokenizer = arithmetic_tokenizer()
    head = tokenizer(prompt, return_tensors="pt")["input_ids"]
    size = len(tokenizer)
    every = torch.cat([head.repeat(size, 1), torch.arange(size)[:, None]], 1)
    p, q = log_probabilities(model, every), log_probabilities(other, every)
    first_p, first_q = p[0, -2], q[0, -2]
    goes_on = (~torch.isin(torch.arange(size), torch.tensor(stop))).double()
    # the sum over sequences of p(y) log p(y)/q(y), term by term: y ends after its first token, or has a second one
    total = 0.0
    for v in range(size):
        if not goes_on[v]:
            total += float(first_p[v].exp() * (first_p[v] - first_q[v]))
            continue
        log_p, log_q = first_p[v] + p[v, -1], first_q[v] + q[v, -1]
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total, float(1 + (first_p.exp() * goes_on).sum())


def even_draws(seed: int, step: int, sequences: int, length: int) -> torch.Tensor:
    """First draws spread evenly over [0, 1): every first token comes up as often as its probability says, to 1/n."""
    each = sequences // PROMPTS
    even = ((torch.arange(each, dtype=torch.float64) + 0.5) / each).repeat(PROMPTS)
    second = torch.rand(sequences, length - 1, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return torch.cat([even[:, None], second], 1)


PROMPTS = 2
EACH = 4000


def test_both_directions_are_those_of_enumeration(monkeypatch) -> None:
    """Completions of at most two tokens; what is summed depends on the first token only, so even draws leave 1/n."""
    monkeypatch.setattr(one_run, "COMPLETIONS", EACH)
    monkeypatch.setattr(one_run, "uniform_numbers", even_draws)
    policy, start = moved(), tiny_llama()
    texts = ["12+34=", "rev ab="]
    pair = pair_of(policy, start, length=2, prompts={"addition": texts}, rows=1500)
    found = numbers_of(pair)
    for name, one, other in (("reverse", policy, start), ("forward", start, policy)):
        exact = [enumerated(one, other, text, list(pair.stop)) for text in texts]
        sequence = sum(value for value, _ in exact) / PROMPTS
        length = sum(value for _, value in exact) / PROMPTS
        assert sequence > 0.1
        assert found[f"kl/{name}_sequence"] == pytest.approx(sequence, rel=2e-3)
        assert found[f"kl/{name}"] == pytest.approx(sequence / length, rel=2e-3)
        if name == "reverse":
            assert found["length"] == pytest.approx(length, rel=1e-3)
    assert found["kl/reverse"] != pytest.approx(found["kl/forward"], rel=0.02), "the directions can be told apart"


@pytest.fixture
def sampled(monkeypatch):
    seen = []
    usual = one_run.completed

    def note(context, prompts, *, uniforms, reference):
        completions = usual(context, prompts, uniforms=uniforms, reference=reference)
        seen.append((context.policy if reference is None else reference.scorer.model, completions, uniforms))
        return completions

    monkeypatch.setattr(one_run, "completed", note)
    return seen


def by_hand(sampled, policy, start, by, *, temperature: float = TEMPERATURE) -> dict[str, float]:
    """Sums over the completions that one of the models sampled, each alone and unpadded, in float64."""
    sums = {"kl": 0.0, "tokens": 0, "sequences": 0, "entropy": 0.0, "reward": 0.0}
    tokenizer = arithmetic_tokenizer()
    for model, c, _ in sampled:
        if model is not by:
            continue
        for i in range(len(c.ids)):
            prompt, ids = c.prompt_ids[i][c.prompt_mask[i].bool()], c.ids[i][c.mask[i]]
            both = torch.cat([prompt, ids])[None]
            rows = [log_probabilities(m, both, temperature)[0, len(prompt) - 1 : -1] for m in (policy, start)]
            ours, theirs = rows
            sums["kl"] += float((kl(ours, theirs) if by is policy else kl(theirs, ours)).sum())
            sums["entropy"] -= float((ours.exp() * ours).sum())
            sums["tokens"] += len(ids)
            sums["sequences"] += 1
            sums["reward"] += rewards.digits(tokenizer.decode(ids, skip_special_tokens=True))
    return sums


def test_every_number_is_that_of_plain_forwards(sampled) -> None:
    policy, start = moved(), tiny_llama()
    pair = pair_of(policy, start, length=6, prompts={"addition": ["12+34=", "5+6=", "77+1="]}, rows=4)
    found = numbers_of(pair)
    ours, theirs = by_hand(sampled, policy, start, policy), by_hand(sampled, policy, start, start)
    assert ours["sequences"] == theirs["sequences"] == 3 * one_run.COMPLETIONS
    expected = {
        "kl/reverse": ours["kl"] / ours["tokens"],
        "kl/reverse_sequence": ours["kl"] / ours["sequences"],
        "kl/forward": theirs["kl"] / theirs["tokens"],
        "kl/forward_sequence": theirs["kl"] / theirs["sequences"],
        "length": ours["tokens"] / ours["sequences"],
        "entropy": ours["entropy"] / ours["tokens"],
        "reward": ours["reward"] / ours["sequences"],
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert 0 < found["reward"] < 1 and 1 < found["length"] < 6


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.0, "temperature": 1.5},
        {"beta": 0.1, "lora_r": 2},
        {"beta": 0.1, "reference": "ema", "reference_decay": 0.5},
        {"beta": 0.1, "ref_model": "other"},
    ],
    ids=["no KL, hot", "adapter", "moving reference", "another reference"],
)
def test_a_policy_is_measured_against_its_start_and_scored_as_in_its_run(llama, tmp_path, sampled, changes) -> None:
    if "ref_model" in changes:
        other = tiny_llama()
        disturb(other, seed=9, size=0.2)
        changes = {**changes, "ref_model": stored(other, tmp_path / "other")}
    folder, values = tmp_path / "run", {"max_steps": 2, "eval_size": 6, "save_every": 1, "top_p": 0.9, **changes}
    config = TrainConfig.from_flat({"model": llama, **TINY, **values, "output_dir": str(folder)})
    train_run(config)
    at = checkpoint.checkpoints(folder)[-1] / "policy"
    found = evaluate(config, at)
    evaluations = [scores for row in rows_of(folder) if (scores := scores_of(row))]
    assert found.before == evaluations[0] and found.after == evaluations[-1]
    assert found.rl_skill == "addition" and found.state == "done"
    assert found.numbers == numbers_of(measured(config, newest_policy(folder)))

    if "lora_r" in changes:
        from peft import PeftModel

        policy = PeftModel.from_pretrained(load_model(llama), str(at)).eval()
    else:
        policy = load_model(str(at))
    first = [(policy, *sampled[0][1:])]
    sums = by_hand(first, policy, tiny_llama(), policy, temperature=config.rollout.temperature)
    assert sums["sequences"] == 6 * one_run.COMPLETIONS
    assert found.numbers["kl/reverse"] == pytest.approx(sums["kl"] / sums["tokens"], rel=1e-4)
    assert found.numbers["kl/reverse"] > 1e-5, "something was learned"


def test_nothing_is_cut_from_the_support_and_a_run_without_a_step_has_not_moved(llama, tmp_path) -> None:
    config = TrainConfig.from_flat({"model": llama, **TINY, "top_p": 0.5, "top_k": 3, "temperature": 1.5})
    context = measured(config, None)
    assert context.config.rollout == replace(config.rollout, top_p=1.0, top_k=0)
    found = numbers_of(context)
    assert found["kl/reverse_sequence"] == pytest.approx(0.0, abs=1e-6)
