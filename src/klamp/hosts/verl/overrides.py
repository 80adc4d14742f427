"""klamp's KL as arguments of verl's command line, what no hook of verl can carry, and what a configuration will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from klamp.config import KLConfig
from klamp.config.describe import DIVERGENCES, PLACEMENTS, describe_average, describe_controller, describe_price
from klamp.config.fields import host_refusals
from klamp.config.loss import Price, price_of
from klamp.config.teacher import TeacherConfig
from klamp.core.advantages import Baseline, Scale
from klamp.core.arguments import describe
from klamp.core.term import Placement
from klamp.core.types import Reduction
from klamp.errors import ConfigError, KlampError, refuse
from klamp.hosts.common.effective import Effective, EffectiveTerm, that_apply
from klamp.hosts.common.versions import told_version
from klamp.hosts.verl.fields_in_verl import LOSS_FIELDS, is_driven, is_ours, loss_kl, name_of, needs_driver, written
from klamp.hosts.verl.teacher import has_head, teacher_of, teacher_refusals, teacher_values

ACTOR = "actor_rollout_ref.actor"
IMPORTED = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=klamp.verl.registered"
"""Has klamp's names registered in every process of verl's."""
DRIVEN = "++trainer.checkpoint_callback_class=klamp.verl.Driver"


def overrides(kl: KLConfig, teacher: TeacherConfig | None = None) -> list[str]:
    """The arguments of `python -m verl.trainer.main_ppo` that give a run this KL, and this teacher, one per element.

    A plain KL in the reward is verl's own `kl`, which is k1. With a KL in the reward they also set
    `algorithm.norm_adv_by_std_in_grpo=False`: in a group whose rewards are all equal the division by the standard
    deviation cancels beta, so that every beta > 0 would be the same.

    A KL that needs whole groups, the tokens, or a coefficient that moves is settled in verl's trainer, by
    `klamp.verl.Driver`, and travels with the batch to the workers' loss: then `kl_loss_type` names it wherever it
    enters, also in the reward.

    A teacher gets one GPU of its own (each of several); arguments that come later win.

    Args:
        kl: the KL. beta 0 gives a run without one, and without a reference.
        teacher: the KL to a teacher besides; None: none.

    Raises:
        ConfigError: verl has no place for what is asked for; with the reason.

    Source: the fields: verl's `ppo_trainer.yaml`; the cancelling: docs/which-kl.md, question 4
    """
    taught = teacher if teacher is not None and teacher.there else None
    refuse([*host_refusals(kl, "verl"), *(teacher_refusals(taught) if taught else ())])
    shifts_reward = kl.needs_reference and kl.kl_placement == "reward"
    by_verl = shifts_reward and not needs_driver(kl) and kl.kl_max_log_ratio is None
    in_loss = kl.needs_reference and not by_verl
    found = [f"{ACTOR}.use_kl_loss={in_loss}", f"algorithm.use_kl_in_reward={by_verl}"]
    if in_loss:
        name = name_of(kl, LOSS_FIELDS)
        found += [f"{ACTOR}.kl_loss_coef={kl.beta!r}", f"{ACTOR}.kl_loss_type={written(name)}"]
    if by_verl:
        found += ["algorithm.kl_penalty=kl", "algorithm.kl_ctrl.type=fixed", f"algorithm.kl_ctrl.kl_coef={kl.beta!r}"]
    if shifts_reward:
        found.append("algorithm.norm_adv_by_std_in_grpo=False")
    if in_loss and is_driven(kl):
        found.append(DRIVEN)
    if taught is not None:
        found += [f"{key}={written(value)}" for key, value in teacher_values(taught).items()]
    return [*found, IMPORTED] if in_loss or taught is not None else found


BASELINES: Mapping[str, Baseline] = {"grpo": "mean", "rloo": "leave_one_out"}
"""verl's advantages whose baseline is known here; GRPO's holds the completion's own reward."""
REDUCTIONS: Mapping[str, Reduction] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_length",
    "token-sum": "sequence_sum",
}
"""verl's loss_agg_mode -> how klamp calls that average; of a sum, the tokens that carry the KL change nothing."""


def price(config: Any, beta: float, placement: Placement) -> Price | str:
    """The price of a coefficient, or why it is not known; `vanilla` averages policy loss and KL alike."""
    estimator, size = config["algorithm"]["adv_estimator"], int(config["actor_rollout_ref"]["rollout"]["n"])
    mode = (config["actor_rollout_ref"]["actor"].get("policy_loss") or {}).get("loss_mode", "vanilla")
    if estimator not in BASELINES:
        return f"adv_estimator={estimator} is not one of {', '.join(BASELINES)}"
    if size < 2:
        return f"rollout.n={size} leaves no group"
    if placement == "loss" and mode != "vanilla":
        return f"loss_mode={mode} may average over tokens otherwise than the KL"
    scale: Scale = "std" if divides_by_std(config["algorithm"]) else "none"
    return price_of(beta, placement=placement, baseline=BASELINES[estimator], scale=scale, group_size=size)


