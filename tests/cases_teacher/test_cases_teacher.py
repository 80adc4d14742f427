"""Public reports of wrong losses to a teacher: in each file `expect` is right, `elsewhere` is what others computed."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.batches import changed, flat_batch, objective_of, rows_of
from tests.core.test_topk import exact, mean, samples

from klamp.config import KLConfig, LossConfig, TeacherConfig
from klamp.core.advantages import group_advantages
from klamp.core.estimators import exact_kl
from klamp.core.gradients import kl_penalty
from klamp.core.heads.kl import Head, cut_mass, linear_kl
from klamp.core.masking import Totals
from klamp.core.objective import grpo_loss, without_gradient
from klamp.core.term import KLTerm, Weighted
from klamp.core.topk import distinct, server_head, topk_kl
from klamp.core.types import Batch
from klamp.doctor.examine import examine
from klamp.doctor.readers import read_record
from klamp.errors import ConfigError, DataError, NonFiniteError, ShapeError
from klamp.lab.anchors import Teachers, TeacherScores, check_keys
from klamp.lab.rollouts import batch_of
from klamp.lab.tasks.base import Example
from klamp.scoring.completions import Completions
from klamp.scoring.scorer import Scores
from klamp.scoring.vllm_reference import VLLMReference
from klamp.verify.convergence import follow, optimum
from klamp.verify.one_step import NO_KL, Scene
from klamp.verify.worlds import one_position

TEACHER = KLTerm(anchor="teacher", value="k1", gradient="reverse", placement="loss")
SUM = {"surrogate": "score_function", "reduction": "sequence_sum"}
near = partial(pytest.approx, abs=1e-8)


class Case(dict[str, Any]):
    """An input: `expect` is right, `elsewhere` was computed by others; lists of numbers as tensors by `rows`."""

    def rows(self, *names: str) -> list[torch.Tensor]:
        return [tensor(self[name]) for name in names]

    @property
    def pair(self) -> list[torch.Tensor]:
        return self.rows("student_logits", "teacher_logits")


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The input that the test is named after."""
    name = request.function.__name__.removeprefix("test_").replace("_", "-")
    return Case(json.loads((Path(__file__).parent / f"{name}.json").read_text()))


def same(found: Any, expected: Any) -> None:
    """A value and a gradient, as `mean` and `exact` give them, are those of an input."""
    assert found[0].item() == near(expected["value"])
    assert found[1].tolist() == near(expected["gradient"])


def taught(student: Any, teacher: Any, mask: Any = None, **term: Any) -> tuple[list[float], dict[str, float]]:
    """The gradient in one completion's log-probabilities (of sampled tokens the log-ratio), and the metrics."""
    policy = tensor([student]).requires_grad_()
    objective = objective_of(**SUM, others=(Weighted(1.0, replace(TEACHER, **term)),))
    loss, metrics = grpo_loss(batch(policy, tensor([teacher]), mask), objective)
    return torch.autograd.grad(loss, policy)[0][0].tolist(), {name: float(x) for name, x in metrics.items()}


def batch(policy: torch.Tensor, teacher: torch.Tensor, mask: Any = None, **more: Any) -> Batch:
    """Completions whose tokens all count, without a reward unless `advantages` says so."""
    mask = torch.ones_like(policy, dtype=torch.bool) if mask is None else torch.tensor([mask]).bool()
    more = {"advantages": torch.zeros(len(policy))} | more
    return flat_batch(policy_logprobs=policy, teacher_logprobs=teacher, mask=mask, **more)


def served(monkeypatch: pytest.MonkeyPatch, scores: list[Any], prompt: int) -> list[float]:
    """What klamp reads from a server's numbers, one for each token of prompt and answer, for the answer."""
    entries = [[x if x is None else {str(i): {"logprob": x}} for i, x in enumerate(scores)]]
    monkeypatch.setattr(VLLMReference, "entries", lambda *_, **__: entries)
    ids = list(range(len(scores)))
    (row,) = VLLMReference("http://h", "x").score_tokens([ids[:prompt]], [ids[prompt:]], temperature=1.0)
    return [place[-1][1] for place in row]


