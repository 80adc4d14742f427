"""A KL to a teacher in verl's configuration: its names, its arguments, its refusals, its words; without verl."""

import copy
from typing import Any

import pytest
from tests.hosts.teachers import HAVE, KINDS, config_of
from tests.hosts.verl.test_effective import CONFIG

from klamp import KLConfig, TeacherConfig
from klamp.errors import ConfigError, UnknownNameError
from klamp.hosts.verl.overrides import named, teacher_name, teacher_of, teacher_refusals
from klamp.verl import effective, overrides

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")

MODEL = {"teacher_model": "/models/teacher"}
HEAD = {"teacher_estimator": "topk", "teacher_direction": "forward", "teacher_head": "teacher", "teacher_top_k": 8}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "klamp"),
        ({"teacher_coef": 0.1}, "klamp"),
        ({"teacher_estimator": "k3", "teacher_top_k": 0, "teacher_tail": "none"}, "klamp:teacher_estimator=k3"),
        (
            {"teacher_horizon": "sequence", "teacher_off_policy": "sequence"},
            "klamp:teacher_horizon=sequence,teacher_off_policy=sequence",
        ),
        (
            {"teacher_estimator": "topk", "teacher_top_k": 0, "teacher_direction": "js"},
            "klamp:teacher_estimator=topk,teacher_direction=js,teacher_top_k=0",
        ),
        (
            HEAD | {"teacher_tail": "bucket"},
            "klamp:teacher_estimator=topk,teacher_direction=forward,teacher_tail=bucket",
        ),
    ],
)
def test_a_name_stands_for_one_kl(fields: dict[str, Any], name: str) -> None:
    teacher = TeacherConfig(**MODEL, **fields)
    assert teacher_name(teacher) == name
    assert teacher_of(name).build_term() == teacher.build_term()


def test_the_names_are_all_different_and_come_back() -> None:
    assert {teacher_name(teacher) for teacher in named().values()} == set(named())
    heads = {name for name, teacher in named().items() if teacher.head_size}
    assert {named()[name].teacher_tail for name in heads} == {"bucket", "generalised", "none"}
    with pytest.raises(UnknownNameError, match="teacher_estimator=k3"):
        teacher_of("klamp:teacher_estimator=k2")


def test_the_arguments_of_a_teacher_beside_a_reference() -> None:
    teacher = TeacherConfig(teacher_model="Qwen/Qwen3-8B", teacher_coef=0.3)
    assert overrides(KLConfig(beta=0.02), teacher) == [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "algorithm.use_kl_in_reward=False",
        "actor_rollout_ref.actor.kl_loss_coef=0.02",
        "actor_rollout_ref.actor.kl_loss_type=klamp",
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=1",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1",
        "distillation.distillation_loss.loss_mode=klamp",
        "distillation.distillation_loss.use_task_rewards=True",
        "distillation.distillation_loss.distillation_loss_coef=0.3",
        "distillation.distillation_loss.use_policy_gradient=False",
        "distillation.distillation_loss.loss_max_clamp=null",
        "distillation.distillation_loss.log_prob_min_clamp=null",
        "distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-8B",
        "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=klamp.verl.registered",
    ]


@pytest.mark.parametrize("teacher", [None, TeacherConfig(), TeacherConfig(**MODEL, teacher_coef=0.0)])
def test_without_a_teacher_nothing_is_said_of_one(teacher: TeacherConfig | None) -> None:
    kl = KLConfig(beta=0.02)
    assert overrides(kl, teacher) == overrides(kl)
    assert not any("distillation" in word for word in overrides(kl))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"teacher_model": None, "teacher_url": "http://there:8000"}, "teacher_url='http://there:8000'"),
        ({"teacher_model": None, "teacher_kind": "ema"}, "teacher_kind='ema'"),
        ({"teacher_model": None, "teacher_kind": "adapter_off"}, "teacher_kind='adapter_off'"),
        ({"teacher_prompt": "hint"}, "teacher_prompt='hint'"),
        ({"teacher_estimator": "exact"}, "teacher_estimator='exact'"),
        (HEAD, "a head of teacher_top_k=8 tokens"),
        (HEAD | {"teacher_head": "student", "teacher_tail": "bucket"}, "a head of teacher_top_k=8 tokens"),
        (HEAD | {"teacher_direction": "reverse", "teacher_tail": "bucket"}, "a head of teacher_top_k=8 tokens"),
        (HEAD | {"teacher_tail": "bucket", "teacher_off_policy": "token"}, "teacher_off_policy='token' of a head"),
        ({"teacher_placement": "advantage"}, "teacher_placement='advantage'"),
        ({"teacher_max_log_ratio": 3.0}, "teacher_max_log_ratio=3.0"),
        ({"teacher_schedule": "cosine"}, "teacher_schedule='cosine'"),
        ({"teacher_warmup_steps": 3}, "teacher_warmup_steps=3"),
    ],
)
def test_what_has_no_place_is_refused_with_its_reason(fields: dict[str, Any], text: str) -> None:
    teacher = TeacherConfig(**{**MODEL, **fields})
    with pytest.raises(ConfigError) as caught:
        overrides(KLConfig(beta=0.02), teacher)
    assert caught.value.what.startswith(f"{text} cannot be honoured by verl")
    assert caught.value.why and caught.value.fix


