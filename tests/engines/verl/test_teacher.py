"""klamp's KL to a teacher through verl's own `distillation_ppo_loss`, called as its engine calls it, from logits."""

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.batches import flat_batch, objective_of
from tests.engines.verl.test_hooks import AVERAGES
from tests.engines.verl.test_overrides import composed
from torch import Tensor
from verl.trainer.distillation import losses
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import ActorConfig, DistillationConfig

from klamp import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.objective import grpo_loss
from klamp.core.term import Weighted
from klamp.core.topk import topk_kl
from klamp.errors import ConfigError
from klamp.hosts.verl.overrides import named
from klamp.verl import effective, overrides, register

pytestmark = [pytest.mark.gate, pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")]

PROMPT, LENGTHS, VOCABULARY, HEAD = 2, (4, 1, 3), 9, 4
BETA, COEF = 0.2, 0.3
MODEL = "/models/teacher"
FORWARD = "teacher_estimator=topk,teacher_direction=forward"
OWN = ("kl", "abs", "k2", "k3", "forward_kl_topk")


class World:
    """Completions of some lengths behind prompts of two tokens, the logits of both models, a reference, a sampler."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(LENGTHS) + PROMPT * len(LENGTHS)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.student, self.teacher = normal(total, VOCABULARY).requires_grad_(), normal(total, VOCABULARY)
        self.tokens = torch.randint(VOCABULARY, (total,), generator=generator)
        self.noise, self.reference = 0.1 * normal(total), -1 - normal(total).abs()
        self.advantages = normal(len(LENGTHS))
        self.sizes = [PROMPT + length for length in LENGTHS]
        self.following = torch.cat([row.roll(-1) for row in self.tokens.split(self.sizes)])
        self.mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]

    @classmethod
    def without_reward(cls) -> "World":
        world = cls(torch.float64)
        world.advantages = torch.zeros_like(world.advantages)
        return world

    def rows(self, flat: Tensor) -> list[Tensor]:
        """The tokens of each completion, of what stands one place before its token."""
        return [row[PROMPT - 1 : -1] for row in flat.split(self.sizes)]

    def padded(self, flat: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(self.rows(flat), batch_first=True)

    def nested(self, flat: Tensor) -> Tensor:
        return nested(list(flat.split(self.sizes)))

    def logprobs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, self.following[:, None])[:, 0]

    def klamp_loss(self, teacher: TeacherConfig, average: str, coefficient: float = COEF) -> Tensor:
        """grpo_loss with a reference and this teacher, from log_softmax of the logits."""
        policy, said = self.logprobs(self.student), self.logprobs(self.teacher)
        kl = None
        if teacher.teacher_estimator == "topk":
            top = self.teacher.topk(teacher.teacher_top_k, -1).indices
            ours, theirs = (x.log_softmax(-1).gather(-1, top) for x in (self.student, self.teacher))
            outside = (top != self.following[:, None]).all(-1)
            weight = -self.noise if teacher.teacher_off_policy != "none" else None
            options: Any = {"direction": teacher.teacher_direction, "tail": teacher.teacher_tail, "log_weight": weight}
            kl = self.padded(topk_kl(ours, theirs, policy, said, outside, **options))
        batch = flat_batch(
            policy_logprobs=self.padded(policy),
            mask=self.mask,
            advantages=self.advantages,
            old_logprobs=self.padded((policy + self.noise).detach()),
            sampler_logprobs=self.padded((policy + self.noise).detach()),
            ref_logprobs=self.padded(self.reference),
            teacher_logprobs=self.padded(said),
            teacher_kl=kl,
        )
        others = (Weighted(coefficient, teacher.build_term()),)
        objective = objective_of(reduction=AVERAGES[average], beta=BETA, kl=KLConfig().build_term(), others=others)  # pyright: ignore[reportArgumentType]
        return grpo_loss(batch, objective).loss

    def verl_loss(
        self, mode: str, average: str, *, topk: bool, reference: str = "klamp", **changes: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """verl's own loss of the same, whose teacher tells of each token what its engine asks for."""
        options = {"use_policy_gradient": False, "loss_max_clamp": None, "log_prob_min_clamp": None} | changes
        options |= {"loss_mode": mode, "topk": HEAD, "distillation_loss_coef": COEF}
        distilled = DistillationConfig(distillation_loss=losses.DistillationLossConfig(**options))
        kl = {"use_kl_loss": True, "kl_loss_type": reference, "kl_loss_coef": BETA, "loss_agg_mode": average}
        actor = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e6, **kl)
        policy = logprobs_from_logits(self.student, self.following)
        said = self.teacher.log_softmax(-1)
        best = said.topk(HEAD, -1).indices if topk else self.following[:, None]
        data = self.data(said.gather(-1, best), best, policy.detach() + self.noise)
        output = {"log_probs": self.nested(policy)}
        if topk:
            found = losses.distillation_ppo_loss(actor, distilled, data=data, student_logits=self.student[None])
            output |= {name: self.nested(values[0]) for name, values in found.items()}
        return losses.distillation_ppo_loss(actor, distilled, model_output=output, data=data)

    def data(self, said: Tensor, ids: Tensor, old: Tensor) -> TensorDict:
        ends = list(self.tokens.split(self.sizes))
        columns = {
            "prompts": nested([row[:PROMPT] for row in ends]),
            "responses": nested([row[PROMPT:] for row in ends]),
            "response_mask": nested([torch.ones(length, dtype=torch.long) for length in LENGTHS]),
            "old_log_probs": nested(self.rows(old)),
            "ref_log_prob": nested(self.rows(self.reference)),
            "advantages": nested([a.expand(n) for a, n in zip(self.advantages, LENGTHS, strict=True)]),
            "teacher_logprobs": self.nested(said),
            "teacher_ids": self.nested(ids),
        }
        made = TensorDict(columns, batch_size=[len(LENGTHS)])
        for name, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
            tensordict_utils.assign_non_tensor_data(made, name, value)
        return made


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def slope(loss: Tensor, world: World) -> Tensor:
    """d loss / d logits of the student."""
    return torch.autograd.grad(loss, world.student)[0]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("average", [name for name, reduction in AVERAGES.items() if reduction != "fixed_length"])
