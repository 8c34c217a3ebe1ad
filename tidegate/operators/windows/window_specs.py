"""Window specifications, which determine the windows that a row belongs to. They have no state, and all window
operators use them.

Rules, as in Flink:

- A window is `[start, end)`, in milliseconds since 1970. A row at its end belongs to the next window.
- A watermark W promises that no row at W or before it follows. So a window is complete when `end - 1 <= W`.
- Tumbling, sliding and cumulating windows are aligned: to 1970 in UTC plus the offset, or to the days of a time zone.
- Two rows are in one session if they are at most the gap apart, or if rows between them are. A row exactly at the end
  of a session therefore belongs to the session, and a session is complete when `end <= W`, which is a millisecond later
  than for other windows. (In Flink it depends on the watermark whether such a row joins.) Session operators delay the
  watermark that they forward by this millisecond.
- Each row may have its own session gap. A row is then the interval from its time to the end of its gap, and rows with
  intervals that overlap or touch are in one session.
- Days of a time zone follow each other without gaps. When clocks change, a day is shorter or longer. If midnight occurs
  twice, the day begins at the first one. If it does not occur, the day begins when the clocks change.
- An event time beyond about a million years is refused, because its window might not fit into 64 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
from numpy.typing import NDArray

from tidegate.operators.aggregates.column_expressions import ColumnExpression, ColumnLike, column_like
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import is_polars_expression
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl


Duration: TypeAlias = str | timedelta | int
Times: TypeAlias = NDArray[np.int64]
"""Times in ms since 1970, one for each row."""
Numbers: TypeAlias = NDArray[np.int64]
"""Numbers of rows, keys or groups, one for each row."""

TIME_MS_MAX = 1 << 55
"""Greatest event time, in ms, for which windows are supported.