def risen(path: Path, case: Case, **settings: Any) -> list[str]:
    path.write_text("\n".join(map(json.dumps, case["log"])))
    history = read_record(path)
    history.settings = replace(history.settings, **settings)
    return [finding.alarm.name for finding in examine(history).findings]


def test_answer_in_pieces(case: Case) -> None:
    mask, (student,) = case["mask"], case.rows("student")
    places = [i for i, on in enumerate(mask) if on]
    policy, teacher = [-9.0] * len(mask), [x if x is not None else -8.0 for x in case["teacher_by_position"]]
    for place, value in zip(places, student.tolist(), strict=True):
        policy[place] = value
    token, metrics = taught(policy, teacher, mask)
    assert [token[i] for i in places] == near(case["expect"]["delta"]) and not any(token[i] for i in (0, 3, 4))
    assert metrics["teacher/k1"] == near(sum(case["expect"]["delta"]) / 3)
    whole, _ = taught(policy, teacher, mask, horizon="sequence")
    assert [whole[i] for i in places] == near(tensor(case["expect"]["delta"]).flip(0).cumsum(0).flip(0).tolist())


def test_head_that_saw_the_sample(case: Case) -> None:
    student, teacher = case.pair
    y, p, q = torch.arange(5), student.log_softmax(-1), teacher.log_softmax(-1)
    same(mean(student, teacher, [int(teacher.argmax())]), case["expect"])
    ids = torch.stack((teacher.argmax().expand(5), y), 1)  # k = 1; the sampled token comes beside it
    kept = server_head(ids, y, 1, ids >= 0)
    value = topk_kl(p[ids], q[ids], p[y], q[y], ~(kept & (ids == y[:, None])).any(1), kept=kept)
    assert kept.tolist() == [[True, False]] * 5 and (p.exp() @ value).item() == near(case["expect"]["value"])
    everything = topk_kl(p[ids], q[ids], p[y], q[y], y < 0, kept=distinct(ids, ids >= 0), tail="bucket")
    assert (p.exp() @ everything).item() == near(case["elsewhere"]["value"])


def test_head_without_tail(case: Case) -> None:
    value, gradient, _ = samples(*case.pair, case["head"])
    assert not value.abs().max() > 1e-15 and not gradient.any(), "of every sample"
    cut = samples(*case.pair, case["head"], tail="none")
    assert cut[1][0].tolist() == near(case["elsewhere"]["gradient"])
    with pytest.warns(UserWarning, match="training leaves it"):
        TeacherConfig(teacher_model="DIR", teacher_estimator="topk", teacher_tail="none")


@pytest.mark.parametrize("padding", [-math.inf, math.nan])
def test_inf_padding(case: Case, padding: float) -> None:
    """Of another trainer's log-probabilities, that miss a little of 1, the plain sum over all words."""
    policy, there = tensor(case["student_logits"]).requires_grad_(), torch.tensor(case["mask"]).bool()
    teacher = tensor([case["teacher_logprobs"][0], [padding] * 3])
    p, kept = policy.log_softmax(-1), there[:, None].expand(2, 3)
    plain = topk_kl(p, teacher, p[:, 0], teacher[:, 0], ~there, kept=kept, tail="none")
    for value in (torch.where(there, plain, 0.0), torch.where(there, exact_kl(policy, teacher), 0.0)):
        gradient = torch.autograd.grad(value.sum(), policy, retain_graph=True)[0]
        assert gradient.flatten().tolist() == near(tensor(case["expect"]["gradient"]).flatten().tolist())
    assert plain.tolist() == [near(case["expect"]["value"]), 0.0]


