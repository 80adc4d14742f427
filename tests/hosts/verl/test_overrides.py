"""KLs in verl's configuration: names, overrides, refusals, and what they will do, in words; without verl."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from tests.config.drawn import accepted
from tests.hosts.teachers import HAVE, KINDS, config_of

from klamp import TeacherConfig
from klamp.config import KLConfig
from klamp.errors import ConfigError, UnknownNameError
from klamp.hosts.common.versions import host_version
from klamp.hosts.verl import overrides as names
from klamp.hosts.verl.overrides import ACTOR, DRIVEN, IMPORTED, LOSS_FIELDS, is_ours, loss_kl, name_of
from klamp.verl import effective, overrides

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")

IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"}


ELSEWHERE = {"beta", "kl_normalizer", "kl_early_stop", "kl_monitor"}
BELOW_0 = {"kl_max_teacher_log_ratio"}  # needs a beta below 0, which verl refuses
IN_A_NAME = [name for name in KLConfig.__dataclass_fields__ if not name.startswith("reference")]


@pytest.mark.parametrize("field", sorted({*IN_A_NAME} - ELSEWHERE - BELOW_0))
def test_each_field_comes_back(field: str) -> None:
    kl = accepted(KLConfig, KLConfig.__dataclass_fields__[field])
    assert loss_kl(name_of(kl, LOSS_FIELDS), kl.beta) == kl != KLConfig()


def test_several_fields_come_back_with_texts_that_need_quotes() -> None:
    texts, factors = ("</s>", "a, (b", "it's", 7), (1.5, 0.9, 2.0, 0.25)
    held: dict[str, Any] = {"target_kl": 1e-6, "kl_controller": "step", "kl_controller_factors": factors}
    kl = KLConfig(beta=0.1, kl_estimator="k2", kl_gradient="own", kl_exclude_tokens=texts, **held)
    assert loss_kl(name_of(kl, LOSS_FIELDS), 0.1) == kl


def test_a_name_says_what_differs_from_the_default() -> None:
    assert name_of(KLConfig(beta=0.7), LOSS_FIELDS) == "klamp"
    kl = KLConfig(kl_estimator="k1", kl_max_log_ratio=2.0)
    assert name_of(kl, LOSS_FIELDS) == "klamp:kl_estimator=k1,kl_max_log_ratio=2.0"
    assert loss_kl("klamp: kl_estimator = k1 , kl_max_log_ratio=2") == loss_kl(name_of(kl, LOSS_FIELDS))
    assert is_ours("klamp") and is_ours("klamp:kl_gradient=own")
    assert not any(map(is_ours, ("klamped", "low_var_kl", "k3+", "", None, 3)))


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("klamp:kl_gradient", ConfigError, "FIELD=VALUE"),
        ("klamp:kl_gradient=own)(", ConfigError, "cannot be read"),
        ("klamp:kl_gradient=own,kl_gradient=forward", ConfigError, "each field once"),
        ("klamp:kl_gradint=own", UnknownNameError, "did you mean 'kl_gradient'"),
        ("klamp:beta=0.1", UnknownNameError, "unknown field"),
        ("klamp:kl_estimator=k9", ConfigError, "k9"),
    ],
)
def test_what_cannot_be_read(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        loss_kl(name)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"beta": 0}, [f"{ACTOR}.use_kl_loss=False", "algorithm.use_kl_in_reward=False"]),
        (
            {"beta": 0.04, "kl_gradient": "forward", "kl_max_log_ratio": 5.0},
            [
                f"{ACTOR}.use_kl_loss=True",
                "algorithm.use_kl_in_reward=False",
                f"{ACTOR}.kl_loss_coef=0.04",
                f"{ACTOR}.kl_loss_type='klamp:kl_gradient=forward,kl_max_log_ratio=5.0'",
                IMPORTED,
            ],
        ),
        (
            {"beta": 0.1, **IN_REWARD},
            [
                f"{ACTOR}.use_kl_loss=False",
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_penalty=kl",
                "algorithm.kl_ctrl.type=fixed",
                "algorithm.kl_ctrl.kl_coef=0.1",
                "algorithm.norm_adv_by_std_in_grpo=False",
            ],
        ),
    ],
    ids=["none", "in the loss", "verl's own k1 in the reward"],
)
def test_the_arguments_of_a_kl(fields: dict, arguments: list[str]) -> None:
    assert overrides(KLConfig(**fields)) == arguments


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"target_kl": 0.05}, "klamp:target_kl=0.05"),
        ({"kl_exclude_tokens": ("</s>", 7)}, r"klamp:kl_exclude_tokens=(\'</s>\', 7)"),
        ({"kl_placement": "advantage", "kl_estimator": "k1"}, "klamp:kl_estimator=k1,kl_placement=advantage"),
        (
            {**IN_REWARD, "kl_max_log_ratio": 3.0},
            "klamp:kl_estimator=k1,kl_horizon=sequence,kl_placement=reward,kl_max_log_ratio=3.0",
        ),
    ],
)
def test_what_needs_the_whole_batch_goes_through_the_driver(fields: dict, name: str) -> None:
    arguments = overrides(KLConfig(beta=0.1, **fields))
    in_loss = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type='{name}'"]
    assert {*in_loss, "algorithm.use_kl_in_reward=False", DRIVEN} <= set(arguments)
    assert ("algorithm.norm_adv_by_std_in_grpo=False" in arguments) == (fields.get("kl_placement") == "reward")


MODEL = {"teacher_model": "/models/teacher"}
FORWARD = {"teacher_estimator": "topk", "teacher_direction": "forward"}
HEAD = FORWARD | {"teacher_head": "teacher", "teacher_top_k": 8}


@pytest.mark.parametrize(
    ("fields", "besides"),
    [
        ({}, {}),
        ({}, {"teacher_coef": 0.1}),
        ({"teacher_estimator": "k3"}, {"teacher_top_k": 0, "teacher_tail": "none"}),
        ({"teacher_horizon": "sequence", "teacher_off_policy": "sequence"}, {}),
        ({"teacher_estimator": "topk", "teacher_direction": "js", "teacher_top_k": 0}, {}),
        (FORWARD | {"teacher_tail": "bucket"}, {"teacher_head": "teacher", "teacher_top_k": 8}),
    ],
)
def test_a_name_stands_for_one_kl(fields: dict[str, Any], besides: dict[str, Any]) -> None:
    """It has these fields, and none of those besides."""
    teacher, written = TeacherConfig(**MODEL, **fields, **besides), ",".join(f"{x}={y}" for x, y in fields.items())
    name = names.teacher_name(teacher)
    assert name == (f"klamp:{written}" if fields else "klamp")
    assert names.teacher_of(name).build_term() == teacher.build_term()


def test_the_names_are_all_different_and_come_back() -> None:
    named = names.named()
    assert {names.teacher_name(teacher) for teacher in named.values()} == set(named)
    assert {teacher.teacher_tail for teacher in named.values() if teacher.head_size} == {
        "bucket",
        "generalised",
        "none",
    }
    with pytest.raises(UnknownNameError, match="teacher_estimator=k3"):
        names.teacher_of("klamp:teacher_estimator=k2")


def test_the_arguments_of_a_teacher_come_after_those_of_a_reference() -> None:
    loss, (*alone, _) = "distillation.distillation_loss", overrides(KLConfig(beta=0.02))
    assert overrides(KLConfig(beta=0.02), TeacherConfig(teacher_model="Qwen/Qwen3-8B", teacher_coef=0.3)) == [
        *alone,
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=1",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1",
        f"{loss}.loss_mode=klamp",
        f"{loss}.use_task_rewards=True",
        f"{loss}.distillation_loss_coef=0.3",
        f"{loss}.use_policy_gradient=False",
        f"{loss}.loss_max_clamp=null",
        f"{loss}.log_prob_min_clamp=null",
        "distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-8B",
        IMPORTED,
    ]


@pytest.mark.parametrize("teacher", [None, TeacherConfig(), TeacherConfig(**MODEL, teacher_coef=0.0)])
def test_without_a_teacher_nothing_is_said_of_one(teacher: TeacherConfig | None) -> None:
    assert overrides(KLConfig(beta=0.02), teacher) == overrides(KLConfig(beta=0.02))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kl_estimator": "exact"}, "kl_estimator='exact'"),
        ({"kl_normalizer": "token_mean"}, "kl_normalizer='token_mean'"),
        ({"reference": "ema"}, "reference='ema'"),
        ({"reference_dtype": "bfloat16"}, "reference_dtype='bfloat16'"),
        ({"kl_early_stop": 0.1}, "kl_early_stop=0.1"),
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
    of_teacher = {name: value for name, value in fields.items() if name.startswith("teacher")}
    of_kl = {name: value for name, value in fields.items() if name not in of_teacher}
    with pytest.raises(ConfigError) as caught:
        overrides(KLConfig(beta=0.02, **of_kl), TeacherConfig(**MODEL | of_teacher))
    assert caught.value.what.startswith(f"{text} cannot be honoured by verl")
    assert caught.value.why and caught.value.fix


TOPK, OF_HEAD = "klamp:teacher_estimator=topk,teacher_direction=forward", "topk of the teacher's"
OWN, BIASED = "own, per token: KL(teacher||policy)", "own, per token: not KL(teacher||policy)"


def config(**options: Any) -> dict[str, Any]:
    loss = {"loss_mode": "k3", "topk": 32, "use_task_rewards": True, "distillation_loss_coef": 0.5}
    loss |= {"use_policy_gradient": False, "loss_max_clamp": None, **options}
    models = {"teacher_model": {"model_path": "/models/teacher"}}
    return CONFIG | {"distillation": {"enabled": True, "teacher_models": models, "distillation_loss": loss}}


@pytest.mark.parametrize(
    ("options", "beta", "value", "gradient"),
    [
        ({"loss_mode": "klamp"}, 0.5, "k1", "reverse, per token: KL(policy||teacher)"),
        ({"loss_mode": "klamp", "use_task_rewards": False}, 0.5, "k1", "reverse, per token: KL(policy||teacher)"),
        ({"loss_mode": f"{TOPK},teacher_top_k=0"}, 0.5, f"{OF_HEAD} 0 likeliest and a sampled tail", OWN),
        ({"loss_mode": f"{TOPK},teacher_tail=bucket"}, 0.5, f"{OF_HEAD} 32 likeliest and a bucket tail", BIASED),
        ({}, 0.5, "k3", "KL(teacher||policy); its value"),
        ({"use_task_rewards": False}, 1.0, "k3", "KL(teacher||policy); its value"),
        ({"loss_mode": "k2"}, 0.5, "k2", "KL(policy||teacher)"),
        ({"loss_mode": "kl"}, 0.5, "k1", "zero in expectation"),
        ({"loss_mode": "k1", "use_policy_gradient": True}, 0.5, "k1", "KL(policy||teacher)"),
        ({"loss_mode": "k3", "use_policy_gradient": True}, 0.5, "k3", "follows no divergence"),
        ({"loss_mode": "forward_kl_topk"}, 0.5, "over 32 of the teacher's words", "follows the plain sum"),
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
    (tokenizers,) = set(effective(config()).notes) - set(effective(CONFIG).notes)
    assert "klamp.check_pair" in tokenizers
    assert any("leaves out its policy loss" in note for note in effective(config(use_task_rewards=False)).notes)
    assert any("past it the KL to the teacher" in note for note in effective(config(loss_max_clamp=10.0)).notes)
    warm, off = copy.deepcopy(config()), copy.deepcopy(config())
    warm["actor_rollout_ref"]["rollout"]["temperature"] = 0.7
    assert any("scores at temperature 1" in note for note in effective(warm).notes)
    off["distillation"]["enabled"] = False
    assert effective(off) == effective(CONFIG)


@pytest.mark.parametrize("kind", KINDS)
def test_what_verl_has_of_the_list_is_registered_and_the_rest_refused(kind: str) -> None:
    """Those that are registered are held against klamp's loss within verl: `tests/engines/verl/test_teacher.py`."""
    teacher = config_of(kind)
    refused = [each for each in names.teacher_refusals(teacher) if each.applies]
    assert bool(refused) == (kind not in HAVE["verl"])
    assert refused or names.teacher_name(teacher) in names.named()


