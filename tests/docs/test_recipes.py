"""Each snippet of docs/hosts.md, bound to the trainer's own code: names, arguments, keywords, fields, keys, options.

Both sides are parsed, not imported. The code is $KLAMP_CHECKOUTS/NAME, or the newest wheel in build/recipes/NAME, where
`scripts/newest.py` puts it. NAME is the first word of the section.
"""

import ast
import builtins
import os
import re
from collections.abc import Iterator
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripts.checkouts import commit_of
from tests.docs.pages import DOCS, ROOT

INTRODUCTION, *TEXTS = (DOCS / "hosts.md").read_text(encoding="utf-8").split("\n## ")
SECTIONS = {text.split("\n", 1)[0]: text for text in TEXTS}
BOUND_TO = dict(re.findall(r"^\| \[(.+?)\].* \| (\S+ \S+) \|$", INTRODUCTION, re.M))
PLACE, EITHER, KEYWORD = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY


class Hook(NamedTuple):
    """What a recipe relies on; `file::name` is a definition in the trainer's code."""

    ours: str  # what of the snippet the trainer calls
    calls: tuple[str, ...]  # `file::how each such call begins`
    place: str = ""  # the trainer's function that the second snippet stands in; empty: the first snippet's
    unpacked: str = ""  # the arguments that those calls unpack from a dictionary
    keys: str = ""  # columns that the snippets read, beside those in square brackets
    files: tuple[str, ...] = ()  # where all of these are written as strings
    fields: tuple[str, ...] = ()  # a variable of the snippets and its class: `variable file::name`


NEMO = ("nemo_rl/algorithms/loss/utils.py", "nemo_rl/algorithms/loss/loss_functions.py", "nemo_rl/algorithms/grpo.py")
NEMO_CALL = ("nemo_rl/algorithms/loss/wrapper.py::loss_fn(",)
SLIME, MILES = "slime/backends/megatron_utils", "miles/backends/training_utils"
HOOKS = {
    "prime-rl": Hook("klamp_loss", ("prime_rl/trainer/rl/loss.py::custom_fn(",),
        fields=("inputs prime_rl/trainer/rl/loss.py::LossInputs",)),
    "OpenRLHF": Hook("compute_approx_kl", ("openrlhf/trainer/ray/ppo_actor.py::compute_approx_kl(",),
        "openrlhf/trainer/ray/ppo_actor.py::ActorPPOTrainer.training_step",
        fields=("experience openrlhf/trainer/ppo_utils/experience.py::Experience",)),
    "SkyRL": Hook("KlampTrainer.compute_advantages_and_returns",
        ("skyrl/train/trainer.py::self.compute_advantages_and_returns(",),
        "skyrl/backends/skyrl_train/workers/worker.py::PolicyWorkerBase._forward_backward_micro",
        keys="action_log_probs base_action_log_probs loss_mask", files=("skyrl/train/trainer.py",)),
    "NeMo-RL": Hook("KlampLoss.__call__", NEMO_CALL, unpacked="next_token_logprobs",
        keys="prev_logprobs generation_logprobs reference_policy_logprobs", files=NEMO),
    "NeMo-RL distillation": Hook("KlampDistillation.__call__", NEMO_CALL,
        unpacked="student_topk_logprobs teacher_topk_logprobs H_all", files=NEMO),
    "ms-swift": Hook("jsd_loss", ("swift/rlhf_trainers/gkd_loss.py::jsd_loss(",),
        "swift/rlhf_trainers/gkd_loss.py::jsd_loss"),
    "slime": Hook("klamp_loss", (f"{SLIME}/loss.py::func(",), files=(f"{SLIME}/model.py",),
        keys="unconcat_tokens total_lengths response_lengths teacher_log_probs"),
    "miles": Hook("klamp_loss", (f"{MILES}/loss.py::func(",), files=("miles/backends/megatron_utils/model.py",),
        keys="total_lengths response_lengths max_seq_lens"),
    "AReaL": Hook("grpo_loss_fn",
        ("areal/engine/fsdp_engine.py::loss_fn(logprobs,", "areal/engine/megatron_engine.py::loss_fn(logprobs,"),
        "areal/trainer/ppo/actor.py::grpo_loss_fn", files=("areal/trainer/ppo/actor.py",)),
    "Trinity-RFT": Hook("KlampLoss.__call__", ("trinity/trainer/verl/losses.py::self.policy_loss_fn(logprob=",),
        keys="old_logprob action_mask teacher_logprobs",
        files=("trinity/algorithm/key_mapper.py", "trinity/algorithm/advantage_fn/on_policy_distill_advantage.py")),
    "ROLL": Hook("KlampStudent.divergence", ("roll/distributed/strategy/strategy.py::loss_callable(",),
        "roll/pipeline/distill/distill_worker.py::StudentWorker.loss_func"),
    "rLLM": Hook("klamp_loss",
        ("rllm/trainer/verl/verl_backend.py::get_loss(name)(", "rllm/trainer/tinker/custom_loss.py::resolved.fn("),
        files=("rllm/trainer/algorithms/loss.py",), fields=("ctx rllm/trainer/algorithms/loss.py::LossContext",)),
    "torchtitan": Hook("KlampLoss.__call__", ("torchtitan/experiments/rl/actors/trainer.py::self.loss_fn(",)),
}  # fmt: skip


