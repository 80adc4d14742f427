"""The names that the outside relies on, and their signatures. A red test here is a breaking change: mean it.

A function or class goes into SIGNATURES, written as it would be called, any other name into EXPORTED; a module that the
outside imports by its own path goes into MODULES."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import DOCS, ROOT, load

import klamp

SIGNATURES = {
    "check": "(loss, *, policy_logprobs=None, mask=None, ref_logprobs=None, old_logprobs=None, sampler_logprobs=None, "
    "advantages=None, rewards=None, beta=None, means='reverse', baseline=None, clip=None, kl_in=None, logits=None, "
    "ref_logits=None, teacher_logits=None, ids=None, temperature=1.0, pad=None, eos=None, segments=None, "
    "group_size=None, loss_scale=1.0, watched=None, example=None, save=None, save_ids=False, once=True, host='')",
    "check_pair": "(policy_tokenizer, teacher_tokenizer, example=None, *, teacher_example=None, policy_ids=None, "
    "teacher_ids=None, prompt_lengths=None, end_ids=None, template_options=None, who='teacher')",
    "tap": "(policy_logprobs)",
    "watch": "(*, ref_logprobs=None, advantages=None)",
    "kl_estimate": "(policy_logprobs, ref_logprobs, *, estimator='k3')",
    "exact_kl": "(policy_logits, ref_logits, *, direction='reverse')",
    "kl_penalty": "(policy_logprobs, ref_logprobs, mask, *, value='k3', gradient='reverse', horizon='token', "
    "behavior_logprobs=None, max_weight=None, max_log_ratio=None)",
    "linear_logprobs": "(hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None, return_entropy=False)",
    "linear_kl": "(policy_hidden, policy_weight, ref_hidden, ref_weight, *, direction='reverse', top_k=None, "
    "tail='sampled', targets=None, log_weight=None, policy_bias=None, ref_bias=None, temperature=1.0, softcap=None)",
    "linear_head_kl": "(policy_hidden, policy_weight, head_ids, head_logprobs, *, top_k, targets, target_logprobs, "
    "kept=None, direction='reverse', tail='sampled', log_weight=None, policy_bias=None, temperature=1.0, softcap=None)",
    "linear_topk": "(hidden, weight, k, *, targets=None, bias=None, temperature=1.0, softcap=None)",
    "topk_kl": "(policy_head, anchor_head, policy_target, anchor_target, outside, *, direction='reverse', "
    "tail='sampled', log_weight=None, kept=None)",
    "clip_kl": "(kl, threshold, *, method, temperature=1.0)",
    "kl_budget": "(threshold, *, per_token, reference_length)",
    "group_advantages": "(rewards, group_size, *, scale='std', baseline='mean', eps=0.0001)",
    "grpo_loss": "(batch, objective, *, totals=None)",
    "FixedController": "(value, *, min_value=0.0, max_value=None)",
    "HoldController": "(value, *, min_value=0.0, max_value=None, target, gain=0.05, lead=12.0, landing=None)",
    "StepController": "(value, *, min_value=0.0, max_value=None, target, up=1.5, down=0.75, high=1.5, low=0.5)",
    "ProportionalController": "(value, *, min_value=0.0, max_value=None, target, horizon, clip=0.2)",
    "adaptive_kl_coefficient": "(kl_divergence, target_kl=0.05, *, kl_coefficient)",
    "preset": "(name)",
    "build_objective": "(kl, loss, *, max_length, teacher=None)",
    "Batch": "(*, policy_logprobs, mask, advantages, old_logprobs=None, anchors=<factory>, reference_length=None, "
    "group_size=None, ref_logprobs=None, sampler_logprobs=None)",
    "Scored": "(logprobs, kl=None, forward_kl=None, mask=None, gate=None, weight=None)",
    "LossOutput": "(loss, metrics)",
    "Totals": "(sequences, tokens, kl_tokens)",
}

# Configurations that are built by name: more fields may be added to each, none may go. KLConfig is the one that means
# the same in every trainer.
FIELDS = {
    "KLConfig": "beta kl_clip_method kl_clip_temperature kl_clip_threshold kl_controller kl_estimator "
    "kl_exclude_tokens kl_gradient kl_horizon kl_max_log_ratio kl_normalizer kl_off_policy kl_placement "
    "kl_reference_length reference target_kl use_per_token_kl_threshold",
    "KLTerm": "clip_level clip_method clip_temperature clip_threshold gradient horizon max_log_ratio max_weight "
    "normalizer off_policy placement value",
    "LossConfig": "advantage_baseline epsilon epsilon_high loss_type scale_rewards surrogate",
    "Objective": "clip_high clip_low max_length reduction surrogate terms trust",
    "TrustRegion": "high low mode threshold",
}

OTHERS = ("KLWarning", "TeacherConfig", "TopTokens", "Verdict", "Weighted", "__version__", "check_sync")
EXPORTED = sorted({*SIGNATURES, *FIELDS, *OTHERS})
"""All that `klamp` exports, with or without a signature above."""
CONTROLLERS = [name for name in EXPORTED if name.endswith("Controller")]
API = re.compile(r"\[`(\w+)`\]\[([\w.]+)\]")
"""A name in the table of docs/api.md, and where it is defined."""
CONTROLLER_METHODS = {"update": "(self, kl, n_steps=1)", "state_dict": "(self)", "load_state_dict": "(self, state)"}

MODULES = {
    "klamp.verify": ["examine", "examine_config", "explain_config", "explain_form", "verify_all", "verify_estimators"],
    "klamp.verify.judge": ["judge"],
    "klamp.tinker.testing": ["Fault", "Standin", "serve", "tiny_model"],
    "klamp.tinker": ["Effective", "EffectiveTerm"],
    "klamp.trl": ["Effective", "EffectiveTerm"],
    "klamp.unsloth": ["Effective", "EffectiveTerm", "attach", "effective"],
    "klamp.verl": ["Effective", "EffectiveTerm"],
    "klamp.training.loop": ["compute_kl_divergence", "compute_loss", "grpo_microbatch_step", "log_train", "train"],
}

# The SDK that klamp plugs into calls these, or people write them out: module -> name -> signature.
HOST_SIGNATURES = {
    "klamp.tinker": {
        "build_datum": "(prompt, response, advantages, logprobs, ref_logprobs=None, *, teacher_logprobs=None, "
        "teacher_head=None, mask=None, kl_mask=None)",
        "check": "(loss, data, logprobs_list, *, beta=None, means='reverse', **more)",
        "compute_grpo_kl_loss": "(data, logprobs_list, kl_coef=None, cliprange=None, kl=None, **options)",
        "compute_reference_logprobs": "(ref_client, prompt_tokens, response_tokens, *, concurrency=64, timeout=300.0)",
        "compute_teacher_head": "(teacher_client, prompt_tokens, response_tokens, top_k, *, concurrency=64, "
        "timeout=300.0)",
        "count_tokens": "(data)",
        "effective": "(kl_coef=None, cliprange=None, kl=None, **options)",
        "forward_backward_kl": "(client, data, kl_coef=None, cliprange=None, kl=None, **options)",
        "strip_for_builtin": "(datums)",
    },
    "klamp.trl": {
        "CheckCallback": "(at=(1, 10, 100), *, means=None, save=False, raise_if_wrong=False)",
        "DistillationTrainer": "(model, teacher_model=None, args=None, *more, **options)",
        "GRPOTrainer": "(model, reward_funcs=None, args=None, *positional, ref_model=None, teacher_model=None, "
        "**options)",
        "attach": "(trainer, kl, *, ref_model=None)",
        "check": "(trainer, *, means=None)",
        "effective": "(trainer)",
    },
    "klamp.verl": {"effective": "(config)", "overrides": "(kl, teacher=None)", "register": "(*, check=False)"},
}


def write_signature(function: object) -> str:
    """The signature as one would call it: names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_all_is_sorted_pinned_and_documented() -> None:
    assert list(klamp.__all__) == EXPORTED
    assert [name for name in EXPORTED if not (inspect.getdoc(getattr(klamp, name)) or "").strip()] == []


