"""`WritePace`: decides when the thread that writes a large snapshot pauses, so that it hardly slows down processing.

`TaskEffects` wraps the store of a snapshot in a `PacedStore`. Rules:

- A small snapshot is written at full speed: its first `FREE_MS` of processor time cause no pause.
- Beyond that, writing takes one part in `PARTS` of the time, as long as other threads of the process work and the
  writing thread has to wait for a processor. With a free processor, or no other work, a pause gains nothing.
- The pauses of a snapshot have a limit in total, so that the snapshot is done well before its timeout and before the
  next snapshot.
- Closing the task ends a pause.

`WritePace` decides from the times that it gets. `PacedStore` measures and waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from tidegate.storage.files.store import Buffer, Store, WrappedStore

FREE_MS = 100
PARTS = 12
STEP_MS = 20
"""Processor time in ms that the writing thread uses between two decisions."""
PAUSED_MS_MAX = 10_000
WAITED_FROM = 0.1
OTHERS_FROM = 0.25
"""Fraction of the writing thread's own time. Work of other threads below this fraction does not count as work.

A process without rows does that much on a busy machine. Elapsed time is not a measure, because it grows with the load
of the machine.
"""

_NS_A_MS = 1_000_000
_SCHEDULING = "/proc/thread-self/schedstat"


def paused_ms_max(timeout_ms: int, interval_ms: int | None) -> int:
    """Returns the limit, in ms, of all pauses of a snapshot, given the timeout and interval of checkpoints."""
    limit_ms = min(PAUSED_MS_MAX, timeout_ms // 10)
    return limit_ms if interval_ms is None else min(limit_ms, interval_ms // 2)


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor times of a thread and its process so far, in ms. Only differences of two values are meaningful."""

    own_ms: float
    process_ms: float
    """Processor time of all threads of the process."""
    waited_ms: float | None
    """Time in ms for which the thread was ready to run and had no processor. None if the system does not report
    it.
    """


class WritePace:
    """Decides the pauses while one snapshot is written: at most `paused_ms_max` in total."""

    def __init__(self, paused_ms_max: int) -> None:
        self._free_ms = float(FREE_MS)
        self._left_ms = float(paused_ms_max)
        self._since: Usage | None = None

    def begin(self, now: Usage) -> None:
        """Records that a thread begins to write, or continues after a pause."""
        self._since = now

    def is_due(self, own_ms: float) -> bool:
        """Returns whether the thread should pause now, given the processor time in ms that it has used. The caller then
        calls `pause_ms`.
        """
        return self._since is not None and own_ms - self._since.own_ms >= STEP_MS

    def pause_ms(self, now: Usage) -> float:
        """Returns how long, in ms, the thread has to pause now. After a pause the thread must call `begin`."""
        assert self._since is not None, "a pace that has not begun"
        since = self._since
        own_ms = now.own_ms - since.own_ms
        if own_ms < STEP_MS:
            return 0.0
        self._since = now
        self._free_ms -= own_ms
        others_ms = now.process_ms - since.process_ms - own_ms
        waited_ms = own_ms if since.waited_ms is None or now.waited_ms is None else now.waited_ms - since.waited_ms
        held_up = others_ms >= OTHERS_FROM * own_ms and waited_ms >= WAITED_FROM * own_ms
        if self._free_ms >= 0 or not held_up:
            return 0.0
        pause_ms = min((PARTS - 1) * own_ms, self._left_ms)
        self._left_ms -= pause_ms
        return pause_ms


class PacedStore(WrappedStore):
    """A store that pauses during writes. All files of a snapshot share one `WritePace`.

    `wait` pauses for a number of seconds, or less.
    """

    def __init__(
        self,
        store: Store,
        pace: WritePace,
        wait: Callable[[float], object],
        usage: Callable[[], Usage] | None = None,
        own_ms: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(store)
        self._pace = pace
        self._wait = wait
        self._usage = usage_of_this_thread if usage is None else usage
        self._own_ms = own_ms_of_this_thread if own_ms is None else own_ms

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Writes a file, with pauses between its chunks."""
        return super().write(path, self._paced(chunks))

    def _paced(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        self._pace.begin(self._usage())
        for chunk in chunks:
            yield chunk
            # A snapshot has many small chunks, and measuring what all threads have used costs more than such a chunk.
            if self._pace.is_due(self._own_ms()) and (pause_ms := self._pace.pause_ms(self._usage())) > 0:
                self._wait(pause_ms / 1000)
                self._pace.begin(self._usage())


def paced(store: Store, paused_ms_max: int, closed: threading.Event) -> Store:
    """Returns a store for the files of one snapshot, which pauses for up to `paused_ms_max` in total, until
    `closed` is set.
    """
    return PacedStore(store, WritePace(paused_ms_max), closed.wait) if paused_ms_max else store


def own_ms_of_this_thread() -> float:
    """Returns the processor time, in ms, that the calling thread has used."""
    return time.thread_time_ns() / _NS_A_MS


def usage_of_this_thread() -> Usage:
    """Returns the processor times of the calling thread and its process."""
    waited_ms = None
    with suppress(OSError, ValueError, IndexError), open(_SCHEDULING, encoding="ascii") as file:
        waited_ms = int(file.read().split()[1]) / _NS_A_MS
    return Usage(own_ms_of_this_thread(), time.process_time_ns() / _NS_A_MS, waited_ms)
