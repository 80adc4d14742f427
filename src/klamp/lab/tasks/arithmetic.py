"""The built-in task, sums that a small model can learn and skills that RL does not train, and its small base model.

    skill         prompt         completion
    addition      47+85=         132            the skill that RL trains
    subtraction   71-38=         33             kept by the KL term, or lost
    reversal      rev abcd=      dcba           likewise

One character is one token. The model is a Llama that is trained from scratch once, and then cached. Its training rows
sometimes forget a carry, which RL can mend; it is near perfect at the other skills, which a KL term can keep.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from klamp.errors import ModelError
from klamp.lab.tasks.base import Example, Task, TaskConfig, checked, is_held_out

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ALPHABET = "0123456789+-= abcdefghijklmnopqrstuvwxyz"  # every character of the task; each is one token
PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
RL_SKILL = "addition"
HELD_OUT_SHARE = 8  # one prompt in this many is held out
MAX_PROMPT_LENGTH, MAX_COMPLETION_LENGTH = 9, 5  # in tokens; the completion's includes the end token
MAX_MODEL_LENGTH = 64  # how many tokens the base model can hold
REVERSAL_LETTERS = 4
TRAIN_SIZE = 4096  # how many prompts RL trains on where the configuration leaves it open
REPEATS = 5000  # after so many known prompts in a row, a skill counts as exhausted


def draw_addition(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randint(10, 99), rng.randint(10, 99)
    return f"{left}+{right}=", str(left + right)


def draw_subtraction(rng: random.Random) -> tuple[str, str]:
    low, high = sorted((rng.randint(10, 99), rng.randint(10, 99)))
    return f"{high}-{low}=", str(high - low)


def draw_reversal(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=REVERSAL_LETTERS))
    return f"rev {word}=", word[::-1]


SKILLS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = {
    "addition": draw_addition,
    "subtraction": draw_subtraction,
    "reversal": draw_reversal,
}
"""The skills by name; the RL skill comes first."""


def pairs(skill: str, rng: random.Random, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs of one skill, for training or for evaluation; they may repeat."""
    draw = SKILLS[skill]
    while True:
        prompt, answer = draw(rng)
        if is_held_out(prompt, HELD_OUT_SHARE) == held_out:
            yield prompt, answer


def examples(skill: str, count: int, *, seed: int, held_out: bool) -> tuple[Example, ...]:
    """Draw `count` different examples of one skill, or all that turn up if the skill has fewer."""
    source = pairs(skill, random.Random(f"{seed}/{skill}/{held_out}"), held_out=held_out)
    answers, repeats = dict[str, str](), 0
    while len(answers) < count and repeats < REPEATS:
        prompt, answer = next(source)
        repeats = repeats + 1 if prompt in answers else 0
        answers[prompt] = answer
    return tuple(
        Example(prompt=prompt, answer=answer, skill=skill, fields={"prompt": prompt, "answer": answer, "skill": skill})
        for prompt, answer in answers.items()
    )


def arithmetic_task(config: TaskConfig) -> Task:
    """The built-in task, with its own reward; the configuration's sizes and seed are used."""
    seed = config.task_seed
    return Task(
        name="arithmetic",
        train=examples(RL_SKILL, config.train_size or TRAIN_SIZE, seed=seed, held_out=False),
        evaluation={skill: examples(skill, config.eval_size, seed=seed, held_out=True) for skill in SKILLS},
        rl_skill=RL_SKILL,
        score=checked(lambda example, completion: completion == example.answer, name="arithmetic"),
    )


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, padding on the left, and no beginning token; it needs no file."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD_TOKEN, EOS_TOKEN, *ALPHABET))}
    # no unknown token: a character outside the alphabet is an error, not a token that means anything
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore
    backend.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_MODEL_LENGTH,
    )


Progress = Callable[[str, int, int, float | None], None]
"""Called while a model is made, as `progress(what, done, total, loss)`; the loss may be None."""
IGNORED = -100  # the label of a token that the loss leaves out
HEAVY_COLUMN = 14  # from this sum of two digits on, a carry is forgotten more often than not
MIXTURE = {"addition": 0.46, "subtraction": 0.41, "reversal": 0.13}  # the share of each skill in the training rows
RECIPE: Mapping[str, Any] = {
    **MIXTURE,
    "recipe": 1,  # raise it whenever the code below would give other weights
    "seed": 0,  # of the weights and of the training rows
    "carelessness": 0.6,  # how often additions forget the carry of a heavy column: what RL has to gain
    "hidden_size": 128,
    "layers": 3,
    "heads": 4,
    "initializer_range": 0.08,  # at a Llama's usual 0.02 so narrow a model learns carrying far later
    "steps": 1000,
    "batch_size": 96,
    "learning_rate": 2e-3,  # the highest, after the warm-up; it falls to a hundredth along a cosine
}
"""All that the weights depend on besides the rows and the code; with the first rows, the name of the cached folder."""


def careless_sum(left: int, right: int, rng: random.Random) -> int:
    """A sum of two two-digit numbers in which some carries are forgotten, half as often in a light column."""
    carry, total = 0, 0
    for place in (1, 10):
        column = left // place % 10 + right // place % 10 + carry
        forgotten = rng.random() < RECIPE["carelessness"] * (1.0 if column >= HEAVY_COLUMN else 0.5)
        carry = int(column > 9 and not forgotten)
        total += column % 10 * place
    return total + 100 * carry


