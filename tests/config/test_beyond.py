"""A negative beta beside a teacher: where it ends, what is refused, what is measured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.audit.bench.losses import exact_kl, ppo, score
from tests.audit.bench.worlds import make_world
from tests.batches import flat_batch
from tests.diagnostics.histories import history_of
from tests.hosts.trl.hosts import arguments

from klamp import check
from klamp.config import KLConfig, LossConfig, TeacherConfig, build_objective
from klamp.config.loss import Price
from klamp.core.objective import Objective, grpo_loss
from klamp.core.term import Weighted
from klamp.doctor.examine import examine
from klamp.errors import ConfigError, KLWarning, NonFiniteError
from klamp.hosts.common.control import KLControl, beta_metrics
from klamp.lab.config import TrainConfig
from klamp.verify.convergence import follow, worlds
from klamp.verify.one_step import Scene
from klamp.verl import overrides

LOSS = LossConfig(scale_rewards="none")
LAMBDA = 1.25


def taught(coef: float = LAMBDA, **choices: Any) -> TeacherConfig:
    return TeacherConfig(teacher_model="DIR", teacher_coef=coef, **choices)


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(
    ("choices", "scene"),
    [
        ({"kl_estimator": "k3"}, worlds()[1]),
        ({"kl_estimator": "k2", "kl_gradient": "own", "kl_horizon": "token"}, worlds()[0]),
        ({"kl_estimator": "exact"}, Scene(chain=worlds()[0].chain)),
        ({"kl_estimator": "k1", "kl_placement": "advantage"}, worlds()[0]),
        ({"kl_estimator": "k1", "kl_placement": "reward"}, worlds()[0]),
    ],
)
def test_a_negative_beta_ends_at_the_mix_beyond_the_teacher(choices: dict[str, Any], scene: Scene) -> None:
    """The optimum of E[r] + |beta| KL(policy||ref) - coef KL(policy||teacher), whose price is beta + coef."""
    kl = KLConfig(**{"kl_horizon": "sequence", **choices}, beta=1 - LAMBDA)
    end = follow(kl, LOSS, scene, taught(teacher_horizon=kl.kl_horizon))
    assert end.exact and abs(end.distance) < 1e-9


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "no teacher": ({}, None),
    "a teacher that is switched off": ({}, {"teacher_coef": 0.0}),
    "no minimum": ({"beta": -1.0}, {"teacher_coef": 1.0}),
    "forward": ({"kl_gradient": "forward"}, {}),
    "a clip": ({"kl_clip_method": "hard"}, {}),
    "a controller": ({"target_kl": 0.05, "kl_controller": "step"}, {}),
    "the sampler": ({"reference": "sampler"}, {}),
    "tokens left out": ({"kl_exclude_tokens": ("special",)}, {}),
    "forward to the teacher": ({}, {"teacher_estimator": "exact", "teacher_direction": "forward"}),
    "a tail that drops words": ({}, {"teacher_estimator": "topk", "teacher_tail": "bucket"}),
    "two horizons": ({"kl_horizon": "sequence"}, {}),
    "two weights": ({"kl_off_policy": "token"}, {}),
    "a teacher that fades": ({}, {"teacher_schedule": "linear"}),
}


"""Without a row here: what KLConfig alone refuses, in test_rules.py."""


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("kl", "teacher"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_bound_a_negative_beta_is_refused(kl: dict[str, Any], teacher: dict[str, Any] | None) -> None:
    beside = None if teacher is None else TeacherConfig(**{"teacher_model": "DIR"} | teacher)
    with pytest.raises(ConfigError) as error:
        build_objective(KLConfig(**{"beta": -0.25} | kl), LOSS, max_length=4, teacher=beside)
    assert error.value.why and error.value.fix


def test_hosts_take_it_beside_a_teacher_and_refuse_it_alone() -> None:
    beside = {"teacher_model": "DIR", "teacher_coef": 1.0}
    assert arguments(beta=-0.25, scale_rewards="none", **beside).beta == -0.25
    assert TrainConfig.from_flat({"beta": -0.25, "cpu": True, **beside}).kl.beta == -0.25
    for refused in (
        lambda: arguments(beta=-0.25),
        lambda: arguments(beta=-0.25, kl_estimator="k1"),
        lambda: TrainConfig.from_flat({"beta": -0.25}),
        lambda: overrides(KLConfig(beta=-0.25), taught(1.0)),
    ):
        with pytest.raises(ConfigError, match="beta"):
            refused()


def test_a_far_lambda_and_open_lengths_are_warned_of() -> None:
    for kl, teacher, said in (
        ({"beta": -0.5}, {"coef": 1.0}, "lambda = 2"),
        ({"beta": -0.1, "kl_horizon": "sequence"}, {"coef": 1.0, "teacher_horizon": "sequence"}, "may have no optimum"),
    ):
        with pytest.warns(KLWarning, match=said):
            build_objective(KLConfig(**kl), LOSS, max_length=4, teacher=taught(**teacher))


def _objective(beta: float, **choices: Any) -> Objective:
    made = build_objective(KLConfig(beta=beta, **choices), LOSS, max_length=1, teacher=taught(1.0))
    return replace(made, surrogate="score_function", reduction="sequence_sum")


def _batch(policy: torch.Tensor, ref: torch.Tensor, teacher: torch.Tensor, **masks: Any) -> Any:
    scores = {"policy_logprobs": policy, "ref_logprobs": ref, "teacher_logprobs": teacher}
    columns = {name: x[:, None] for name, x in scores.items()} | masks
    return flat_batch(**columns, mask=torch.ones(len(ref), 1, dtype=torch.bool), advantages=torch.zeros(len(ref)))


def test_the_kl_to_the_mix_is_what_is_left_of_both_kls_by_enumeration() -> None:
    """E[kl/mix] = KL(policy||mix) + Z - 1 - log Z, and s (KL(policy||mix) - log Z) is the sum of both KLs."""
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    policy, ref, teacher = logits.log_softmax(-1)
    mix = (-0.25 * ref + teacher) / 0.75
    log_z = mix.logsumexp(-1)
    kls = [(policy.exp() * (policy - other)).sum() for other in (ref, teacher, mix - log_z)]
    torch.testing.assert_close(-0.25 * kls[0] + kls[1], 0.75 * (kls[2] - log_z))
    rows = [
        grpo_loss(_batch(policy[v : v + 1], ref[v : v + 1], teacher[v : v + 1]), _objective(-0.25)).metrics["kl/mix"]
        for v in range(5)
    ]
    measured = sum(p * row for p, row in zip(policy.exp(), rows, strict=True))
    torch.testing.assert_close(measured, kls[2] + log_z.exp() - 1 - log_z)
    assert min(rows) >= 0 and "kl/mix" not in grpo_loss(_batch(policy, ref, teacher), _objective(0.25)).metrics


def test_a_bound_of_the_teacher_over_the_reference_binds_by_name_and_is_counted() -> None:
    """A token that the reference hardly has is worth no more than the bound; -inf of the reference stays refused."""
    policy = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    ref, teacher = torch.tensor([-1.5, -14.0, -2.0], dtype=torch.float64), torch.tensor([-1.0, -7.0, -9.0]).double()
    output = grpo_loss(_batch(policy, ref, teacher), _objective(-0.25, kl_max_teacher_log_ratio=3.0))
    bounded = torch.maximum(ref, teacher - 3)
    expected = -0.25 * (policy - bounded) + (policy - teacher)
    torch.testing.assert_close(3 * torch.autograd.grad(output.loss, policy)[0], expected.detach())
    assert output.metrics["kl/teacher_clamped"] == pytest.approx(1 / 3)
    ref[1] = -torch.inf
    with pytest.raises(NonFiniteError, match="ref_logprobs"):
        grpo_loss(_batch(policy, ref, teacher), _objective(-0.25, kl_max_teacher_log_ratio=3.0))


def test_a_token_that_the_teacher_did_not_score_is_not_driven_from_the_reference() -> None:
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref, unscored = torch.tensor([-3.0, -3.0]).double(), torch.tensor([[True], [False]])
    batch = _batch(policy, ref, ref - 1, teacher_mask=unscored)
    pull = torch.autograd.grad(grpo_loss(batch, _objective(-0.25)).loss, policy)[0]
    assert pull[0] != 0 and pull[1] == 0


def test_an_objective_refuses_a_negative_coefficient_that_nothing_bounds() -> None:
    sound = _objective(-0.25)
    assert sound.weighted(-0.5).beta == -0.5
    for broken in (lambda: sound.weighted(-1.0), lambda: replace(sound, terms=sound.terms[:1])):
        with pytest.raises(ConfigError, match="coefficient"):
            broken()
    (beta, term), teacher = sound.terms
    with pytest.raises(ConfigError, match="coefficient"):
        replace(sound, terms=(Weighted(beta, replace(term, gradient="own")), teacher))


def test_the_control_keeps_the_sign_and_logs_no_price() -> None:
    control = KLControl(KLConfig(beta=-0.25, kl_schedule="linear"))
    assert [control.beta(step, 4) for step in range(5)] == [-0.25, -0.1875, -0.125, -0.0625, 0.0]
    control.load_state_dict(control.state_dict())
    assert control.beta(0, 4) == -0.25
    assert beta_metrics(Price(beta=-0.25), 0.3) == {"beta": -0.25}


def test_alarms_of_a_kl_that_grows_by_design_stay_silent() -> None:
    """Case: the same curve of the KL to the reference under a positive beta is an alarm."""
    curve = [0.05 * 1.1**i for i in range(40)]
    sound, beyond = (
        examine(history_of(k3=curve, reward=[0.5] * 40, length=[50.0] * 40, beta=[beta] * 40, teacher__kl=[0.1] * 40))
        for beta in (0.25, -0.25)
    )
    assert {"kl-growing", "kl-far"} <= {finding.alarm.name for finding in sound.findings}
    by_design = {"kl-growing", "kl-far", "kl-high", "negative-beta"}
    assert not {finding.alarm.name for finding in beyond.findings} & by_design
    assert "kl-growing" not in beyond.checked and "kl-growing" not in beyond.unchecked


def test_check_names_a_negative_beta_and_a_baseline() -> None:
    """With beta passed the sign is right, and said; a coefficient less the KL at the prefix is the reverse KL's."""
    w = make_world(1, lag=0)
    verdict = check(w.token(score(w, w.d - exact_kl(w))), once=False, **w.teacher_passed())
    assert verdict.kl == "reverse" and "baseline" in str(verdict)
    verdict = check(w.token(ppo(w) - 0.25 * score(w, w.d)), beta=-0.25, once=False, **w.passed())
    assert verdict.kl == "reverse" and [x.code for x in verdict.findings if x.code.startswith("kl-")] == ["kl-beyond"]
