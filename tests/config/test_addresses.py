"""Addresses hold no user, no password and no query: what a configuration holds is shown and kept."""

import pytest

from klamp.config import KLConfig
from klamp.config.fields import check_cluster, check_server
from klamp.errors import ConfigError, KlampError, without_credentials
from klamp.lab.config import RolloutConfig


@pytest.mark.parametrize("url", ["http://host", "https://host:8000/v1/", "http://127.0.0.1:9", "http://[::1]:8000/a"])
def test_an_address_of_a_server_is_kept_as_it_is(url: str) -> None:
    assert KLConfig(reference="remote", reference_url=url).reference_url == url
    assert RolloutConfig(sampler_url=url).sampler_url == url
    check_server(None, "url", key="")


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:1", "ftp://host", "http://", "http:///x", "http://host:port", "http://host:0", "http://host:99999"),
        *("http://[::1", "http://ho st", "http://host\n", "http://hé"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="reference_url=.* is no address") as caught:
        KLConfig(reference="remote", reference_url=url)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    "url",
    [
        *("http://me:pass/phrase@host", "me:passphrase@host:1", "http://me:passphrase@host", "http://me@host"),
        *("http://me:pass phrase@host", "http://me:pass#phrase@host", "http://me:pass?phrase@host"),
        *("http://host:x?token=passphrase", "http://host?token=passphrase"),
    ],
)
def test_a_user_a_password_and_a_query_are_refused_and_not_shown(url: str) -> None:
    remote = {"reference": "remote", "reference_url": url}
    for make, name, fields, way_out in (
        (KLConfig, "reference_url", remote, "KLAMP_REFERENCE_KEY"),
        (RolloutConfig, "sampler_url", {"sampler_url": url}, "netrc"),
    ):
        with pytest.raises(ConfigError, match=f"{name} holds more than") as caught:
            make(**fields)
        assert "me:" not in str(caught.value) and "phrase" not in str(caught.value)
        assert way_out in caught.value.fix


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