def config(**options: Any) -> dict[str, Any]:
    made = copy.deepcopy(CONFIG)
    loss = {"loss_mode": "k3", "topk": 32, "use_task_rewards": True, "distillation_loss_coef": 0.5}
    loss |= {"use_policy_gradient": False, "loss_max_clamp": None, **options}
    models = {"teacher_model": {"model_path": "/models/teacher"}}
    return made | {"distillation": {"enabled": True, "teacher_models": models, "distillation_loss": loss}}


@pytest.mark.parametrize(
    ("options", "beta", "value", "gradient"),
    [
        ({"loss_mode": "klamp"}, 0.5, "k1", "reverse, per token: KL(policy||teacher)"),
        ({"loss_mode": "klamp", "use_task_rewards": False}, 0.5, "k1", "reverse, per token: KL(policy||teacher)"),
        (
            {"loss_mode": "klamp:teacher_estimator=topk,teacher_direction=forward,teacher_top_k=0"},
            0.5,
            "topk of the teacher's 0 likeliest and a sampled tail",
            "own, per token: KL(teacher||policy)",
        ),
        (
            {"loss_mode": "klamp:teacher_estimator=topk,teacher_direction=forward,teacher_tail=bucket"},
            0.5,
            "topk of the teacher's 32 likeliest and a bucket tail",
            "own, per token: not that of KL(teacher||policy)",
        ),
        ({}, 0.5, "k3", "KL(teacher||policy); its value"),
        ({"use_task_rewards": False}, 1.0, "k3", "KL(teacher||policy); its value"),
        ({"loss_mode": "k2"}, 0.5, "k2", "KL(policy||teacher)"),
        ({"loss_mode": "kl"}, 0.5, "k1", "zero in expectation"),
        ({"loss_mode": "k1", "use_policy_gradient": True}, 0.5, "k1", "KL(policy||teacher)"),
        ({"loss_mode": "k3", "use_policy_gradient": True}, 0.5, "k3", "that of no divergence"),
        ({"loss_mode": "forward_kl_topk"}, 0.5, "over 32 of the teacher's words", "that of the plain sum"),
        ({"loss_mode": "forward_kl_topk", "use_policy_gradient": True}, 0.5, "over 32 of the teacher's words", "zero"),
    ],
)
def test_the_words_of_a_teacher(options: dict[str, Any], beta: float, value: str, gradient: str) -> None:
    term = effective(config(**options)).terms[-1]
    assert (term.beta, term.value) == (beta, value) and term.gradient.startswith(gradient)
    assert "/models/teacher" in term.term and term.term.startswith("klamp's" if "klamp" in str(options) else "verl's")
    shifted = options.get("use_policy_gradient")
    assert term.placement == ("taken from the advantage" if shifted else "in the loss")


def test_what_may_surprise_with_a_teacher() -> None:
    assert effective(config()).notes == effective(CONFIG).notes
    assert any("leaves out its policy loss" in note for note in effective(config(use_task_rewards=False)).notes)
    assert any("past it the KL to the teacher" in note for note in effective(config(loss_max_clamp=10.0)).notes)
    warm = config()
    warm["actor_rollout_ref"]["rollout"]["temperature"] = 0.7
    assert any("scores at temperature 1" in note for note in effective(warm).notes)
    off = config()
    off["distillation"]["enabled"] = False
    assert effective(off) == effective(CONFIG)


@pytest.mark.filterwarnings("ignore:teacher_tail:klamp.errors.KLWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_verl_has_of_the_list_is_registered_and_the_rest_refused(kind: str) -> None:
    """Those that are registered are held against klamp's loss within verl: `tests/engines/verl/test_teacher.py`."""
    teacher = config_of(kind)
    refused = [each for each in teacher_refusals(teacher) if each.applies]
    assert bool(refused) == (kind not in HAVE["verl"])
    if not refused:
        assert teacher_name(teacher) in named()
