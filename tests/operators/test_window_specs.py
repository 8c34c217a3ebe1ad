"""Specifications of windows: which window has a row, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.operators.windows.window_specs import (
    TIME_MS_MAX,
    Count,
    Cumulating,
    EventTimeWindow,
    Session,
    Sliding,
    Tumbling,
)
from tidegate.storage.errors import ConfigurationError

TIMES = st.integers(-(10**14), 10**14) | st.sampled_from([-TIME_MS_MAX, -1, 0, 1, TIME_MS_MAX])
SIZES = st.integers(1, 10**9)


def last_end(spec: EventTimeWindow, time_ms: int) -> int:
    """Of one time."""
    return int(spec.last_end_ms(np.array([time_ms], dtype=np.int64))[0])


@given(TIMES, SIZES, st.data())
def test_a_tumbling_window_holds_its_row(time_ms: int, size_ms: int, data: st.DataObject) -> None:
    """It has its size, begins at the offset plus a multiple of the size, and the row lies in it."""
    offset_ms = data.draw(st.integers(0, size_ms - 1))
    spec = Tumbling(size_ms, offset_ms)
    (start,), (end,) = spec.bounds_ms(np.array([time_ms], dtype=np.int64))
    assert (int(start) - offset_ms) % size_ms == 0
    assert int(end) - int(start) == size_ms
    assert int(start) <= time_ms < int(end)
    assert last_end(spec, time_ms) == int(end)


@given(TIMES, SIZES, st.data())
def test_the_last_sliding_window_is_the_last(time_ms: int, size_ms: int, data: st.DataObject) -> None:
    """It holds the row, and the one after it begins later."""
    slide_ms = data.draw(st.integers(1, size_ms))
    offset_ms = data.draw(st.integers(0, slide_ms - 1))
    start = last_end(Sliding(size_ms, slide_ms, offset_ms), time_ms) - size_ms
    assert (start - offset_ms) % slide_ms == 0
    assert start <= time_ms < start + slide_ms


@given(TIMES, st.integers(1, 10**6), st.integers(1, 1000))
def test_the_last_cumulating_window_is_the_longest(time_ms: int, step_ms: int, steps: int) -> None:
    """It ends at a multiple of `max`."""
    end = last_end(Cumulating(step_ms, step_ms * steps), time_ms)
    assert end % (step_ms * steps) == 0
    assert end - step_ms * steps <= time_ms < end


@given(TIMES, SIZES)
def test_a_session_of_one_row_ends_after_the_gap(time_ms: int, gap_ms: int) -> None:
    """Whatever else comes."""
    assert last_end(Session(gap_ms), time_ms) == time_ms + gap_ms


ZONES = ("Europe/Berlin", "America/Havana", "America/St_Johns", "Pacific/Apia", "Asia/Kolkata", "Africa/Casablanca")


@given(
    st.sampled_from(ZONES),
    st.lists(st.datetimes(datetime(1950, 1, 1), datetime(2037, 1, 1)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.data(),
)
def test_days_of_a_time_zone_begin_at_its_midnight(
    zone: str, moments: list[datetime], days: int, data: st.DataObject
) -> None:
    """Each moment is in one window, whose bounds are moments that the zone shows as midnight (plus the offset)."""
    hours, offset_days = data.draw(st.sampled_from([0, 6])), data.draw(st.integers(0, days - 1))
    offset_ms = hours * 3_600_000 + offset_days * 86_400_000
    times = np.array([int(m.replace(tzinfo=UTC).timestamp()) * 1000 for m in moments], dtype=np.int64)
    starts, ends = Tumbling(timedelta(days=days), offset_ms, zone).bounds_ms(times)
    assert ((starts <= times) & (times < ends)).all()
    epoch = datetime(1970, 1, 1)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        for bound in (start, end):
            # Within an hour: clocks may change at the very bound. (Apia once lost a day.)
            wall = datetime.fromtimestamp(bound / 1000, ZoneInfo(zone)).replace(tzinfo=None)
            into = (wall - epoch - timedelta(milliseconds=offset_ms)) / timedelta(days=days) % 1
            assert into * days * 24 <= 1 or into * days >= days - 1, (zone, bound, wall)
        around = Tumbling(timedelta(days=days), offset_ms, zone).bounds_ms(np.array([start, end - 1, end]))
        assert around[0].tolist() == [start, start, end], "windows leave no gap"


def utc_ms(text: str) -> int:
    """A moment."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1000


