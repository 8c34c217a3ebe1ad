"""`Timers` manages the timers of one operator: for each key, the event times and processing times at which `on_timer`
is called.

Rules, as in Flink:

- A timer is registered once for each key, time and time domain, however often a function registers it.
- Timers that are due fire in the order of time, then of key, so the order is the same on every run.
- A timer that is registered while other timers fire, and that is already due, fires in the same round.
- Timers are keyed state in the backend. Registrations and deletions are written to the backend at the end of a batch of
  rows, or of a step of timers.

`TimerStep` holds the timers of one step, which is the unit in which timers fire. The timers that are due are read from
the backend when the step begins, and changes are written at its end. A timer that is registered within the step, and is
due, fires in the step if its time is before the last timer that was read, or if all due timers were read. Otherwise it
fires in the next step.

`TimerChains` detects timers that register further timers without end. Operators report each timer that fires to it.
Rules:

- A timer that is later than all timers before it is progress. Timers up to a watermark, or up to the current time, that
  only register later timers end at some point, whatever their number is. A periodic timer can therefore catch up after
  any pause.
- Timers that register timers for the same or for earlier times may never end. They fail when `_CHAINED_TIMERS_MAX`
  timers for each remaining timer have fired without progress.
- At the end of event time every time is due, so later timers are no progress. Instead the number of timers must become
  smaller: the timers fail if there are as many as before after a long run (`_fires_in_a_run`).
"""

from __future__ import annotations

import enum
import heapq
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from tidegate.operators.row_values import column_of
from tidegate.operators.state.keys import Key, KeyCodec, KeyScope, Places, sort_key
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import DueTimers, KeyedTimers
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.stored_rows import DOMAINS

_DELETED_TOGETHER = 65_536
_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}


class TimeDomain(enum.Enum):
    """The clock of a timer: event time (watermarks) or processing time."""

    EVENT_TIME = "event_time"
    PROCESSING_TIME = "processing_time"

    @property
    def number(self) -> int:
        """Returns the number that represents the time domain in backends."""
        return DOMAINS.index(self.value)


