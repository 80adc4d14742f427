"""Teachers in klamp's own loop: their numbers, their prompts, their rows, and what is refused before any work."""

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from tests.batches import changed
from tests.hosts.teachers import KINDS, at_prefixes
from tests.training.answering import VLLMServer, answering
from tests.training.conftest import TINY, AfterStep, disturb, greedy, steps_of, steps_taken, stored, tiny_llama
from tests.training.test_resume import assert_same_run
from torch.optim import SGD

from klamp.core.objective import grpo_loss
from klamp.doctor.metrics import settings_of_run
from klamp.errors import ConfigError, DataError, KLWarning, ModelError, TrainingStopped
from klamp.hosts.common.anchors import check_same
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.folders import lines_of
from klamp.lab.loop import Trainer, take_step
from klamp.lab.models import load_model
from klamp.lab.rollouts import collect
from klamp.lab.setup import build, open_inputs
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer
from klamp.lab.updates import adamw, completion_row, measured, scored_batch, taught_of, update, with_old_logprobs
from klamp.scoring.completions import select
from klamp.scoring.scorer import Ask, score

ALONE = {"reward": "none", "beta": 0.0}
IN_TEACHERS_REWARD = {"teacher_placement": "reward", "teacher_horizon": "sequence", "scale_rewards": "none"}


def scored(context, **changes):
    objective = context.objective
    rollout = collect(context, context.task.train[:3], step=0, terms=objective.terms)
    whole = slice(0, len(rollout.texts))
    ask = Ask(temperature=context.config.rollout.temperature, taught=taught_of(context, rollout, whole))
    scores = context.scorer(rollout.completions, ask)
    return rollout, scores, scored_batch(context, rollout, scores, objective)


@pytest.fixture(scope="module")
def taught(llama, teacher):
    """A policy with a reference and a teacher."""
    context = build(TrainConfig.from_flat({"model": llama, **TINY, "teacher_model": teacher, "beta": 0.3}))
    disturb(context.policy, seed=3, size=0.02)
    return context


