"""A session with a Tinker service in which no wait is endless and every failure is a klamp error."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError, KlampError, ModelError, without_credentials
from klamp.hosts.common.versions import load_tinker

HOSTED = "the hosted service"
GOODBYE = 5.0
"""How long the end of a session may take, in seconds."""


def check_key() -> None:
    """Refuse to start without an API key; if the SDK has another way to find one, it is left to do so.

    Raises:
        ConfigError: no TINKER_API_KEY, and no other credentials that the SDK knows.
    """
    elsewhere = os.environ.get("TINKER_CREDENTIAL_CMD") or Path("~/.tinker/credentials.json").expanduser().exists()
    if not os.environ.get("TINKER_API_KEY") and not elsewhere:
        raise ConfigError(
            "there is no key for the Tinker service",
            got="TINKER_API_KEY is not set",
            why="the service trains for whoever the key belongs to",
            fix="export TINKER_API_KEY=tml-...; for a server of your own (klamp.tinker.testing) any key that starts "
            "with tml- will do, together with TINKER_BASE_URL",
        )


class Connection:
    """A session with the service.

    Args:
        seconds: longest wait for one answer.

    Raises:
        ModelError: the service does not answer.
        UnsupportedVersion: the SDK is missing or outside the range.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.tinker = load_tinker()
        self.service: Any = self.ask("open a session", self.tinker.ServiceClient)

    @property
    def where(self) -> str:
        """The address of the server, in words; without credentials."""
        return without_credentials(os.environ.get("TINKER_BASE_URL", "")) or HOSTED

    def ask(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call to the service on a thread of its own, with a limit on the wait: the SDK may wait for ever.

        Args:
            what: what is asked, for the error.
            call: asks; a future that it returns is waited for.

        Raises:
            ModelError: no answer in time, or a refusal.
            KlampError: what `call` itself raises.
        """
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put((resolved(call()), None))
            except BaseException as error:  # goes to the thread that waits
                answers.put((None, error))

        threading.Thread(target=work, daemon=True, name="klamp-tinker").start()
        try:
            answer, error = answers.get(timeout=self.seconds)
        except queue.Empty:
            raise self.failed(
                "did not answer in time", f"asked to {what}; nothing within {self.seconds:g} s", "raise service_timeout"
            ) from None
        if isinstance(error, KlampError):
            raise error
        if error is not None:
            text = str(error).partition("\n")[0][:500]
            raise self.failed(
                "refused or failed", f"asked to {what}; {type(error).__name__}: {text}", "see what it says"
            ) from error
        return answer

    def close(self) -> None:
        """End the session; a service that is gone is not waited for."""
        finish = getattr(self.service, "close", None)  # SDK 0.38 and later
        self.seconds = min(self.seconds, GOODBYE)
        with contextlib.suppress(KlampError):
            # looked up on the thread that may wait: in old SDKs `holder` opens the session that is to be ended
            self.ask("end the session", lambda: finish("success") if finish else self.service.holder.close())

    def failed(self, what: str, got: str, fix: str) -> ModelError:
        """The error for a service that failed or did not answer."""
        return ModelError(
            f"the Tinker service {what}",
            got=f"{got} ({self.where})",
            why="the run cannot go on without it",
            fix=f"check that the service is up and the model's name is right; {fix}; then continue with --resume",
        )


def resolved(answer: Any) -> Any:
    """The result of a call, which is a future in some versions of the SDK and the value itself in others."""
    return answer.result() if callable(getattr(answer, "result", None)) else answer
