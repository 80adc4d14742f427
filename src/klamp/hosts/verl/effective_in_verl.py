"""What the KL of a verl configuration will really do, in words; verl itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from klamp.config.describe import DIVERGENCES, PLACEMENTS, describe_average, describe_controller, describe_price
from klamp.config.loss import Price, price_of
from klamp.core.advantages import Baseline, Scale
from klamp.core.arguments import describe
from klamp.core.term import Placement
from klamp.core.types import Reduction
from klamp.errors import ConfigError, KlampError
from klamp.hosts.common.effective import Effective, EffectiveTerm, that_apply
from klamp.hosts.common.versions import host_version
from klamp.hosts.verl.overrides import is_driven, is_ours, loss_kl, teacher_of

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
NOTHING, NO_DIVERGENCE = "zero in expectation: it holds nothing", "follows no divergence"
OWN: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("kl", "k1"), ("k1", NOTHING)),
    "abs": ("|log-ratio|", NO_DIVERGENCE),
    **dict.fromkeys(("mse", "k2"), ("k2", DIVERGENCES["reverse"])),
    **dict.fromkeys(("low_var_kl", "k3"), ("k3", f"{DIVERGENCES['forward']}{K3_STOPS}")),
}
"""verl's own types: (value, gradient as a loss); `klamp audit verl` measures them."""
WITHOUT_TAIL = "follows the plain sum over these words, which is not 0 at the teacher"


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
    policy, mode = config["actor_rollout_ref"], config["actor_rollout_ref"]["actor"]["loss_agg_mode"]
    in_loss, in_reward = bool(policy["actor"]["use_kl_loss"]), bool(config["algorithm"]["use_kl_in_reward"])
    reference, distills = _reference(policy["model"]), bool((config.get("distillation") or {}).get("enabled"))
    terms = ((_in_loss, in_loss), (_in_reward, in_reward), (_to_teacher, distills))
    notes = [*_notes(config, in_loss, in_reward), *(_teacher_notes(config, in_loss) if distills else ())]
    return Effective(
        host=host_version("verl"),
        terms=tuple(term(config) for term, is_asked in terms if is_asked),
        normalizer=f"{_average(mode)} (loss_agg_mode={mode})",
        reference=reference if in_loss or in_reward else "none: use_kl_loss and use_kl_in_reward are off",
        notes=that_apply(notes),
    )


def _average(mode: str) -> str:
    if mode == "token-sum":
        return "sum over the tokens of the mini-batch"
    length = "loss_scale_factor, else the padded length"
    return describe_average(REDUCTIONS[mode], over="the mini-batch", length=length) if mode in REDUCTIONS else "unknown"


def _in_loss(config: Any) -> EffectiveTerm:
    name, beta = (config["actor_rollout_ref"]["actor"][key] for key in ("kl_loss_type", "kl_loss_coef"))
    if not is_ours(name):
        return _own_term("loss", *_own(name), beta, _price(config, beta, "loss"))
    kl = loss_kl(name, float(beta))
    controller = describe_controller(kl) if is_driven(kl) else "fixed"
    return EffectiveTerm.of(kl, beta=beta, price=_price(config, beta, kl.kl_placement), controller=controller)


def _in_reward(config: Any) -> EffectiveTerm:
    control, value = config["algorithm"]["kl_ctrl"], _own(config["algorithm"]["kl_penalty"])[0]
    kind, beta, target = control["type"], control["kl_coef"], control["target_kl"]
    term = _own_term("reward", value, _as_reward(value), beta, _price(config, beta, "reward"))
    adaptive = f"{kind} from {beta:g}, towards {target:g} nats per token"
    return term if kind == "fixed" else replace(term, controller=adaptive)


