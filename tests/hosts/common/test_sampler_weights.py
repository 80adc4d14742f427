"""Sampler and trainer held against the model's weights: the usual faults, each planted and named."""

import copy
import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from klamp import check_sync
from klamp.errors import ConfigError, DataError, ShapeError
from klamp.hosts.common import sampler_weights as sync
from klamp.hosts.common.sampler_weights import SAME, START, WEIGHTS, Reported, compare

PROMPTS = [[1, 2, 3, 4], [5, 6]]
COMPLETIONS = [[7, 8, 9, 3, 2], [4, 4, 1]]
PAIRS = list(zip(PROMPTS, COMPLETIONS, strict=True))
TEMPERATURE = 0.7


def model(seed: int = 0, *, tied: bool = True) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.4, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def made() -> Any:
    """A model that no test changes."""
    return model()


def moved(start: Any) -> Any:
    torch.manual_seed(1)
    after = copy.deepcopy(start)
    with torch.no_grad():
        for weight in after.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return after


def logits_of(made: Any, prompt: list[int], completion: list[int], **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return made(torch.tensor([[*prompt, *completion]]), **options).logits[0, len(prompt) - 1 : -1].float()


def chosen(logits: torch.Tensor, completion: list[int], temperature: float = TEMPERATURE) -> list[float]:
    scored = (logits / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(scored, completion, strict=True)]


def told(made: Any, *, temperature: float = TEMPERATURE) -> list[list[float]]:
    """What a faultless engine with these weights reports."""
    return [chosen(logits_of(made, prompt, each), each, temperature) for prompt, each in PAIRS]


def checked(made: Any, sampler: Any, **options: Any) -> sync.SyncReport:
    return check_sync(made, PROMPTS, COMPLETIONS, sampler, **{"temperature": TEMPERATURE, **options})


def test_a_sampler_with_the_weights_of_the_model_is_in_sync(made: Any) -> None:
    report = checked(made, told(made), trainer_logprobs=told(made), start=model(3))
    assert (report.in_sync, report.tokens) == (True, 8)
    assert [side.side for side in report.sides] == ["sampler", "trainer"]
    assert all(side.gaps[sync.WEIGHTS] < 1e-6 for side in report.sides)
    assert "the sampler has the weights' log-probabilities" in str(report)
    assert check_sync(made, PROMPTS, COMPLETIONS, told(made, temperature=1.0)).in_sync, "at 1 where none is told"
    cut = checked(made, told(made), trainer_logprobs=told(made), top_k=1)
    assert sync.TRUNCATED in cut.sides[0].gaps and sync.TRUNCATED not in report.sides[0].gaps


def test_the_model_is_left_as_it_was() -> None:
    policy = model().train()
    before = copy.deepcopy(policy.state_dict())
    checked(policy, told(model()), start=model(3))
    assert policy.training
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def found(side: str, made: Any, wrong: Any, **options: Any) -> sync.Reported:
    """The side that reports something wrong, where the other one is right."""
    sampler, trainer = (wrong, told(made)) if side == "sampler" else (told(made), wrong)
    report = checked(made, sampler, trainer_logprobs=trainer, **options)
    assert not report.in_sync
    (other,) = (each for each in report.sides if each.side != side)
    (of_side,) = (each for each in report.sides if each.side == side)
    assert other.is_right
    return of_side


@pytest.mark.parametrize("side", ["sampler", "trainer"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_stale_model_is_told_from_a_stale_head(side: str, tied: bool) -> None:
    start = model(tied=tied)
    policy = moved(start)
    assert found(side, policy, told(start), start=start).nearest == sync.START
    mixed = copy.deepcopy(policy)
    mixed.lm_head.weight = torch.nn.Parameter(start.lm_head.weight.detach().clone())  # the embeddings are the new ones
    half = found(side, policy, told(mixed), start=start)
    assert half.nearest == sync.START_HEAD
    assert half.gaps[sync.START_HEAD] < 1e-6


@pytest.mark.parametrize("side", ["sampler", "trainer"])
def test_another_temperature_and_a_mask_that_hides_the_prompt_are_named(made: Any, side: str) -> None:
    assert found(side, made, told(made, temperature=1.0)).nearest == sync.RAW
    masks = [torch.tensor([[0] * len(prompt) + [1] * len(each)]) for prompt, each in PAIRS]
    pairs = zip(PAIRS, masks, strict=True)
    hidden = [chosen(logits_of(made, *pair, attention_mask=mask), pair[1]) for pair, mask in pairs]
    seen = found(side, made, hidden)
    assert seen.nearest == sync.HIDDEN and "prompt" in seen.text


@pytest.mark.parametrize(
    ("kept", "given"), [(TopPLogitsWarper(0.8), {"top_p": 0.8}), (TopKLogitsWarper(9), {"top_k": 9})]
)
def test_a_truncated_distribution_is_named(made: Any, kept: Any, given: dict[str, Any]) -> None:
    """As transformers cuts it."""
    wrong = []
    for prompt, completion in PAIRS:
        scaled = kept(None, logits_of(made, prompt, completion) / TEMPERATURE)
        values = chosen(scaled, completion, 1.0)
        wrong.append([value if math.isfinite(value) else None for value in values])  # could not have been drawn
    assert any(value is not None for row in wrong for value in row)
    seen = found("sampler", made, wrong, **given)
    assert seen.nearest == sync.TRUNCATED and seen.gaps[sync.TRUNCATED] < 1e-6


def test_a_missing_adapter_is_named() -> None:
    base = model()
    plain = told(base)
    torch.manual_seed(2)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    report = checked(adapted, plain, trainer_logprobs=told(adapted))
    assert report.sides[0].nearest == sync.NO_ADAPTER
    assert report.sides[1].is_right


def test_another_data_type_is_not_called_a_fault_and_what_no_reading_explains_is(made: Any) -> None:
    report = checked(made, told(model().to(torch.bfloat16)))
    assert sync.SAME < report.sides[0].gaps[sync.WEIGHTS] < sync.COARSE
    assert report.in_sync and "data types" in str(report)
    torch.manual_seed(5)
    noise = [[value + float(torch.randn(())) for value in row] for row in told(made)]
    report = checked(made, noise, start=model(3))
    assert not report.in_sync and "no reading that was tried explains it" in str(report)


def test_tokens_without_a_number_are_left_out(made: Any) -> None:
    numbers = told(made)
    numbers[0][0] = math.nan
    assert checked(made, numbers).in_sync
    with pytest.raises(DataError, match="reports no log-probability"):
        checked(made, [[math.nan] * 5, [None] * 3])


def test_lists_that_do_not_fit_are_refused(made: Any) -> None:
    with pytest.raises(ShapeError, match="do not fit the completions"):
        checked(made, [[0.0] * 4, [0.0] * 3])
    with pytest.raises(ShapeError, match="do not fit"):
        check_sync(made, [], [], [])
    with pytest.raises(ShapeError, match=r"\[0, 1, 2, 3, 4, 5, 6, 7\] numbers for \[1, 2, 3, 4, 5, 6, 7, 8\] tokens"):
        check_sync(made, [[1]] * 9, [[1] * each for each in range(1, 10)], [[0.0] * each for each in range(9)])
    with pytest.raises(ConfigError, match="temperature must be a number > 0"):
        checked(made, told(made), temperature=0.0)


def test_the_gap_is_the_mean_size_of_the_differences_of_finite_numbers_and_without_any_it_explains_nothing() -> None:
    reported = torch.tensor([-1.0, -2.0, float("nan"), -3.0])
    readings = {WEIGHTS: torch.tensor([-1.5, -2.0, -9.0, -2.0]), START: torch.tensor([float("nan"), -2.0, -2.0, -3.0])}
    side = compare({"sampler": reported}, readings).sides[0]
    assert side.gaps == {WEIGHTS: pytest.approx(0.5), START: 0.0}
    lost = torch.full((2,), float("nan"))
    side = compare({"sampler": torch.tensor([-1.0, -1.0])}, {WEIGHTS: torch.tensor([-5.0, -5.0]), START: lost}).sides[0]
    assert side.gaps[START] == float("inf")
    assert side.nearest == WEIGHTS


@pytest.mark.parametrize(
    ("right", "other", "nearest"),
    [
        (SAME, 0.0, WEIGHTS),  # the same, whatever else fits better
        (0.5, 0.2, WEIGHTS),  # not clearly nearer
        (0.5, 0.1, START),
        (0.01, 0.0, START),  # data types could explain it, and another reading does so exactly
    ],
)
def test_another_reading_is_named_only_where_it_is_clearly_nearer(right: float, other: float, nearest: str) -> None:
    assert Reported(side="sampler", gaps={WEIGHTS: right, START: other}).nearest == nearest
