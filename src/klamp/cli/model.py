"""`klamp model NAME`: the folder of a named language model, for every trainer that takes a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from klamp.cli.flags import read_options
from klamp.cli.options import ModelOptions
from klamp.cli.text import say
from klamp.tasks.named_models import NAMED_MODELS, load_named_model


def run(argv: Sequence[str]) -> int:
    """Print the folder; all else is said on stderr, so that `$(klamp model smollm2)` is the folder alone.

    Raises:
        ConfigError: no name, or another one.
        ModelError: the package that carries the model is missing.
    """
    name = read_options(ModelOptions, argv, command="klamp model").name
    folder = load_named_model(name)
    model = NAMED_MODELS[name]
    say(f"{model.title}: {model.parameters} parameters, {model.licence}, from {model.origin}", file=sys.stderr)
    say(folder)
    return 0
