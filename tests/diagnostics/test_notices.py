"""Alarms that reach a person."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from klamp.diagnostics.alarm import Evidence
from klamp.diagnostics.alarms import ALARMS
from klamp.diagnostics.doctor import Finding
from klamp.diagnostics.notices import URLS, notice, tell_of
from klamp.errors import ConfigError, KLWarning, MissingLibrary


def finding(name: str = "kl-spike") -> Finding:
    seen = Evidence("it jumped", (), ["a cause"])
    return Finding(alarm=ALARMS[name], first_step=7, last_step=7, steps=1, evidence=seen)


class Service:
    """What apprise has of it: addresses, and sending."""

    sent: list[tuple[str, str]]

    def __init__(self) -> None:
        type(self).sent = []
        self.urls: list[str] = []

    def add(self, urls: list[str]) -> bool:
        self.urls += urls
        return all("://" in url for url in urls)

    def notify(self, *, title: str, body: str) -> bool:
        type(self).sent.append((title, body))
        return "down://" not in self.urls


@pytest.fixture(autouse=True)
def apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("apprise")
    module.Apprise = Service  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "apprise", module)


def test_an_alarm_is_sent_with_what_was_seen_and_a_note_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URLS, "json://here mailto://there")
    tells = [notice()]
    tell_of(finding(), tells)
    tell_of(finding("kl-high"), tells)
    ((title, body),) = Service.sent
    assert title == "klamp: kl-spike"
    assert "alarm after step 7: kl-spike: the KL jumped (it jumped; likely a cause)" in body
    assert body.endswith(ALARMS["kl-spike"].next_step)


def test_what_cannot_be_sent_is_a_warning_and_ends_nothing() -> None:
    told: list[Finding] = []
    with pytest.warns(KLWarning, match="the notice of kl-spike was not sent: ConnectionError"):
        tell_of(finding(), [notice("down://"), told.append])
    assert len(told) == 1, "the next is told all the same"


def test_without_an_address_or_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URLS, raising=False)
    for urls in ((), ("nowhere",)):
        with pytest.raises(ConfigError, match="no address"):
            notice(*urls)
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(MissingLibrary, match="apprise"):
        notice("json://here")
