"""Reads the source of one task (`SplitReads`), and makes reads pause while a reader of the job's output is behind
(`HeldSources`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tidegate.actors.graph.job_graph import SourceSpec
from tidegate.actors.graph.source_checks import checked_read
from tidegate.actors.task.events import SourceBatchRead
from tidegate.actors.task.instructions import ReadSource
from tidegate.actors.task.source_cursor import PAUSE_MAX_MS
from tidegate.connectors.source import NotifiedReader, ReadResult, SourceReader, SourceSplit
from tidegate.storage.argument_checks import check_methods_run_at_once
from tidegate.storage.errors import StorageError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.storage.schemas.batches import owned_batch

_OWN_PACKAGE = "tidegate."


class _Tried(NamedTuple):
    """Result of one try to read rows from a task's splits.

    `held`: the job's sources are paused, and nothing was read. `empty`: the number of splits without rows that were
    read first. `result`: the read of the last split. `nothing`: the last split has no rows either.
    """

    held: bool
    empty: int
    result: ReadResult
    nothing: bool


class SplitReads:
    """Reads the source of one task, and waits for rows on the reading thread.

    Rules:

    - There is one reader. It is created with the first read, used by one thread at a time, and closed once. If the task
      is closed during a read, the reading thread closes the reader.
    - A patient read continues, with pauses, while no split has rows, so that the task is not woken up ten times a
      second for nothing. Barriers do not wait for the read, because they are handled on the task's own thread.
    - A read returns at once when there is anything to report, when the sources are paused, and when the task has ended.
    - A reader is notified of completed checkpoints between two reads, and for the last time when it is closed.
    """

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
        self._completed: deque[Sequence[SourceSplit]] = deque(maxlen=1)
        """The splits of the newest completed checkpoint, until the reader is notified of it."""

    def checkpoint_completed(self, splits: Sequence[SourceSplit]) -> None:
        """Notifies the reader of a completed checkpoint with these splits, before its next read or when it is
        closed.
        """
        self._completed.append(splits)

    def read(self, instruction: ReadSource, patient: bool) -> SourceBatchRead | None:
        """Reads one batch. Returns None once closed. A `patient` read may wait as long as the instruction allows."""
        with self._lock:
            if self._closed:
                return None
            if self._reader is None:
                assert self._source is not None
                made = self._source.source.reader()
                check_methods_run_at_once(made, SourceReader, NotifiedReader)
                self._reader = made
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
                    self._close(reader)
        result = tried.result
        return SourceBatchRead(
            self._now_ms(),
            instruction.read,
            result.batch,
            result.next_offset,
            result.at_end,
            induces=result.induces,
            held=tried.held,
            payload=result.payload,
            found=result.found,
            empty=tried.empty,
            bad=result.bad,
            lost=result.lost,
            behind=result.behind,
        )

    def _try(self, reader: SourceReader, instruction: ReadSource) -> _Tried:
        if self._held.wait():
            return _Tried(True, 0, ReadResult(None, instruction.offset, False), nothing=False)
        self._notify(reader)
        split = instruction.split
        offset = instruction.offset
        empty = 0
        result = self._read(reader, split, offset, instruction.rows_max)
        for split, next_offset in instruction.others:
            if self._closed or not result.is_empty(offset):
                break
            offset = next_offset
            empty = empty + 1
            result = self._read(reader, split, offset, instruction.rows_max)
        return _Tried(False, empty, result, result.is_empty(offset))

    def _read(self, reader: SourceReader, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        result = self._check(split, offset, reader.read(split, offset, rows_max))
        if result.batch is None or type(reader).__module__.startswith(_OWN_PACKAGE):
            return result
        return replace(result, batch=owned_batch(result.batch))  # a user's reader may use its arrays again

    def close(self) -> bool:
        """Closes the source reader, now or after the running read. Returns False if it was closed before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            if self._reader is not None and not self._reading:
                self._close(self._reader)
            return True

    def _close(self, reader: SourceReader) -> None:
        try:
            self._notify(reader)
        finally:
            reader.close()

    def _notify(self, reader: SourceReader) -> None:
        while self._completed:
            assert isinstance(reader, NotifiedReader), "the readers of this source are notified"
            reader.checkpoint_completed(self._completed.popleft())


log = logging.getLogger(__name__)
LOOK_MS = 250
"""Time in ms between two checks whether a table's reader has paused the sources."""
HELD_S = 0.05
"""Seconds that a read waits before it returns without rows, while the sources are paused."""


class HeldSources:
    """Pauses the sources of a job while a reader of its output tables is behind.

    The reader of a table may be slower than the job (`tidegate/storage/tables/handed_rows.py`). The slow reader creates
    a file next to the table. Sources then return no rows. Barriers still pass, so checkpoints complete and rows in the
    job are committed, but no new rows wait for the reader.

    While storage does not answer, the sources stay paused or running as before.
    """

    def __init__(self, open_store: OpenStore, urls: Sequence[str], job_id: JobId, now_ms: Callable[[], int]) -> None:
        self._open_store = open_store
        self._urls = urls
        self._job_id = job_id
        self._now_ms = now_ms
        self._looked_at_ms: int | None = None
        self._held = False

    def wait(self) -> bool:
        """Returns whether the sources are paused now. In that case it first sleeps for `HELD_S`, to limit the
        rate of calls.
        """
        if self._urls:
            self._look()
        if self._held:
            time.sleep(HELD_S)
        return self._held

    def _look(self) -> None:
        now_ms = self._now_ms()
        if self._looked_at_ms is not None and 0 <= now_ms - self._looked_at_ms < LOOK_MS:
            return
        self._looked_at_ms = now_ms
        # Code for logs of tables is loaded only by jobs that have such a table.
        from tidegate.storage.tables.handed_rows import hold_path

        path = hold_path(self._job_id)
        try:
            self._held = any(self._open_store(url).exists(path) for url in self._urls)
        except StorageError as error:
            log.warning("whether the sources are held back is not known, so they go on as before: %s", error)