def kl(p: list[float], q: list[float], head: list[int], y: int, **options: Any) -> tuple[float, torch.Tensor]:
    """Value and gradient of one sample of a head and a tail, from probabilities."""
    student, teacher = tensor(p).log().requires_grad_(), tensor(q).log()
    outside = torch.tensor(y not in head)
    value = topk_kl(student[head], teacher[head], student[y], teacher[y], outside, **options)
    return value.item(), torch.autograd.grad(value, student)[0]


def test_inf_supports(case: Case) -> None:
    shared, of_teacher, of_student = ((x["student_probs"], x["teacher_probs"], x["expect"]) for x in case["cases"])
    for direction in ("reverse", "forward"):
        value, gradient = kl(*shared[:2], [0, 1, 2], 0, direction=direction)
        assert value == near(shared[2][direction]) and gradient.isfinite().all()
    assert [kl(*of_teacher[:2], head, 1)[0] for head in ([1], [0])] == [math.inf] * 2
    student, teacher = (tensor(x).log().tolist() for x in of_teacher[:2])
    with pytest.raises(NonFiniteError, match="teacher_max_log_ratio"):
        taught(student[:2], teacher[:2])
    gradient, metrics = taught(student[:2], teacher[:2], max_log_ratio=20.0)
    assert gradient[1] == 20 and metrics["teacher/log_ratio_clamped"] == 0.5, "one of two tokens"
    assert all(map(math.isfinite, metrics.values()))
    p, q, expected = of_student
    of_head, of_samples = (sum(p[y] * kl(p, q, head, y)[0] for y in (0, 2)) for head in ([1], []))
    assert (of_head, of_samples) == (near(expected["reverse"]), near(expected["k3_of_samples"]))
    assert of_head - of_samples == near(expected["k3_short_by"])
    assert kl(p, q, [0, 1, 2], 0, direction="forward")[0] == math.inf
    assert kl(p, q, [0, 1, 2], 0, direction="js")[1].isfinite().all()


def test_jsd_ends(case: Case) -> None:
    """klamp has the middle of the family, under its own name, and both KLs; no JS passes for one of them."""
    expected = case["expect"]
    value, gradient = exact(*case.pair, "js")
    assert value.item() == near(expected["js"]["0.5"]["value"])
    assert gradient.norm().item() == near(expected["js"]["0.5"]["gradient_norm"])
    for direction in ("forward", "reverse"):
        assert exact(*case.pair, direction)[0].item() == near(expected[direction])


def test_mean_of_means(case: Case) -> None:
    losses = []
    for log_ratios in case["micro_batches"]:
        policy = torch.full((len(log_ratios), 1), -2.0).double().requires_grad_()
        part = batch(policy, policy.detach() - tensor(log_ratios)[:, None])
        objective = objective_of(surrogate="score_function", reduction="token_mean", others=(Weighted(1.0, TEACHER),))
        losses.append(grpo_loss(part, objective, totals=Totals(sequences=5.0, tokens=5.0, kl_tokens=5.0)).loss)
    assert sum(x.item() for x in losses) == near(case["expect"]["token_mean"])


def test_padded_vocabulary(case: Case) -> None:
    """What the teacher has besides is left out and counted; what it lacks is refused, until the policy is cut."""
    student, teacher = (tensor(x)[:, None] for x in case["a"].values())  # as weights of one hidden number
    one, right = torch.ones(1, 1, dtype=torch.float64), case["expect"]
    student.requires_grad_()
    cut = cut_mass(one, Head(teacher), case["shared_ids"]).item()
    assert cut == near(right["a"]["mass_cut_teacher"])
    value = linear_kl(one, student, one, teacher)
    assert value.item() == near(right["a"]["value"] - math.log1p(-cut) - cut)
    assert torch.autograd.grad(value, student)[0][:, 0].tolist() == near(right["a"]["gradient"])
    wide, narrow = (tensor(x) for x in case["b"].values())
    wide.requires_grad_()
    with pytest.raises(ShapeError, match="lacks a token"):
        linear_kl(one, wide[:, None], one, narrow[:, None])
    with pytest.raises(ShapeError) as caught:
        exact_kl(wide, narrow)
    assert "cut both to the ids that they share" in caught.value.fix
    value = exact_kl(wide[: case["shared_ids"]], narrow)
    assert value.item() == near(right["b"]["value"])
    assert torch.autograd.grad(value, wide)[0].tolist() == near(right["b"]["gradient"])