def test_a_name_that_klamp_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="klamp.*kl_penalti"):
        _ = klamp.kl_penalti  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError):
        from klamp import kl_penalti  # pyright: ignore  # noqa: F401
    with pytest.raises(ImportError, match="from klamp.trl import GRPOConfig"):
        from klamp import GRPOConfig  # pyright: ignore  # noqa: F401


def test_the_table_of_the_api_page_names_what_can_be_imported_and_nothing_else() -> None:
    table = (DOCS / "api.md").read_text(encoding="utf-8").partition("\n## ")[0]
    named = dict(API.findall(table))
    assert sorted(named) == [name for name in klamp.__all__ if name != "__version__"]
    for name, place in named.items():
        assert getattr(klamp, name) is pkgutil.resolve_name(place), place


@pytest.mark.parametrize(("module", "signatures"), {"klamp": SIGNATURES, **HOST_SIGNATURES}.items())
def test_signatures(module: str, signatures: dict[str, str]) -> None:
    loaded = importlib.import_module(module)
    assert list(loaded.__all__) == sorted(loaded.__all__)
    assert signatures.keys() <= {*loaded.__all__}
    assert {name: write_signature(getattr(loaded, name)) for name in signatures} == signatures


@pytest.mark.parametrize("name", CONTROLLERS)
def test_controllers_share_one_interface(name: str) -> None:
    controller = getattr(klamp, name)
    assert dataclasses.fields(controller)[0].name == "value"
    assert {each: write_signature(getattr(controller, each)) for each in CONTROLLER_METHODS} == CONTROLLER_METHODS


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_are_imported_by_their_own_path(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in MODULES[module] if not callable(getattr(loaded, name, None))] == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_configuration_that_is_built_by_name_keeps_its_fields(name: str) -> None:
    assert {*FIELDS[name].split()} <= {field.name for field in dataclasses.fields(getattr(klamp, name))}