@pytest.mark.parametrize("name", named())
def test_the_loss_is_klamps_own(name: str, average: str) -> None:
    """Reward, reference and teacher at once; of a head verl's own sums are in float32."""
    teacher = named()[name]
    head = {"teacher_top_k": HEAD} if teacher.head_size else {}
    teacher = TeacherConfig(**{**vars(teacher), **head})
    for dtype, near in ((torch.float64, 1e-6 if head else 1e-9), (torch.float32, 1e-6)):
        world = World(dtype)
        expected = world.klamp_loss(teacher, average)
        found, _ = world.verl_loss(name, average, topk=bool(head))
        torch.testing.assert_close(found, expected, rtol=0, atol=near)
        torch.testing.assert_close(slope(found, world), slope(expected, world), rtol=0, atol=near)


@pytest.mark.usefixtures("registered")
def test_the_teacher_alone_has_the_coefficient_too() -> None:
    """verl weighs a distillation without task rewards by 1, and leaves out policy loss and reference."""
    world = World(torch.float64)
    found, metrics = world.verl_loss("klamp", "token-mean", topk=False, use_task_rewards=False)
    policy, said = world.padded(world.logprobs(world.student)), world.padded(world.logprobs(world.teacher))
    assert found.item() == pytest.approx(COEF * (policy - said)[world.mask].mean().item(), abs=1e-9)
    unrewarded = World.without_reward()
    whole, _ = unrewarded.verl_loss("klamp", "token-mean", topk=False)
    assert not torch.equal(slope(whole, unrewarded), slope(found, world)), "the reference is left out"
    assert "actor/pg_loss" not in metrics


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["klamp", f"klamp:{FORWARD},teacher_top_k=0", f"klamp:{FORWARD},teacher_tail=bucket"])
def test_what_is_measured_of_it(name: str) -> None:
    """Means over tokens, whatever the loss is averaged over, and without the coefficient."""
    world, teacher = World(torch.float64), named()[name]
    _, metrics = world.verl_loss(name, "seq-mean-token-sum", topk=bool(teacher.head_size))
    delta = (world.padded(world.logprobs(world.student)) - world.padded(world.logprobs(world.teacher)))[world.mask]
    expected = {"teacher/k1": delta.mean(), "teacher/kl": ((-delta).exp() - 1 + delta).mean()}
    if name != "klamp":
        sized = TeacherConfig(**{**vars(teacher), "teacher_top_k": HEAD if teacher.head_size else 0})
        alone = World.without_reward()
        whole = alone.klamp_loss(sized, "token-mean") - alone.klamp_loss(sized, "token-mean", coefficient=0.0)
        expected = {"teacher/kl": whole / COEF}
    found = {key: each.aggregate() for key, each in metrics.items() if key in ("teacher/k1", "teacher/kl")}
    assert found == pytest.approx({key: each.item() for key, each in expected.items()}, abs=1e-6)
    assert metrics["teacher/coef"] == COEF and metrics["teacher/repeated"].aggregate() == 0
    world.teacher.zero_()
    repeated = world.verl_loss(name, "seq-mean-token-sum", topk=bool(teacher.head_size))[1]["teacher/repeated"]
    assert repeated.aggregate() == 1, "a teacher of one number"


