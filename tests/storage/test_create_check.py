"""The self-test of conditional creates: it races, and what has not exactly one winner is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_proxy import run_proxy
from seaweed import BUCKET, S3Server

from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, StorageError
from tidegate.storage.files import file_system_store
from tidegate.storage.files.file_system_store import (
    PAIRS,
    REQUESTS_MAX,
    ROUNDS,
    FileSystemStore,
    check_conditional_create,
    open_store,
)
from tidegate.storage.files.store import Buffer

WAIT_S = 240.0
FOUND_ATOMIC = file_system_store._found_atomic
"""The stores that this process has found to create reliably. It does not look at them again."""
NO_CREATE = "has no conditional create that is reliable"


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    """As in a new process."""
    known = set(FOUND_ATOMIC)
    FOUND_ATOMIC.clear()
    yield
    FOUND_ATOMIC.clear()
    FOUND_ATOMIC.update(known)


class LooksFirst(FileSystemStore):
    """A store whose create looks whether the name is free, and then puts: who comes in between does the same.

    Two who race for one of the names meet there; to everybody else nothing happens in between.
    """

    def __init__(self, url: str, raced: Callable[[str], bool]) -> None:
        super().__init__(url)
        self._raced = raced
        self._lock = threading.Lock()
        self._both_have_looked: dict[str, threading.Barrier] = {}

    def create(self, path: str, data: Buffer) -> None:
        """Look, then put."""
        _, race, name = path.partition("-race-")
        if not race or not self._raced(name):
            super().create(path, data)
            return
        with self._lock:
            both_have_looked = self._both_have_looked.setdefault(path, threading.Barrier(2))
        if self.exists(path):
            raise AlreadyExistsError(path)
        both_have_looked.wait(WAIT_S)
        self.write(path, (data,))


@pytest.mark.parametrize("raced", ["", "0-0", f"{ROUNDS - 1}-{PAIRS - 1}"])
def test_a_store_that_looks_and_then_puts_is_refused(tmp_path: Path, raced: str) -> None:
    """Though only one race of many, the first or the last one, has two winners. Nothing is left behind."""
    store = LooksFirst(str(tmp_path), lambda name: name == raced or not raced)

    with pytest.raises(ConfigurationError, match=rf"{NO_CREATE} \(of two .* both won\).*AWS S3"):
        check_conditional_create(store)
    assert store.list("") == []


class _NobodyWins(FileSystemStore):
    """All who come at the same time are told that another one was faster."""

    def create(self, path: str, data: Buffer) -> None:
        if "-race-" in path:
            raise AlreadyExistsError(path)
        super().create(path, data)


class _LoserStays(FileSystemStore):
    """One is told that it has won, and what another one wrote is there."""

    def create(self, path: str, data: Buffer) -> None:
        super().create(path, data)
        if "-race-" in path:
            self.write(path, (b"another",))


@pytest.mark.parametrize(("kind", "why"), [(_NobodyWins, "none won"), (_LoserStays, "was replaced")])
def test_a_race_without_a_winner_that_stays_is_refused(tmp_path: Path, kind: type[FileSystemStore], why: str) -> None:
    """A job could not begin there, or would read what another one wrote."""
    with pytest.raises(ConfigurationError, match=f"{NO_CREATE}.*{why}"):
        check_conditional_create(kind(str(tmp_path)))
    assert open_store(str(tmp_path)).list("") == []


class _LosesAnswers(FileSystemStore):
    """The answers to creates of some are lost, which had their effect. Of the first pair the second creator wins."""

    def __init__(self, url: str, *lost: bytes) -> None:
        super().__init__(url)
        self._lost = lost
        self._second_was_there: dict[str, threading.Event] = {}

    def create(self, path: str, data: Buffer) -> None:
        second = self._second_was_there.setdefault(path, threading.Event())
        if path.endswith("-0") and data == b"creator 1":
            assert second.wait(WAIT_S), "there is a thread for each creator"
        try:
            super().create(path, data)
        finally:
            if data == b"creator 2":
                second.set()
            if data in self._lost:
                raise StorageError("the connection broke before the answer came")


def test_a_lost_answer_proves_nothing(tmp_path: Path) -> None:
    """A request that fails beside one that is answered does not refuse a store; when all do, the user is told so."""
    check_conditional_create(_LosesAnswers(str(tmp_path), b"creator 1"))
    FOUND_ATOMIC.clear()

    with pytest.raises(StorageError, match="connection broke"):
        check_conditional_create(_LosesAnswers(str(tmp_path), b"creator 1", b"creator 2"))
    assert open_store(str(tmp_path)).list("") == []


def test_stores_that_can_pass(store: FileSystemStore) -> None:
    """Local folders, memory and S3 pass every time, and nothing is left behind."""
    for _ in range(3):
        FOUND_ATOMIC.clear()
        check_conditional_create(store)
    assert store.list("") == []


def test_what_it_costs(s3_server: S3Server) -> None:
    """So many requests the first time, and four for every further place in the bucket."""
    with run_proxy(s3_server) as proxy:
        options = s3_server.options | {"endpoint_url": proxy.url}
        check_conditional_create(open_store(f"s3://{BUCKET}/first", **options))
        assert len(proxy.requests()) == REQUESTS_MAX == 68
        proxy.forget()
        check_conditional_create(open_store(f"s3://{BUCKET}/second", **options))
        assert len(proxy.requests()) == 4
