"""Each caution of a reference or a teacher has a test of both its sides: the words are read from the code."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from klamp.config import KLConfig, TeacherConfig

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(__file__).with_name("test_cautions.py")
FIELDS = {*KLConfig.__dataclass_fields__, *TeacherConfig.__dataclass_fields__}
ROOMS = ("config", "hosts", "scoring", "lab")


# what is read from the code --------------------------------------------------------------------------------------

WORDING = {"cautions", "_cautions", "wide_clip", "_without_effect", "step_zero_text", "resumed_text", "_unheard"}
"""Functions that give a caution to whoever says it."""
NO_ANCHOR = {
    "LossConfig.__post_init__", "_check_precision", "_caution", "DoctorCallback.on_log", "_LengthCallback.on_log",
    "settings_kept", "settle", "fall_back", "ReportCallback._answer", "Training.warn", "watch_sampler",
}  # fmt: skip
"""Those that say one of something else than a reference or a teacher."""
TABLES = (
    *(("config/teacher.py", "FOLLOWED"), ("config/rules.py", "MEASURED"), ("config/rules.py", "OWN_GRADIENT")),
    *(("hosts/tinker/loss.py", table) for table in ("UNREAD", "UNREAD_WITHOUT_KL_COEF", "IN_REWARD")),
)


def source(file: str) -> ast.Module:
    return ast.parse((ROOT / "src/klamp" / file).read_text(encoding="utf-8"))


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if isinstance(node, ast.FunctionDef):
                yield f"{above}{node.name}", node
            yield from functions(node, f"{above}{node.name}.")


def says(node: ast.AST) -> bool:
    """Whether a function gives a caution to the user itself."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    named = [each for each in calls if isinstance(each.func, ast.Attribute)]
    told = [ast.unparse(each.func) for each in named]
    category = any("KLWarning" in ast.unparse(each) for each in named if ast.unparse(each.func) == "warnings.warn")
    return category or any(each in ("self.warn", "trainer._caution") for each in told)


def literals(node: ast.AST) -> Iterator[str]:
    """The words in a function, but for its docstring and its refusals."""
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
        node = ast.Module(body=node.body[1:], type_ignores=[])
    for child in ast.iter_child_nodes(node):
        refused = isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("Error", "Refusal"))
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and len(child.value.strip()) > 24:
            yield child.value
        elif not refused:
            yield from literals(child)


@functools.cache
def read() -> dict[str, str]:
    """Each piece of a caution in the code -> where it stands."""
    found: dict[str, str] = {}
    for file in sorted(file for room in ROOMS for file in (ROOT / "src/klamp" / room).rglob("*.py")):
        for name, node in functions(source(str(file))):
            if name not in NO_ANCHOR and (says(node) or name.split(".")[-1] in WORDING):
                found |= dict.fromkeys(literals(node), f"{file.relative_to(ROOT)}:{name}")
    for file, table in TABLES:
        (value,) = (
            n.value for n in source(file).body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == table
        )
        assert value is not None
        found |= dict.fromkeys(literals(value), f"{file}:{table}")
    return found


