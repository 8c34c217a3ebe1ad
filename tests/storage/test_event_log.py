"""The event log decides each entry once, fences whoever has lost, and takes nothing missing for its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_store import FaultyStore
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.errors import CodecError, CorruptionError, FencedError, NotFoundError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import Generation, JobId

_JOB = JobId("demo-1")


def _entry(index: int, generation: int = 1, nonce: str = "") -> LogEntry:
    return LogEntry(
        index, Generation(generation), 1_000 + index, nonce or f"g{generation}", (f"event {index}",), index, (None,)
    )


def _filled(store: FileSystemStore, entries: int) -> EventLog:
    log = EventLog(store, _JOB)
    for index in range(entries):
        log.append(_entry(index))
    return log


def _entry_file(index: int) -> str:
    return f"{_JOB}/events/{index:012d}"


def test_entries_come_back_in_order(store: FileSystemStore) -> None:
    """On every store, what was appended is read back from any index on."""
    log = _filled(store, 5)

    assert list(log.entries(0)) == [_entry(i) for i in range(5)]
    assert list(EventLog(store, _JOB).entries(3)) == [_entry(3), _entry(4)]
    assert list(log.entries(5)) == []
    assert log.indices() == [0, 1, 2, 3, 4]


def test_a_new_log_is_empty(memory_store: FileSystemStore) -> None:
    """A job that has logged nothing has no entries and no snapshot."""
    log = EventLog(memory_store, _JOB)

    assert (list(log.entries(0)), log.indices(), log.latest_snapshot()) == ([], [], None)


def test_logs_of_jobs_are_apart(memory_store: FileSystemStore) -> None:
    """Two jobs under one root do not see each other's entries."""
    _filled(memory_store, 2)

    assert list(EventLog(memory_store, JobId("demo-2")).entries(0)) == []


def test_the_second_coordinator_is_fenced(store: FileSystemStore) -> None:
    """Of two that want to write an entry, one is told that another generation did; the entry is the winner's."""
    _filled(store, 2).append(_entry(2, generation=2))

    with pytest.raises(FencedError, match=r"entry 2 .* generation 2, not by generation 1"):
        EventLog(store, _JOB).append(_entry(2, generation=1))
    assert EventLog(store, _JOB).read(2) == _entry(2, generation=2)


def test_equal_decisions_of_two_writers_differ(memory_store: FileSystemStore) -> None:
    """Two incarnations of one generation that decide the same are still told apart, by their nonces."""
    log = _filled(memory_store, 1)
    log.append(_entry(1, nonce="one"))

    with pytest.raises(FencedError):
        log.append(_entry(1, nonce="other"))


def test_a_lost_answer_may_be_repeated(memory_store: FileSystemStore) -> None:
    """An append that succeeded without our learning of it succeeds again, and the log goes on."""
    store = FaultyStore(memory_store.url)
    log = _filled(store, 1)
    store.lose_next_answer = True

    with pytest.raises(StorageError):
        log.append(_entry(1))
    log.append(_entry(1))
    log.append(_entry(2))

    assert list(log.entries(0)) == [_entry(0), _entry(1), _entry(2)]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_hole_is_not_the_end(memory_store: FileSystemStore, missing: int) -> None:
    """A missing entry before others is damage: replaying without it would lose a decision."""
    log = _filled(memory_store, 4)
    memory_store.delete(_entry_file(missing))

    with pytest.raises(CorruptionError, match=f"entry {missing} is missing, entry 3 is there"):
        list(log.entries(0))


@pytest.mark.parametrize("unlisted", range(4))
def test_what_a_listing_leaves_out_is_no_hole(memory_store: FileSystemStore, unlisted: int) -> None:
    """A listing that is made while entries are created may show one without another."""
    _filled(memory_store, 4)
    store = FaultyStore(memory_store.url)
    log = EventLog(store, _JOB)
    entries = [_entry(index) for index in range(4)]

    store.unlisted = f"{unlisted:012d}"
    assert list(log.entries(0)) == entries
    store.unlisted = f"{unlisted:012d}"
    assert log.oldest() == 0
    store.unlisted = f"{unlisted:012d}"
    assert log.history() == entries


@pytest.mark.parametrize(("entries", "unlisted"), [(0, 0), (4, 3), (4, 4)])
def test_a_writer_whose_entry_or_predecessor_is_not_listed_is_not_fenced(
    memory_store: FileSystemStore, entries: int, unlisted: int
) -> None:
    """It would take a good entry back, and a healthy job would end."""
    store = FaultyStore(memory_store.url)
    log = _filled(store, entries)

    store.unlisted = f"{unlisted:012d}"
    log.append(_entry(entries))
    log.append(_entry(entries + 1))

    assert [entry.index for entry in log.entries(0)] == list(range(entries + 2))


