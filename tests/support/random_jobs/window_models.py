"""Computes the results of windows in plain Python: which rows are late, and in which windows other rows count.

Rules:

- Where all rows arrive by one channel, each row meets the watermark that the rows before it have made. The data
  therefore determines which rows are late, and in which windows the other rows still count (`read_in_order`).
- Where rows arrive by several channels, the slowest channel determines the watermark. It is not known which one that
  is, but its watermark is never beyond the watermark that the rows of a split have made themselves. A row may be late
  only if it is late by the earlier rows of its split (`late_in_split`). If it is not on the late side, it certainly
  counts in its last window. It counts in an earlier window if that window is not over by the rows of its split
  (`bounds_of_results`). Every row is in one place.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tidegate.operators.windows.window_specs import Count, Cumulating, Session, Sliding, Tumbling

Row: TypeAlias = tuple[int, int, int]
"""Key, value and event time."""
Window: TypeAlias = tuple[int, int, int]
"""Key, start and end."""
Sums: TypeAlias = tuple[int, int]
"""Number of rows, and the sum of their values."""
Bounded: TypeAlias = Tumbling | Sliding | Cumulating
Timed: TypeAlias = Bounded | Session
Judged: TypeAlias = tuple[Row, int | None]
"""A row, and the watermark that earlier rows of its split have made, or None before there is one."""

_HELD_BACK_MS = 1
"""A row at the end of a session still extends it, so sessions end this much later, in ms."""


def judged(rows: Sequence[Row], bound_ms: int, moves: Sequence[bool]) -> list[Judged]:
    """Returns the rows of a split, each with the watermark before it. `moves` marks rows that advance event time."""
    found = list[Judged]()
    newest_ms = None
    for row, moving in zip(rows, moves, strict=True):
        found.append((row, None if newest_ms is None else newest_ms - bound_ms - 1))
        if moving:
            newest_ms = row[2] if newest_ms is None else max(newest_ms, row[2])
    return found


def gap_of(spec: Session) -> int:
    """Returns the gap of all rows."""
    assert spec.gap_ms is not None, "a gap of each row"
    return spec.gap_ms


def is_late(spec: Timed, lateness_ms: int, row: Row, watermark_ms: int | None) -> bool:
    """Returns whether a row is late by a watermark: its last window is over, or a session of it alone would be."""
    if watermark_ms is None:
        return False
    if isinstance(spec, Session):
        return row[2] + gap_of(spec) - 1 + lateness_ms <= watermark_ms - _HELD_BACK_MS
    return max(end for _, end in windows_of(spec, row[2])) - 1 + lateness_ms <= watermark_ms


def late_in_split(spec: Timed, lateness_ms: int, rows: Iterable[Judged]) -> list[Row]:
    """Returns the rows that are late by earlier rows of their splits. No other rows may be late."""
    return [row for row, watermark_ms in rows if is_late(spec, lateness_ms, row, watermark_ms)]


def without_late(
    spec: Timed, lateness_ms: int, rows: Sequence[Judged], found: Counter[str]
) -> tuple[list[Row], list[Judged]]:
    """Returns the rows that were emitted as late and may be, and all other rows."""
    late = Counter(late_in_split(spec, lateness_ms, rows)) & Counter(map(ast.literal_eval, found.elements()))
    gone = late.copy()
    left = list[Judged]()
    # Of equal rows of several splits, the late ones are taken that leave the fewest windows with certain rows.
    for row, watermark_ms in sorted(rows, key=lambda each: (each[1] is not None, each[1] or 0)):
        if gone[row] and is_late(spec, lateness_ms, row, watermark_ms):
            gone[row] -= 1
        else:
            left.append((row, watermark_ms))
    return [*late.elements()], left


def read_in_order(spec: Timed, lateness_ms: int, rows: Sequence[Judged]) -> dict[Window, list[Sums]]:
    """Computes the sums of each window of rows that meet exactly these watermarks, without late rows.

    Two sessions with the same bounds may be emitted one after the other.
    """
    found: dict[Window, list[Sums]] = defaultdict(list)
    timely = [(row, at) for row, at in rows if not is_late(spec, lateness_ms, row, at)]
    if not isinstance(spec, Session):
        for window, counted in _in_windows(spec, lateness_ms, timely).items():
            found[window].append(_sums(counted))
        return found
    held: dict[int, list[tuple[int, int, list[Row]]]] = defaultdict(list)
    for row, watermark_ms in timely:
        key, _, time_ms = row
        start = time_ms
        end = time_ms + gap_of(spec)
        of = [row]
        kept = []
        for session in held[key]:
            over = watermark_ms is not None and session[1] - 1 + lateness_ms <= watermark_ms - _HELD_BACK_MS
            if over:
                found[key, session[0], session[1]].append(_sums(session[2]))
            elif session[0] <= end and start <= session[1]:
                start = min(start, session[0])
                end = max(end, session[1])
                of = of + session[2]
            else:
                kept.append(session)
        held[key] = [*kept, (start, end, of)]
    for key, sessions in held.items():
        for start, end, of in sessions:
            found[key, start, end].append(_sums(of))
    return found


def bounds_of_results(
    spec: Bounded, lateness_ms: int, rows: Iterable[Judged]
) -> tuple[dict[Window, Sums], dict[Window, Sums]]:
    """Computes which sums each window has for certain and at most, from rows that are not on the late side."""
    sure: dict[Window, list[Row]] = defaultdict(list)
    possible: dict[Window, list[Row]] = defaultdict(list)
    for row, watermark_ms in rows:
        windows = sorted(windows_of(spec, row[2]), key=lambda window: window[1])
        for start, end in windows:
            possible[row[0], start, end].append(row)
            last = end == windows[-1][1]
            if last or watermark_ms is None or end - 1 + lateness_ms > watermark_ms:
                sure[row[0], start, end].append(row)
    return {window: _sums(of) for window, of in sure.items()}, {window: _sums(of) for window, of in possible.items()}


def sums_so_far(results: Mapping[Window, Sequence[Sums]]) -> list[tuple[int, int, int, int, int]]:
    """Computes running totals over the windows of each key, in the order in which they end."""
    totals: Counter[int] = Counter()
    found = []
    for (key, start, end), ((number, total),) in sorted(results.items()):
        totals[key] += total
        found.append((key, start, end, number, totals[key]))
    return found


def full_counts(spec: Count, rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Computes the full count windows of each key."""
    of_keys = Counter(key for key, _, _ in rows)
    return [(key, spec.rows) for key, n in of_keys.items() for _ in range(n // spec.rows)]


def windows_of(spec: Bounded, time_ms: int) -> Iterator[tuple[int, int]]:
    """Yields the windows that hold a time, found by trying."""
    match spec:
        case Tumbling():
            start = time_ms - (time_ms - spec.offset_ms) % spec.size_ms
            yield start, start + spec.size_ms
        case Sliding():
            for start in range(time_ms - spec.size_ms + 1, time_ms + 1):
                if (start - spec.offset_ms) % spec.slide_ms == 0:
                    yield start, start + spec.size_ms
        case Cumulating():
            first = time_ms - time_ms % spec.max_ms
            for end in range(first + spec.step_ms, first + spec.max_ms + 1, spec.step_ms):
                if time_ms < end:
                    yield first, end


def _in_windows(spec: Bounded, lateness_ms: int, rows: Iterable[Judged]) -> dict[Window, list[Row]]:
    """Returns the rows of each window that is not over when they arrive."""
    found: dict[Window, list[Row]] = defaultdict(list)
    for row, watermark_ms in rows:
        for start, end in windows_of(spec, row[2]):
            if watermark_ms is None or end - 1 + lateness_ms > watermark_ms:
                found[row[0], start, end].append(row)
    return found


def _sums(rows: Sequence[Row]) -> Sums:
    return len(rows), builtins.sum(value for _, value, _ in rows)