Its negative is the smallest. The limit leaves space for the six bits that the state appends (`slices.py`).
"""
SIZE_MS_MAX = 1 << 50
"""Largest size of a window in ms: 35,000 years."""
_CALENDAR_MS = (-61_000_000_000_000, 253_000_000_000_000)
"""The smallest and the greatest time, in ms, for which calendars of time zones have dates."""
_EPOCH = datetime(1970, 1, 1)
_CACHED_DAYS = 4_096


class EventTimeWindow(ABC):
    """Base class of the specifications of event-time windows."""

    @abstractmethod
    def last_end_ms(self, times: Times) -> Times:
        """Returns the end of the last window that contains each time, in ms. Raises ConfigurationError for times that
        are out of range.

        A row is late if `last_end_ms - 1 + allowed lateness <= watermark`.
        """

    def ended_ms(self, times: Times, moments: Times) -> Times:
        """Returns, for each row, the last end among its windows that have ended at the given time in `moments`, or a
        later end if none has ended.

        If the result is the same for two times, a row is treated the same at both times. `times` must not be later than
        `moments`.
        """
        return self.last_end_ms(times)


@dataclass(frozen=True, slots=True)
class Tumbling(EventTimeWindow):
    """Windows of one size without gaps. They begin at multiples of the size, plus the offset.

    An offset may be negative: days with `offset="-8h"` begin at 16:00 UTC.

    With a `timezone` (`"Europe/Berlin"`) the windows are one or several days in that time zone. `size`, which must be
    whole days, and `offset` are in local time, so a day may have 23 or 25 hours.

    Example:

        >>> orders.key_by("user").window(tg.Tumbling("2s")).aggregate(total=tg.sum("amount")).show()
        +------+--------------+------------+-------+
        | user | window_start | window_end | total |
        +------+--------------+------------+-------+
        | ann  |            0 |       2000 |    30 |
        | bob  |            0 |       2000 |     5 |
        | ann  |         2000 |       4000 |    12 |
        +------+--------------+------------+-------+
    """

    size: Duration
    offset: Duration = 0
    timezone: str | None = None
    size_ms: int = field(init=False, repr=False, compare=False)
    offset_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, size_ms=_positive_ms(self.size, "Tumbling: size"))
        _set(self, offset_ms=_offset_ms(self.offset, self.size_ms, "Tumbling"))
        if self.timezone is None:
            return
        _check_timezone(self.timezone)
        if self.size_ms % DAY_MS:
            raise ConfigurationError(
                f"Tumbling: windows of {self.size!r} in a time zone: a size must be whole days there, because hours "
                'come twice or not at all; remove timezone=, or use size="1d"'
            )

    def bounds_ms(self, times: Times) -> tuple[Times, Times]:
        """Returns the start and the end of the window of each time, in ms.

        Raises ConfigurationError for times that are out of range.
        """
        check_times(times)
        if self.timezone is not None:
            return self._bounds_of_days(times, self.timezone)
        starts = floored(times, self.size_ms, self.offset_ms)
        return starts, starts + self.size_ms

    def last_end_ms(self, times: Times) -> Times:
        """Returns the end of the only window of each time, in ms."""
        return self.bounds_ms(times)[1]

    def _bounds_of_days(self, times: Times, timezone: str) -> tuple[Times, Times]:
        days = self.size_ms // DAY_MS
        first_day, into_day_ms = divmod(self.offset_ms, DAY_MS)
        known, starts = day_starts_around(times, timezone, into_day_ms, days)
        # A day may have no moments, as at a change of the date line. Of such days the last one counts.
        today = known[np.searchsorted(starts, times, side="right") - 1]
        begins = today - (today - first_day) % days
        return starts[np.searchsorted(known, begins)], starts[np.searchsorted(known, begins + days)]


@dataclass(frozen=True, slots=True)
class Sliding(EventTimeWindow):
    """Windows of one `size` that begin every `slide`, so a row may be in several windows.

    Also called hopping windows. They begin at multiples of `slide`, plus the `offset`.

    Example:

        >>> orders.key_by("user").window(tg.Sliding("4s", "2s")).aggregate(total=tg.sum("amount")).show()
        +------+--------------+------------+-------+
        | user | window_start | window_end | total |
        +------+--------------+------------+-------+
        | ann  |        -2000 |       2000 |    30 |
        | bob  |        -2000 |       2000 |     5 |
        | ann  |            0 |       4000 |    42 |
        | bob  |            0 |       4000 |     5 |
        | ann  |         2000 |       6000 |    12 |
        +------+--------------+------------+-------+
    """

    size: Duration
    slide: Duration
    offset: Duration = 0
    size_ms: int = field(init=False, repr=False, compare=False)
    slide_ms: int = field(init=False, repr=False, compare=False)
    offset_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, size_ms=_positive_ms(self.size, "Sliding: size"))
        _set(self, slide_ms=_positive_ms(self.slide, "Sliding: slide"))
        _set(self, offset_ms=_offset_ms(self.offset, self.slide_ms, "Sliding"))
        if self.slide_ms > self.size_ms:
            raise ConfigurationError(
                f"Sliding: a slide of {self.slide!r} is longer than the size {self.size!r}, so rows between windows "
                "would be lost; use Tumbling, or filter these rows out first"
            )

    def last_end_ms(self, times: Times) -> Times:
        """Returns the end of the last of the windows that contain each time, in ms."""
        check_times(times)
        return floored(times, self.slide_ms, self.offset_ms) + self.size_ms

    def ended_ms(self, times: Times, moments: Times) -> Times:
        """Returns, for each row, the last end among its windows that have ended at the given time in `moments`, or a
        later end if none has ended.
        """
        return _ended(times, moments, self.last_end_ms(times), self.slide_ms)


@dataclass(frozen=True, slots=True)
class Cumulating(EventTimeWindow):
    """Windows that begin together and end at every `step` up to the length `max`: for example the day so far, every
    minute. `max` is a multiple of `step`.

    Example:

        >>> orders.key_by("user").window(tg.Cumulating("2s", "4s")).aggregate(total=tg.sum("amount")).show()
        +------+--------------+------------+-------+
        | user | window_start | window_end | total |
        +------+--------------+------------+-------+
        | ann  |            0 |       2000 |    30 |
        | bob  |            0 |       2000 |     5 |
        | ann  |            0 |       4000 |    42 |
        | bob  |            0 |       4000 |     5 |
        +------+--------------+------------+-------+
    """

    step: Duration
    max: Duration
    step_ms: int = field(init=False, repr=False, compare=False)
    max_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, step_ms=_positive_ms(self.step, "Cumulating: step"))
        _set(self, max_ms=_positive_ms(self.max, "Cumulating: max"))
        if self.max_ms % self.step_ms:
            raise ConfigurationError(
                f"Cumulating: max={self.max!r} is not a multiple of step={self.step!r}; the last window must end with "
                f"a step, as in max={self.step!r}"
            )

    def last_end_ms(self, times: Times) -> Times:
        """Returns the end of the longest window of each time, in ms."""
        check_times(times)
        return floored(times, self.max_ms, 0) + self.max_ms

    def ended_ms(self, times: Times, moments: Times) -> Times:
        """Returns, for each row, the last end among its windows that have ended at the given time in `moments`, or a
        later end if none has ended.
        """
        return _ended(times, moments, self.last_end_ms(times), self.step_ms)


@dataclass(frozen=True, slots=True)
class Session(EventTimeWindow):
    """Windows of the rows of a key that follow each other within `gap`. A session ends `gap` after its last row.

    Each row may have its own gap (Flink's dynamic gap): `gap` is then the name of a column, or a polars expression,
    with durations or whole numbers of milliseconds. A row at `t` keeps its session open until `t + gap`, and rows whose
    intervals overlap or touch are in one session. A string that is a duration ("30min") is used as a duration.
    `pl.col("30min")` is the column of that name.

    Example:

        >>> orders.key_by("user").window(tg.Session("1s")).aggregate(total=tg.sum("amount")).show()
        +------+--------------+------------+-------+
        | user | window_start | window_end | total |
        +------+--------------+------------+-------+
        | ann  |            0 |       1000 |    30 |
        | ann  |         2000 |       3000 |    12 |
        | bob  |         1000 |       2000 |     5 |
        +------+--------------+------------+-------+
    """

    gap: Duration | ColumnLike | pl.Expr
    gap_ms: int | None = field(init=False, repr=False, compare=False)
    """The gap of all rows in ms, or None if each row has its own gap."""
    column: ColumnLike | None = field(init=False, repr=False)
    """The column with the gaps, or the expression that computes them. None if all rows have the same gap."""

    def __post_init__(self) -> None:
        gap = self.gap
        if isinstance(gap, str) and gap.isidentifier() and not _is_duration(gap):
            object.__setattr__(self, "column", gap)
            object.__setattr__(self, "gap_ms", None)
        elif isinstance(gap, ColumnExpression) or is_polars_expression(gap):
            column = column_like(gap, "Session: gap")
            object.__setattr__(self, "gap", column)
            object.__setattr__(self, "column", column)
            object.__setattr__(self, "gap_ms", None)
        else:
            object.__setattr__(self, "column", None)
            _set(self, gap_ms=_positive_ms(gap, "Session: gap"))

    def of_column(self, column: str) -> Session:
        """Returns a copy of this specification with the gap in the column `column`."""
        made = copy(self)
        object.__setattr__(made, "column", column)
        return made

    def last_end_ms(self, times: Times) -> Times:
        """Returns the end of the session that each row would form alone, in ms.

        All rows must have the same gap. Other rows may extend the session.
        """
        check_times(times)
        assert self.gap_ms is not None, "a gap of each row"
        return times + self.gap_ms

    def ended_ms(self, times: Times, moments: Times) -> Times:
        """Returns, for each row, the last time up to `moments` at which a session of the row may have ended.

        Sessions may end at any time, so this is the time in `moments`, but at most the end of the row's own gap plus 1
        ms.
        """
        if self.gap_ms is None:  # and so may the session of the row alone
            return moments
        return np.minimum(self.last_end_ms(times) + 1, moments)


@dataclass(frozen=True, slots=True)
class Count:
    """Windows of `rows` rows of a key, in the order of arrival. They do not depend on event time.

    With `slide`, windows overlap as in Flink's `countWindow(size, slide)`: after every `slide` rows of a key there is a
    result over its last `rows` rows, or over all of its rows while there are fewer. A `slide` equal to `rows` has no
    effect.

    With `timeout`, a window that is not full fires when this processing time has passed since its first row:
    `Count(100, timeout="1s")` is a hundred rows or a second. With `fire_at_end`, windows that are not full fire when
    the input ends; with a slide this is the next window, with the rows that it has so far. Without `fire_at_end` they
    do not fire, and the log reports how many rows are in no result.
    """

    rows: int
    slide: int | None = field(default=None, kw_only=True)
    timeout: Duration | None = field(default=None, kw_only=True)
    fire_at_end: bool = field(default=False, kw_only=True)
    timeout_ms: int | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if not _is_row_count(self.rows):
            raise ConfigurationError(f"Count: rows={self.rows!r} must be a whole number, 1 or more, as in Count(100)")
        if not isinstance(self.fire_at_end, bool):
            raise ConfigurationError(f"Count: fire_at_end={self.fire_at_end!r} must be True or False; give one of them")
        if self.slide is not None:
            self._check_slide(self.slide)
        if self.timeout is not None:
            _set(self, timeout_ms=_positive_ms(self.timeout, "Count: timeout"))

    def _check_slide(self, slide: int) -> None:
        if not _is_row_count(slide):
            raise ConfigurationError(
                f"Count: slide={slide!r} must be a whole number, 1 or more, as in Count(100, slide=10)"
            )
        if slide > self.rows:
            raise ConfigurationError(
                f"Count: a slide of {slide} rows is longer than the window of {self.rows} rows, so rows between "
                "windows would be in none; give a slide of up to the window, or filter these rows out first"
            )
        if slide == self.rows:
            object.__setattr__(self, "slide", None)
        elif self.timeout is not None:
            raise ConfigurationError(
                "Count: timeout= cannot be combined with slide=: after a window that came out early, the rows of the "
                "next window are not defined; remove one of them, or use tg.Sliding for the rows of the last seconds"
            )


@dataclass(frozen=True, slots=True)
class Clock:
    """Represents processing time, in place of an event-time column.

    With `fires_at_end`, open windows fire at the end of the input.
    """

    fires_at_end: bool = False


WindowSpec: TypeAlias = Tumbling | Sliding | Cumulating | Session | Count
"""The window specifications that `window` accepts."""

TimeOf: TypeAlias = str | Clock | None
"""The time of windows: the name of an event-time column, a `Clock` for processing time, or None for count windows."""


def check_times(times: Times) -> None:
    """Raises ConfigurationError for an event time that is out of the range for which windows are supported."""
    if len(times) and not -TIME_MS_MAX <= int(times.min()) <= int(times.max()) <= TIME_MS_MAX:
        far = times[(times > TIME_MS_MAX) | (times < -TIME_MS_MAX)]
        raise ConfigurationError(
            f"{int(far[0])} ms since 1970 is out of range for event time; an int64 column holds milliseconds: "
            "convert or filter such rows before the window"
        )


@dataclass(frozen=True, slots=True)
class DueByWindows:
    """The `Due` rule of windows: the treatment of a row changes when a watermark ends one of its windows, including the
    allowed lateness.
    """

    spec: EventTimeWindow
    allowed_lateness_ms: int = 0

    def __call__(self, times: Times, watermarks: Times) -> Times:
        """Returns, for each row, the greatest watermark up to the given one at which a window of the row was over.

        Returns a later watermark if no window was over. Times out of range are clipped, because the window operator
        raises the error for them later.
        """
        zoned = isinstance(self.spec, Tumbling) and self.spec.timezone is not None
        times = np.clip(times, *(_CALENDAR_MS if zoned else (-TIME_MS_MAX, TIME_MS_MAX)))
        moments = watermarks + 1 - self.allowed_lateness_ms
        ended = self.spec.ended_ms(times, np.maximum(moments, times))
        return np.where(ended <= moments, ended - 1 + self.allowed_lateness_ms, watermarks + 1)


def _ended(times: Times, moments: Times, last_ends: Times, step_ms: int) -> Times:
    """Returns, for each row, the last window end that is after the row and not later than the time in `moments`.

    Window ends are `step_ms` apart. Returns the last window end if there is none.
    """
    ends = last_ends - np.maximum(0, -((moments - last_ends) // step_ms)) * step_ms
    return np.where(ends > times, ends, last_ends)


def steps_of(times: Times, step_ms: int, offset_ms: int) -> Times:
    """Returns how many whole steps each time is after the offset, in a new array. All arguments are in ms."""
    steps = times - offset_ms
    steps //= step_ms
    return steps


def floored(times: Times, step_ms: int, offset_ms: int) -> Times:
    """Returns the last multiple of the step, plus the offset, that is not later than each time.

    Computed by division and multiplication, because NumPy divides by one number many times faster than it computes
    remainders.
    """
    found = steps_of(times, step_ms, offset_ms)
    found *= step_ms
    found += offset_ms
    return found


def _is_duration(text: str) -> bool:
    try:
        parse_duration_ms(text, setting="a gap")
    except ConfigurationError:
        return False
    return True


def _is_row_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _set(spec: object, **fields: int) -> None:
    """Computes and sets the derived fields, in ms, of a frozen window specification."""
    for name, value in fields.items():
        object.__setattr__(spec, name, value)


def _positive_ms(duration: Duration, setting: str) -> int:
    parsed = parse_duration_ms(duration, setting=setting)
    if not 0 < parsed <= SIZE_MS_MAX:
        raise ConfigurationError(
            f"{setting}: {duration!r} is not between 1 ms and 35,000 years; give a duration in this range"
        )
    return parsed


def _offset_ms(offset: Duration, period_ms: int, spec: str) -> int:
    setting = f"{spec}: offset"
    if isinstance(offset, str):
        text = offset.strip()
        negative = text.startswith("-")
        parsed = parse_duration_ms(text[1:] if negative else text, setting=setting)
    else:
        negative = offset < timedelta() if isinstance(offset, timedelta) else isinstance(offset, int) and offset < 0
        parsed = parse_duration_ms(-offset if negative else offset, setting=setting)
    if parsed >= period_ms:
        raise ConfigurationError(
            f"{spec}: the offset {offset!r} must be less than the time between two windows, {period_ms} ms; windows "
            "repeat, so a larger offset changes nothing"
        )
    return -parsed % period_ms if negative else parsed  # the windows repeat, so both name the same ones


def _check_timezone(timezone: str) -> None:
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
        raise ConfigurationError(
            f"Tumbling: there is no time zone {timezone!r} here; give a name of the IANA database, such as "
            '"Europe/Berlin", and install tzdata if the system has no such database'
        ) from error


DAY_MS = 86_400_000


def day_starts_around(
    times: NDArray[np.int64], timezone: str, into_day_ms: int, days: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns local days, numbered from 1970-01-01, and their starts in ms: the days that contain the times, and `days`
    days before and after each.

    Days begin `into_day_ms` ms after midnight in local time. Raises ConfigurationError outside of the years 1 to 9999,
    which calendars have.
    """
    utc_days = distinct_integers(times // DAY_MS)
    # Local time differs from UTC by less than a day, and a start is up to a day after midnight.
    around = np.arange(-days - 2, days + 2)
    known = distinct_integers((utc_days[:, None] + around).ravel())
    starts = np.array([_day_start(timezone, day, into_day_ms) for day in known.tolist()], dtype=np.int64)
    return known, starts


@lru_cache(maxsize=_CACHED_DAYS)
def _day_start(timezone: str, day: int, into_day_ms: int) -> int:
    try:
        wall = _EPOCH + timedelta(days=day, milliseconds=into_day_ms)
        offset = wall.replace(tzinfo=ZoneInfo(timezone)).utcoffset()
    except OverflowError as error:
        raise ConfigurationError(
            f"day {day} since 1970 is outside of the years 1 to 9999, and has no date in {timezone}; filter such rows "
            "before the window"
        ) from error
    assert offset is not None, f"{timezone} has no offset"
    return day * DAY_MS + into_day_ms - offset // timedelta(milliseconds=1)


def ends_of(spec: Tumbling | Sliding | Cumulating, times: Times) -> Iterator[tuple[NDArray[np.int64], Times]]:
    """Yields row indices and the ends of their windows, in ms: first the last window of each row, then the window
    before, and so on.

    A row is listed once for each of its windows.
    """
    ends = spec.last_end_ms(times)
    rows = np.arange(len(times), dtype=np.int64)
    yield rows, ends
    if isinstance(spec, Tumbling):
        return
    step_ms = spec.slide_ms if isinstance(spec, Sliding) else spec.step_ms
    while (inside := ends - step_ms > times).any():
        rows, times, ends = rows[inside], times[inside], ends[inside] - step_ms
        yield rows, ends


def starts_of(spec: Tumbling | Sliding | Cumulating, ends: Times) -> Times:
    """Returns the starts of the windows with these ends, in ms."""
    match spec:
        case Tumbling():
            return spec.bounds_ms(ends - 1)[0]
        case Sliding():
            return ends - spec.size_ms
        case Cumulating():
            return floored(ends - 1, spec.max_ms, 0)
