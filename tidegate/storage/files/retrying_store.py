"""`RetryingStore`: retries reads and writes for a few seconds before they fail.

One failed write of a task costs a restart of the job, and most faults of storage pass within seconds. Rules:

- There is one loop of attempts. A store that repeats requests itself (S3) is left alone: two loops would multiply.
- Attempts and pauses are bounded. Longer faults are left to the restart strategy, and to the coordinator, which waits
  for the end of long outages.
- Only transient errors are retried: no missing file, no refusal, no damage, and no error of the caller's data.
- A write may be repeated, because it replaces the file as a whole. A create may not: the second attempt could find the
  file of the first one.
- Data that an iterator produces while it is written is kept for a retry up to `KEPT_BYTES_MAX`. A larger write has one
  attempt. Other iterables are iterated again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tidegate.storage.errors import StorageError, may_pass
from tidegate.storage.files.file_system import OF_THIS_PROCESS
from tidegate.storage.files.file_system_store import FileSystemStore, join_url
from tidegate.storage.files.store import Buffer, Store, WrappedStore

T = TypeVar("T")

TRIES_MAX = 7
PAUSE_S_FIRST = 0.1
"""Length of the first pause in seconds. Each pause is twice as long as the one before, 6.3 s in total."""
KEPT_BYTES_MAX = 16 * 1024 * 1024

_logger = logging.getLogger(__name__)


def retrying(
    open_store: Callable[[str], Store], pause: Callable[[float], object] = time.sleep
) -> Callable[[str], Store]:
    """Returns a function like `open_store` whose stores retry transient errors.

    `pause` sleeps for a number of seconds.
    """

    def opened(url: str) -> Store:
        store = open_store(url)
        if isinstance(store, FileSystemStore) and store.repeats_requests:
            return store
        return RetryingStore(store, pause)

    return opened


class RetryingStore(WrappedStore):
    """Retries the reads and writes of the store that it wraps. As thread-safe as that store."""

    def __init__(self, store: Store, pause: Callable[[float], object] = time.sleep) -> None:
        """Wraps `store`. `pause` sleeps for a number of seconds."""
        super().__init__(store)
        self._pause = pause

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        again = _Replayed(chunks) if isinstance(chunks, Iterator) else chunks

        def attempt() -> int:
            return self._store.write(path, again)

        return self._tried("write", path, attempt, lambda: not isinstance(again, _Replayed) or again.can_be_replayed)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._tried("read", path, lambda: self._store.read(path, offset, length), lambda: True)

    def _tried(self, operation: str, path: str, attempt: Callable[[], T], can_repeat: Callable[[], bool]) -> T:
        pause_s = PAUSE_S_FIRST
        for number in range(1, TRIES_MAX):
            try:
                return attempt()
            except StorageError as error:
                if not may_pass(error) or not can_repeat():
                    raise
                _logger.log(
                    logging.WARNING if number == 1 else logging.DEBUG,
                    "Attempt %d of %d to %s %s failed, the next one is in %g s: %s",
                    number,
                    TRIES_MAX,
                    operation,
                    join_url(self.url, path),
                    pause_s,
                    error,
                )
            self._pause(pause_s)
            pause_s *= 2
            OF_THIS_PROCESS.tried_again()
        try:
            return attempt()
        except StorageError as error:
            if not may_pass(error):
                raise
            raise StorageError(
                f"{error} (the last of {TRIES_MAX} attempts to {operation} {join_url(self.url, path)}; check that the "
                "storage can be reached)"
            ) from error


class _Replayed:
    """Chunks of a file to write, recorded so that a retry can iterate over them again.

    Only possible while their total size is at most `KEPT_BYTES_MAX`.
    """

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._rest = iter(chunks)
        self._kept: list[Buffer] = []
        self._kept_bytes = 0
        self.can_be_replayed = True
        """False once chunks were dropped, or once their source has raised an error."""

    def __iter__(self) -> Iterator[Buffer]:
        assert self.can_be_replayed
        yield from tuple(self._kept)
        while True:
            try:
                chunk = next(self._rest, None)
            except BaseException:
                self.can_be_replayed = False
                raise
            if chunk is None:
                return
            self._keep(chunk)
            yield chunk

    def _keep(self, chunk: Buffer) -> None:
        if not self.can_be_replayed:
            return
        self._kept_bytes += memoryview(chunk).nbytes
        if self._kept_bytes > KEPT_BYTES_MAX:
            self.can_be_replayed = False
            self._kept.clear()
        else:
            self._kept.append(chunk)