class Code(NamedTuple):
    """A trainer's code: the folder that contains its package."""

    root: Path

    def tree(self, file: str) -> ast.Module:
        assert (self.root / file).is_file(), f"there is no {file}"
        return parsed(self.root / file)

    def find(self, module: str, name: str = "") -> Any:
        """A definition in a module, through re-exports; the tree of a module or submodule."""
        paths = (f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
        file = next((x for x in paths if (self.root / x).is_file()), None)
        assert file, f"there is no module {module}"
        for node in ast.walk(self.tree(file)) if name else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom) and name in (x.asname or x.name for x in node.names):
                return self.find(str(node.module), name)
        return self.find(f"{module}.{name}") if name else self.tree(file)

    def definition(self, place: str) -> Any:
        file, _, names = place.partition("::")
        node: Any = self.tree(file)
        for name in names.split("."):
            node = members(node).get(name)
            assert node, f"{file} has no {names}"
        return node


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def members(node: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for x in node.body:
        targets = x.targets if isinstance(x, ast.Assign) else [getattr(x, "target", x)]
        named |= {getattr(target, "id", getattr(target, "name", "")): x for target in targets}
    return named


def signature_of(node: Any, *, bound: bool = False) -> Signature:
    """Of a function; of a dataclass, whose fields are its arguments."""
    if isinstance(node, ast.ClassDef):
        fields = [(x, y.value) for x, y in members(node).items() if isinstance(y, ast.AnnAssign)]
        return Signature([Parameter(x, EITHER, default=default or Parameter.empty) for x, default in fields])
    a = node.args
    names = [(x, PLACE) for x in a.posonlyargs] + [(x, EITHER) for x in a.args]
    defaults = [None] * (len(names) - len(a.defaults)) + a.defaults
    rows = [(x.arg, kind, default) for (x, kind), default in zip(names, defaults, strict=True)][bound:]
    rows += [(a.vararg.arg, Parameter.VAR_POSITIONAL, None)] if a.vararg else []
    rows += [(x.arg, KEYWORD, default) for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    rows += [(a.kwarg.arg, Parameter.VAR_KEYWORD, None)] if a.kwarg else []
    return Signature([Parameter(x, kind, default=ast.unparse(y) if y else Parameter.empty) for x, kind, y in rows])


def bind(call: ast.Call, signature: Signature, who: str, unpacked: str = "") -> None:
    """Fail if the call does not fit; what it unpacks is `unpacked`, or unknown."""
    keywords = [*(x.arg for x in call.keywords if x.arg), *unpacked.split()]
    places = [None for x in call.args if not isinstance(x, ast.Starred)]
    whole = unpacked or (len(places) == len(call.args) and all(x.arg for x in call.keywords))
    try:
        (signature.bind if whole else signature.bind_partial)(*places, **dict.fromkeys(keywords))
    except TypeError as error:
        pytest.fail(f"{who} calls {ast.unparse(call)}; the other side has {signature}: {error}")


def calls_out(snippet: ast.Module, code: Code, package: str) -> Iterator[tuple[ast.Call, Any, bool]]:
    """Calls of the snippet into the trainer's code, with what is there; every name on the way must exist."""
    known: dict[str, Any] = {}
    for node in snippet.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == package:
            known |= {x.name: code.find(str(node.module), x.name) for x in node.names}
        elif isinstance(node, ast.Import) and node.names[0].name == package:
            known[package] = code.find(package)
    modules = {x.name: str(y.module) for y in snippet.body if isinstance(y, ast.ImportFrom) for x in y.names}
    for node in (x for x in ast.walk(snippet) if isinstance(x, ast.Attribute)):
        owner = ast.unparse(node.value)
        if isinstance(known.get(owner), ast.ClassDef):
            assert node.attr in members(known[owner]), f"{package} has no {ast.unparse(node)}"
        elif owner in known:
            known[ast.unparse(node)] = code.find(f"{modules.get(owner, '')}.{owner}".lstrip("."), node.attr)
    assigned = [x for x in snippet.body if isinstance(x, ast.Assign)]
    known |= {ast.unparse(x.targets[0]): known.get(ast.unparse(x.value)) for x in assigned}
    for outer in snippet.body:
        for call in (x for x in ast.walk(outer) if isinstance(x, ast.Call)):
            callee = ast.unparse(call.func)
            if callee.startswith("super()."):
                assert isinstance(outer, ast.ClassDef)
                base = members(known[ast.unparse(outer.bases[0])])
                assert callee.removeprefix("super().") in base, f"{package} has no {callee}"
                yield call, base[callee.removeprefix("super().")], True
            elif known.get(callee):
                yield call, known[callee], False


def stored(*nodes: ast.AST) -> set[str]:
    """Names that code assigns or takes as arguments."""
    inner = [x for node in nodes for x in ast.walk(node)]
    assigned = {x.id for x in inner if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return assigned | {x.arg for x in inner if isinstance(x, ast.arg)}


def snippets_and_code(trainer: str) -> tuple[ast.Module, ast.Module, Code, str]:
    """Both snippets, the trainer's code and its package; a skip that is counted, if the code is not here."""
    first, second = (ast.parse(x) for x in re.findall(r"```python\n(.*?)```", SECTIONS[trainer], re.S))
    name, package = trainer.partition(" ")[0], HOOKS[trainer].calls[0].partition("/")[0]
    folders = [Path(x) for x in os.environ.get("KLAMP_CHECKOUTS", "").split(os.pathsep) if x]
    for folder in (*folders, ROOT / "build" / "recipes"):
        for root in (folder / name, folder / name / "src"):
            if (root / package).is_dir():
                print(f"{trainer}: code of {commit_of(folder / name)}; the page says {BOUND_TO[trainer]}")
                return first, second, Code(root), package
    pytest.skip(f"NOT RUN: {name} has no wheel in build/recipes and no checkout in $KLAMP_CHECKOUTS")


@pytest.mark.parametrize("trainer", HOOKS)
def test_a_recipe_binds(trainer: str) -> None:
    hook, (snippet, _, code, package) = HOOKS[trainer], snippets_and_code(trainer)
    for call, theirs, bound in calls_out(snippet, code, package):
        bind(call, signature_of(theirs, bound=bound), "the snippet")
    ours: Any = snippet
    for name in hook.ours.split("."):
        ours = members(ours)[name]
    for place in hook.calls:
        file, beginning = place.split("::")
        calls = [x for x in ast.walk(code.tree(file)) if isinstance(x, ast.Call)]
        calls = [x for x in calls if ast.unparse(x).startswith(beginning)]
        assert calls, f"{file} has no call {beginning}"
        for call in calls:
            bind(call, signature_of(ours, bound="." in hook.ours), f"{trainer} ({file}:{call.lineno})", hook.unpacked)


@pytest.mark.parametrize("trainer", HOOKS)
def test_names_keys_and_options_of_a_recipe_exist(trainer: str) -> None:
    hook, (first, second, code, package) = HOOKS[trainer], snippets_and_code(trainer)
    nodes = [*ast.walk(first), *ast.walk(second)]
    read = {x.id for x in ast.walk(second) if isinstance(x, ast.Name)} - stored(second) - {"klamp", *dir(builtins)}
    assert read - {"loss"} <= stored(code.definition(hook.place) if hook.place else first), hook.place
    for variable, place in (x.split() for x in hook.fields):
        used = {x.attr for x in nodes if isinstance(x, ast.Attribute) and ast.unparse(x.value) == variable}
        assert used <= set(members(code.definition(place))), place
    constants = [x.slice.value for x in nodes if isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Constant)]
    keys = {x for x in constants if isinstance(x, str)} | {*hook.keys.split(), *hook.unpacked.split()}
    written = {x.value for file in hook.files for x in ast.walk(code.tree(file)) if isinstance(x, ast.Constant)}
    assert not hook.files or keys <= written, hook.files
    prose = re.sub(r"```.*?```", "", SECTIONS[trainer], flags=re.S)
    sources = {str(x): x.read_text(encoding="utf-8", errors="ignore") for x in (code.root / package).rglob("*.py")}
    for option in re.findall(r"--([a-z][\w.-]+\w)", prose):
        assert any(option in text for text in sources.values()), f"{trainer} has no option --{option}"
    for path in re.findall(r"`([\w/]+\.py)`", prose):
        assert any(x.endswith(path) for x in sources), f"{trainer} has no file {path}"


def test_a_changed_call_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "OpenRLHF" / "openrlhf" / "trainer" / "ray" / "ppo_actor.py"
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").touch()
    call = "compute_approx_kl(now, base, log_probs_old=old, estimator=name)"
    file.write_text(f"def compute_approx_kl(): ...\n\nkl = {call}\n")
    monkeypatch.setenv("KLAMP_CHECKOUTS", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"ppo_actor.py:3\) calls .*unexpected .*'estimator'"):
        test_a_recipe_binds("OpenRLHF")


def test_the_page_says_what_each_recipe_is_bound_to_and_is_short() -> None:
    assert list(BOUND_TO) == list(SECTIONS) == list(HOOKS)
    for trainer, text in SECTIONS.items():
        assert len(re.sub(r"```.*?```", "", text, flags=re.S).split()) <= 150, trainer
        assert all(len(x.splitlines()) <= 6 for x in re.findall(r"```python\n(.*?)```", text, re.S)[1:]), trainer
