"""A small language model that tells stories of a hundred words, taught in place, for what the real one is too dear.

Its stories are drawn from a grammar, "the old lamp remembers the quiet garden .", with a happy word in one adjective of
twelve; a model of a million parameters learns it in two minutes. What RL finds there is as in the real one: happy
words earn the reward of `describe`, a completion is cut at its hundredth token, and a step has thousands of tokens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.language.tasks import words

HAPPY = 1 / 12
STEPS, ROWS, SENTENCES, RATE = 300, 32, 16, 2e-3
RECIPE = 1
VERBS = (
    *("finds", "follows", "remembers", "carries", "watches", "forgets", "mends", "hides", "opens", "loses", "keeps"),
    *("paints", "hears", "leaves", "meets", "sells", "guards", "counts", "moves", "visits", "breaks", "borrows"),
)
PLACES = ("near", "behind", "under", "above", "beside", "before", "after", "without", "with", "against")


def vocabulary() -> tuple[list[str], list[str], list[str]]:
    """Happy adjectives, other adjectives, and nouns: those of the word lists that are one word."""
    happy = [word for (word,) in words("happy.txt")]
    other = sorted({word for word, *_ in words("opposites.tsv") if " " not in word} - set(happy))
    nouns = sorted({thing.split()[-1] for (thing,) in words("things.txt")})
    return happy, other, nouns


def prompt(noun: str) -> str:
    """The question of a story."""
    return f"tell a story of the {noun} :"


def story(rng: random.Random, noun: str) -> str:
    """More than a hundred words about a thing."""
    happy, other, nouns = vocabulary()
    adjectives = [rng.choice(happy if rng.random() < HAPPY else other) for _ in range(3 * SENTENCES)]
    told = []
    for first, second, third in zip(*[iter(adjectives)] * 3, strict=True):
        told += ["the", first, noun, rng.choice(VERBS), "the", second, rng.choice(nouns), rng.choice(PLACES)]
        told += ["the", third, rng.choice(nouns), "."]
    return " ".join(told)


def teach(folder: Path) -> None:
    """Train the model and save it with its tokenizer: always the same weights on the same machine."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    happy, other, nouns = vocabulary()
    known = ["[pad]", "[end]", *dict.fromkeys((*prompt("x").split(), ".", *happy, *other, *nouns, *VERBS, *PLACES))]
    known.remove("x")
    bare = Tokenizer(WordLevel({word: place for place, word in enumerate(known)}, unk_token="[pad]"))
    bare.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="[pad]", eos_token="[end]")
    rng = random.Random(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(known),
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=256,
                tie_word_embeddings=True,
                eos_token_id=1,
                pad_token_id=0,
                bos_token_id=None,
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
        for _ in range(STEPS):
            told = [f"{prompt(noun)} {story(rng, noun)}" for noun in rng.choices(nouns, k=ROWS)]
            tokens = torch.tensor(tokenizer(told)["input_ids"])
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = (json.dumps({"prompt": prompt(noun), "answer": ""}) for noun in nouns)
    (folder / "stories.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
