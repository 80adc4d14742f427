"""`klamp audit verl` against the installed verl, and through the whole of its actor loss."""

from tests.engines.documented import assert_documented

from klamp.audit import load_subject


def test_the_page_shows_what_the_command_prints() -> None:
    assert_documented("verl")
    assert load_subject("verl").cautions == ()
