"""What is cut from an event log is kept where its job says so, and read as if it were still there."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from dying_store import DiedError, deaths

from tidegate.recovery.event_history import EventHistory
from tidegate.storage.checkpoints import event_log
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Store
from tidegate.storage.ids import Generation, JobId

_JOB = JobId("demo-1")
_TAKEOVER = 4


def _entry(index: int) -> LogEntry:
    return LogEntry(index, Generation(1), 1_000 + index, "one", (f"event {index}",), index, (None,))


def _cut(store: Store, entries: int, *snapshots: int) -> EventLog:
    """A log that was folded at these entries, and cut each time behind the fold before."""
    log = EventLog(store, _JOB)
    folded = [index for index, *_ in [log.latest_snapshot() or (0,)]]
    for index in range(entries):
        log.append(_entry(index))
        if index + 1 in snapshots:
            log.write_snapshot(index + 1, "fold")
            log.truncate(folded[-1], frozenset({_TAKEOVER}), segments=True)
            folded.append(index + 1)
    return log


def _read_back(log: EventLog) -> list[int]:
    read = EventHistory.read(log, _JOB)
    assert read.unreadable == 0
    return [index for index, *_ in read.entries]


def test_what_was_cut_is_read_with_what_is_there(store: FileSystemStore) -> None:
    """On every store, through several cuts, with the entry of a takeover that stays where it is."""
    log = _cut(store, 20, 3, 9, 15)

    assert log.indices() == [_TAKEOVER, *range(8, 20)]
    assert log.segments.spans() == [range(2), range(2, 8)]
    assert log.history() == [_entry(index) for index in range(20)]
    assert _read_back(log) == list(range(20))
    assert [event.number for event in EventHistory.read(log, _JOB).why(0).events] == [0]
    assert [index for index, *_ in EventHistory.read(log, _JOB, 5).entries] == list(range(5, 20))


def test_large_cuts_become_several_files(memory_store: FileSystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no file, and no memory, has to hold what a log has gathered while nobody could cut it."""
    monkeypatch.setattr(event_log, "SEGMENT_ENTRIES", 3)
    log = _cut(memory_store, 12, 10, 12)

    assert log.segments.spans() == [range(3), range(3, 7), range(7, 9)]
    assert log.history() == [_entry(index) for index in range(12)]


def test_wherever_a_cut_dies_no_entry_is_lost(tmp_path: Path) -> None:
    """At any operation on storage, and the next cut goes on from there."""
    died = 0
    for number, death in enumerate(deaths()):
        folder = str(tmp_path / str(number))
        log = _cut(open_store(folder), 8)
        log.write_snapshot(6, "fold")
        with contextlib.suppress(DiedError):
            EventLog(death.open_store(folder), _JOB).truncate(6, frozenset({_TAKEOVER}), segments=True)
        died += death.came
        for _ in range(2):
            assert log.history() == [_entry(index) for index in range(8)]
            assert _read_back(log) == list(range(8))
            log.truncate(6, frozenset({_TAKEOVER}), segments=True)
        assert log.indices() == [_TAKEOVER, 5, 6, 7]
        shutil.rmtree(folder)
    assert died > 2 * 8


def test_a_damaged_segment_is_told_of_and_the_rest_is_there(memory_store: FileSystemStore) -> None:
    """A damaged entry in a segment takes no other along, and a damaged segment no other segment."""
    log = _cut(memory_store, 20, 3, 9, 15)
    kept = log.segments.read(range(2, 8))
    log.segments.write(kept | {6: kept[6][:-1]})

    read = EventHistory.read(log, _JOB)
    assert [index for index, entry, *_ in read.entries if entry is None] == [6]
    assert [index for index, *_ in read.entries] == list(range(20))
    memory_store.write(f"{_JOB}/events/kept/{2:012d}-{7:012d}", [b"torn"])
    read = EventHistory.read(log, _JOB)
    assert read.unreadable == 1
    assert [index for index, entry, *_ in read.entries if entry is not None] == [0, 1, _TAKEOVER, *range(8, 20)]
    with pytest.raises(CorruptionError, match="events/kept/"):
        log.history()


def test_a_log_that_is_cut_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that was listed and is gone is no fault: it is kept, or was folded."""
    log = _cut(open_store(str(tmp_path)), 8)
    read = EventLog.read

    def cut_before(self: EventLog, index: int) -> LogEntry:
        monkeypatch.setattr(EventLog, "read", read)
        log.write_snapshot(6, "fold")
        log.truncate(6, segments=segments)
        return read(self, index)

    for segments, left in ((False, [5, 6, 7]), (True, list(range(8)))):
        log = _cut(open_store(str(tmp_path / str(segments))), 8)
        monkeypatch.setattr(EventLog, "read", cut_before)
        assert _read_back(log) == left
