"""Reports in a real headless Chromium; a page that loads something, logs an error or breaks its own policy fails."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.diagnostics.histories import completion
from tests.report.pages import run_of

from klamp.cli import main
from klamp.report.page import render
from klamp.report.run import ReportRun

ROOT = Path(__file__).resolve().parents[2]
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 800}
HOSTILE = "</script></style><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

TRAIN = "--cpu --max_steps 10 --prompts_per_step 8 --num_generations 8 --eval_size 64 --eval_every 5 --warmup_steps 3"
TRAIN += " --log_completions_every 1 --log_completions 16"

Open: TypeAlias = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = subprocess.run([ROOT / "scripts" / "chromium.sh", "--find"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    with sync_playwright() as playwright:
        # As root, and in containers with little shared memory, Chromium starts with these only.
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        running = playwright.chromium.launch(executable_path=found.stdout.strip(), args=options)
        yield running
        running.close()


@contextmanager
def watched(browser: Browser, file: Path, **context: Any) -> Iterator[Page]:
    """A page that must load nothing but itself, log nothing, and keep to its policy."""
    requests, problems = list[str](), list[str]()
    opened = browser.new_context(**{"viewport": WIDE, "color_scheme": "light"} | context)
    opened.set_default_timeout(10_000)
    page = opened.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(file.as_uri())
    try:
        yield page
        assert {url.partition("#")[0] for url in requests} == {file.as_uri()}
        assert problems == []
    finally:
        opened.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda file, **context: stack.enter_context(watched(browser, file, **context))


def write(file: Path, *runs: ReportRun) -> Path:
    file.write_text(render(runs), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, default_base_model: Path) -> tuple[Path, Path]:
    """Two real runs: one goes too fast, so that alarms rise; the other has a target."""
    folder = tmp_path_factory.mktemp("runs")
    flags = {"fast": "--learning_rate 0.02", "held": "--learning_rate 0.004 --beta 0.1 --target_kl 0.05"}
    for name, more in flags.items():
        assert main(["train", "--output_dir", str(folder / name), *TRAIN.split(), *more.split()]) == 0
    return folder / "fast", folder / "held"


@pytest.fixture(scope="session")
def report(runs: tuple[Path, Path]) -> Path:
    assert main(["report", str(runs[0])]) == 0
    return runs[0] / "report.html"


@pytest.fixture(scope="session")
def comparison(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("compared") / "both.html"
    assert main(["report", *map(str, runs), "--output", str(file)]) == 0
    return file


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run whose every text is an attack."""
    nasty = (HOSTILE, "\u202egnp.exe\ud800", "x" * 10_000, "\x00\x1b[31m", "'\"><svg/onload=document.title='owned'>")
    ref = (-5.0, -4.0, -3.0, -2.0, -1.0)
    row = completion(tokens=nasty, prompt=HOSTILE * 3, group=HOSTILE, policy=(-1.0,) * 5, ref=ref)
    details = {"config": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    scores = [(0, {HOSTILE: 0.5}), (1, {HOSTILE: 0.0})]
    run = run_of(name=HOSTILE, completions=[row], scores=scores, details=details, k3=[0.5])
    return write(tmp_path_factory.mktemp("hostile") / "report.html", run)


@pytest.fixture(scope="session")
def written(runs: tuple[Path, Path]) -> list[dict[str, Any]]:
    """The completions of the run that went too fast, as they were written."""
    lines = (runs[0] / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