def corpus(count: int) -> Iterator[tuple[str, str]]:
    """Draw `count` (prompt, completion) pairs for training, of all skills."""
    rng = random.Random(f"corpus/{RECIPE['seed']}")
    sources = {skill: pairs(skill, rng, held_out=False) for skill in MIXTURE}
    for skill in rng.choices(list(MIXTURE), weights=list(MIXTURE.values()), k=count):
        prompt, answer = next(sources[skill])
        if skill == "addition":
            left, right = prompt.rstrip("=").split("+")
            answer = str(careless_sum(int(left), int(right), rng))
        yield prompt, answer


def training_tensors(rows: Iterator[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [rows, width]: labels[t] is the token after tokens[t], or `IGNORED`; rows get an end token."""
    import torch

    vocabulary, width = arithmetic_tokenizer().get_vocab(), MAX_PROMPT_LENGTH + MAX_COMPLETION_LENGTH
    tokens, labels = [], []
    for prompt, completion in rows:
        row = [*(vocabulary[character] for character in prompt + completion), vocabulary[EOS_TOKEN]]
        padding = width - len(row)
        tokens.append(row[:-1] + [vocabulary[PAD_TOKEN]] * padding)
        labels.append([IGNORED] * (len(prompt) - 1) + row[len(prompt) :] + [IGNORED] * padding)
    return torch.tensor(tokens), torch.tensor(labels)


def base_model_folder() -> Path:
    """The folder of the base model in KLAMP_CACHE or ~/.cache/klamp, named by its recipe and first training rows."""
    key = json.dumps({**RECIPE, "rows": list(corpus(64))}, sort_keys=True)
    cache = Path(os.environ.get("KLAMP_CACHE") or Path.home() / ".cache" / "klamp").expanduser()
    return cache / f"base-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def load_base_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the base model and its tokenizer; see `cached_base_model`."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from klamp.scoring.model_parts import check_whole

    folder = cached_base_model()
    try:
        load: Any = LlamaForCausalLM.from_pretrained
        with without_bars():
            model, loading = load(folder, local_files_only=True, output_loading_info=True)
        check_whole(loading, folder=str(folder))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        fix = "delete this folder; the next run trains the model again"
        raise ModelError("the cached base model cannot be read", got=str(folder), why=why, fix=fix) from error
    return model.eval(), tokenizer


def cached_base_model(*, progress: Progress | None = None) -> Path:
    """The folder of the base model; the first call trains it, which takes a minute."""

    def write(empty: Path) -> None:
        model = train_base_model(progress=progress)
        with without_bars():
            model.save_pretrained(empty)
        arithmetic_tokenizer().save_pretrained(empty)

    return stored(base_model_folder(), write)


def train_base_model(*, progress: Progress | None = None) -> LlamaForCausalLM:
    """Train a new base model, with a loss on completions; padding is on the right, so no attention mask is needed."""
    import torch

    steps, size = RECIPE["steps"], RECIPE["batch_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RECIPE["seed"])
        model = _new_model()
        rate = RECIPE["learning_rate"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
        batches = zip(*(rows.split(size) for rows in training_tensors(corpus(steps * size))), strict=True)
        for step, (tokens, labels) in enumerate(batches, start=1):
            hidden, counted = model.model(input_ids=tokens, use_cache=False).last_hidden_state, labels != IGNORED
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[counted]), labels[counted])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress("teaching the built-in base model", step, steps, float(loss.detach()))
    return model.eval()


def _new_model() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = arithmetic_tokenizer().get_vocab()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=RECIPE["hidden_size"],
            intermediate_size=3 * RECIPE["hidden_size"],
            num_hidden_layers=RECIPE["layers"],
            num_attention_heads=RECIPE["heads"],
            num_key_value_heads=RECIPE["heads"],
            max_position_embeddings=MAX_MODEL_LENGTH,
            initializer_range=RECIPE["initializer_range"],
            tie_word_embeddings=True,
            attention_dropout=0.0,
            bos_token_id=None,
            eos_token_id=vocabulary[EOS_TOKEN],
            pad_token_id=vocabulary[PAD_TOKEN],
        )
    ).train()


def _rate(step: int, steps: int) -> float:
    """The factor on the learning rate: a short linear warm-up, then a cosine down to a hundredth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def stored(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder of the cache, which `write` fills first if it is not there; it is there as a whole, or not at all."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True)
    except OSError as error:
        what, fix = "the cache folder for models cannot be written", "set KLAMP_CACHE to a folder that can be written"
        raise ModelError(what, got=str(folder.parent), why=str(error), fix=fix) from error
    with place as temporary:
        write(Path(temporary))
        make_readable(Path(temporary))
        try:
            Path(temporary).rename(folder)
        except OSError:  # another process was quicker: its folder holds the same model
            if not folder.is_dir():
                raise
    return folder


def make_readable(folder: Path) -> None:
    """Give all in a folder the permissions of new files here: safetensors and tempfile ignore the umask."""
    probe = folder / ".umask"
    probe.mkdir()
    usual = S_IMODE(probe.stat().st_mode)  # reading the umask would set it for all threads
    probe.rmdir()
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            with suppress(PermissionError):  # another user's: unchanged
                path.chmod(S_IMODE(path.stat().st_mode) | (usual if path.is_dir() else usual & 0o666))


@contextmanager
def without_bars() -> Iterator[None]:
    """A context in which transformers shows no progress bars: a library does not print."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
