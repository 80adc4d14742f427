"""Auditing distillation losses: stand-ins whose divergence, tail, padding, shift and vocabulary are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from klamp.audit.distillation import Distillation, DistillationFinding, Sequences, examine_distillation
from klamp.cli.audit import OF_DISTILLATION, distillation_row, distillation_sentences

PerToken = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Log-probabilities of student and teacher, [B, T, V], and the tokens, [B, T] -> [B, T]."""


def reverse(p: Tensor, q: Tensor, _: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def forward(p: Tensor, q: Tensor, _: Tensor) -> Tensor:
    return (q.exp() * (q - p)).sum(-1)


def js(p: Tensor, q: Tensor, _: Tensor) -> Tensor:
    m = torch.logaddexp(p, q) - torch.tensor(2.0).log()
    return ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2


def k1(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return (p - q).gather(-1, tokens[..., None])[..., 0]


def k3(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return torch.expm1(-k1(p, q, tokens)) + k1(p, q, tokens)


def as_advantage(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return k1(p, q, tokens).detach() * p.gather(-1, tokens[..., None])[..., 0]


def top(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """The student's two likeliest tokens, without a tail."""
    head = p.topk(2, dim=-1).indices
    return reverse(p.gather(-1, head), q.gather(-1, head), tokens)


def top_and_sampled_tail(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """The value of kl-semantics' head with a sampled tail: gradient delta in both."""
    head = p.topk(2, dim=-1).indices
    outside = (head != tokens[..., None]).all(-1)
    delta, sampled = (p - q).gather(-1, head).detach(), k1(p, q, tokens)
    own = p.gather(-1, tokens[..., None])[..., 0]
    return (p.gather(-1, head).exp() * delta).sum(-1) + outside * sampled.detach() * (own - own.detach() + 1)


def mean(per_token: PerToken, *, temperature: float = 1.0) -> Callable[[Sequences], Tensor]:
    """The mean over all trained tokens of a batch."""

    def loss(batch: Sequences) -> Tensor:
        student, teacher, tokens, mask = batch.aligned
        logps = ((x / temperature).log_softmax(-1)[..., : student.shape[-1]] for x in (student, teacher))
        return (per_token(*logps, tokens) * mask).sum() / mask.sum()

    return loss


def found(loss: Callable[[Sequences], Tensor], **term: object) -> DistillationFinding:
    finding = examine_distillation(Distillation(name="mine", loss=loss, **{"means": "reverse", **term}))  # type: ignore[arg-type]
    assert finding.error == ""
    return finding


def cells(finding: DistillationFinding) -> dict[str, str]:
    return dict(zip(OF_DISTILLATION, distillation_row(finding), strict=True))


@pytest.mark.parametrize(
    ("per_token", "value", "gradient", "noise"),
    [
        (reverse, "reverse", "reverse", "0"),
        (forward, "forward", "forward", "0"),
        (js, "js", "js", "0"),
        (k1, "reverse", "zero", "100%"),
        (k3, "reverse", "forward", "0"),
        (lambda *x: 2 * reverse(*x), "2 reverse", "2 reverse", "0"),
        (lambda *x: -reverse(*x), "-reverse", "-reverse", "0"),
        (top_and_sampled_tail, "reverse", "reverse", "0"),
    ],
)
def test_value_gradient_and_noise_at_the_teacher(per_token: PerToken, value: str, gradient: str, noise: str) -> None:
    finding = found(mean(per_token))
    got = cells(finding)
    assert (got["value"], got["gradient"], got["noise"]) == (value, gradient, noise)
    assert (got["far"], got["padding"], got["mean over"], got["larger"]) == (gradient, "-", "token", "-")
    assert [s for s in distillation_sentences(finding) if "forbids" not in s] == []


def test_a_detached_advantage_has_a_gradient_and_no_value_of_its_own() -> None:
    assert cells(found(mean(as_advantage)))["gradient"] == "reverse"
    detached = found(mean(lambda p, q, y: reverse(p, q, y).detach() + 0 * p.sum(-1)))
    assert (cells(detached)["value"], cells(detached)["gradient"]) == ("reverse", "zero")


def test_a_head_without_a_tail_is_off_and_says_how_far() -> None:
    finding = found(mean(top))
    assert finding.value and finding.gradient and finding.value.follows.name == "none of these"
    assert 0.05 < finding.value.off < 1 and 0.05 < finding.gradient.off < 1 and 0 < finding.noise < 1
    assert cells(finding)["value"] == f"{finding.value.off:.0%} off"


@pytest.mark.parametrize("temperature", [2.0, 0.5])
def test_a_temperature_is_that_of_student_and_teacher(temperature: float) -> None:
    got = cells(found(mean(reverse, temperature=temperature), temperature=temperature))
    assert (got["value"], got["gradient"]) == ("reverse", "reverse")
    assert "off" in cells(found(mean(reverse), temperature=temperature))["gradient"]


def test_a_mean_over_padding_is_smaller_with_more_of_it_and_a_mean_of_means_weighs_short_answers_more() -> None:
    def of_all(batch: Sequences) -> Tensor:
        student, teacher, tokens, mask = batch.aligned
        return (reverse(student.log_softmax(-1), teacher.log_softmax(-1), tokens) * mask).mean()

    def of_means(batch: Sequences) -> Tensor:
        student, teacher, tokens, mask = batch.aligned
        each = (reverse(student.log_softmax(-1), teacher.log_softmax(-1), tokens) * mask).sum(-1)
        return (each / mask.sum(-1)).mean()

    def nan_there(batch: Sequences) -> Tensor:
        return mean(reverse)(batch) * (1.0 if batch.mask[:, -1].all() else float("nan"))

    diluted = found(of_all)
    assert diluted.padding == pytest.approx(3 / 7) and cells(diluted)["padding"] == "x0.43"
    assert (cells(found(of_means))["mean over"], cells(found(of_means))["padding"]) == ("sequence", "-")
    assert cells(found(nan_there))["padding"] == "xnan"


@pytest.mark.parametrize("places", [0, 1, 2])
def test_predictions_of_the_wrong_tokens_are_told(places: int) -> None:
    """Logits at a position are of the token after it: a place further is right."""

    def loss(batch: Sequences) -> Tensor:
        student, teacher = (x[..., :6].log_softmax(-1).roll(places, dims=1) for x in batch[:2])
        return (reverse(student, teacher, batch.tokens) * batch.mask).sum() / batch.mask.sum()

    finding = found(loss)
    assert (finding.elsewhere > 0.1) == (places != 1)
    told = "".join(distillation_sentences(finding))
    assert ("of its gradient falls on prompt or padding" in told) == (places != 1)


def test_a_mask_that_multiplies_lets_nan_through_and_one_that_chooses_does_not() -> None:
    def chosen(batch: Sequences) -> Tensor:
        student, teacher, tokens, mask = batch.aligned
        student, teacher = student[mask], teacher[mask][:, : student.shape[-1]]
        return reverse(student.log_softmax(-1), teacher.log_softmax(-1), tokens[mask]).mean()

    assert not found(chosen).leaks
    finding = found(mean(reverse))
    assert finding.leaks and "forbids" in distillation_sentences(finding)[0]


def test_a_larger_teacher_may_count_change_or_raise() -> None:
    def refuses(batch: Sequences) -> Tensor:
        reverse(batch.student, batch.teacher, batch.tokens)
        return mean(reverse)(batch)

    def counts(batch: Sequences) -> Tensor:
        return mean(reverse)(batch) * batch.teacher.shape[-1] / batch.student.shape[-1]

    assert cells(found(counts))["larger"] == "+50%"
    finding = found(refuses)
    assert cells(finding)["larger"] == "raises"
    assert "of a teacher with three more entries it raises RuntimeError" in distillation_sentences(finding)[-1]


def test_a_loss_that_raises_or_is_not_finite_is_the_finding() -> None:
    def raises(_: Sequences) -> Tensor:
        raise ValueError("no\nsecond line")

    finding = examine_distillation(Distillation(name="mine", loss=raises, means="forward"))
    assert distillation_row(finding)[:3] == ("mine", "forward", "raises")
    assert distillation_sentences(finding) == ["mine: raises ValueError: no."]
    far = found(lambda batch: mean(reverse)(batch) / (batch.student.detach().abs().max() < 8))
    assert cells(far)["far"] == "not finite" and cells(far)["value"] == "reverse"
