"""Tells a person of an alarm while a run goes on: by a function of one's own, or by apprise, which knows the services.

Each alarm is told once, since whoever watches a run hands each out once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

from klamp.diagnostics.doctor import Finding
from klamp.errors import ConfigError, KLWarning, missing_library

Tell: TypeAlias = Callable[[Finding], object]
"""What is called with an alarm that rose."""

URLS = "APPRISE_URLS"
"""apprise's own variable of the surroundings: where notices go, so that no address stands in a run's configuration."""


def notice(*urls: str) -> Tell:
    """A function that sends an alarm through apprise, https://github.com/caronc/apprise: mail, chats, phones, webhooks.

    Args:
        urls: where to, as apprise writes them; none: those of APPRISE_URLS, separated by spaces.

    Raises:
        MissingLibrary: apprise is not installed.
        ConfigError: no address that apprise knows.
    """
    try:
        import apprise  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_library("apprise", by="a notice of an alarm") from error
    service, given = apprise.Apprise(), list(urls) or os.environ.get(URLS, "").split()
    if not (given and service.add(given)):
        raise ConfigError(
            "a notice has no address",
            got=f"{len(given)} of them, and apprise does not know each",
            why="nobody would be told",
            fix=f"give notice('mailto://...'), or set {URLS}; see https://github.com/caronc/apprise",
        )

    def tell(finding: Finding) -> None:
        text = f"{finding.in_a_line}. {finding.alarm.next_step}"
        if not service.notify(title=f"klamp: {finding.alarm.name}", body=text):
            raise ConnectionError("apprise could not send it")

    return tell


def tell_of(finding: Finding, tells: Sequence[Tell]) -> None:
    """Tell of an alarm, not of a note; what fails in it is a warning, since no run ends for a notice.

    Args:
        finding: what rose.
        tells: who is told.
    """
    for tell in tells if finding.alarm.level == "alarm" else ():
        try:
            tell(finding)
        except Exception as error:  # of whatever service it is
            text = f"the notice of {finding.alarm.name} was not sent: {type(error).__name__}: {error}"
            warnings.warn(text, KLWarning, stacklevel=2)