def test_renormalised_top1(case: Case) -> None:
    same(mean(*case.pair, case["head"]), case["expect"])
    with pytest.raises(ConfigError, match="renormalised"):
        TeacherConfig(teacher_model="DIR", teacher_estimator="topk", teacher_tail="renormalised")  # pyright: ignore


def test_reverse_that_is_forward(case: Case) -> None:
    student, teacher = case.pair
    for gradient, expected in (("reverse", case["expect"]), ("own", case["elsewhere"])):
        logits = student.clone().requires_grad_()
        p, mask = logits.log_softmax(-1), torch.ones(5, 1, dtype=torch.bool)
        tokens = kl_penalty(p[:, None], teacher.log_softmax(-1)[:, None], mask, value="k3", gradient=gradient)
        slope = torch.autograd.grad(p.detach().exp() @ tokens[:, 0], logits)[0]
        assert slope.tolist() == near(expected["gradient"])
    assert slope.tolist() == near(exact(student, teacher, "forward")[1].tolist())


def test_reward_drowned(case: Case) -> None:
    teacher, rewards = case.rows("teacher_logprobs", "rewards")
    for coef, expected in case["expect"].items():
        end = optimum(teacher, rewards, float(coef))
        assert (end.exp() @ rewards).item() == near(expected["reward"])
        assert (end.exp() @ (end - teacher)).item() == near(expected["kl_to_teacher"])
    scene = Scene(chain=one_position(teacher, teacher, None, teacher), rewards=rewards)
    loss = LossConfig(scale_rewards="none", advantage_baseline="leave_one_out")
    end = follow(NO_KL, loss, scene, TeacherConfig(teacher_model="DIR", teacher_coef=0.3))
    assert end.exact and end.optimal_kl == near(case["expect"]["0.3"]["kl_to_teacher"])


def completions_of(lengths: list[int]) -> Completions:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids, ones = torch.zeros(mask.shape).long(), torch.ones(len(lengths), 1).long()
    return Completions(
        prompt_ids=ones,
        prompt_mask=ones,
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros(mask.shape),
        ended=torch.ones(len(lengths)).bool(),
    )


def test_routed_teachers(case: Case) -> None:
    rows = [Example(prompt=key, fields={"subject": key}) for key in case["keys"]]
    names = tuple(f"{key}={model}" for key, model in case["teachers"].items())
    config: Any = SimpleNamespace(teacher=TeacherConfig(teacher_models=names, teacher_key="subject"))
    with pytest.raises(DataError, match="a prompt names a teacher that does not exist: 'poetry'"):
        check_keys(config, SimpleNamespace(train=rows), case["teachers"])  # pyright: ignore
    told = {name: iter(tensor(scores)) for name, scores in case["scores_by_teacher"].items()}

    def scored_by(name: str) -> Any:
        """A teacher that answers in its own order, row by row, whatever part of the batch it is asked for."""
        return SimpleNamespace(score=lambda x, **_: Scores(logprobs=torch.stack([next(told[name]) for _ in x.ids])))

    models = {key: scored_by(model) for key, model in case["teachers"].items()}
    teachers = Teachers(config=config.teacher, models=models, tokenizer=None, prompts={})  # pyright: ignore
    scores = teachers.score(rows[:3], completions_of([1, 1, 1]), temperature=1.0, parts=[slice(0, 2), slice(2, 3)])
    assert scores.logprobs.tolist() == [pytest.approx(row) for row in case["expect_first_three"]]


