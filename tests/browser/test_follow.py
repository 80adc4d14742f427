"""A page that follows a run, in a browser."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.cli.test_report import klamp_run


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[Path, str, subprocess.Popen[str]]]:
    """A run, the address of its page, and the command that serves it."""
    folder = klamp_run(tmp_path / "run")
    command = [sys.executable, "-m", "klamp.cli", "report", str(folder), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.match(r"http://127\.0\.0\.1:\d+/", line)
            assert address, line
            yield folder, address[0], process
        finally:
            process.kill()


def test_the_page_grows_with_its_run(followed: tuple[Path, str, subprocess.Popen[str]], browser: Browser) -> None:
    folder, address, process = followed
    page = browser.new_page()
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    page.goto(address)
    expect(page.locator(".source")).to_contain_text("7 logged steps")
    expect(page.get_by_role("button", name="Live")).to_be_visible()
    page.get_by_role("slider", name="Smoothing").fill("35")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "kl/k3": 0.5, "reward": 0.9}\n')
    page.evaluate("document.activeElement.blur()")
    expect(page.locator(".source")).to_contain_text("8 logged steps", timeout=10_000)
    assert page.get_by_role("slider", name="Smoothing").input_value() == "35", "what was set stays"
    page.get_by_label("Text").fill("2+2")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "kl/k3": 0.5, "reward": 0.9}\n')
    waiting = page.get_by_role("button", name="Load new steps")
    expect(waiting).to_be_visible(timeout=10_000)
    expect(page.locator(".source")).to_contain_text("8 logged steps"), "not while someone types"
    waiting.click()
    expect(page.locator(".source")).to_contain_text("9 logged steps", timeout=10_000)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    expect(page.get_by_role("button", name="Not followed any more")).to_be_visible(timeout=10_000)
    assert asked == {address, f"{address}version"}
    page.close()