IN_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "klamp", "loss_agg_mode": "token-mean"}
CONTROL = {"type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1}
REWARD = {"use_kl_in_reward": False, "kl_penalty": "kl", "kl_ctrl": CONTROL}
CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 128},
    "actor_rollout_ref": {
        "model": {"lora_rank": 0},
        "rollout": {"n": 8},
        "actor": {**IN_LOSS, "policy_loss": {"loss_mode": "vanilla"}},
    },
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, **REWARD},
}


def config_with(**changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(CONFIG)
    for name, value in changes.items():
        for section in (made["actor_rollout_ref"]["actor"], made["actor_rollout_ref"]["model"], made["algorithm"]):
            if name in section:
                section[name] = value
    return made


@pytest.mark.parametrize("part", [{}, None, "config.yaml", CONFIG["actor_rollout_ref"], {"actor_rollout_ref": None}])
def test_a_part_of_a_configuration_is_refused_in_words(part: Any) -> None:
    with pytest.raises(ConfigError, match="no whole configuration of verl") as caught:
        effective(part)
    assert caught.value.got and caught.value.why and caught.value.fix


def test_a_missing_key_and_an_unknown_name_are_named() -> None:
    with pytest.raises(UnknownNameError, match="kl_gradint"):
        effective(config_with(kl_loss_type="klamp:kl_gradint=own"))
    without = {name: value for name, value in CONFIG["algorithm"].items() if name != "kl_ctrl"}
    with pytest.raises(ConfigError, match="no whole configuration of verl: KeyError: 'kl_ctrl'"):
        effective(CONFIG | {"algorithm": without})


def test_the_page_has_the_arguments_and_the_words_of_a_configuration() -> None:
    words = str(effective(config_with())).splitlines()
    page = (Path(__file__).resolve().parents[3] / "docs" / "verl.md").read_text(encoding="utf-8")
    assert "\n".join(["```text", *overrides(KLConfig(beta=0.04)), "```"]) in page
    (shown,) = re.findall(r"```text\n(term .*?)```", page, re.S)
    assert [line for line in shown.splitlines() if line not in ("...", *words)] == []
    assert words[0] == f"host       {host_version('verl')}" and words[-1] == "reference  a frozen copy"
    assert effective(config_with(lora_rank=8)).reference == "the policy with its adapter off"
    without = effective(config_with(use_kl_loss=False))
    assert without.terms == () and "term       none" in str(without).splitlines()
    assert without.reference == "none: use_kl_loss and use_kl_in_reward are off"


def test_a_kl_in_both_places_is_two_terms_each_with_its_own_beta() -> None:
    in_loss, in_reward = effective(config_with(use_kl_in_reward=True, kl_ctrl=CONTROL | {"kl_coef": 0.3})).terms
    assert (in_loss.placement, in_loss.beta, in_loss.controller) == ("in the loss", 0.04, "fixed")
    assert (in_reward.placement, in_reward.beta) == ("taken from the reward", 0.3)
    target = "klamp:kl_estimator=k1,kl_horizon=sequence,kl_placement=reward,target_kl=0.1,kl_controller=step"
    driven = effective(config_with(kl_loss_type=target))
    assert driven.terms[0].controller == "step controller from 0.04, towards 0.1 nats per token"
    assert driven.terms[0].placement == "taken from the reward"
    assert driven.notes == ("this KL needs ++trainer.checkpoint_callback_class=klamp.verl.Driver",)
    callback = {"trainer": {"checkpoint_callback_class": "klamp.verl.Driver"}}
    assert effective(config_with(kl_loss_type=target) | callback).notes == ()


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("kl", "k1", "zero in expectation: it holds nothing"),
        ("k1", "k1", "zero in expectation: it holds nothing"),
        ("mse", "k2", "KL(policy||ref)"),
        ("low_var_kl", "k3", "KL(ref||policy); its value stops at 10 nats"),
        ("k3+", "k3", "KL(policy||ref)"),
        ("full", "full", "unknown: verl raises NotImplementedError"),
    ],
)
def test_verls_own_names_in_words(name: str, value: str, gradient: str) -> None:
    (term,) = effective(config_with(kl_loss_type=name)).terms
    assert (term.term, term.value) == ("verl's own", value)
    assert term.gradient.startswith(gradient) and (term.gradient == gradient or name == "low_var_kl")


