"""The keeper of a lease renews it until the job is over, and tries again when storage was away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from waiting import until

from tidegate.actors.drivers.lease_keeper import LeaseKeeper
from tidegate.storage.checkpoints.lease import Lease, Life, life_of, read_lease, write_lease
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Buffer
from tidegate.storage.ids import JobId

JOB = JobId("job-12345678")
WAIT_S = 240


class Renewals(FileSystemStore):
    """A store that counts the writes, and lets the first of them fail."""

    def __init__(self, url: str, fail: int = 0, error: type[Exception] = StorageError) -> None:
        super().__init__(url)
        self._error = error
        self.written = threading.Semaphore(0)
        self._fail = fail

    def write(self, path: str, chunks: tuple[Buffer, ...]) -> int:  # type: ignore[override]
        """A renewal."""
        if self._fail:
            self._fail -= 1
            raise self._error("storage is away")
        size_bytes = super().write(path, chunks)
        self.written.release()
        return size_bytes


def keeper(store: FileSystemStore, lease_ms: int) -> LeaseKeeper:
    """A keeper of the job."""
    return LeaseKeeper(store, JOB, "job", lease_ms, clock=lambda: 7)


def held(store: FileSystemStore) -> Lease:
    """The lease that is there."""
    found = read_lease(store, JOB)
    assert found is not None
    return found


def test_it_renews_until_the_end(tmp_path: Path) -> None:
    """At once, then again and again; the end is said, once."""
    store = Renewals(str(tmp_path))
    renewing = keeper(store, lease_ms=3)

    renewing.start()
    assert life_of(held(store), 7) is Life.ALIVE
    for _ in range(3):
        until("a renewal", lambda: store.written.acquire(blocking=False))
    renewing.end()
    last = held(store)
    renewing.end()

    assert (last.ended, last.renewals >= 3, held(store)) == (True, True, last)


@pytest.mark.parametrize("error", [StorageError, RuntimeError])
def test_a_storage_that_was_away_is_tried_again(tmp_path: Path, error: type[Exception]) -> None:
    """Nobody is told but the log. Whatever a library raises: a living job whose thread has died would be swept."""
    store = Renewals(str(tmp_path), 3, error)
    renewing = keeper(store, lease_ms=3)

    renewing.start()
    until("a renewal", lambda: store.written.acquire(blocking=False))
    renewing.end()


def test_who_is_not_the_holder_any_more_ends_nothing(tmp_path: Path) -> None:
    """A coordinator that was replaced says nothing about its job."""
    store = open_store(str(tmp_path))
    old, new = keeper(store, lease_ms=60_000), keeper(store, lease_ms=60_000)
    old.start()
    new.start()

    old.end()
    assert not held(store).ended
    new.end()
    assert held(store).ended


def test_an_abandoned_lease_is_known_to_be_dead_in_its_own_process(tmp_path: Path) -> None:
    """Its time has not passed, but nobody renews it any more."""
    store = open_store(str(tmp_path))
    renewing = keeper(store, lease_ms=60_000)
    renewing.start()
    renewing.abandon()

    assert life_of(held(store), 7) is Life.DEAD
    write_lease(store, held(store).renewed(8))
    renewing.end()
    assert not held(store).ended
