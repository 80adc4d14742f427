"""`klamp verify`: every check shown, exit code 1 when one fails, the questions, a real model."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from klamp.cli import main
from klamp.cli.options import Question, VerifyOptions
from klamp.cli.verify import ARITHMETIC, PROMPTS, QUESTIONS, answer_model, perturbed, read_options, run
from klamp.core.estimators import ESTIMATORS
from klamp.errors import ConfigError, DataError, ModelError, UnknownNameError
from klamp.verify.answers import SAMPLES
from klamp.verify.proofs import PROOFS

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def shown(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    return run(argv, stream=out), out.getvalue()


def break_k3(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: -(torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)


def test_everything_passes_and_is_shown() -> None:
    code, text = shown()
    assert code == 0
    assert all(section in text for section in PROOFS)
    assert "FAIL" not in text
    assert "checks passed, in" in text.splitlines()[-1]
    assert text.count("\n  ok  ") > 100


def test_a_broken_sign_fails_with_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    break_k3(monkeypatch)
    code, text = shown()
    assert code == 1
    assert "\n  FAIL  E[k3] - KL(policy||ref) " in text
    assert "checks FAILED:" in text
    assert "values: tokens of the policy: E[k3] - KL(policy||ref): expected 0, got " in text


def test_a_real_process_exits_with_one(tmp_path: Path) -> None:
    code = (
        "import dataclasses, sys, klamp.core.estimators as e\n"
        "e.ESTIMATORS['k3'] = dataclasses.replace(e.ESTIMATORS['k3'], value=lambda delta: delta.exp() - 1 - delta)\n"
        "from klamp.cli import main\nsys.exit(main(['verify', 'direction', '--samples', '1000']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "FAIL" in done.stdout


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("direction", "As a loss it is not what its value says"),
        ("importance-sampling", "KL(ref||policy), value and gradient."),
    ],
)
def test_the_questions_are_answered_in_numbers_and_words(question: str, said: str) -> None:
    code, text = shown(question, "--samples", "20000", "--seed", "3")
    assert code == 0
    assert said in " ".join(text.split())
    assert " +- " in text
    assert (code, text.rsplit(",", 1)[0]) == (
        0,
        shown(question, "--samples", "20000", "--seed", "3")[1].rsplit(",", 1)[0],
    )


def test_an_answer_that_does_not_hold_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    break_k3(monkeypatch)
    code, text = shown("direction", "--samples", "1000")
    assert code == 1
    assert "As a value it is right" not in text


@pytest.mark.parametrize(
    ("argv", "error", "said"),
    [
        (["directoin"], UnknownNameError, "did you mean 'direction'"),
        (["--sampels", "3"], UnknownNameError, "--samples"),
        (["direction", "--samples", "many"], ConfigError, "a whole number"),
        (["direction", "--samples", "1"], ConfigError, "--samples takes 1000 or more"),
        (["direction", "--seed"], ConfigError, "no value"),
        (["--prompts", "x.txt"], UnknownNameError, "unknown flag"),
        (["--ref-model", "x"], ConfigError, "--ref_model needs --model"),
    ],
)
def test_wrong_arguments(argv: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read_options(argv)
    assert main(["verify", *argv]) == 2


def test_the_defaults_and_names_are_those_of_the_questions() -> None:
    """`klamp verify --help` is there without torch, so that they are written down twice."""
    assert VerifyOptions().samples == SAMPLES
    assert set(get_args(Question)) == set(QUESTIONS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a character tokenizer, saved to a folder."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    letters = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzTOQ0123456789 .:?+_()\n"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_real_model_against_a_perturbed_copy(tiny: Path) -> None:
    code, text = shown("--model", str(tiny))
    assert code == 0, text
    assert "against a copy with 0.05 noise" in text
    assert "k3, gradient own      KL(ref||policy)" in text
    assert "k1     " in text


def test_a_real_model_against_another_checkpoint(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    perturbed(perturbed(AutoModelForCausalLM.from_pretrained(tiny), 1), 2).save_pretrained(tmp_path)
    near, far = (answer_model(str(tiny), reference, 0) for reference in (None, str(tmp_path)))
    assert near.passed and far.passed
    assert near.tables[0].title.split(";")[0] == far.tables[0].title.split(";")[0]  # the same sampled prefixes
    assert float(near.tables[0].rows[0][1]) < float(far.tables[0].rows[0][1])


def test_a_broken_k3_fails_on_a_real_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: -(torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    code, text = shown("--model", str(tiny))
    assert code == 1
    assert "FAIL  k3 is unbiased" in text


def test_a_model_that_is_its_own_reference_fails(tiny: Path) -> None:
    code, text = shown("--model", str(tiny), "--ref_model", str(tiny))
    assert code == 1
    assert "FAIL  the two models differ" in text


def test_models_of_different_vocabularies_are_refused(tiny: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="another vocabulary"):
        answer_model(str(tiny), str(tmp_path), 0)


def test_prompts_are_ones_that_the_tokenizer_reads(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(prompts: list[str], *_: object) -> None:
        asked.append(prompts[0])
        raise Exception("Unk token not found")  # as tokenizers raises it

    asked: list[str] = []
    monkeypatch.setattr("klamp.training.sampling.encode_prompts", encode)
    with pytest.raises(DataError, match="neither words nor sums"):
        answer_model(str(tiny), None, 0)
    assert asked == [PROMPTS[0], ARITHMETIC[0]]


def test_noise_touches_matrices_only_and_is_seeded() -> None:
    layer = torch.nn.Linear(4, 4)
    one, again, other = perturbed(layer, 0), perturbed(layer, 0), perturbed(layer, 1)
    assert torch.equal(one.weight, again.weight)  # pyright: ignore
    assert not torch.equal(one.weight, other.weight)  # pyright: ignore
    assert torch.equal(one.bias, layer.bias)  # pyright: ignore