def divides_by_std(algorithm: Any) -> bool:
    """Whether advantages are divided by the standard deviation of their group's rewards."""
    return algorithm["adv_estimator"] == "grpo" and bool(algorithm.get("norm_adv_by_std_in_grpo", True))


K3_STOPS = "; its value stops at 10 nats, at log-ratios -2.61 and +11.0, and past them it has no gradient"
OWN: Mapping[str, tuple[str, str]] = {
    "kl": ("k1", "zero in expectation: it holds nothing"),
    "abs": ("|log-ratio|", "that of no divergence"),
    "mse": ("k2", DIVERGENCES["reverse"]),
    "low_var_kl": ("k3", f"{DIVERGENCES['forward']}{K3_STOPS}"),
}
"""verl's own types: (value, gradient as a loss); `klamp audit verl` measures them."""
WITHOUT_TAIL = "that of the plain sum over these words, which is not 0 at the teacher"
ALIASES: Mapping[str, str] = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def effective(config: Any) -> Effective:
    """What the KL of a composed verl configuration will really do; changes nothing, needs no verl.

    Args:
        config: verl's whole configuration, as its trainers get it: a DictConfig, or nested mappings.

    Raises:
        ConfigError: no whole configuration; a name of klamp's that cannot be read, or that asks for what is refused.
    """
    try:
        return _effective(config)
    except KlampError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"this is no whole configuration of verl: {type(error).__name__}: {error}",
            got=describe(config),
            why="actor, algorithm, model, rollout and data decide together what the KL does",
            fix="pass the configuration that verl's trainer gets, composed by Hydra: its parts and all defaults",
        ) from error


def _effective(config: Any) -> Effective:
    policy = config["actor_rollout_ref"]
    mode, in_reward = policy["actor"]["loss_agg_mode"], bool(config["algorithm"]["use_kl_in_reward"])
    in_loss = bool(policy["actor"]["use_kl_loss"])
    reference = _reference(policy["model"])
    return Effective(
        host=told_version("verl"),
        terms=(
            *([_in_loss(config)] if in_loss else []),
            *([_in_reward(config)] if in_reward else []),
            *([_to_teacher(config["distillation"])] if _distills(config) else []),
        ),
        normalizer=f"{_average(mode)} (loss_agg_mode={mode})",
        reference=reference if in_loss or in_reward else "none: use_kl_loss and use_kl_in_reward are off",
        notes=_notes(config, in_loss, in_reward),
    )


def _average(mode: str) -> str:
    if mode == "token-sum":
        return "sum over the tokens of the mini-batch"
    length = "loss_scale_factor, else the padded length"
    return describe_average(REDUCTIONS[mode], over="the mini-batch", length=length) if mode in REDUCTIONS else "unknown"


def _in_loss(config: Any) -> EffectiveTerm:
    actor = config["actor_rollout_ref"]["actor"]
    name, beta = actor["kl_loss_type"], actor["kl_loss_coef"]
    if is_ours(name):
        kl = loss_kl(name, float(beta))
        moves = describe_controller(kl) if is_driven(kl) else "fixed"
        return EffectiveTerm.of(kl, beta=beta, price=_price(config, beta, kl.kl_placement), controller=moves)
    value, gradient = _own(name)
    return _of_verl("loss", value, gradient, beta, _price(config, beta, "loss"), "fixed")


def _in_reward(config: Any) -> EffectiveTerm:
    control, value = config["algorithm"]["kl_ctrl"], _own(config["algorithm"]["kl_penalty"])[0]
    kind, beta, target = control["type"], control["kl_coef"], control["target_kl"]
    moves = "fixed" if kind == "fixed" else f"{kind} from {beta:g}, towards {target:g} nats per token"
    return _of_verl("reward", value, _as_reward(value), beta, _price(config, beta, "reward"), moves)


def _distills(config: Any) -> bool:
    return bool((config.get("distillation") or {}).get("enabled"))


