"""Backend `verl` against verl itself: configuration, data set, tokenizing, reward manager, losses; no run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import verl.trainer.ppo.core_algos as algorithms
import yaml
from omegaconf import DictConfig, OmegaConf
from tests.engines.programs import ROOT
from tests.engines.verl.actor import Step, actor_loss, gradient
from tests.engines.verl.test_overrides import composed
from tests.training.conftest import stored, tiny_llama
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import create_rl_sampler, need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from klamp.config import build_objective
from klamp.core.advantages import group_advantages
from klamp.core.objective import grpo_loss
from klamp.lab.config import TrainConfig
from klamp.lab.engines.verl import Layout, load_in_verl, verl_overrides, write_data
from klamp.lab.models import load_tokenizer
from klamp.lab.sampling import encode_prompts, examples_of_step
from klamp.lab.sizing import Shape, sizes_of
from klamp.lab.tasks import load_task
from klamp.lab.updates import schedule_of

pytestmark = pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")

SMALL: dict[str, Any] = {"backend": "verl", "reward": "tests.training.rewards:digits", "max_steps": 5}
SMALL |= {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 6, "max_prompt_length": 40}
SMALL |= {"train_size": 10, "eval_size": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tiny_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What verl's data set caches goes with the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def config_of(model: str) -> Callable[..., TrainConfig]:
    return lambda **changes: TrainConfig.from_flat({"model": model, **SMALL, **changes})


def in_verl(config: TrainConfig, folder: Path, shape: Shape | None = None) -> DictConfig:
    """What verl's `main_ppo` gets from the command."""
    words = [word for word in verl_overrides(config, folder, shape) if not word.startswith("hydra.")]
    return composed(words, required=())


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"beta": 0.0},
    {"loss_type": "dapo", "advantage_baseline": "mean", "gpus": 2, "gradient_accumulation_steps": 2, "top_k": 3},
    {"loss_type": "grpo", "advantage_baseline": "mean", "surrogate": "cispo", "machines": 2, "max_grad_norm": 0.0},
    {"dtype": "bfloat16", "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]},
    {"dtype": "bfloat16", "master_weights": "none"},
    {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence", "target_kl": 0.1, "num_iterations": 2},
    {"output_dir": "a folder, with {marks}='", "resume": True, "ray_address": "ray://head:10001", "log_answers": 0},
    {"verl_args": ["trainer.save_freq=7", "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]},
]


SEVEN = Shape(7_615_616_512, 28, 3584, 152_064, 28)  # Qwen2.5-7B
EXAMPLE = yaml.safe_load((ROOT / "examples" / "gsm8k-verl.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("shape", [SEVEN, SEVEN._replace(parameters=10 * SEVEN.parameters)], ids=["7B", "70B"])
def test_verl_composes_and_accepts_the_example_with_its_sizes(shape: Shape, tmp_path: Path) -> None:
    config = TrainConfig.from_flat(EXAMPLE | {"machines": 4})
    found = in_verl(config, tmp_path, shape)
    policy = found.actor_rollout_ref
    actor, rollout = (omega_conf_to_dataclass(each) for each in (policy.actor, policy.rollout))
    sizes = sizes_of(load_in_verl(config, shape))
    assert actor.ppo_micro_batch_size_per_gpu == rollout.log_prob_micro_batch_size_per_gpu == sizes.micro
    assert policy.model.enable_gradient_checkpointing == sizes.checkpointing and sizes.fits
    assert actor.fsdp_config.param_offload == actor.fsdp_config.optimizer_offload == sizes.offload
    assert policy.ref.fsdp_config.param_offload, "it is needed once a step"
    assert rollout.gpu_memory_utilization == sizes.engine_share
    assert rollout.tensor_model_parallel_size == sizes.tensor_parallel
    validate_config(found, need_reference_policy(found), need_critic(found))


@pytest.mark.parametrize("changes", CONFIGURATIONS, ids=str)
def test_verl_composes_and_accepts_every_command(changes, config_of, tmp_path, monkeypatch) -> None:
    """Hydra refuses keys that do not exist, data classes values of other kinds, `validate_config` the rest."""
    config = config_of(**changes)
    found = in_verl(config, tmp_path / (config.run.output_dir or "run"))
    actor = omega_conf_to_dataclass(found.actor_rollout_ref.actor)
    omega_conf_to_dataclass(found.actor_rollout_ref.rollout)
    omega_conf_to_dataclass(found.algorithm)
    monkeypatch.setitem(__import__("sys").modules, "verl.workers.rollout.vllm_rollout.utils", _Rank)
    validate_config(found, use_reference_policy=need_reference_policy(found), use_critic=need_critic(found))
    assert not need_critic(found)
    assert need_reference_policy(found) == config.kl.needs_reference
    assert actor.ppo_mini_batch_size == found.data.train_batch_size == config.rollout.prompts_per_step
    assert math.isinf(actor.optim.clip_grad) == (config.optim.max_grad_norm == 0)
    OmegaConf.to_container(found, resolve=True)


class _Rank:
    """verl's module for vLLM, which is not installed: the one function that `validate_config` asks of it."""

    @staticmethod
    def get_vllm_max_lora_rank(rank: int) -> int:
        return rank


LOSSES = [
    {"loss_type": "dr_grpo"},
    {"loss_type": "dapo", "advantage_baseline": "mean", "epsilon": 0.05, "epsilon_high": 0.1},
    {"loss_type": "grpo", "advantage_baseline": "mean"},
    {"loss_type": "dapo", "advantage_baseline": "mean", "surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 0.05},
    {"loss_type": "dr_grpo", "beta": 0.3, "kl_horizon": "sequence", "surrogate": "cispo"},
]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("changes", LOSSES, ids=str)
def test_the_loss_is_klamps(changes, config_of, tmp_path) -> None:
    """Average, bounds of the ratio, KL: verl's whole actor loss under the translated configuration."""
    config = config_of(**changes)
    actor, step = omega_conf_to_dataclass(in_verl(config, tmp_path).actor_rollout_ref.actor), Step.random(seed=1)
    names = ("loss_agg_mode", "loss_scale_factor", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "use_kl_loss")
    options = {name: getattr(actor, name) for name in (*names, "kl_loss_coef", "kl_loss_type")}
    found, _ = actor_loss(step, loss_mode=actor.policy_loss.loss_mode, **options)
    expected = grpo_loss(step.batch(), build_objective(config.kl, config.loss, max_length=6)).loss
    assert abs(found.item() - expected.item()) < 1e-9
    assert (gradient(found, step) - gradient(expected, step)).abs().max() < 1e-9


@pytest.mark.parametrize(("loss", "baseline"), [("dr_grpo", "leave_one_out"), ("dr_grpo", "mean"), ("dapo", "mean")])
def test_advantages_are_klamps(loss, baseline, config_of, tmp_path) -> None:
    config = config_of(loss_type=loss, advantage_baseline=baseline)
    settings = in_verl(config, tmp_path).algorithm
    rewards = torch.tensor([1.0, 0, 0, 0, 0.5, 0.25, 1, 0], dtype=torch.float64)
    mask = torch.ones(8, 1, dtype=torch.float64)
    estimator = algorithms.get_adv_estimator_fn(settings.adv_estimator)
    own = {"norm_adv_by_std_in_grpo": settings.norm_adv_by_std_in_grpo} if settings.adv_estimator == "grpo" else {}
    found, _ = estimator(rewards[:, None].clone(), mask, index=np.array([0] * 4 + [1] * 4), **own)
    expected = group_advantages(rewards, 4, scale=config.loss.scale, baseline=config.loss.advantage_baseline)
    assert (found[:, 0] - expected).abs().max() < 1e-3, "verl adds 1e-6 to the standard deviation, klamp 1e-4"


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_the_schedule_is_klamps(kind, warmup, config_of, tmp_path) -> None:
    config = config_of(lr_scheduler_type=kind, warmup_steps=warmup, max_steps=7)
    optim = omega_conf_to_dataclass(in_verl(config, tmp_path).actor_rollout_ref.actor.optim)
    weights = [torch.nn.Parameter(torch.zeros(1))]
    theirs, ours = (torch.optim.SGD(weights, lr=optim.lr) for _ in range(2))
    if optim.lr_scheduler_type == "constant":
        schedule = get_constant_schedule_with_warmup(theirs, num_warmup_steps=optim.lr_warmup_steps)
    else:
        steps = {"num_warmup_steps": optim.lr_warmup_steps, "num_training_steps": config.run.max_steps}
        options = {name: getattr(optim, name) for name in ("min_lr_ratio", "num_cycles", "zero_indexed_step")}
        schedule = get_cosine_schedule_with_warmup(theirs, **steps, **options)
    own = schedule_of(ours, config)
    for _ in range(config.run.max_steps):
        assert schedule.get_last_lr() == pytest.approx(own.get_last_lr(), abs=1e-12)
        theirs.step(), ours.step(), schedule.step(), own.step()


def written(config: TrainConfig, folder: Path) -> tuple[Any, Any]:
    """(task, tokenizer) of a run whose files are written."""
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    task = load_task(config.task, tokenizer)
    write_data(config, task, tokenizer, Layout(folder))
    return task, tokenizer


def as_verl_tokenizes(config: TrainConfig, folder: Path) -> tuple[list[list[int]], Any, Any]:
    """Token ids of the training prompts as verl's data set and agent loop make them; the data set; its settings."""
    found = in_verl(config, folder)
    tokenizer = omega_conf_to_dataclass(found.actor_rollout_ref.model).tokenizer
    rows = RLHFDataset([found.data.train_files], tokenizer, found.data)
    builder = create_continuous_token_builder(tokenizer, hf_model_type="llama")
    ids = [builder.build_initial_tokens(list(rows[i]["raw_prompt"])) for i in create_rl_sampler(found.data, rows)]
    return ids, rows, found


def test_prompts_have_the_tokens_and_the_order_of_klamps_own_loop(config_of, tmp_path) -> None:
    config = config_of()
    task, tokenizer = written(config, tmp_path)
    verls_ids, _, _ = as_verl_tokenizes(config, tmp_path)
    size, steps = config.rollout.prompts_per_step, config.run.max_steps
    order = [i for step in range(steps) for i in examples_of_step(step, len(task.train), size=size, seed=0)]
    ids, mask = encode_prompts([task.train[i].prompt for i in order], tokenizer, torch.device("cpu"))
    assert verls_ids == [row[carried.bool()].tolist() for row, carried in zip(ids, mask, strict=True)]


def test_verl_scores_with_the_task(config_of, tmp_path) -> None:
    """The function that verl's reward managers load and call, on rows of verl's data set."""
    config = config_of()
    task, _ = written(config, tmp_path)
    _, rows, found = as_verl_tokenizes(config, tmp_path)
    score = get_custom_reward_fn(found)
    assert score is not None
    order = examples_of_step(0, len(task.train), size=4, seed=0)
    for i, text in enumerate(("12", "x1", "")):
        row = rows[i]
        told, truth = {**row["extra_info"], "num_turns": 2}, row["reward_model"]["ground_truth"]
        reward = score(data_source=row["data_source"], solution_str=text, ground_truth=truth, extra_info=told)
        assert reward == task.score(task.train[order[i]], text)
