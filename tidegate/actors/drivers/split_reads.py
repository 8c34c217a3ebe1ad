"""`SplitReads`: reads the source of one task, and waits there while it has no rows.

Rules:

- There is one reader. It is made with the first read, used by one thread at a time, and closed once: by whoever reads
  where the task is closed meanwhile, so that it is never used by two threads.
- A read may be patient: then it goes on while no split has anything, with pauses, so that the task is not woken up ten
  times a second to hear that there is nothing. Barriers do not wait for it: they pass on the task's own thread.
- It comes back at once when there is anything to tell, when the job is held back, and when the task is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tidegate.actors.drivers.held_sources import HeldSources
from tidegate.actors.graph.job_graph import SourceSpec
from tidegate.actors.graph.source_checks import checked_read
from tidegate.actors.task.messages.events import SourceBatchRead
from tidegate.actors.task.messages.instructions import ReadSource
from tidegate.actors.task.pipeline.source_cursor import PAUSE_MAX_MS
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.schemas.owned_arrays import owned_batch

_OWN_PACKAGE = "tidegate."


class _Tried(NamedTuple):
    """An answer: that of the split after `empty` others. `nothing`: it is the last one, and has nothing as they had."""

    held: bool
    empty: int
    result: ReadResult
    nothing: bool


class SplitReads:
    """Those of one task; `over` is set when the task is, and nobody need wait any more."""

    def __init__(
        self, source: SourceSpec | None, held: HeldSources, over: threading.Event, now_ms: Callable[[], int]
    ) -> None:
        self._source = source
        self._held = held
        self._over = over
        self._now_ms = now_ms
        self._reader: SourceReader | None = None
        self._check: Callable[[SourceSplit, int, object], ReadResult]
        self._lock = threading.Lock()
        self._reading = False
        self._closed = False

    def read(self, instruction: ReadSource, patient: bool) -> SourceBatchRead | None:
        """Read one batch; nothing once this is closed. `patient`: it may take the time that the instruction gives."""
        with self._lock:
            if self._closed:
                return None
            if self._reader is None:
                assert self._source is not None
                self._reader = self._source.source.reader()
                self._check = partial(checked_read, self._source, self._source.source.schema)
            reader = self._reader
            self._reading = True
        try:
            until_s = time.monotonic() + (instruction.patience_ms if patient else 0) / 1000
            pause_ms = instruction.pause_ms
            tried = self._try(reader, instruction)
            while tried.nothing and time.monotonic() < until_s and not self._over.wait(pause_ms / 1000):
                pause_ms = min(2 * pause_ms, PAUSE_MAX_MS)
                tried = self._try(reader, instruction)
        finally:
            with self._lock:
                self._reading = False
                if self._closed:
                    reader.close()
        result = tried.result
        read = instruction.read, result.batch, result.next_offset, result.at_end, result.induces, tried.held
        return SourceBatchRead(
            self._now_ms(), *read, result.payload, result.found, tried.empty, result.bad, result.lost
        )

    def _try(self, reader: SourceReader, instruction: ReadSource) -> _Tried:
        if self._held.wait():
            return _Tried(True, 0, ReadResult(None, instruction.offset, False), nothing=False)
        split, offset, empty = instruction.split, instruction.offset, 0
        result = self._read(reader, split, offset, instruction.rows_max)
        for split, next_offset in instruction.others:
            if self._closed or not result.says_nothing(offset):
                break
            offset, empty = next_offset, empty + 1
            result = self._read(reader, split, offset, instruction.rows_max)
        return _Tried(False, empty, result, result.says_nothing(offset))

    def _read(self, reader: SourceReader, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        result = self._check(split, offset, reader.read(split, offset, rows_max))
        if result.batch is None or type(reader).__module__.startswith(_OWN_PACKAGE):
            return result
        return replace(result, batch=owned_batch(result.batch))  # a user's reader may use its arrays again

    def close(self) -> bool:
        """Release the source's files, now or after the read that is under way. Whether that is new."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            if self._reader is not None and not self._reading:
                self._reader.close()
            return True