def test_a_history_that_is_truncated_meanwhile_begins_again(
    memory_store: FileSystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running job truncates its log while somebody reads it: that is no damage."""
    log = _filled(memory_store, 6)
    entries = EventLog.entries

    def truncated_before(self: EventLog, from_index: int) -> Iterator[LogEntry]:
        monkeypatch.setattr(EventLog, "entries", entries)
        log.write_snapshot(4, "fold")
        log.truncate(4)
        return entries(self, from_index)

    monkeypatch.setattr(EventLog, "entries", truncated_before)
    assert log.history() == [_entry(index) for index in (3, 4, 5)]

    memory_store.write(_entry_file(4), [b""])
    with pytest.raises(CorruptionError, match="000000000004"):
        log.history()


def test_damage_is_not_the_end(memory_store: FileSystemStore) -> None:
    """A flipped bit or a torn entry is CorruptionError, and a file in another's place too."""
    log = _filled(memory_store, 3)
    whole = memory_store.read(_entry_file(1))

    for damaged in (whole[:-1], whole[:-1] + b"\0", b"", memory_store.read(_entry_file(2))):
        memory_store.write(_entry_file(1), [damaged])
        with pytest.raises(CorruptionError, match="000000000001"):
            list(log.entries(0))


def test_only_wire_values_are_logged(memory_store: FileSystemStore) -> None:
    """An event that could not be replayed is refused, and the entry stays free."""
    log = _filled(memory_store, 1)

    with pytest.raises(CodecError):
        log.append(LogEntry(1, Generation(1), 0, "", (object(),), 1, (None,)))
    assert log.indices() == [0]


def test_the_newest_snapshot_counts(store: FileSystemStore) -> None:
    """On every store, the snapshot of the highest index is found, and snapshots are no entries."""
    log = _filled(store, 3)
    log.write_snapshot(1, {"state": 1})
    log.write_snapshot(3, {"state": (1, 2)})

    assert log.latest_snapshot() == (3, {"state": (1, 2)})
    assert log.indices() == [0, 1, 2]


def test_a_damaged_snapshot_is_passed_over(memory_store: FileSystemStore, caplog: pytest.LogCaptureFixture) -> None:
    """The one before it is used, and a warning says why."""
    log = _filled(memory_store, 3)
    log.write_snapshot(1, "good")
    log.write_snapshot(2, "bad")
    memory_store.write(f"{_JOB}/events/snapshot-{2:012d}", [b"torn"])

    with caplog.at_level(logging.WARNING):
        assert log.latest_snapshot() == (1, "good")
    assert "Snapshot 2" in caplog.text
    assert "damaged" in caplog.text


def test_without_a_snapshot_nothing_is_truncated(memory_store: FileSystemStore) -> None:
    """Entries that nothing else tells are kept, whatever is asked; a damaged snapshot tells nothing."""
    log = _filled(memory_store, 3)
    log.truncate(3)
    memory_store.write(f"{_JOB}/events/snapshot-{2:012d}", [b"torn"])
    log.truncate(3)

    assert log.indices() == [0, 1, 2]


@given(entries=st.integers(1, 8), data=st.data())
@settings(max_examples=30)
def test_what_is_left_folds_to_the_same(entries: int, data: st.DataObject) -> None:
    """After any snapshots and truncations, snapshot and entries give the whole history, and appending goes on."""
    store = open_store("memory://event-log-fold")
    store.delete_tree("")
    log = _filled(store, entries)
    for _ in range(data.draw(st.integers(1, 4))):
        log.write_snapshot(index := data.draw(st.integers(1, entries)), [f"event {i}" for i in range(index)])
        log.truncate(data.draw(st.integers(0, entries)))
    log.append(_entry(entries))

    index, fold = EventLog(store, _JOB).latest_snapshot() or (0, ())
    history = [*fold, *(event for entry in log.entries(index) for event in entry.events)]

    assert history == [f"event {i}" for i in range(entries + 1)]


def test_truncation_deletes_what_is_not_needed(memory_store: FileSystemStore) -> None:
    """One snapshot and the entries from the one before it on stay."""
    log = _filled(memory_store, 6)
    for index in (2, 4):
        log.write_snapshot(index, index)
    log.truncate(4)

    assert memory_store.list(f"{_JOB}/events") == [f"{i:012d}" for i in (3, 4, 5)] + [f"snapshot-{4:012d}"]


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("snapshot", [1, 3, 6])
def test_a_sleeper_is_fenced_after_truncation(memory_store: FileSystemStore, index: int, snapshot: int) -> None:
    """A coordinator that wakes up wherever the others have written, and truncated, cannot append; the log is intact."""
    log = EventLog(memory_store, _JOB)
    for i in range(7):
        log.append(_entry(i, generation=2))
    log.write_snapshot(snapshot, "fold")
    log.truncate(snapshot)
    before = memory_store.list(f"{_JOB}/events")

    for _ in range(2):
        with pytest.raises(FencedError):
            EventLog(memory_store, _JOB).append(_entry(index, generation=1))

    assert memory_store.list(f"{_JOB}/events") == before
    assert [entry.index for entry in log.entries(snapshot)] == list(range(snapshot, 7))
    log.append(_entry(7, generation=2))


def test_a_single_entry_is_read_or_not_found(tmp_path: Path) -> None:
    """Reading one index gives that entry, or says that it is not there."""
    log = _filled(open_store(str(tmp_path)), 1)

    assert log.read(0) == _entry(0)
    with pytest.raises(NotFoundError):
        log.read(1)
