"""Texts of failures: they fit into events and logs, whatever the code of users puts into them."""

from __future__ import annotations

import pytest

from tidegate.protocol.failures import TEXT_BYTES_MAX, bounded_text, error_text
from tidegate.storage.codec import decode, encode
from tidegate.storage.user_values import repr_text


class Rude(Exception):
    """An error whose own code raises."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


@pytest.mark.parametrize("text", ["", "short", "ä" * 2_000, "\U0001f600" * 1_024])
def test_a_text_that_fits_stays_as_it_is(text: str) -> None:
    """Also where it has exactly as many bytes as it may."""
    assert bounded_text(text) == text


@pytest.mark.parametrize("character", ["x", "ä", "\U0001f600", "\ud800"])
def test_a_long_text_keeps_its_beginning_and_its_end(character: str) -> None:
    """What is in the middle is left out, and the text says so."""
    text = "begin" + character * 3_000_000 + "end"
    bounded = bounded_text(text)
    assert len(bounded.encode()) <= TEXT_BYTES_MAX
    assert bounded.startswith("begin")
    assert bounded.endswith("end")
    assert "3000008 characters in all" in bounded


def test_lone_surrogates_are_escaped() -> None:
    """So that the text can be written down."""
    bounded = bounded_text("file \udcff of \ud800")
    assert bounded == r"file \udcff of \ud800"
    assert decode(encode(bounded)) == bounded


def test_an_error_is_told_by_its_class_and_its_message() -> None:
    """One without a message by its class alone."""
    assert error_text(ValueError("no")) == "ValueError: no"
    assert error_text(GeneratorExit()) == "GeneratorExit"


def test_an_error_that_cannot_be_read_is_told_all_the_same() -> None:
    """The failure is what counts."""
    assert error_text(Rude()) == "Rude, whose text cannot be read: SystemExit"
    assert repr_text(Rude()) == "<a Rude, whose repr raised SystemExit>"


def test_a_value_is_shown_in_part_if_it_is_long() -> None:
    """As many characters as one wants to read."""
    assert repr_text("abcdef", 3) == "'ab…"
