"""The pages: what they name is there, and their examples are read by the commands that they call."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from klamp.audit import HOSTS
from klamp.cli.ablate_arguments import parse_ablate
from klamp.cli.arguments import parse_train
from klamp.cli.evaluate import read_request as read_evaluate
from klamp.cli.explain import read_request
from klamp.cli.flags import fields_of, read_options
from klamp.cli.help import PAGES, list_alarms, list_hosts, list_presets
from klamp.cli.train_fields import fields
from klamp.cli.verify import read_options as read_verify
from klamp.config import PRESETS
from klamp.diagnostics.alarms import ALARMS
from klamp.verify.printed_formulas import FORMS

READERS = {
    "train": parse_train,
    "ablate": parse_ablate,
    "evaluate": read_evaluate,
    "explain": read_request,
    "verify": read_verify,
}
CALLS = [(command, example) for command, page in PAGES.items() for example in page.examples]


@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
@pytest.mark.parametrize(("command", "example"), CALLS)
def test_examples_are_understood(command: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in {"config_demo.yaml": "beta: 0.1\n", "plan.yaml": "sweep: {beta: [0, 0.1]}\n"}.items():
        Path(file).write_text(text, encoding="utf-8")
    words = shlex.split(example.partition(" > ")[0], comments=True)
    assert words[:2] == ["klamp", command]
    read = READERS.get(command)
    assert read(words[2:]) if read else read_options(PAGES[command].options, words[2:], command=f"klamp {command}")


@pytest.mark.parametrize("command", PAGES)
def test_what_is_shown_first_is_there(command: str) -> None:
    page = PAGES[command]
    known = fields_of(page.options).keys() | (fields().keys() if page.takes_configuration else set())
    shown = [name for names in page.first.values() for name in names]
    assert set(shown) <= known
    assert len(shown) == len(set(shown))
    assert set(page.hidden) <= fields().keys()


def test_the_lists_are_complete() -> None:
    presets = " ".join(text for _, text in list_presets())
    assert all(name in presets for name in (*PRESETS, *FORMS))
    assert [name for name, _ in list_hosts()] == [*HOSTS, "module:function"]
    assert [name for name, _ in list_alarms()] == list(ALARMS)
    assert sum(text.endswith(" (a note)") for _, text in list_alarms()) == sum(
        a.level != "alarm" for a in ALARMS.values()
    )
