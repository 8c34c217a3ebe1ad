"""How pages write sizes, durations, rates, moments, and texts of users."""

from __future__ import annotations

import pytest

from tidegate.web.page import texts

UNKNOWN = texts.UNKNOWN


@pytest.mark.parametrize("value", [None, -1, "NaN", float("nan"), float("inf"), True, "12"])
def test_what_is_no_number_is_not_known(value: object) -> None:
    """A dash, and no zero, where Flink has -1 or NaN."""
    writers = (texts.size, texts.span, texts.count, texts.rate, texts.percent, texts.clock, texts.moment)
    assert [write(value) for write in writers] == [UNKNOWN] * len(writers)


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0 ms"),
        (84, "84 ms"),
        (1_249, "1.2 s"),
        (59_999, "60.0 s"),
        (60_000, "1 min 0 s"),
        (200_000, "3 min 20 s"),
        (7_500_000, "2 h 5 min"),
        (84.6, "84 ms"),
    ],
)
def test_durations_have_the_unit_that_fits(duration_ms: float, text: str) -> None:
    """From milliseconds to days."""
    assert texts.span(duration_ms) == text


@pytest.mark.parametrize(
    ("a_second", "text"),
    [
        (0, "0"),
        (0.44, "0.4"),
        (9.96, "10"),
        (987, "987"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (12_345, "12.3k"),
        (345_678, "346k"),
        (999_600, "1.0M"),
        (9_600_000, "9.6M"),
        (2e9, "2.0G"),
    ],
)
def test_rates_have_three_digits_at_most(a_second: float, text: str) -> None:
    """So that they fit into a box of the graph."""
    assert texts.rate(a_second) == text


def test_moments_are_in_utc() -> None:
    """The same on every machine."""
    at_ms = 1_795_458_974_123
    assert texts.moment(at_ms) == "2026-11-23 18:36:14"
    assert texts.clock(at_ms) == "18:36:14"
    assert texts.machine_moment(at_ms) == "2026-11-23T18:36:14Z"


def test_a_moment_behind_the_last_date_is_not_known() -> None:
    """Flink's largest watermark says that nothing more comes; it is no date."""
    assert texts.moment(2**63 - 1) == UNKNOWN
    assert not texts.is_moment(2**63 - 1)


@pytest.mark.parametrize(
    ("at_ms", "text"), [(1_000, "9.0 s ago"), (9_500, "just now"), (99_999, "just now"), (-1, UNKNOWN)]
)
def test_what_lies_ahead_is_just_now(at_ms: int, text: str) -> None:
    """Clocks differ."""
    assert texts.ago(at_ms, 10_000) == text


def test_a_line_is_one_bounded_line() -> None:
    """Whatever a user writes."""
    assert texts.line("two\nlines\t and   spaces") == "two lines and spaces"
    assert texts.line("x" * 10_000_000) == "x" * 299 + "…"
    assert texts.name("y" * 81) == "y" * 79 + "…"


def test_characters_that_hide_others_are_shown() -> None:
    """A right-to-left override makes `exe.txt` of `txt.exe`; a null ends a string elsewhere."""
    assert texts.line("a\u202etxt.exe\x00b\x1b[31m") == "a�txt.exe�b�[31m"


def test_a_trace_keeps_its_lines_its_head_and_its_tail() -> None:
    """The end says what went wrong."""
    assert texts.trace("a\n  b\nc") == "a\n  b\nc"
    long = texts.trace("h" * 5_000 + "m" * 50_000 + "ValueError: end")
    assert long.startswith("hhhh")
    assert long.endswith("ValueError: end")
    assert "43,015 characters omitted" in long
    assert len(long) < texts.TRACE_MAX + 60
