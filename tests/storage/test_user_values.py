"""Marks of values survive what becomes of a text, and nothing between them is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.protocol.failures import TEXT_BYTES_MAX, bounded_text
from tidegate.storage.user_values import (
    CLOSE,
    OPEN,
    WITHHELD,
    WithheldTexts,
    mark_values,
    marked,
    shown_text,
    unmarked,
    value_text,
    without_secrets,
)

SECRET = "qzx"
AROUND = st.text("abc ': " + OPEN + CLOSE, max_size=30)


@given(st.lists(st.text(OPEN + CLOSE + "'", max_size=4), min_size=1, max_size=5), AROUND)
def test_a_value_is_withheld_whatever_is_in_it(rude: list[str], around: str) -> None:
    """Marks of its own included."""
    value = SECRET.join(["", *rude, ""])
    text = f"{unmarked(around)}{marked(value)}{unmarked(around)}"
    assert SECRET not in shown_text(text, False)
    assert SECRET in shown_text(text, True)
    assert not {OPEN, CLOSE} & set(shown_text(text, True) + shown_text(text, False))


@given(st.integers(0, 3 * TEXT_BYTES_MAX), st.integers(1, 2 * TEXT_BYTES_MAX))
def test_a_value_of_which_a_part_was_cut_out_is_withheld(before: int, length: int) -> None:
    """A long text loses its middle, and with it marks."""
    text = "a" * before + marked(SECRET * length) + "b" * 2_000
    assert SECRET[0] not in shown_text(bounded_text(text), False).replace(WITHHELD, "")


@pytest.mark.parametrize(
    ("message", "value", "expected"),
    [
        ("invalid literal for int(): 'x7'", "x7", f"invalid literal for int(): '{WITHHELD}'"),
        ("index 7 is out of bounds", "7", "index 7 is out of bounds"),
        ("user 4711 of 147112", "4711", f"user {WITHHELD} of 147112"),
        ("to maria@example.org.", "maria@example.org", f"to {WITHHELD}."),
        (f"was {marked('4711')}, not 4711", "4711", f"was {WITHHELD}, not {WITHHELD}"),
    ],
)
def test_a_message_that_repeats_a_value(message: str, value: str, expected: str) -> None:
    """Short values count in quotes or as words alone: a message has numbers of its own."""
    assert shown_text(mark_values(message, [value]), False) == expected


def test_the_repr_of_a_value_may_fail() -> None:
    """The error must still be reported."""

    class Rude:
        def __repr__(self) -> str:
            raise KeyError("no")

    assert shown_text(value_text(Rude()), True) == "<a Rude, whose repr raised KeyError>"


def test_what_was_withheld_is_known_for_a_while() -> None:
    """For the driver, of the newest texts alone; also as a part of a longer text."""
    texts = WithheldTexts()
    first = texts.withhold(f"first {marked('qzx')}", False)
    assert texts.whole(f"task: {first}") == "task: first qzx"
    for number in range(16):
        texts.withhold(f"number {number} {marked('qzx')}", False)
    assert texts.whole(f"task: {first}") == f"task: first {WITHHELD}"
    assert texts.withhold(f"shown {marked('qzx')}", True) == "shown qzx"
    assert texts.whole(None) is None


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://app:SECRET@host:5432/db refused",
        "cannot reach s3://AKIA:SEC/RET@bucket/x",
        "{'sasl.password': 'SECRET', 'a': 1}",
        "AWS_SECRET_ACCESS_KEY=SECRET",
        "https://host/x?token=SECRET&a=1",
        'sasl.jaas.config=x required username="u" password="SECRET";',
        "Authorization: Bearer SECRETSECRET",
        "DefaultEndpointsProtocol=https;AccountKey=SECRET==;x",
    ],
)
def test_secrets_are_never_shown(text: str) -> None:
    """In URLs, in headers, and behind a name."""
    for rows in (True, False):
        assert "SECRET" not in shown_text(text, rows).replace("AWS_SECRET_ACCESS_KEY", "")
        assert "RET" not in shown_text(text, rows).replace("AWS_SECRET_ACCESS_KEY", "")


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:8000/x?a=b@c", "s3://bucket/folder@v2", "rest.token: it must have 16", "the key is new"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    """A port is no password."""
    assert without_secrets(text) == text
