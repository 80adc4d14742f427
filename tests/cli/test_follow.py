"""`klamp report --follow`: a page of this machine, made anew when its records grow."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.test_report import klamp_run, lines
from tests.waiting import SECONDS

from klamp.cli import main
from klamp.cli.follow import Followed, server_of, signature
from klamp.errors import DataError


@contextmanager
def served(followed: Followed) -> Iterator[Callable[..., tuple[int, str, dict[str, str]]]]:
    """The server's answers to requests: status, text, headers."""
    with server_of(followed) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        host, port = str(server.server_address[0]), server.server_port
        assert host == "127.0.0.1" and port > 0

        def get(path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
            connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())

        yield get
        server.shutdown()
        thread.join()


def growing(file: Path, told: list[str] | None = None) -> Followed:
    def page(version: str) -> str:
        text = file.read_text()
        if "half" in text:
            raise DataError("line 2 is not JSON")
        return f"{version}: {text}"

    return Followed([file], page, (told if told is not None else []).append)


def test_the_page_is_made_anew_when_the_record_grows(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("one")
    with served(growing(file)) as get:
        assert get("/")[:2] == (200, "1: one") and get("/version")[1] == "1"
        file.write_text("one two")
        assert get("/version")[1] == "2" and get("/")[1] == "2: one two"
        assert get("/version")[1] == "2", "nothing is new"
        assert get("/")[2]["Cache-Control"] == "no-store" and get("/")[2]["X-Frame-Options"] == "DENY"


def test_half_a_record_leaves_the_page_as_it_was(tmp_path: Path) -> None:
    file, told = tmp_path / "metrics.jsonl", []
    file.write_text("one")
    with served(growing(file, told)) as get:
        for text in ("one half", "one half a"):
            file.write_text(text)
            assert get("/")[1] == "1: one"
        assert len(told) == 1 and "line 2 is not JSON" in told[0], "said once"
        file.write_text("one two")
        assert get("/")[1] == "2: one two"


def test_only_its_page_by_its_name_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("one")
    with served(growing(file)) as get:
        assert [get(path)[0] for path in ("/metrics.jsonl", "/../etc/passwd", "/version/", "/index.html")] == [404] * 4
        assert get("/", Host="evil.example:80")[0] == get("/", Host="evil.example")[0] == 403
        assert get("/", Host="localhost:1")[0] == 200
        assert get("/", method="POST")[0] == 501


def test_what_changes_a_page(tmp_path: Path) -> None:
    folder = klamp_run(tmp_path / "run")
    before = signature([folder])
    (folder / "report.html").write_text("x")
    assert signature([folder]) == before, "its own page is no reason"
    lines(folder / "metrics.jsonl", {"step": 1, "kl/k3": 0.5})
    assert signature([folder]) != before
    assert signature([tmp_path / "gone"]) == ()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = klamp_run(tmp_path / "run")

    def stop(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", stop)
    assert main(["report", str(folder), "--follow"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("http://127.0.0.1:") and f"/ follows {folder}; Ctrl-C ends it" in out and "ended" in out
    assert not (folder / "report.html").exists()
    assert main(["report", str(folder), "--follow", "--output", "x.html"]) == 2
    assert "--follow writes no file" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none"), "--follow"]) == 1