@pytest.mark.parametrize(
    ("zone", "moment", "start", "end"),
    [
        ("Europe/Berlin", "2024-03-31T12:00", "2024-03-30T23:00", "2024-03-31T22:00"),  # 23 hours
        ("Europe/Berlin", "2024-10-27T12:00", "2024-10-26T22:00", "2024-10-27T23:00"),  # 25 hours
        ("America/Havana", "2024-11-03T05:30", "2024-11-03T04:00", "2024-11-04T05:00"),  # midnight comes twice
        ("America/Havana", "2024-03-10T12:00", "2024-03-10T05:00", "2024-03-11T04:00"),  # and not at all
        ("Pacific/Apia", "2011-12-30T12:00", "2011-12-30T10:00", "2011-12-31T10:00"),  # 30 December 2011 was left out
    ],
)
def test_days_where_clocks_change(zone: str, moment: str, start: str, end: str) -> None:
    """As calendars of the place have them."""
    starts, ends = Tumbling("1d", timezone=zone).bounds_ms(np.array([utc_ms(moment)]))
    assert (starts[0], ends[0]) == (utc_ms(start), utc_ms(end))


def test_weeks_may_begin_on_mondays() -> None:
    """1970 began on a Thursday: four days later was a Monday."""
    starts, ends = Tumbling("7d", offset="4d", timezone="Europe/Berlin").bounds_ms(
        np.array([utc_ms("2024-04-03T10:00")])
    )
    assert (starts[0], ends[0]) == (utc_ms("2024-03-31T22:00"), utc_ms("2024-04-07T22:00"))


@given(st.lists(TIMES, max_size=20), SIZES)
@example([], 1)
def test_many_times_are_as_one(times: list[int], size_ms: int) -> None:
    """Vectorised: row i has the answer of time i."""
    for spec in (Tumbling(size_ms), Sliding(size_ms, max(1, size_ms // 3)), Session(size_ms)):
        together = spec.last_end_ms(np.array(times, dtype=np.int64)).tolist()
        assert together == [last_end(spec, time) for time in times]


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Tumbling("0s"), "Tumbling: size: '0s' is not between"),
    (lambda: Tumbling("10 parsecs"), "Tumbling: size: unknown unit"),
    (lambda: Tumbling(-1), "negative"),
    (lambda: Tumbling("1000000000d"), "35,000 years"),
    (lambda: Tumbling("1h", offset="1h"), "less than the time between two windows"),
    (lambda: Tumbling("1h", offset=None), "Tumbling: offset: cannot read None"),  # type: ignore[arg-type]
    (lambda: Sliding("1h", "1min", offset=[]), "Sliding: offset: cannot read []"),  # type: ignore[arg-type]
    (lambda: Tumbling("1h", offset=True), "Tumbling: offset: cannot read True"),
    (lambda: Tumbling("1h", timezone="Europe/Berlin"), "whole days"),
    (lambda: Tumbling("1d", timezone="Mars/Olympus"), "no time zone 'Mars/Olympus'"),
    (lambda: Tumbling("1d", timezone="../etc/passwd"), "no time zone"),
    (lambda: Sliding("1min", "2min"), "longer than the size"),
    (lambda: Sliding("1min", 0), "Sliding: slide"),
    (lambda: Sliding("1min", "10s", offset="10s"), "less than the time between"),
    (lambda: Cumulating("7min", "1h"), "not a multiple"),
    (lambda: Cumulating(0, "1h"), "Cumulating: step"),
    (lambda: Session("0ms"), "Session: gap"),
    (lambda: Count(0), "must be a whole number"),
    (lambda: Count(True), "must be a whole number"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_is_refused(make: Callable[[], object], words: str) -> None:
    """With what is wrong and what to do."""
    with pytest.raises(ConfigurationError) as error:
        make()
    assert words in str(error.value)


def test_times_without_windows_are_refused() -> None:
    """Windows of a number that is no time would have wrong bounds. Calendars end with the year 9999."""
    for spec in (Tumbling("1h"), Sliding("1h", "1min"), Cumulating("1h", "1d"), Session("1h")):
        for time_ms in (TIME_MS_MAX + 1, -TIME_MS_MAX - 1, 2**63 - 1, -(2**63)):
            with pytest.raises(ConfigurationError, match="out of range for event time"):
                last_end(spec, time_ms)
    with pytest.raises(ConfigurationError, match="years 1 to 9999"):
        last_end(Tumbling("1d", timezone="Asia/Kolkata"), 10**15)


def test_specifications_are_values() -> None:
    """They travel with the program, and two that say the same are equal."""
    for spec in (Tumbling("1h", "5min"), Sliding("1h", "1min"), Cumulating("1h", "1d"), Session("1h"), Count(3)):
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))
    assert Tumbling("1h") != Tumbling("2h")


def test_an_offset_may_be_negative() -> None:
    """Days that begin 8 hours before midnight are those that begin at 16:00; as text, number and timedelta."""
    of_china = Tumbling("1d", offset="16h")
    for offset in ("-8h", "- 8 hours", -8 * 3_600_000, timedelta(hours=-8)):
        assert Tumbling("1d", offset=offset).offset_ms == of_china.offset_ms
    assert Sliding("10s", "5s", offset="-1s").offset_ms == 4_000
    with pytest.raises(ConfigurationError, match="must be less than the time between two windows"):
        Tumbling("1h", offset="-1h")