class Timers:
    """The timers of one operator. `backend` stores them, and is None for a stream without keys, which has no timers."""

    def __init__(self, scope: KeyScope, backend: KeyedTimers | None = None) -> None:
        self._scope = scope
        self._backend = backend
        self._numbers: list[int] = []
        self._domains: list[int] = []
        self._moments: list[int] = []
        self._registered: list[bool] = []
        self._step: TimerStep | None = None
        self._step_changes: list[tuple[bool, int, int]] = []
        """Changes to the current step since the last mark.

        Each has True for a registration or False for a deletion, the time of the timer, and the number of its key.
        """
        self._ended: TimeDomain | None = None
        self.no_method: str | None = None
        """Text that names the method that timers call, if the function lacks it. None if it has the method."""

    def count(self, limit: int) -> int:
        """Returns an upper bound for the number of timers. Stops counting at `limit`."""
        return len(self._numbers) + (0 if self._backend is None else self._backend.count(limit))

    def change(self, domain: TimeDomain, moment: int, registered: bool) -> None:
        """Registers or deletes a timer of the current key. `moment` is its time in ms.

        Raises ConfigurationError for a registration if the function has no method for timers.
        """
        if registered:
            if self.no_method is not None:
                raise ConfigurationError(f"{self.no_method}, but a timer is registered; add the method")
            if domain is self._ended:
                return
        number = self._scope.current_number("a timer")
        self._note(number, domain.number, moment, registered)
        if self._step is not None and self._step.domain == domain.number:
            changed = (self._step.register if registered else self._step.delete)(moment, number)
            if changed:
                self._step_changes.append((registered, moment, number))

    def change_many(self, domain: TimeDomain, moments: Sequence[int], registered: bool, numbers: Sequence[int]) -> None:
        """Registers or deletes timers.

        Timer i has the time `moments[i]`, in ms, and the key with the number `numbers[i]`. Raises ConfigurationError
        for registrations if the function has no method for timers.
        """
        if registered:
            if self.no_method is not None:
                raise ConfigurationError(f"{self.no_method}, but a timer is registered; add the method")
            if domain is self._ended:
                return
        self._numbers += numbers
        self._domains += [domain.number] * len(numbers)
        self._moments += moments
        self._registered += [registered] * len(numbers)

    def due(self, domain: TimeDomain, time_ms: int, timers_max: int) -> DueTimers:
        """Returns the next timers that are due at `time_ms`, up to `timers_max`.

        The timers stay registered. Used for functions that are called once with all timers of a step.
        """
        assert self._backend is not None and not self._numbers, "a step within a batch"
        return self._backend.due(domain.number, time_ms, timers_max)

    def first_ms(self, domain: TimeDomain) -> int | None:
        """Returns the time of the timer that fires next, in ms, or None if there is no timer."""
        return None if self._backend is None else self._backend.first_ms(domain.number)

    @property
    def changes(self) -> int:
        """Returns the number of timer registrations and deletions since the last flush."""
        return len(self._moments)

    def first_change_ms(self, domain: TimeDomain, since: int) -> int | None:
        """Returns the earliest time, in ms, among the registrations and deletions after the first `since` ones. None if
        there are none.

        These changes are not in the backend before the next flush, so `first_ms` ignores them.
        """
        number = domain.number
        moments = [
            moment for of, moment in zip(self._domains[since:], self._moments[since:], strict=True) if of == number
        ]
        return min(moments, default=None)

    def is_due(self, domain: TimeDomain, time_ms: int) -> bool:
        """Returns whether any timer of the domain has a time of `time_ms` or earlier."""
        first_ms = self.first_ms(domain)
        return first_ms is not None and first_ms <= time_ms

    def begin_step(self, domain: TimeDomain, time_ms: int, timers_max: int, codec: KeyCodec) -> TimerStep:
        """Begins a step with the next timers that are due at `time_ms`, up to `timers_max`.

        `pop` removes them one by one, and `flush` ends the step.
        """
        assert self._backend is not None and not self._numbers, "a step within a batch"
        due = self._backend.due(domain.number, time_ms, timers_max)
        self._step = TimerStep(domain.number, time_ms, due, codec)
        return self._step

    def pop(self) -> tuple[int, int] | None:
        """Removes the timer of the step that fires next.

        Returns its time in ms and the number of its key, or None if no timer is left.
        """
        assert self._step is not None, "no step"
        timer = self._step.pop()
        if timer is not None:
            self._note(timer[1], self._step.domain, timer[0], False)
        return timer

    def mark(self) -> int:
        """Returns a position for `back_to`, which undoes the later registrations and deletions."""
        self._step_changes.clear()
        return len(self._numbers)

    def back_to(self, mark: int) -> None:
        """Undoes the registrations and deletions that were made after the call of `mark` that returned `mark`."""
        for changes in (self._numbers, self._domains, self._moments, self._registered):
            del changes[mark:]
        while self._step_changes:
            assert self._step is not None, "a step changes only while it is under way"
            self._step.undo(*self._step_changes.pop())

    def flush(self) -> None:
        """Writes the registrations and deletions of timers to the backend.

        Called at the end of a batch of rows, and of a step of timers.
        """
        self._step = None
        self._step_changes.clear()
        if self._numbers:
            assert self._backend is not None
            keys = self._scope.entered_columns(self._numbers)
            self._backend.change(keys, self._domains, self._moments, self._registered)
            self._numbers, self._domains, self._moments, self._registered = [], [], [], []

    def end(self, domain: TimeDomain) -> None:
        """Ends a time domain: registrations of timers are ignored from now on."""
        self._ended = domain

    def drop(self, domain: TimeDomain) -> None:
        """Deletes all timers of a time domain."""
        while self._backend is not None and self.first_ms(domain) is not None:
            due = self._backend.due(domain.number, MAX_WATERMARK_MS, _DELETED_TOGETHER)
            rows = len(due.moments)
            self._backend.change(due.keys, [domain.number] * rows, due.moments, [False] * rows)

    def _note(self, number: int, domain: int, moment: int, registered: bool) -> None:
        self._numbers.append(number)
        self._domains.append(domain)
        self._moments.append(moment)
        self._registered.append(registered)