def test_window_of_the_micro_batch(case: Case) -> None:
    completions, context = completions_of(case["lengths"]), SimpleNamespace(config=SimpleNamespace(kl=KLConfig()))
    nothing = dict.fromkeys(("gate_kl", "ref_logprobs", "old_logprobs", "reference_length"))
    scores = TeacherScores(tensor(case["teacher_rows_padded"]), [], {})
    rollout = SimpleNamespace(
        completions=completions, mask=completions.mask, advantages=torch.zeros(2), teacher_scores=scores, **nothing
    )
    for (row,) in case["micro_batches"]:
        policy = torch.zeros(1, case["lengths"][row])
        part = batch_of(context, rollout, policy, slice(row, row + 1))  # pyright: ignore
        assert part.anchors["teacher"].logprobs[part.mask].tolist() == case["expect"][f"row_{row}"]


def test_shift_by_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for student, teacher, delta in (
        (case["response_logprobs_student"], case["response_logprobs_teacher"], case["expect"]["delta"]),
        (case["one_token"]["student"], case["one_token"]["teacher"], [case["expect"]["one_token_delta"]]),
    ):
        scores = served(monkeypatch, [None, *teacher], case["prompt_tokens"])
        assert taught(student, scores)[0] == near(delta)
        assert taught(scores, scores)[0] == [0.0] * len(scores)


def test_tail_without_weight(case: Case) -> None:
    student, teacher = case.pair
    sampler, cut = tensor(case["sampler_logits"]), case["truncated_sampler"]
    assert mean(student, teacher, case["head"], sampler=sampler)[1].tolist() == near(case["expect"]["gradient"])
    _, gradient, _ = samples(student, teacher, case["head"])
    assert (sampler.softmax(-1) @ gradient).tolist() == near(case["elsewhere"]["unweighted"])
    nucleus = torch.full((5,), -math.inf).double().index_copy(0, torch.tensor(cut["nucleus"]), student[cut["nucleus"]])
    value, gradient = mean(student, teacher, case["head"], sampler=nucleus)
    assert value.item() == near(cut["generalised_kl_over_head_and_nucleus"])
    assert gradient.tolist() == near(cut["gradient_coefficient_delta"])
    assert not samples(teacher, teacher, case["head"], sampler=nucleus)[1][cut["nucleus"]].any()


def test_teacher_is_the_student(case: Case, tmp_path: Path) -> None:
    assert risen(tmp_path / "log.jsonl", case) == ["teacher-inert"]
    case["log"][-1]["teacher_kl"] = 1e-9
    assert risen(tmp_path / "log.jsonl", case) == ["teacher-inert"], "three steps in a row"
    case["log"][1]["teacher_kl"] = 1e-9
    assert risen(tmp_path / "log.jsonl", case) == []


def test_teacher_never_in_the_loss(case: Case, tmp_path: Path) -> None:
    coefficient = case["config"]["teacher_coef"]
    assert risen(tmp_path / "log.jsonl", case, teacher_coef=coefficient) == ["teacher-inert"]
    assert risen(tmp_path / "log.jsonl", case) == [], "the arguments alone tell that there is one"
    case["log"] = [row | {"teacher_kl": 0.2} for row in case["log"]]
    assert risen(tmp_path / "log.jsonl", case, teacher_coef=coefficient) == []


def test_teacher_prompt_longer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = len(case["teacher_sequence"]) - len(case["student_logprobs"])
    scores = served(monkeypatch, case["server_prompt_logprobs"], prompt)
    assert scores == case["expect"]["teacher"]
    assert taught(case["student_logprobs"], scores)[0] == near(case["expect"]["delta"])


