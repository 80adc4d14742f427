"""Addresses whose user, password and query are sent, and seen nowhere."""

from __future__ import annotations

import copy
import json
import pickle
from base64 import b64decode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.config import KLConfig
from klamp.config.addresses import Address, check_cluster
from klamp.errors import ConfigError, KlampError, without_credentials

WHOLE = "https://me:s%40cret@host:8000/v1/?token=s%40cret"


def test_an_address_is_the_url_without_its_secrets() -> None:
    address = Address(WHOLE)
    assert address == "https://host:8000/v1/"
    assert address.whole == WHOLE and address.asked == "https://host:8000/v1/?token=s%40cret"
    assert address.has_secrets and not Address("http://h").has_secrets
    assert Address("http://h").authorization is None
    for text in (
        repr(address),
        f"{address}",
        json.dumps([address]),
        str(KLConfig(reference="remote", reference_url=WHOLE)),
    ):
        assert "cret" not in text and "me:" not in text


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), Address])
def test_a_copy_keeps_them(through: Any) -> None:
    assert through(Address(WHOLE)).whole == WHOLE


def test_another_page_of_the_server_is_asked_with_them() -> None:
    beside = Address(WHOLE).beside("https://host:8000/v1/models")
    assert beside == "https://host:8000/v1/models"
    assert beside.whole == "https://me:s%40cret@host:8000/v1/models?token=s%40cret"


@given(user=st.text(st.characters(codec="utf-8"), min_size=1), password=st.text(st.characters(codec="utf-8")))
def test_what_is_sent_is_what_was_written(user: str, password: str) -> None:
    from urllib.parse import quote

    user = user.replace(":", "")  # HTTP has no way to send it in a user
    address = Address(f"http://{quote(user, safe='')}:{quote(password, safe='')}@host")
    assert address == "http://host"
    kind, _, text = (address.authorization or "").partition(" ")
    assert (kind, b64decode(text).decode()) == ("Basic", f"{user}:{password}")


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:1", "ftp://host", "http://", "http:///x", "http://host:port", "http://host:0", "http://host:99999"),
        *(
            "http://[::1",
            "http://ho st",
            "http://host\n",
            "http://hé",
            "http://me:pass/phrase@host",
            "me:passphrase@host:1",
        ),
        *(
            "http://me:pass phrase@host",
            "http://me:pass#phrase@host",
            "http://me:pass?phrase@host",
            "http://host:x?token=passphrase",
        ),
    ],
)
def test_what_is_no_address_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match="reference_url=.* is no address") as caught:
        KLConfig(reference="remote", reference_url=url)
    assert "me:" not in str(caught.value) and "phrase" not in str(caught.value)
    assert caught.value.why and caught.value.fix
    assert ("is not shown" in str(caught.value)) == ("@" in url), "what is left out is said to be left out"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://u:p@h:1/x, twice http://u:p@h", "at http://h:1/x, twice http://h"),
        ("'http://h?key=p', and more", "'http://h', and more"),
        ("http://u:p/p@h", "http://h"),
        ("ray://u:p@h:10001", "ray://h:10001"),
        ("http://h/a@b http://[::1]:8000/a@b http://HOST:PORT", "http://h/a@b http://[::1]:8000/a@b http://HOST:PORT"),
        ("a@b, no URL", "a@b, no URL"),
    ],
)
def test_no_message_shows_credentials(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
    error = KlampError(text, got=[text], why=text, fix=text)
    assert (error.what, error.why, error.fix) == (shown,) * 3
    assert "p@" not in f"{error} {error.got} {error.args}" and "key=" not in f"{error} {error.args}"


@pytest.mark.parametrize("address", ["ray://u:p@h:1", "u:p@h:1", "u@h:1", "ray://h:1?key=p"])
def test_the_address_of_a_cluster_has_no_secrets(address: str) -> None:
    with pytest.raises(ConfigError, match="ray_address holds more than") as caught:
        check_cluster(address, "ray_address")
    assert "p@" not in str(caught.value) and "key=" not in str(caught.value)
    for plain in (None, "auto", "local", "h:6379", "ray://h:10001"):
        check_cluster(plain, "ray_address")