class TimerService:
    """Registers and deletes timers of the current key. Times are in milliseconds since 1970."""

    def __init__(
        self, timers: Timers, scope: KeyScope, now_ms: Callable[[], int], watermark_ms: Callable[[], int]
    ) -> None:
        self._timers = timers
        self._scope = scope
        self._now_ms = now_ms
        self._watermark_ms = watermark_ms

    def current_processing_time(self) -> int:
        """Returns the processing time in ms since 1970: when the task started to process the current row or timer."""
        return self._now_ms()

    def current_watermark(self) -> int:
        """Returns the newest watermark in ms. `MIN_WATERMARK_MS` before the first watermark, also after a restore."""
        return self._watermark_ms()

    def register_event_time_timer(self, timestamp_ms: int) -> None:
        """Registers an event-time timer of the current key: `on_timer` is called when the watermark reaches
        `timestamp_ms`.

        If the watermark has already passed this time, the timer fires with the next watermark.
        """
        self._timers.change(TimeDomain.EVENT_TIME, moment_of(timestamp_ms), registered=True)

    def register_processing_time_timer(self, timestamp_ms: int) -> None:
        """Registers a processing-time timer of the current key: `on_timer` is called when the clock reaches
        `timestamp_ms`.

        If the input ends before, the timer is dropped, or fires at the end with `process(..., fire_at_end=True)`.
        """
        self._timers.change(TimeDomain.PROCESSING_TIME, moment_of(timestamp_ms), registered=True)

    def delete_event_time_timer(self, timestamp_ms: int) -> None:
        """Deletes the event-time timer of the current key at `timestamp_ms`, if it is registered."""
        self._timers.change(TimeDomain.EVENT_TIME, moment_of(timestamp_ms), registered=False)

    def delete_processing_time_timer(self, timestamp_ms: int) -> None:
        """Deletes the processing-time timer of the current key at `timestamp_ms`, if it is registered."""
        self._timers.change(TimeDomain.PROCESSING_TIME, moment_of(timestamp_ms), registered=False)

    def register_many(self, moments: Any, at: Places = None, domain: TimeDomain = TimeDomain.EVENT_TIME) -> None:
        """Registers a timer for the key of each row, in `process_batch`.

        `moments` is an array of milliseconds since 1970 or of timestamps, or one time for all rows. `at` selects rows,
        as for `ValueState.get_many`. `domain` is the clock, event time by default. Raises ValueError for a null, or if
        there are more or fewer times than rows.
        """
        self._change_many(domain, moments, at, True)

    def delete_many(self, moments: Any, at: Places = None, domain: TimeDomain = TimeDomain.EVENT_TIME) -> None:
        """Deletes the timers that `register_many` would register with the same arguments, if they exist."""
        self._change_many(domain, moments, at, False)

    def _change_many(self, domain: TimeDomain, moments: Any, at: Places, registered: bool) -> None:
        numbers = self._scope.rows(at, "register_many").tolist()
        times = [moment_of(moments)] * len(numbers) if isinstance(moments, int) else _moments(moments)
        if len(times) != len(numbers):
            raise ValueError(
                f"{len(times)} times were given for timers of {len(numbers)} rows; give one time for each row"
            )
        self._timers.change_many(domain, times, registered, numbers)