@pytest.mark.filterwarnings("ignore:teacher_tail:klamp.errors.KLWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_whole_rows(taught, config_of, teacher, kind):
    config = config_of(teacher_model=teacher, beta=0.3, scale_rewards="none", **KINDS[kind])
    context = replace(taught, config=config, teachers=replace(taught.teachers, config=config.teacher))
    rollout, _, batch = scored(context)
    models = (context.policy, context.teachers.models[""].model)
    logits, teacher_logits = (score(model, rollout.completions, temperature=1.0).logits for model in models)
    mask, ids = rollout.mask, rollout.completions.ids
    own, theirs = (x.log_softmax(-1).gather(-1, ids[..., None])[..., 0] for x in (logits, teacher_logits))
    kl = at_prefixes(context.config.teacher, logits, teacher_logits.detach(), ids)
    expected = changed(batch, policy_logprobs=own, teacher_logprobs=theirs.detach(), teacher_kl=kl)
    losses, gradients = [], []
    for scores in (batch, expected):
        context.policy.zero_grad()
        loss = grpo_loss(scores, context.objective, totals=rollout.totals).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append([x.grad.clone() for x in context.policy.parameters() if x.grad is not None])
    assert mask.any() and float(gradients[1][0].norm()) > 0
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    # A float32 gradient is a sum over tokens: its entries are right to some eps of the largest one, not of themselves.
    atol = 1e-5 * max(float(x.abs().max()) for x in gradients[1])
    torch.testing.assert_close(*gradients, rtol=0, atol=atol)


def test_a_step_beyond_the_teacher_with_baselines_and_the_sampler_held(context_of, teacher):
    """The whole step of klamp's own loop: no price, the KL to the mix, that to the sampler after an update."""
    twice = {"num_iterations": 2, "learning_rate": 1e-3}
    beyond = {"beta": -0.2, "kl_estimator": "k1", "kl_baseline": "exact", "kl_off_policy": "token", **twice}
    beside = {"teacher_coef": 1.0, "teacher_baseline": "bucket", "teacher_top_k": 4, "teacher_off_policy": "token"}
    made = context_of(teacher_model=teacher, **beyond, **beside), context_of(beta=0.1, sampler_coef=0.2, **twice)
    metrics, held = (take_step(c, adamw(c.policy, c.config), c.task.train[:3], step=0, total_steps=4)[1] for c in made)
    assert metrics["beta"] == -0.2 and "beta/price" not in metrics and metrics["kl/mix"] >= 0
    assert made[0].exact_everywhere and "beta/price" in held
    assert held["sampler/kl"] > 0 and "teacher/coef" not in held


def prompts_file(tmp_path, rows) -> dict[str, str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"task": str(file)}


ROWS = [
    {"prompt": f"{a}+{b}=", "hint": f"{b}+{a}={a + b}{a}+{b}=", "who": "ab"[b % 2]} for a in range(5) for b in range(4)
]


def test_the_teacher_sees_its_own_prompt_and_the_same_answer(context_of, teacher, tmp_path):
    task = prompts_file(tmp_path, ROWS)
    context = context_of(teacher_model=teacher, teacher_prompt="hint", train_size=0, **task, **ALONE)
    rollout, _, _ = scored(context)
    tokenizer, model = arithmetic_tokenizer(), context.teachers.models[""].model
    for row, example in enumerate(rollout.examples):
        ids = rollout.completions.ids[row][rollout.completions.mask[row]]
        before = torch.tensor(tokenizer(example.fields["hint"], add_special_tokens=False)["input_ids"])
        logits = model(input_ids=torch.cat([before, ids])[None]).logits[0, len(before) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        torch.testing.assert_close(rollout.teacher_scores.logprobs[row, : len(ids)], expected, rtol=0, atol=1e-4)
    theirs = context.teachers.completions(rollout.examples, rollout.completions)
    assert torch.equal(theirs.ids, rollout.completions.ids)
    assert theirs.prompt_ids.shape[1] > rollout.completions.prompt_ids.shape[1]


def test_each_row_gets_the_numbers_of_its_own_teacher(context_of, teacher, llama, tmp_path):
    several = prompts_file(tmp_path, ROWS) | {"teacher_models": (f"a={teacher}", f"b={llama}"), "teacher_key": "who"}
    context = context_of(train_size=0, teacher_estimator="exact", gradient_accumulation_steps=2, **several, **ALONE)
    rollout, scores, _ = scored(context)
    for key, folder in (("a", teacher), ("b", llama)):
        rows = torch.tensor([e.fields["who"] == key for e in rollout.examples])
        model = context.teachers.models[key].model
        expected = score(model, select(rollout.completions, rows.nonzero()[:, 0]), temperature=1.0).logprobs
        mask = rollout.mask[rows][:, : expected.shape[1]]
        theirs = rollout.teacher_scores.logprobs[rows][:, : expected.shape[1]]
        torch.testing.assert_close(theirs[mask], expected[mask], rtol=0, atol=1e-5)
        kl = scores.teacher.detach()[rows][rollout.mask[rows]]
        assert (float(kl.max()) < 1e-5) == (folder == llama)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"teacher_estimator": "topk", "teacher_top_k": 3, **ALONE, "num_generations": 1}, marks=pytest.mark.slow
        ),
        {"teacher_coef": 0.3, "teacher_estimator": "exact", "num_iterations": 2, "teacher_off_policy": "token"},
        pytest.param(
            {"teacher_kind": "ema", "teacher_decay": 0.5, "teacher_horizon": "sequence"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"teacher_schedule": "linear", "teacher_placement": "advantage", "lora_r": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["alone", "three anchors", "ema", "schedule"],
)
def test_a_killed_run_goes_on_with_the_same_numbers(config_of, teacher, tmp_path, changes):
    fields = {"max_steps": 3, "eval_every": 0, "eval_size": 1} | changes
    fields |= {} if "teacher_kind" in changes else {"teacher_model": teacher}
    train_run(config_of(output_dir=str(tmp_path / "whole"), **fields))
    parts = config_of(output_dir=str(tmp_path / "parts"), **fields)
    with pytest.raises(TrainingStopped):
        train_run(parts, [AfterStep(1)])
    train_run(replace(parts, run=replace(parts.run, resume=True)))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    rows = steps_of(tmp_path / "whole")
    for row in rows:
        assert "teacher/kl" in row and ("train/teacher_penalty" in row) == ("teacher_placement" not in changes)
    if "teacher_schedule" in changes:
        assert [row["teacher/coef"] for row in rows] == pytest.approx([1, 2 / 3, 1 / 3])


@pytest.mark.filterwarnings("ignore:teacher_tail:klamp.errors.KLWarning")
@pytest.mark.parametrize("changes", [{"teacher_estimator": "exact"}, {"teacher_estimator": "topk", "teacher_top_k": 4}])
def test_a_live_teacher_stays_where_it_was_for_all_updates_of_a_step(context_of, tmp_path, changes):
    file = prompts_file(tmp_path, ROWS)
    changes |= {"teacher_kind": "live", "teacher_prompt": "hint", "num_iterations": 2}
    context = context_of(train_size=0, **changes, **file, **ALONE)
    rollout = collect(context, context.task.train[:3], step=0, terms=context.objective.terms)
    ((_, predictions),) = rollout.teacher_scores.parts
    before = predictions.logits().detach().clone()
    disturb(context.policy, size=0.1)  # as the first update does
    torch.testing.assert_close(predictions.logits(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"teacher_kind": "ema", "teacher_decay": 0.75}, (0.75, 0.75)),
        ({"teacher_kind": "periodic", "teacher_reset_steps": 2}, (1.0, 0.0)),
    ],
)
def test_a_teacher_that_follows_the_policy_moves_after_each_step(context_of, changes, kept):
    context = context_of(log_completions=0, **changes)
    trainer, model = Trainer(context, []), context.teachers.models[""].model
    expected = start = [p.clone() for p in model.parameters()]
    for share in kept:
        trainer.train_step()
        pairs = zip(expected, context.policy.parameters(), strict=True)
        expected = [share * mine + (1 - share) * theirs.detach() for mine, theirs in pairs]
    torch.testing.assert_close(list(model.parameters()), expected, rtol=0, atol=1e-6)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, start, strict=True)) > 1e-4