# none is missing -------------------------------------------------------------------------------------------------

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "verify/test_exclusions.py:test_k1_as_a_loss_moves_the_mass_of_the_kept": ("with tokens left out it only makes",),
    "config/test_rules.py:test_what_may_not_be_what_was_meant_is_warned_of": (
        "Leave kl_controller out for", "before anything was learnt", "is too slow at its defaults"),
    "config/test_rules.py:test_a_soft_clip_of_a_length_that_is_measured": (
        "in shorter ones the", "if they are that long"),
    "config/test_rules.py:test_how_far_a_wide_soft_clip_is_open_is_said": (
        "nats: the soft clip passes", "of the pull at a KL of 0", "Use kl_clip_temperature"),
    "training/test_trainer.py:test_a_reference_that_is_not_the_policy_is_pointed": (
        "The KL before the first update is", "policy and reference differ already", "other kernels, or a mask"),
    "hosts/trl/test_reference.py:test_": ("passed as ref_model is another",),
    "hosts/trl/test_reference.py:test_a_reference_without_a_beta_is_said_to_be_unused": ("ref_model is passed and",),
    "hosts/common/test_anchors.py:test_another_chat_template_of_a_teacher_is_cautioned_and_a_reference_s_is_not": (
        "use a teacher with the policy's",),
    "hosts/tinker/test_options.py:test_a_controller_or_schedule_moves_nothing": ("kl_coef=controller.value",),
    "hosts/tinker/test_options.py:test_a_controller_or_schedule_moves": ("teacher_coef=teacher.coefficient",),
    "hosts/tinker/test_options.py:test_a_kl_in_the_reward_is_the_callers": ("from each reward, before",),
    "hosts/tinker/test_options.py:test_a_field_that_no_call_reads": (
        "a trainer that", "an old policy besides", "vllm_importance_sampling_mode"),
    "hosts/trl/test_session.py:test_": ("beta starts again from its configured",),
    "hosts/trl/test_session.py:test_a_resume_without_klamps_fields_is_told": (
        "was written with klamp's KL", "is that of TRL's own"),
    "hosts/verl/test_driver.py:test_": ("is missing: beta starts",),
    "training/test_vllm_reference.py:test_a_server_that_takes_no_texts": (
        "takes no texts", "tokenizer is the policy's is not known", "name the tokens of a text by"),
    "training/test_setup.py:test_a_reference_that_is_padded": ("The policy's entries from", "on are cut"),
    "training/test_config.py:test_": ("rollout's first update the policy",),
}  # fmt: skip
"""The test that has both sides of a caution -> its words."""
PARTS = (
    "Use kl_gradient='reverse'.", "nats per token: below the budget", "so the controller raises",
    "Set kl_clip_threshold", "Use teacher_tail='sampled'", "a teacher (teacher_model",
    "in its last step, and goes", "in the first step after the",
    "in the last one before it", "The KL to the teacher before", "for the KL over what it",
    "is that over what it keeps",
    "kl_monitor=True shows where",
)  # fmt: skip
"""Pieces of sentences whose other pieces are above."""
NO_CAUTION = ("the environment variable", "the gradient is not finite")
NEEDED = r"^(, and )?(a |use_per|teacher_|kl_)[\w ]+(=|$| \()|beta above 0|weights of its own|controller that moves"
"""What a field without effect needs: the rows of tests/config/test_rules.py, and those above, ask for each by name."""


def test_every_caution_of_an_anchor_has_its_two_sides() -> None:
    beside = ast.walk(ast.parse(BESIDE.read_text(encoding="utf-8")))
    strings = (each.value for each in beside if isinstance(each, ast.Constant))
    shown = {
        each.split(".*")[-1].strip() for each in strings if isinstance(each, str) and len(each) > 12 and " " in each
    }
    known = {*itertools.chain(*ELSEWHERE.values()), *PARTS, *NO_CAUTION, *shown}
    missing = {
        words: where
        for words, where in read().items()
        if not any(each in words for each in known)
        and not (where.endswith(("_without_effect", "TeacherConfig.cautions")) and re.search(NEEDED, words))
    }
    assert missing == {}, "a caution without a test of both sides"


def test_what_is_tested_elsewhere_is_there_and_still_said() -> None:
    for place, words in ELSEWHERE.items():
        file, name = place.split(":")
        assert f"def {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert [each for each in words if not any(each in said for said in read())] == []


@pytest.mark.parametrize(("module", "function"), [("rules", "_without_effect"), ("teacher", "TeacherConfig.cautions")])
def test_every_field_without_effect_has_a_row(module: str, function: str) -> None:
    files = {"rules": "tests/config/test_rules.py", "teacher": "tests/config/test_cautions.py"}
    rows, tree = (ROOT / files[module]).read_text(encoding="utf-8"), source(f"config/{module}.py")
    (table,) = (n.value for n in ast.walk(dict(functions(tree))[function]) if isinstance(n, ast.Assign)
                and ast.unparse(n.targets[0]) == "needs")  # fmt: skip
    assert isinstance(table, ast.Dict)
    names = [each.value for each in ast.walk(table) if isinstance(each, ast.Constant) and str(each.value) in FIELDS]
    assert len(names) > 6 and [name for name in names if f'"{name}"' not in rows] == []