def _to_teacher(section: Any) -> EffectiveTerm:
    options, models = section["distillation_loss"], section["teacher_models"]
    several = [each["model_path"] for name, each in models.items() if name != "teacher_model"]
    who = ", ".join(several) or str(models["teacher_model"]["model_path"])
    name, coefficient = options["loss_mode"], float(options["distillation_loss_coef"])
    if is_ours(name):
        teacher = teacher_of(name)
        taught = replace(teacher, teacher_top_k=int(options["topk"])) if has_head(teacher) else teacher
        return EffectiveTerm.to_teacher(taught, who=who, coefficient=coefficient)
    head, shifts = name == "forward_kl_topk", bool(options["use_policy_gradient"])
    value, gradient = (f"over {options['topk']} of the teacher's words", WITHOUT_TAIL) if head else _own(name)
    if shifts:
        gradient = OWN["kl"][1] if head else _as_reward(value)
    weight = coefficient if options["use_task_rewards"] else 1.0
    found = _of_verl("advantage" if shifts else "loss", value, gradient, weight, "that of beta", "fixed")
    return replace(
        found, term=f"{found.term}, to the teacher: {who}", gradient=found.gradient.replace("ref", "teacher")
    )


def _price(config: Any, beta: float, placement: Placement) -> str:
    found = price(config, beta, placement)
    if isinstance(found, str):
        return f"unknown: {found}"
    return describe_price(found, group_size=int(config["actor_rollout_ref"]["rollout"]["n"]))


def _of_verl(
    placement: Placement, value: str, gradient: str, beta: float, price: str, controller: str
) -> EffectiveTerm:
    return EffectiveTerm(
        term="verl's own",
        beta=beta,
        price=price if "KL(" in gradient else "none: its gradient is that of no KL",
        controller=controller,
        value=value,
        gradient=gradient,
        placement=PLACEMENTS[placement],
    )


def _own(name: str) -> tuple[str, str]:
    """The value and gradient of one of verl's own types as a loss; a + after the name means the gradient of k2."""
    base = ALIASES.get(name.removesuffix("+"), name.removesuffix("+"))
    if base not in OWN:
        return name, "unknown: verl raises NotImplementedError"
    value, gradient = OWN[base]
    return value, OWN["mse"][1] if name.endswith("+") else gradient


def _as_reward(value: str) -> str:
    return DIVERGENCES["reverse"] if value == "k1" else "that of no divergence"


def _reference(model: Any) -> str:
    ranks = (model.get("lora_rank"), (model.get("lora") or {}).get("rank"))  # FSDP's, Megatron's
    adapter = any((rank or 0) > 0 for rank in ranks) or model.get("lora_adapter_path") is not None
    return "the policy with its adapter off" if adapter else "a frozen copy"


def _notes(config: Any, in_loss: bool, in_reward: bool) -> tuple[str, ...]:
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    control, name = algorithm["kl_ctrl"], actor["kl_loss_type"]
    completions = int(config["data"]["train_batch_size"]) * int(config["actor_rollout_ref"]["rollout"]["n"])
    callback = (config.get("trainer") or {}).get("checkpoint_callback_class")
    driven, value = str(callback).endswith("klamp.verl.Driver"), _own(algorithm["kl_penalty"])[0]
    rows = [
        (in_loss and in_reward, "the KL counts twice: in the loss and in the reward"),
        (
            in_reward and divides_by_std(algorithm),
            "norm_adv_by_std_in_grpo divides by the standard deviation of rewards that hold the KL: in a group whose "
            "rewards are all equal beta cancels, and every beta > 0 is the same",
        ),
        (in_reward and value != "k1", f"in the reward {value} is biased: only k1 has the gradient of KL(policy||ref)"),
        (
            in_reward and control["type"] == "adaptive" and completions > 5 * control["horizon"],
            f"the adaptive rule turns beta negative: it multiplies by 1 - 0.2 * {completions} / {control['horizon']} "
            "when the KL is low",
        ),
        (
            in_reward and control["type"] != "fixed",
            "verl's checkpoints do not hold the controller: on resume beta starts at kl_coef",
        ),
        (
            in_loss and not driven and is_ours(name) and is_driven(loss_kl(name)),
            "this KL needs ++trainer.checkpoint_callback_class=klamp.verl.Driver",
        ),
        *(_of_teacher(config, config["distillation"]["distillation_loss"], in_loss) if _distills(config) else ()),
    ]
    return that_apply(rows)


def _of_teacher(config: Any, options: Any, in_loss: bool) -> list[tuple[bool, str]]:
    temperature = float(config["actor_rollout_ref"]["rollout"].get("temperature", 1.0))
    return [
        (
            in_loss and not options["use_task_rewards"],
            "use_task_rewards is off: verl leaves out its policy loss, and the KL to the reference with it",
        ),
        (
            options["loss_max_clamp"] is not None,
            f"loss_max_clamp={options['loss_max_clamp']}: past it the KL to the teacher has no gradient",
        ),
        (
            temperature != 1,
            f"the teacher scores at temperature 1, the policy at rollout.temperature={temperature:g}",
        ),
    ]