def test_training_brings_the_policy_to_its_teacher(context_of, teacher):
    context = context_of(teacher_model=teacher, teacher_estimator="exact", max_steps=12, learning_rate=2e-2, **ALONE)
    course = steps_taken(context, 12)
    assert course[-1]["teacher/kl"] < 0.5 * course[0]["teacher/kl"]
    assert {"reward_std", "groups/saturated", "beta/price"}.isdisjoint(course[-1])


def test_placeholders_of_a_teacher_are_an_alarm_of_the_step_without_logged_completions(config_of, teacher, tmp_path):
    """Case: an output head of zeros gives every token the same log-probability."""
    flat = load_model(teacher)
    flat.lm_head.weight.data.zero_()
    fields = {"max_steps": 1, "eval_every": 0, "eval_size": 1, "save_every": 0, "log_completions": 0, **ALONE}
    for name, folder in (("flat", stored(flat, tmp_path / "teacher")), ("sound", teacher)):
        train_run(config_of(teacher_model=folder, output_dir=str(tmp_path / name), **fields))
        told = [row["name"] for row in lines_of(tmp_path / name / "alarms.jsonl") if row["step"] == 1]
        assert ("teacher-silent" in told) == (name == "flat")


def test_what_is_seen_of_each_of_several_teachers(context_of, teacher, llama, tmp_path):
    fields = prompts_file(tmp_path, ROWS) | {"teacher_models": (f"a={teacher}", f"b={llama}"), "teacher_key": "who"}
    fields |= {"train_size": 0, "teacher_estimator": "topk", "teacher_top_k": 3, "beta": 0.0}
    (row,), (in_parts,) = (steps_taken(context_of(gradient_accumulation_steps=n, **fields), 1) for n in (1, 2))
    for key in ("teacher/kl.a", "teacher/kl.b", "teacher/student_mass", "teacher/overlap_ratio"):
        assert row[key] == pytest.approx(in_parts[key], abs=1e-6), key
    assert row["teacher/kl.a"] > row["teacher/kl"] > row["teacher/kl.b"] == pytest.approx(0, abs=1e-5)
    assert 0 < row["teacher/end"] < 1


def test_a_completion_that_is_written_has_the_teacher_s_numbers(context_of, teacher):
    context = context_of(teacher_model=teacher, **ALONE)
    rollout, _, _ = scored(context)
    likelier = rollout.teacher_scores.logprobs - rollout.completions.sampler_logprobs
    likelier = torch.where(rollout.mask, likelier, 0.0).sum(-1) / rollout.mask.sum(-1).clamp(min=1)
    for sign in (1, -1):
        rewarded = replace(rollout, rewards=sign * likelier)
        output = update(context, SGD(context.policy.parameters(), lr=0.0), rewarded, context.objective)
        assert measured(context, rewarded, [output])["teacher/reward_correlation"] == pytest.approx(sign, abs=1e-4)
    row = completion_row(context, with_old_logprobs(rollout, output), 0)
    assert row["teacher_logprobs"] == rollout.teacher_scores.logprobs[0, : int(rollout.mask[0].sum())].tolist()