@pytest.mark.parametrize(
    ("changes", "price"),
    [
        ({"norm_adv_by_std_in_grpo": False}, "0.0457 reward per nat of a whole completion"),
        ({"adv_estimator": "rloo"}, "0.04 reward per nat of a whole completion"),
        ({"adv_estimator": "gae"}, "unknown: adv_estimator=gae"),
        ({"policy_loss": {"loss_mode": "gspo"}}, "unknown: loss_mode=gspo"),
        ({"kl_loss_type": "kl"}, "none: its gradient follows no KL"),
        ({"use_kl_loss": False, "use_kl_in_reward": True}, "0.001 reward per nat of a whole completion"),
        ({"use_kl_loss": False, "use_kl_in_reward": True, "kl_penalty": "abs"}, "none: its gradient follows no KL"),
    ],
)
def test_the_price_of_beta_or_why_it_is_unknown(changes: dict[str, Any], price: str) -> None:
    (term,) = effective(config_with(**changes)).terms
    assert term.price.startswith(price)
    alone = config_with()
    alone["actor_rollout_ref"]["rollout"]["n"] = 1
    assert effective(alone).terms[0].price == "unknown: rollout.n=1 leaves no group"


def test_what_may_surprise() -> None:
    def notes(**changes: Any) -> str:
        return " ".join(effective(config_with(**changes)).notes)

    assert notes() == ""
    assert "counts twice" in notes(use_kl_in_reward=True)
    assert "beta cancels" in notes(use_kl_in_reward=True, use_kl_loss=False)
    assert "beta cancels" not in notes(use_kl_in_reward=True, norm_adv_by_std_in_grpo=False)
    assert "biased" in notes(use_kl_in_reward=True, kl_penalty="low_var_kl")
    theirs = notes(use_kl_in_reward=True, kl_ctrl=CONTROL | {"type": "adaptive", "horizon": 100})
    assert "turns beta negative: it multiplies by 1 - 0.2 * 1024 / 100" in theirs and "on resume" in theirs