def test_version_is_the_one_that_is_installed() -> None:
    assert version("klamp") == klamp.__version__


PACKAGE = Path(klamp.__file__).parent
CHANGED = {"KLFields", "TeacherFields", *CONTROLLERS}
"""Fields of a dataclass of TRL's, which is not frozen; and what has a state."""
BY_ORDER = {"Need", "HostLimit", "Numbers", "Kind", "KLFields", "TeacherFields", "FixedController", "Preset"}
"""Few fields of their own, each of another kind."""


def made() -> Iterator[type]:
    for package in ("core", "core/heads", "config", "hosts/common"):
        for file in sorted((PACKAGE / package).glob("*.py")):
            module = importlib.import_module(".".join(("klamp", *Path(package).parts, file.stem)))
            classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
            yield from filter(dataclasses.is_dataclass, classes)


def test_data_is_frozen_and_made_by_names() -> None:
    changed, by_order = set[str](), set[str]()
    for each in made():
        own = [f for f in dataclasses.fields(each) if f.name in vars(each).get("__annotations__", {})]
        changed |= set() if each.__dataclass_params__.frozen else {each.__name__}  # pyright: ignore
        by_order |= set() if all(f.kw_only for f in own) else {each.__name__}
    assert (changed, by_order) == (CHANGED, BY_ORDER)


SOURCE = ROOT / "src" / "klamp"
SETTINGS: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = SETTINGS["tool"]["importlinter"]["contracts"]
HOSTS = sorted(path.parent.name for path in (SOURCE / "hosts").glob("*/__init__.py") if path.parent.name != "common")


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_has_a_door_apart_from_the_laboratory_and_is_installed_described_pinned_and_tested(host: str) -> None:
    assert (SOURCE / f"{host}.py").is_file() or (SOURCE / host / "__init__.py").is_file()
    (layers,) = [each["layers"] for each in CONTRACTS if each["type"] == "layers"]
    assert any(host in layer.split(" : ") for layer in layers if "trl" in layer)
    (apart,) = [each for each in CONTRACTS if "klamp.hosts" in each.get("source_modules", ())]
    assert f"klamp.{host}" in apart["source_modules"]
    assert host in SETTINGS["project"]["optional-dependencies"]
    assert (DOCS / f"{host}.md").is_file()
    assert f"from klamp.{host} import" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"klamp.{host}" in load("hooks").DOORS
    assert f"klamp.{host}" in {*HOST_SIGNATURES, *MODULES}
    assert any((ROOT / "tests" / kind / host).is_dir() for kind in ("hosts", "engines"))