@pytest.mark.parametrize("both", ["both_at_T", "both_at_1"])
def test_teacher_temperature(case: Case, both: str) -> None:
    """One temperature for the two; a server, which scores at 1 alone, is refused at another one."""
    student, teacher = (x[:, None] for x in case.pair)
    one, temperature = torch.ones(1, 1, dtype=torch.float64), {"both_at_T": case["sampling_temperature"]}.get(both, 1.0)
    student.requires_grad_()
    for head in ({}, {"top_k": 4, "targets": torch.tensor([0])}):
        value = linear_kl(one, student, one, teacher, temperature=temperature, **head)
        same((value, torch.autograd.grad(value.sum(), student)[0][:, 0]), case["expect"][both])
    if temperature != 1:
        with pytest.raises(ConfigError, match="temperature 1 only"):
            VLLMReference("http://h", "x").score_tokens([[1]], [[2]], temperature=temperature)


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_topk_kl_as_advantage(case: Case, horizon: str) -> None:
    """By enumeration of two tokens: in the loss a head teaches at its own position; in the advantage it is refused."""
    first, second = (tensor(case["student_logits"][x]).requires_grad_() for x in ("first", "second_after"))
    theirs = [tensor(case["teacher_logits"][x]) for x in ("first", "second_after")]
    a, b = torch.cartesian_prod(torch.arange(3), torch.arange(3)).T
    prefixes = [torch.stack((x[0].expand(9, 3), x[1][a]), 1).log_softmax(-1) for x in ((first, second), theirs)]
    drawn, scores = (x.gather(-1, torch.stack((a, b), 1)[..., None])[..., 0] for x in prefixes)
    probabilities, head = drawn.detach().sum(-1).exp(), prefixes[0].topk(2).indices
    outside = ~(head == torch.stack((a, b), 1)[..., None]).any(-1)
    kl = topk_kl(*(x.gather(-1, head) for x in prefixes), drawn, scores, outside)
    term = replace(TEACHER, value="topk", gradient="own" if horizon == "token" else "reverse", horizon=horizon)
    loss = torch.zeros(())
    for row in range(9):
        one = rows_of(batch(drawn, scores, teacher_kl=kl), slice(row, row + 1))
        loss = loss + probabilities[row] * grpo_loss(one, objective_of(**SUM, others=(Weighted(1.0, term),))).loss
    found = torch.autograd.grad(loss, (first, second))
    expected = case["expect"][f"{horizon}_horizon"]
    assert found[0].tolist() == near(expected["first"])
    assert found[1].flatten().tolist() == near(tensor(expected["second"]).flatten().tolist())
    with pytest.raises(ConfigError, match="takes teacher_estimator='k1' only"):
        TeacherConfig(teacher_model="DIR", teacher_estimator="topk", teacher_placement="advantage")


def test_truncated_sum_clamped(case: Case) -> None:
    same(mean(*case.pair, case["head"]), case["expect"])
    truncated, generalised = (samples(*case.pair, case["head"], tail=x)[0][0] for x in ("none", "generalised"))
    assert truncated.item() == near(case["elsewhere"]["truncated"])
    assert generalised.item() == pytest.approx(0.0473, abs=1e-4)


def test_two_normalisers(case: Case) -> None:
    _, gradient, _ = samples(*case.pair, case["head"], direction="forward")
    assert not gradient.any(), "of every sample"
    same(mean(*case.pair, case["head"], direction="forward"), case["expect"])


def test_whitened_teacher(case: Case) -> None:
    """A group of equal rewards keeps its teacher, whose part is not divided by anything."""
    rewards, delta = case.rows("reward_group", "delta")
    policy = torch.full((4, 1), -2.0).double().requires_grad_()
    group = batch(policy, policy.detach() - delta[:, None], advantages=group_advantages(rewards, 4))
    for coef in case["teacher_coefs"]:
        shift = Weighted(coef, replace(TEACHER, placement="advantage"))
        objective = objective_of(**SUM, others=(shift,))
        assert without_gradient(group, objective_of()).all() and not without_gradient(group, objective).any()
        gradient = torch.autograd.grad(grpo_loss(group, objective).loss, policy)[0][:, 0]
        assert (-4 * gradient).tolist() == near(case["expect"]["advantage"][str(coef)])
    unscored = changed(group, teacher_mask=torch.zeros_like(group.mask))
    assert without_gradient(unscored, objective).all()