def _moments(given: Any) -> list[int]:
    column = given if isinstance(given, pa.Array | pa.ChunkedArray) else pa.array(given)
    if column.null_count:
        raise ValueError("one of the times for timers is null; select the other rows with at=")
    if not pa.types.is_timestamp(column.type):
        times: list[int] = column_of(column, pa.int64()).to_pylist()
        return times
    raw = column.cast(pa.int64()).to_numpy()
    moments: list[int] = (raw * 1000 if column.type.unit == "s" else raw // _PER_MS[column.type.unit]).tolist()
    return moments


def moment_of(timestamp_ms: int) -> int:
    """Returns the time of a timer in ms, limited to the range from `MIN_WATERMARK_MS` to `MAX_WATERMARK_MS`.

    Raises ConfigurationError if it is not an integer.
    """
    try:
        moment_ms = operator.index(timestamp_ms)
    except TypeError:
        raise ConfigurationError(
            f"the time of a timer must be an integer in milliseconds since 1970, not {timestamp_ms!r}"
        ) from None
    # A moment beyond int64 is the end of time, or its beginning.
    return max(MIN_WATERMARK_MS, min(MAX_WATERMARK_MS, moment_ms))


_Entry = tuple[int, tuple[Any, ...], int]


class TimerStep:
    """The timers that fire in one step. Their keys are numbered from 0.

    No keys are added during the step, because a firing timer can register timers only for its own key.
    """

    def __init__(self, domain: int, time_ms: int, due: DueTimers, codec: KeyCodec) -> None:
        self.domain = domain
        self._time_ms = time_ms
        encoded = codec.encode(due.keys)
        numbers = {key: number for number, key in enumerate(dict.fromkeys(encoded))}
        self.keys: Sequence[Key] = tuple(numbers)
        """The Python keys of the step, by number."""
        first_rows = {key: row for row, key in reversed(list(enumerate(encoded)))}
        self.columns: pa.RecordBatch = due.keys.take(pa.array([first_rows[key] for key in self.keys], pa.int64()))
        """The keys of the step as stored key columns, in the order of their numbers."""
        self._orders = [sort_key(key) for key in self.keys]
        self._waiting: list[_Entry] = [
            self._entry(moment, numbers[key]) for moment, key in zip(due.moments, encoded, strict=True)
        ]
        self._last = self._waiting[-1] if due.more else None
        self._registered = {(moment, number) for moment, _, number in self._waiting}

    def register(self, moment: int, number: int) -> bool:
        """Records that a timer of a key was registered. Returns True if this adds the timer to the step, because the
        timer is due now.

        `moment` is its time in ms, and `number` the number of its key.
        """
        entry = self._entry(moment, number)
        if moment > self._time_ms or (self._last is not None and entry > self._last):
            return False
        if (moment, number) in self._registered:
            return False
        self._registered.add((moment, number))
        heapq.heappush(self._waiting, entry)
        return True

    def delete(self, moment: int, number: int) -> bool:
        """Records that a timer of a key was deleted. Returns True if the timer was part of this step.

        `moment` is its time in ms, and `number` the number of its key.
        """
        if (moment, number) not in self._registered:
            return False
        self._registered.remove((moment, number))
        return True

    def undo(self, registered: bool, moment: int, number: int) -> None:
        """Undoes a change of the step: the registration (`registered` is True) or deletion of a timer that has not
        fired.
        """
        if registered:
            self._registered.discard((moment, number))
        else:
            # Its entry waits still, because only `pop` removes entries.
            self._registered.add((moment, number))

    def pop(self) -> tuple[int, int] | None:
        """Removes the timer that fires next.

        Returns its time in ms and the number of its key, or None if no timer is left.
        """
        while self._waiting:
            moment, _, number = heapq.heappop(self._waiting)
            if (moment, number) in self._registered:
                self._registered.remove((moment, number))
                return moment, number
        return None

    def _entry(self, moment: int, number: int) -> _Entry:
        return moment, self._orders[number], number


_CHAINED_TIMERS_MAX = 1_000
"""How many timers may fire in a row without progress, for each remaining timer.

A timer that is later than all timers before it is progress.
"""
_FIRES_AT_END = 250_000
_FIRES_AT_END_A_TIMER = 10_000
"""How many timers may fire at the end of event time, for each remaining timer, before the number of timers must have
become smaller.
"""
_COUNTED_MAX = 1_000_000


class TimerChains:
    """Detects endless chains of timers among the timers that fire up to one watermark, or up to one time of the clock.

    `at_end` is True if the watermark is the end of event time.
    """

    def __init__(self, timers: Timers, at_end: bool) -> None:
        self._timers = timers
        self._newest_ms = MIN_WATERMARK_MS
        self._fires_left = self._counted_to = _CHAINED_TIMERS_MAX
        self._all_counted = False
        self._at_end = at_end
        self._fires_left_at_end = 0
        self._timers_before: int | None = None

    def begin_step(self) -> None:
        """Records that a step of timers begins.

        Raises RuntimeError if the timers at the end of event time do not become fewer.
        """
        if self._at_end and self._fires_left_at_end <= 0:
            timers = self._timers.count(_COUNTED_MAX)
            if self._timers_before is not None and timers >= self._timers_before:
                raise RuntimeError(
                    "on_timer registers event-time timers without end: the input has ended, so every timer fires at "
                    f"once. {_fires_in_a_run(timers)} timers have fired, and {timers} are still registered, no fewer "
                    "than before. Register no timers while context.current_watermark is tg.MAX_WATERMARK_MS"
                )
            self._timers_before = timers
            self._fires_left_at_end = _fires_in_a_run(timers)

    def fires(self, moment_ms: int) -> None:
        """Records that a timer fires. Raises RuntimeError if too many timers have fired without progress."""
        if moment_ms > self._newest_ms:
            self._newest_ms = moment_ms
            self._fires_left = self._counted_to = _CHAINED_TIMERS_MAX
            self._all_counted = False
        else:
            self._fires_without_progress(moment_ms)
        self._fires_left_at_end -= 1

    def _fires_without_progress(self, moment_ms: int) -> None:
        if self._fires_left == 0:
            if self._all_counted:
                raise RuntimeError(
                    f"on_timer registers timers without end for times that have passed ({moment_ms} ms since 1970 or "
                    f"earlier): more than {_CHAINED_TIMERS_MAX} fired for each timer that is left; a timer that "
                    "registers itself again must be for a later time"
                )
            # Each remaining timer may be the first of a chain. Counting them costs no more than the fired timers did.
            timers = self._timers.count(self._counted_to)
            self._all_counted = timers < self._counted_to
            self._fires_left = _CHAINED_TIMERS_MAX * (timers + 1)
            self._counted_to *= _CHAINED_TIMERS_MAX
        self._fires_left -= 1


def _fires_in_a_run(timers: int) -> int:
    return _FIRES_AT_END + _FIRES_AT_END_A_TIMER * timers
