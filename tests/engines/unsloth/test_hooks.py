"""On Unsloth: klamp's KL in its loss, what is refused, and what is said to be in force."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tests.batches import flat_batch, objective_of
from tests.engines.unsloth.hosts import PROMPTS, attached, model, move, reward, saved, tokenizer, trainer
from torch import Tensor

import klamp.trl
from benchmarks.measure import isolated
from benchmarks.step_runs import Setting, write_setting
from benchmarks.unsloth_cpu import with_switches
from klamp.config import KLConfig
from klamp.core.objective import grpo_loss
from klamp.errors import ConfigError, NonFiniteError, UnsupportedVersion
from klamp.hosts.common.rollout import excluded_ids, kl_tokens
from klamp.hosts.trl.grpo_trainer import K3_STOPS

BETA = 0.4
CLIP: dict[str, Any] = {"kl_clip_method": "hard", "kl_clip_threshold": 0.17, "kl_reference_length": 6}
SHIFT: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "advantage"}
REWARD: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "k3": {},
    "k1": {"kl_estimator": "k1"},
    "k2 forward": {"kl_estimator": "k2", "kl_gradient": "forward"},
    "no gradient": {"kl_gradient": "none"},
    "over the sequence": {"kl_horizon": "sequence"},
    "bounded log-ratio": {"kl_max_log_ratio": 0.1},
    "without some tokens": {"kl_exclude_tokens": tuple(range(3, 40, 3))},
    "hard clip": CLIP,
    "soft clip": CLIP | {"kl_clip_method": "soft", "kl_clip_temperature": 0.02},
    "hard clip, batch level": CLIP | {"kl_clip_level": "batch"},
    "in the advantage": SHIFT,
    "in the advantage, to go": SHIFT | {"kl_horizon": "sequence"},
    "in the advantage, clipped": SHIFT | CLIP,
    "in the reward": REWARD,
    "in the reward, clipped": REWARD | CLIP,
}
AVERAGES = {"grpo": "sequence_mean", "dr_grpo": "fixed_length", "dapo": "token_mean"}
NO_PAD = {"generation_kwargs": {"suppress_tokens": [0]}, "scale_rewards": "none"}
"""A pad token amid a completion is padding to Unsloth, and a token like any other to klamp's own loss below."""


def rows(groups: int = 2) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in PROMPTS[:groups] for _ in range(4)]


def logprobs(made: Any, inputs: dict[str, Any]) -> Tensor:
    """Of the completions, by a forward of the model alone."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    rows_of_logits = made(input_ids=ids, attention_mask=mask).logits[:, -inputs["completion_ids"].shape[1] - 1 : -1]
    return rows_of_logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def expected(host: Any, kl: KLConfig, inputs: dict[str, Any]) -> Tensor:
    """klamp's own loss of the same completions."""
    policy, mask = logprobs(host.model, inputs), inputs["completion_mask"].bool()
    with torch.no_grad():
        ref = logprobs(host.ref_model, inputs)
    excluded = excluded_ids(kl.kl_exclude_tokens, tokenizer())
    carries = kl_tokens(inputs["completion_ids"], mask, excluded) if kl.excludes else mask
    advantages = torch.tensor(list(host._logs["advantages"])[-len(mask) :])
    length = float(kl.kl_reference_length or 1)
    known = {"policy_logprobs": policy, "ref_logprobs": ref, "sampler_logprobs": policy.detach(), "mask": mask}
    known |= {"kl_mask": carries if kl.excludes else None, "group_size": 4, "reference_length": length}
    batch = flat_batch(**known, advantages=advantages)
    term = kl.build_term()
    if kl.kl_placement == "reward":
        spent = ((policy - ref) * mask).sum(-1).detach().view(-1, 4)
        taken = kl.beta * (spent - spent.mean(-1, keepdim=True))
        if kl.kl_clip_method == "hard":
            ratio = (policy - ref).detach()
            k3 = ((torch.exp(-ratio) - 1 + ratio) * mask).sum(-1).view(-1, 4)
            taken = taken * ((k3.sum(-1, keepdim=True) - k3) / 3 > kl.kl_clip_threshold * length)
        batch = flat_batch(**{**vars(batch), "advantages": advantages - taken.view(-1)})
    objective = objective_of(
        reduction=AVERAGES[host.loss_type], max_length=host.max_completion_length, beta=kl.beta, kl=term
    )
    return grpo_loss(batch, objective).loss