def _to_teacher(config: Any) -> EffectiveTerm:
    options, models = (config["distillation"][key] for key in ("distillation_loss", "teacher_models"))
    several = [model["model_path"] for name, model in models.items() if name != "teacher_model"]
    who = ", ".join(several) or str(models["teacher_model"]["model_path"])
    name, coefficient = options["loss_mode"], float(options["distillation_loss_coef"])
    if is_ours(name):
        teacher = teacher_of(name)
        teacher = replace(teacher, teacher_top_k=int(options["topk"])) if teacher.head_size else teacher
        return EffectiveTerm.to_teacher(teacher, who=who, coefficient=coefficient)
    head, shifts = name == "forward_kl_topk", bool(options["use_policy_gradient"])
    value, gradient = (f"over {options['topk']} of the teacher's words", WITHOUT_TAIL) if head else _own(name)
    if shifts:
        gradient = NOTHING if head else _as_reward(value)
    coefficient = coefficient if options["use_task_rewards"] else 1.0
    term = _own_term("advantage" if shifts else "loss", value, gradient, coefficient, "like beta's")
    return replace(term, term=f"{term.term}, to the teacher: {who}", gradient=gradient.replace("ref", "teacher"))


def _price(config: Any, beta: float, placement: Placement) -> str:
    cost = price(config, beta, placement)
    if isinstance(cost, str):
        return f"unknown: {cost}"
    return describe_price(cost, group_size=int(config["actor_rollout_ref"]["rollout"]["n"]))


def _own_term(placement: Placement, value: str, gradient: str, beta: float, price: str) -> EffectiveTerm:
    return EffectiveTerm(
        term="verl's own",
        beta=beta,
        price=price if "KL(" in gradient else "none: its gradient follows no KL",
        value=value,
        gradient=gradient,
        placement=PLACEMENTS[placement],
    )


def _own(name: str) -> tuple[str, str]:
    """The value and gradient of one of verl's own types as a loss; a + after the name means the gradient of k2."""
    if name.removesuffix("+") not in OWN:
        return name, "unknown: verl raises NotImplementedError"
    value, gradient = OWN[name.removesuffix("+")]
    return value, DIVERGENCES["reverse"] if name.endswith("+") else gradient


def _as_reward(value: str) -> str:
    return DIVERGENCES["reverse"] if value == "k1" else NO_DIVERGENCE


def _reference(model: Any) -> str:
    ranks = (model.get("lora_rank"), (model.get("lora") or {}).get("rank"))  # FSDP's, Megatron's
    adapter = any((rank or 0) > 0 for rank in ranks) or model.get("lora_adapter_path") is not None
    return "the policy with its adapter off" if adapter else "a frozen copy"


def _notes(config: Any, in_loss: bool, in_reward: bool) -> list[tuple[bool, str]]:
    algorithm, name = config["algorithm"], config["actor_rollout_ref"]["actor"]["kl_loss_type"]
    completions = int(config["data"]["train_batch_size"]) * int(config["actor_rollout_ref"]["rollout"]["n"])
    callback = str((config.get("trainer") or {}).get("checkpoint_callback_class"))
    control, value = algorithm["kl_ctrl"], _own(algorithm["kl_penalty"])[0]
    undriven = in_loss and not callback.endswith("klamp.verl.Driver") and is_ours(name)
    return [
        (in_loss and in_reward, "the KL counts twice: in the loss and in the reward"),
        (
            in_reward and divides_by_std(algorithm),
            "norm_adv_by_std_in_grpo divides by the standard deviation of rewards that hold the KL: in a group whose "
            "rewards are all equal beta cancels, and every beta > 0 acts alike",
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
        (undriven and is_driven(loss_kl(name)), "this KL needs ++trainer.checkpoint_callback_class=klamp.verl.Driver"),
    ]


def _teacher_notes(config: Any, in_loss: bool) -> list[tuple[bool, str]]:
    options, rollout = config["distillation"]["distillation_loss"], config["actor_rollout_ref"]["rollout"]
    clamp, temperature = options["loss_max_clamp"], float(rollout.get("temperature", 1.0))
    return [
        (
            in_loss and not options["use_task_rewards"],
            "use_task_rewards is off: verl leaves out its policy loss, and the KL to the reference with it",
        ),
        (clamp is not None, f"loss_max_clamp={clamp}: past it the KL to the teacher has no gradient"),
        (temperature != 1, f"the teacher scores at temperature 1, the policy at rollout.temperature={temperature:g}"),
        (True, "the tokenizers of policy and teacher are not compared here: klamp.check_pair does it"),
    ]