def test_a_reward_that_holds_the_kl_to_the_teacher_is_another_reward(context_of, teacher):
    plain, shifted = (context_of(teacher_model=teacher, beta=0.0, **more) for more in ({}, IN_TEACHERS_REWARD))
    (one, *_), (other, *_) = scored(plain), scored(shifted)
    assert torch.equal(one.completions.ids, other.completions.ids)
    spent = ((other.old_logprobs - other.teacher_scores.logprobs) * other.mask).sum(-1).view(-1, 4)
    expected = one.advantages - (spent - (spent.sum(-1, keepdim=True) - spent) / 3).flatten()
    torch.testing.assert_close(other.advantages, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"reward": "none"}, ConfigError, "reward='none' needs a teacher"),
        ({"num_generations": 1}, ConfigError, "leaves a reward nothing to be compared with"),
        ({"teacher_model": "builtin"} | ALONE | IN_TEACHERS_REWARD, ConfigError, "needs a reward"),
        ({"teacher_kind": "adapter_off"}, ConfigError, "needs an adapter"),
        ({"teacher_kind": "live"}, ConfigError, "needs teacher_prompt"),
        ({"teacher_url": "http://host:1", "temperature": 0.7}, ConfigError, "at temperature 1 only"),
        ({"teacher_model": "builtin", "teacher_prompt": "hints"}, DataError, "no 'hints' for the teacher"),
        ({"teacher_models": ("a=builtin",), "teacher_key": "who"}, DataError, "a teacher that does not exist: 'b'"),
        ({"teacher_model": "nowhere/DIR"}, ModelError, "cannot load"),
        ({"ref_model": "nowhere/DIR", "beta": 0.1}, ModelError, "cannot load"),
    ],
)
@pytest.mark.parametrize("begin", [train_run, open_inputs])
def test_what_cannot_work_is_refused_before_any_work(config_of, tmp_path, begin, changes, error, text):
    """By a run, and by `klamp train --dry_run`, which opens these inputs."""
    task = prompts_file(tmp_path, ROWS) | {"train_size": 0}
    with pytest.raises(error, match=re.escape(text)):
        begin(config_of(**task | changes))


def test_one_prompt_has_one_prompt_for_the_teacher(config_of, tmp_path):
    task = prompts_file(tmp_path, [*ROWS, dict(ROWS[0], hint="1+1=")]) | {"train_size": 0}
    with pytest.raises(DataError, match="one prompt has two prompts for the teacher"):
        open_inputs(config_of(teacher_model="builtin", teacher_prompt="hint", **task))


@pytest.mark.parametrize(("name", "fields"), [("teacher", {"teacher_kind": "ema", "beta": 0.0}), ("kl", {"beta": 0.1})])
def test_later_updates_without_a_correction_are_warned_of(config_of, name, fields):
    with pytest.warns(KLWarning, match=f"tokens of an older policy.*Set {name}_off_policy='token'"):
        config_of(num_iterations=2, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        config_of(num_iterations=2, **{f"{name}_off_policy": "token"}, **fields)


def test_after_the_last_step_the_teachers_answer(config_of, context_of, teacher, llama, tmp_path):
    """Case: a held-out row whose key names no teacher, or without the teacher's prompt, has no answer of one."""
    rows = [dict(row, prompt=f"1{row['prompt']}") for row in ROWS[:6]]
    rows[3]["who"] = "c"
    del rows[4]["hint"]
    ours = prompts_file(tmp_path, ROWS)
    both = {"teacher_models": (f"a={teacher}", f"b={llama}"), "teacher_key": "who", "teacher_prompt": "hint"} | ALONE
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows)))
    held = {"eval_split": str(tmp_path / "held.jsonl"), "eval_size": 6, "log_answers": 6, "train_size": 0}
    train_run(config_of(max_steps=2, eval_every=1, **held, **ours, **both))
    written = lines_of(tmp_path / "run" / "answers.jsonl")
    theirs = [row for row in written if row.get("who") == "teacher"]
    assert {row["step"] for row in theirs} == {2} and {row["step"] for row in written} == {0, 1, 2}
    assert {row["question"] for row in theirs} == {row["prompt"] for i, row in enumerate(rows) if i not in (3, 4)}
    context = context_of(**held, **ours, **both)
    for row in theirs:
        (own,) = (prompt for prompt in rows if prompt["prompt"] == row["question"])
        assert row["completion"] == greedy(context, context.teachers.models[own["who"]].model, own["hint"])


def test_another_tokenizer_is_refused_and_another_end_is_told(context_of, tmp_path):
    other, ends = tmp_path / "other", tmp_path / "ends"
    for folder in (other, ends):
        stored(tiny_llama(), folder)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"1":', '"&":'))
    with pytest.raises(ModelError, match="another tokenizer than the policy"):
        context_of(teacher_model=str(other), **ALONE)
    settings = json.loads((ends / "tokenizer_config.json").read_text())
    (ends / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "="}))
    with pytest.warns(KLWarning, match="The teacher ends an answer with '='"):
        context_of(teacher_model=str(ends), **ALONE)