def slopes(host: Any, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(host.model.parameters()))])


def generated(host: Any) -> dict[str, Any]:
    """Two groups of completions, as the trainer makes them for the loss."""
    host.current_gradient_accumulation_steps = 1
    host.model.train()
    torch.manual_seed(1)  # the KL of one group is under the clips' budget then, that of the other over it
    return host._generate_and_score_completions(rows())


@pytest.mark.parametrize("loss_type", AVERAGES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_klamps_own_loss(name: str, loss_type: str, tmp_path: Path) -> None:
    kl = KLConfig(beta=BETA, **CONFIGURATIONS[name])
    host = attached(tmp_path, kl, loss_type=loss_type, per_device_train_batch_size=8, **NO_PAD)
    move(host.model)
    inputs = generated(host)
    loss, own = host.compute_loss(host.model, inputs), expected(host, kl, inputs)
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slopes(host, loss), slopes(host, own), rtol=1e-5, atol=1e-6)


def test_the_configurations_differ(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    found = []
    for options in CONFIGURATIONS.values():
        host = attached(tmp_path, KLConfig(beta=BETA, **options), per_device_train_batch_size=8, **NO_PAD)
        move(host.model)
        loss = host.compute_loss(host.model, generated(host))
        found.append(torch.cat([loss.detach().view(1), slopes(host, loss)]))
    named = list(zip(CONFIGURATIONS, found, strict=True))
    same = [(a, b) for i, (a, x) in enumerate(named) for b, y in named[:i] if (x - y).abs().max() < 1e-6]
    assert same == [("in the advantage", "k1")]  # on-policy it is the same, by two ways


def test_attaching_changes_beta_and_nothing_else_of_the_arguments(tmp_path: Path) -> None:
    """Unsloth's own defaults stay: a subclass of its config would bring back TRL's."""
    host = trainer(tmp_path)
    before = host.args.to_dict()
    assert (before["learning_rate"], before["weight_decay"], before["seed"]) == (5e-5, 0.001, 3407)
    klamp.trl.attach(host, KLConfig(beta=0.25))
    assert host.args.to_dict() == before | {"beta": 0.25}
    assert type(host.args) is trl.GRPOConfig
    untouched = trl.GRPOConfig(output_dir=str(tmp_path))
    assert (untouched.learning_rate, untouched.beta, untouched.loss_type) == (5e-5, 0.0, "dapo")
    assert trl.GRPOConfig(output_dir=str(tmp_path), loss_type="grpo").beta == 0.001


@pytest.mark.gate
def test_klamps_own_classes_are_refused_with_the_way_out(tmp_path: Path) -> None:
    text = r"once Unsloth has patched TRL[\s\S]*klamp.trl.attach\(trainer, KLConfig"
    for build in (lambda: klamp.trl.GRPOConfig(output_dir=str(tmp_path)), lambda: klamp.trl.GRPOTrainer(model())):
        with pytest.raises(ConfigError, match=text):
            build()


def test_a_users_subclass_keeps_its_methods(tmp_path: Path) -> None:
    class Mine(trl.GRPOTrainer):
        called = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            Mine.called += 1
            return super().compute_loss(*args, **kwargs)

    host = attached(tmp_path, KLConfig(beta=BETA), kind=Mine)
    assert isinstance(host, Mine) and type(host).__name__ == "KLMine"
    host.train()
    assert Mine.called == 2
    for late in (host, trainer(tmp_path)):
        late.state.global_step = 1
        with pytest.raises(ConfigError, match="attach"):
            klamp.trl.attach(late, KLConfig(beta=BETA))


def test_a_loss_that_goes_past_the_hook_raises(tmp_path: Path) -> None:
    class Elsewhere(trl.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 0 * sum(p.sum() for p in model.parameters())

    with pytest.raises(UnsupportedVersion, match="Unsloth's loss does not take the KL where klamp puts it"):
        attached(tmp_path, KLConfig(beta=BETA), kind=Elsewhere).train()


def test_a_batch_without_reference_raises(tmp_path: Path) -> None:
    class Forgets(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return {**super()._generate_and_score_completions(inputs), "ref_per_token_logps": None}

    with pytest.raises(UnsupportedVersion, match="a batch that the reference has not scored"):
        attached(tmp_path, KLConfig(beta=BETA), kind=Forgets).train()


@pytest.mark.gate
def test_a_given_reference_is_used_and_stays_frozen(tmp_path: Path) -> None:
    other = model(seed=7)
    kept = copy.deepcopy(other.state_dict())
    host = attached(tmp_path, KLConfig(beta=BETA), ref_model=other, learning_rate=1e-2)
    host.train()
    assert all(torch.equal(value, kept[name]) for name, value in host.ref_model.state_dict().items())
    assert host.state.log_history[0]["kl/k3"] > 0.05


def test_a_kl_that_is_not_finite_stops_the_run_before_the_step(tmp_path: Path) -> None:
    broken = model(seed=7)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    host = attached(tmp_path, KLConfig(beta=BETA), ref_model=broken, learning_rate=1e-2)
    kept = [parameter.detach().clone() for parameter in host.model.parameters()]
    with pytest.raises(NonFiniteError, match="KL of this step is not finite"):
        host.train()
    assert all(torch.equal(a, b) for a, b in zip(kept, host.model.parameters(), strict=True))


def test_monitoring_at_beta_0_is_unsloth_without_kl(tmp_path: Path) -> None:
    kl = KLConfig(beta=0, kl_monitor=True)
    host, plain = attached(tmp_path, kl, learning_rate=1e-2), trainer(tmp_path, learning_rate=1e-2)
    for each in (host, plain):
        torch.manual_seed(0)
        each.train()
    for mine, stock in zip(host.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, stock)
    logged = host.state.log_history[-2]
    assert logged["beta"] == 0.0 and logged["kl/k3"] > 0
    off = attached(tmp_path, KLConfig(beta=0))
    assert off.ref_model is None and off.beta == 0.0
    off.train()
    assert "kl/k3" not in off.state.log_history[0]


def test_an_evaluation_has_metrics_of_its_own_and_no_say_in_beta(tmp_path: Path) -> None:
    host = attached(tmp_path, KLConfig(beta=BETA, target_kl=1e-4), per_device_eval_batch_size=4)
    move(host.model)
    host.evaluate()
    logged = host.state.log_history[-1]
    assert logged["eval_kl/k3"] > 1e-3 and logged["eval_beta"] == BETA
    assert host._klamp.control.controller.value == BETA


@pytest.mark.gate
def test_the_controller_follows_from_a_kl_of_0_and_is_saved(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    kl = KLConfig(beta=BETA, target_kl=1e-6)
    options: dict[str, Any] = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    host = attached(tmp_path, kl, **options)
    host.train()
    betas = [entry["beta"] for entry in host.state.log_history if "beta" in entry]
    assert betas[0] == BETA and betas[4] != BETA
    assert host.state.log_history[0]["kl/k3"] < 1e-9
    assert not [w for w in recwarn if "before the first update" in str(w.message)]
    again = attached(tmp_path, kl, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    resumed = [entry["beta"] for entry in again.state.log_history if "beta" in entry]
    assert resumed[4] == betas[4]  # the first four are the saved log's


def test_rewards_still_reach_the_advantages(tmp_path: Path) -> None:
    host = attached(tmp_path, KLConfig(beta=BETA), per_device_train_batch_size=8, **NO_PAD)
    inputs = generated(host)
    text = tokenizer().batch_decode(inputs["completion_ids"], skip_special_tokens=True)
    given = torch.tensor(reward(text)).view(-1, 4)
    torch.testing.assert_close(inputs["advantages"], (given - given.mean(-1, keepdim=True)).view(-1))


def test_a_stock_trainer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = with_switches(AutoModelForCausalLM.from_pretrained(saved(model(), tmp_path)))
    effect = klamp.trl.effective(trainer(tmp_path, made, beta=0.25, loss_type="bnpo"))
    assert effect.host.startswith("unsloth 2026.10.7, trl 1.15.0, UnslothGRPOTrainer")
    (term,) = effect.terms
    assert (term.term, term.beta, effect.reference) == ("Unsloth's own", 0.25, "loaded by Unsloth")
    assert term.value == "k3 times the policy ratio"
    assert term.price.startswith("0.333 x the standard deviation of a group's rewards per nat of a whole completion")
    assert effect.normalizer.startswith("mean over the tokens of the optimizer step")
    assert f"{K3_STOPS}, and nothing says so" in effect.notes
    assert "TRL" not in "".join(effect.notes)


def test_an_attached_one(tmp_path: Path) -> None:
    effect = klamp.trl.effective(attached(tmp_path, KLConfig(beta=0.25, target_kl=0.1)))
    (term,) = effect.terms
    assert (term.term, term.beta, effect.reference) == ("klamp's", 0.25, "a frozen copy in memory")
    assert term.controller == "hold controller from 0.25, towards 0.1 nats per token"
    assert term.price.startswith("0.333 x the standard deviation of a group's rewards per nat of a whole completion")
    assert effect.normalizer == "mean over completions of the mean over tokens (Unsloth's own, loss_type='grpo')"
    assert f"{K3_STOPS}; klamp's KL has none of these clamps" in effect.notes
    assert "Unsloth's own k3 stops" in str(effect)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kl_estimator": "exact"}, {}, "Unsloth's loss is given the log-probabilities of the sampled tokens alone"),
    ({"kl_normalizer": "sequence_sum"}, {}, "Unsloth normalises policy loss and KL together: sequence_mean"),
    ({"kl_normalizer": "sequence_mean"}, {"loss_type": "bnpo"}, "together: token_mean"),
    ({"reference": "ema"}, {}, "sync_ref_model=True"),
    ({"kl_early_stop": 0.1}, {}, "kl_early_stop=0.1 cannot be honoured by Unsloth"),
    ({"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}, {}, "scale_rewards='none'"),
    ({}, {"loss_type": "dpao"}, "did you mean 'dapo'?"),
]


@pytest.mark.parametrize(("kl", "args", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_refused(kl: dict[str, Any], args: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        attached(tmp_path, KLConfig(beta=0.1, **kl), **args)
    assert text in str(raised.value) and "why:" in str(raised.value) and "fix:" in str(raised.value)


def test_left_out_tokens_under_weights_of_whole_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSLOTH_GRPO_LOSS_AGGREGATION", "prompt")
    with pytest.raises(ConfigError, match="tokens cannot be left out of the KL"):
        attached(tmp_path, KLConfig(beta=0.1, kl_exclude_tokens=("special",))).train()


def test_the_average_that_unsloth_has_is_taken(tmp_path: Path) -> None:
    attached(tmp_path, KLConfig(beta=0.1, kl_normalizer="token_mean"), loss_type="bnpo")


def test_the_benchmark_of_a_step_takes_those_that_are_asked_for(tmp_path: Path) -> None:
    folder, prompts = write_setting(tmp_path, "tiny", 8)
    setting = Setting(trainer="unsloth", model=folder, prompts=prompts, completion=8, steps=2, warmup=1)
    found = isolated("benchmarks.step_runs:one", {"setting": setting.to_dict()}, threads=1)
    assert len(found["seconds"]) == 1 and found["tokens"] == 2 * 8 * 8
