"""`TimerRuns`: the order in which the timers of one clock fire, as sorted runs of moments and slots.

`ColumnarTimers` has one for each clock. Rules:
- Timers that are registered together become a run, sorted by moment. Runs are merged until each is at most half as
  long as the one before. So there are about log2(timers) runs, and a timer is moved about as often. This is the
  logarithmic method (Bentley and Saxe, Decomposable Searching Problems, 1980).
- The timers that are due first move to the front: runs that are sorted by moment and key. All timers up to the horizon,
  the last moment that has moved there, are in front. Only those registered since may not be; they follow at the next
  `due`.
- A slot is in at most one run. Deleting a timer leaves its slot where it is; the slot is skipped when its turn comes,
  or at a merge. If the timer is registered again before that, the slot is still in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.state.columnar.slot_flags import SlotFlags

FRONT_TIMERS = 4096
"""About so many timers move to the front at once."""

_LOOK_MIN, _LOOK_MAX = 16, 65_536

Moments = NDArray[np.int64]
Slots = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Run:
    """Sorted timers. Those before position `at` have left."""

    moments: Moments
    slots: Slots
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.slots) - self.at

    def until(self, moment: int) -> int:
        """The position after the last timer up to a moment."""
        return self.at + int(np.searchsorted(self.moments[self.at :], moment, side="right"))


class TimerRuns:
    """The timers of one clock.

    `live` tells which slots have a timer, `order` sorts slots by moment and key, `queued` flags the slots in a run.
    """

    def __init__(
        self,
        live: Callable[[Slots], NDArray[np.bool_]],
        order: Callable[[Moments, Slots], NDArray[np.int64]],
        queued: SlotFlags,
    ) -> None:
        self._live = live
        self._order = order
        self._queued = queued
        self._runs: list[_Run] = []
        self._fronts: list[_Run] = []
        self._horizon: int | None = None
        """The last moment that has moved to the front; None while nothing is in front."""
        self._first: int | None = None
        self._first_known = True

    def push(self, moments: Moments, slots: Slots) -> None:
        """Add timers, in slots that are in no run."""
        if not len(slots):
            return
        order = np.argsort(moments, kind="stable")
        self._queued.set(slots)
        self._add(self._runs, _Run(moments[order], slots[order]), by_key=False)
        self.registered(int(moments[order[0]]))

    def registered(self, first_ms: int) -> None:
        """Timers were registered, the first of them at this moment.

        A timer whose slot is in a run already needs nothing else.
        """
        if self._first_known and (self._first is None or first_ms < self._first):
            self._first = first_ms

    def deleted(self, first_ms: int) -> None:
        """Timers were deleted, the first of them at this moment."""
        if self._first_known and self._first is not None and first_ms <= self._first:
            self._first_known = False

    def forget_first(self) -> None:
        """The first moment is no longer known, and must be looked up."""
        self._first_known = False

    def first_ms(self) -> int | None:
        """The moment of the first timer; None without one."""
        if not self._first_known:
            moments = [moment for run in (*self._runs, *self._fronts) if (moment := self._head(run)) is not None]
            self._first, self._first_known = min(moments, default=None), True
            self._drop_empty()
        return self._first

    def due(self, time_ms: int, timers_max: int) -> tuple[Moments, Slots, bool]:
        """The first timers up to a moment, in order, and whether there may be more."""
        if self._horizon is not None:
            self._pull(self._horizon)
        while True:
            moments, slots = self._from_fronts(time_ms, timers_max)
            if len(slots) == timers_max or not self._fill(time_ms, timers_max):
                return moments, slots, len(slots) == timers_max

    def rebuild(self, kept: Slots) -> None:
        """Renumber: slot `kept[i]` becomes slot i. Every slot with a timer is kept."""
        for run in (*self._runs, *self._fronts):
            left = slice(run.at, None)
            live = self._live(run.slots[left])
            run.moments, run.slots = run.moments[left][live], run.slots[left][live]
            run.slots, run.at = np.searchsorted(kept, run.slots).astype(np.int32), 0
        self._drop_empty()

    def slots(self) -> Slots:
        """All slots that are in a run."""
        return np.concatenate([np.zeros(0, np.int32), *(run.slots[run.at :] for run in (*self._runs, *self._fronts))])

    def _head(self, run: _Run) -> int | None:
        """The moment of a run's first timer; None if it has none left. Removes deleted timers before it."""
        width = _LOOK_MIN
        while run.left:
            block = run.slots[run.at : run.at + width]
            live = self._live(block)
            gone = int(np.argmax(live)) if live.any() else len(block)
            self._queued.clear(block[:gone])
            run.at += gone
            if gone < len(block):
                return int(run.moments[run.at])
            width = min(2 * width, _LOOK_MAX)
        return None

    def _from_fronts(self, time_ms: int, timers_max: int) -> tuple[Moments, Slots]:
        """The first timers that are in front."""
        found = [self._first_of(front, time_ms, timers_max) for front in self._fronts]
        self._drop_empty()
        moments = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in found)])
        slots = np.concatenate([np.zeros(0, np.int32), *(part[1] for part in found)])
        if sum(len(part[1]) > 0 for part in found) > 1:
            order = self._order(moments, slots)
            moments, slots = moments[order], slots[order]
        return moments[:timers_max], slots[:timers_max]

    def _first_of(self, front: _Run, time_ms: int, timers_max: int) -> tuple[Moments, Slots]:
        self._head(front)
        stop = front.until(time_ms)
        found, count, at, width = [np.zeros(0, np.int64)], 0, front.at, timers_max
        while at < stop and count < timers_max:
            end = min(at + width, stop)
            live = at + np.flatnonzero(self._live(front.slots[at:end]))
            found.append(live)
            count, at, width = count + len(live), end, min(2 * width, _LOOK_MAX)
        positions = np.concatenate(found)[:timers_max]
        return front.moments[positions], front.slots[positions]

    def _fill(self, time_ms: int, timers_max: int) -> bool:
        """Move more due timers to the front. False if there are none."""
        wanted = max(timers_max, FRONT_TIMERS)
        runs = [run for run in self._runs if self._head(run) is not None]
        parts = [run.moments[run.at : min(run.until(time_ms), run.at + wanted)] for run in runs]
        moments = np.concatenate([np.zeros(0, np.int64), *parts])
        if not len(moments):
            return False
        nth = min(wanted, len(moments)) - 1
        cut = int(np.partition(moments, nth)[nth])
        self._horizon = cut
        self._pull(cut)
        return True

    def _pull(self, cut: int) -> None:
        """Move all timers up to a moment to the front."""
        moments, slots = [], []
        for run in self._runs:
            stop = run.until(cut)
            if stop > run.at:
                moments.append(run.moments[run.at : stop])
                slots.append(run.slots[run.at : stop])
                run.at = stop
        if not slots:
            return
        run = self._without_gone(np.concatenate(moments), np.concatenate(slots))
        if run.left:
            order = self._order(run.moments, run.slots)
            self._add(self._fronts, _Run(run.moments[order], run.slots[order]), by_key=True)
        self._drop_empty()

    def _add(self, runs: list[_Run], run: _Run, by_key: bool) -> None:
        """Append a run, and merge runs that are too short."""
        runs.append(run)
        while len(runs) > 1 and runs[-2].left < 2 * runs[-1].left:
            last, before = runs.pop(), runs.pop()
            merged = self._without_gone(
                np.concatenate((before.moments[before.at :], last.moments[last.at :])),
                np.concatenate((before.slots[before.at :], last.slots[last.at :])),
            )
            moments, slots = merged.moments, merged.slots
            order = self._order(moments, slots) if by_key else np.argsort(moments, kind="stable")
            runs.append(_Run(merged.moments[order], merged.slots[order]))

    def _without_gone(self, moments: Moments, slots: Slots) -> _Run:
        live = self._live(slots)
        if live.all():
            return _Run(moments, slots)
        self._queued.clear(slots[~live])
        return _Run(moments[live], slots[live])

    def _drop_empty(self) -> None:
        self._runs = [run for run in self._runs if run.left]
        self._fronts = [front for front in self._fronts if front.left]
        if not self._fronts:
            self._horizon = None