def test_a_prompt_past_the_positions_of_an_anchor_is_refused(context_of, config_of, tmp_path):
    short = stored(tiny_llama(max_position_embeddings=12), tmp_path / "short")
    task = prompts_file(tmp_path, ROWS) | {"train_size": 0, "max_completion_length": 8, "beta": 0.1}
    assert context_of(teacher_model=short, ref_model=short, **task).teachers, "the policy's prompts fit"
    hinted = task | {"teacher_model": short, "teacher_prompt": "hint"}
    for who, fields in (("teacher", hinted), ("reference", task | {"ref_model": short, "max_completion_length": 10})):
        for begin in (build, open_inputs):
            with pytest.raises(DataError, match=f"the {who}'s prompt 1 is too long"):
                begin(config_of(**fields))


def test_a_teacher_with_fewer_entries_is_refused_with_a_way_out(context_of, tmp_path):
    folder = stored(tiny_llama(vocab_size=42), tmp_path / "small")
    larger = stored(tiny_llama(vocab_size=44), tmp_path / "large")
    words = r"(?s)the teacher has another vocabulary.*cut the policy's padding with resize_token_embeddings\(42\)"
    with pytest.raises(ModelError, match=words):
        context_of(model=larger, teacher_model=folder, **ALONE)
    assert context_of(model=folder, teacher_model=larger, **ALONE).teachers is not None
    assert settings_of_run(context_of(teacher_model=larger, teacher_coef=0.3).config.flat()).teacher_coef == 0.3
    assert settings_of_run(context_of().config.flat()).teacher_coef is None


def test_the_teacher_of_a_resume_is_known_by_its_numbers():
    before = {"teacher": [-1.0, -2.0], "task": "a"}
    check_same(before, {"teacher": [-1.001, -2.0]}, instead="begin anew")
    for now in ({"teacher": [-1.0, -3.0]}, {"teacher": [-1.0]}):
        with pytest.raises(ConfigError, match="(?s)the teacher is another one than it was.*or begin anew"):
            check_same(before, now, instead="begin anew")


def test_a_resume_with_another_model_at_the_server_is_refused(config_of, llama, teacher):
    """Case: the address is the same, and another model was loaded there while the run slept."""
    server = VLLMServer(load_model(teacher, "float32"), arithmetic_tokenizer())
    with answering(server.answer) as url:
        fields = {"teacher_url": url, "max_steps": 1, **ALONE}
        train_run(config_of(**fields))
        server.model = load_model(llama, "float32")
        with pytest.raises(ConfigError, match="the teacher is another one than it was"):
            train_run(config_of(**fields | {"max_steps": 2, "resume": True}))


@pytest.mark.parametrize(("direction", "top_k"), [("reverse", 0), ("reverse", 3), ("forward", 3), ("js", 3)])
def test_a_head_that_a_server_tells_is_the_local_teachers(context_of, teacher, direction, top_k):
    topk = {"teacher_estimator": "topk", "teacher_top_k": top_k, "teacher_direction": direction}
    topk |= ALONE | ({"teacher_head": "teacher"} if top_k else {})
    (here,) = steps_taken(context_of(teacher_model=teacher, **topk), 1)
    with answering(VLLMServer(load_model(teacher, "float32"), arithmetic_tokenizer()).answer) as url:
        (away,) = steps_taken(context_of(teacher_url=url, **topk), 1)
    names = {f"teacher/{name}" for name in ("kl", "k1", "teacher_mass", "overlap_ratio")} & here.keys()
    for name in (*names, "train/loss", "train/grad_norm"):
        assert away[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6), name


def test_the_sampler_as_the_anchor_needs_no_second_model(config_of, context_of):
    with pytest.warns(KLWarning, match="no effect with num_iterations=1"):
        config_of(reference="sampler", beta=1.0)
    with pytest.warns(KLWarning, match="proximal"):
        context = context_of(reference="sampler", beta=1.0, num_iterations=2)
    assert context.reference is None and context.objective.terms[0].term.anchor == "sampler"
    moved = []
    for beta in (0.01, 3.0):
        with pytest.warns(KLWarning, match="proximal"):
            context = context_of(reference="sampler", beta=beta, num_iterations=4, warmup_steps=0)
        moved.append(steps_taken(context, 1)[0]["policy/kl_old"])
    assert moved[1] < moved[0]