@pytest.mark.usefixtures("registered")
def test_klamps_loss_is_not_made_an_advantage() -> None:
    with pytest.raises(ConfigError, match="as an advantage of verl's") as caught:
        World(torch.float64).verl_loss("klamp", "token-mean", topk=False, use_policy_gradient=True)
    assert caught.value.got and caught.value.why and caught.value.fix


@pytest.mark.usefixtures("untouched")
def test_verls_own_losses_mean_what_they_meant() -> None:
    world = World(torch.float32)

    def everything() -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for name, gradient in itertools.product(OWN, (False, True)):
            options = {"topk": "topk" in name, "reference": "low_var_kl", "use_policy_gradient": gradient}
            loss, _ = world.verl_loss(name, "token-mean", **options)
            found[f"{name} {gradient}"] = loss.detach(), slope(loss, world)
        return found

    before = everything()
    register()
    for name, (loss, gradient) in everything().items():
        assert torch.equal(loss, before[name][0]) and torch.equal(gradient, before[name][1]), name


def comes_back(teacher: TeacherConfig, *arguments: str) -> tuple[DistillationConfig, Any]:
    """What verl makes of its section, as its trainer and each worker do, and the only term that klamp names."""
    config = composed([*overrides(KLConfig(beta=0), teacher), *arguments])
    (term,) = effective(config).terms
    return omega_conf_to_dataclass(config.distillation), term


@pytest.mark.usefixtures("registered")
def test_a_head_comes_back() -> None:
    head = {"teacher_direction": "forward", "teacher_head": "teacher", "teacher_tail": "bucket", "teacher_top_k": 7}
    teacher = TeacherConfig(teacher_model=MODEL, teacher_estimator="topk", **head)
    found, term = comes_back(teacher, "actor_rollout_ref.rollout.name=vllm")
    assert found.distillation_loss.topk == 7 and found.distillation_loss.loss_settings.use_topk
    (model,) = found.teacher_models.values()
    assert model.inference.engine_kwargs["vllm"]["max_logprobs"] == 7, "what its engine is asked for"
    assert term.gradient.endswith("KL(teacher||policy)")


@pytest.mark.usefixtures("registered")
def test_several_teachers_come_back() -> None:
    several = TeacherConfig(teacher_models=("math=/models/a", "code=/models/it's"), teacher_key="subject")
    found, term = comes_back(several, "data.max_response_length=77")
    assert found.teacher_key == "subject" and found.n_gpus_per_node == 2
    assert {key: each.model_path for key, each in found.teacher_models.items()} == several.models
    assert {each.inference.prompt_length for each in found.teacher_models.values()} == {512 + 77}, "as of a single one"
    assert "/models/a, /models/it's" in term.term
