"""Durations and sizes are read exactly or refused with the setting's name."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

_DURATIONS = {"ms": 1, "s": 1_000, "min": 60_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "": 1}
_SIZES = {"b": 1, "kb": 1024, "k": 1024, "mib": 1024**2, "mb": 1024**2, "gb": 1024**3, "tb": 1024**4, "": 1}
_amounts = st.integers(0, 10**9)


@given(amount=_amounts, unit=st.sampled_from(sorted(_DURATIONS)), space=st.sampled_from(["", " "]))
@settings(max_examples=30)
def test_durations_are_amount_times_unit(amount: int, unit: str, space: str) -> None:
    """Any whole amount of any unit, with or without a space, in either case."""
    expected = amount * _DURATIONS[unit]

    assert parse_duration_ms(f"{amount}{space}{unit}") == expected
    assert parse_duration_ms(f" {amount}{space}{unit.upper()} ") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 seconds", 5_000),
        ("1 hour 30 minutes", 5_400_000),
        ("1h30min", 5_400_000),
        ("2 weeks", 1_209_600_000),
        ("PT5S", 5_000),
        ("PT0.5S", 500),
        ("P1DT2H3M", 93_780_000),
        ("pt1h", 3_600_000),
    ],
)
def test_durations_in_words_and_in_iso_8601(text: str, expected: int) -> None:
    """As Spark's intervals and Java's durations are written."""
    assert parse_duration_ms(text) == expected


@given(amount=_amounts, unit=st.sampled_from(sorted(_SIZES)))
@settings(max_examples=30)
def test_sizes_are_amount_times_unit(amount: int, unit: str) -> None:
    """Any whole amount of any unit; a kilobyte has 1,024 bytes."""
    assert parse_size_bytes(f"{amount}{unit}") == amount * _SIZES[unit]


@given(milliseconds=_amounts)
@settings(max_examples=30)
def test_numbers_and_timedeltas_are_taken_as_they_are(milliseconds: int) -> None:
    """An int is milliseconds or bytes already; a timedelta knows its unit."""
    assert parse_duration_ms(milliseconds) == milliseconds
    assert parse_duration_ms(timedelta(milliseconds=milliseconds)) == milliseconds
    assert parse_size_bytes(milliseconds) == milliseconds


@pytest.mark.parametrize(("text", "expected"), [("1.5s", 1_500), ("0.001s", 1), ("0.5h", 1_800_000), ("2.50ms", None)])
def test_fractions_are_exact_or_refused(text: str, expected: int | None) -> None:
    """A fraction that is a whole number of milliseconds is read; a finer one is not rounded."""
    if expected is not None:
        assert parse_duration_ms(text) == expected
        return
    with pytest.raises(ConfigurationError, match="not a whole number of ms"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "s",
        "-1s",
        "1 fortnight",
        "1 month",
        "P1M",
        "PT",
        "PT0.0001S",
        "1h 2x",
        "5s3",
        "1e3",
        "\u0661s",
        "1..5s",
        True,
        1.5,
        None,
        -1,
        timedelta(-1),
        timedelta(microseconds=1),
    ],
)
def test_other_durations_are_refused_by_name(value: object) -> None:
    """The error names the setting, so that the user finds it."""
    with pytest.raises(ConfigurationError, match="checkpoint interval"):
        parse_duration_ms(value, setting="checkpoint interval")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "kb", "-1kb", "1 parsec", "0.1b", True, 1.5, None, -1])
def test_other_sizes_are_refused_by_name(value: object) -> None:
    """The error names the setting, so that the user finds it."""
    with pytest.raises(ConfigurationError, match="memory threshold"):
        parse_size_bytes(value, setting="memory threshold")  # type: ignore[arg-type]


@given(text=st.text(max_size=12))
@settings(max_examples=80)
def test_no_text_raises_anything_else(text: str) -> None:
    """Whatever is written, it is read or refused as a wrong setting."""
    for parse in (parse_duration_ms, parse_size_bytes):
        try:
            assert parse(text) >= 0
        except ConfigurationError as error:
            assert error.args  # noqa: PT017
