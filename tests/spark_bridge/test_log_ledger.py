"""What the writer of a log knows: how much waits to be covered, and what may go. A reader never misses a row."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest
from batch_logs import SCHEMA, append, new_log
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.connectors.staged_parquet import StagedFile
from tidegate.spark_bridge.streams.batch_log import BatchLog, LogBatch, LogHeader, batch_after
from tidegate.spark_bridge.streams.log_source import LOOKS_MAX, LogSource, LogWindow, split_id
from tidegate.spark_bridge.streams.stream_feed import LogLedger, WriterStopped, needed_rows
from tidegate.storage.files.file_system_store import open_store

FILE_BYTES = 10


def batches_of(sizes: list[list[int]], lanes: int) -> list[LogBatch]:
    """Batches whose files have so many rows, each of ten bytes."""
    batches: list[LogBatch] = []
    for batch_id, rows in enumerate(sizes):
        files = tuple(StagedFile(f"data/{batch_id}/{n}", count, FILE_BYTES, "") for n, count in enumerate(rows))
        batches.append(batch_after(batches[-1] if batches else None, batch_id, "query", files, lanes))
    return batches


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_deleted_every_retained_position_can_be_read_on(data: st.DataObject) -> None:
    """Random batches, positions that go forward and back, checkpoints that come and go, deletions in between.

    Some readers begin anew each time, others look now and then, and the log has gone on meanwhile.
    """
    lanes = data.draw(st.integers(1, 3), "lanes")
    store = open_store(f"memory://{uuid.uuid4().hex}")
    log = BatchLog(store)
    log.create(LogHeader("log", SCHEMA, lanes))
    ledger = LogLedger((), 10**9)
    newest: LogBatch | None = None
    retained: list[list[int]] = []
    slow = [LogWindow(log, 0.0) for _ in range(lanes)]
    for step in range(data.draw(st.integers(1, 8), "steps")):
        for _ in range(data.draw(st.integers(0, 2), "batches")):
            rows = data.draw(st.lists(st.integers(1, 3), max_size=4), "files")
            files = tuple(StagedFile(f"data/{step}-{n}/f", count, 1, "") for n, count in enumerate(rows))
            newest = batch_after(newest, 0 if newest is None else newest.batch_id + 1, "query", files, lanes)
            log.commit(newest)
            ledger.append(newest)
        # A checkpoint is taken at or after the newest one; what was restored may be any that is retained.
        floor = data.draw(st.sampled_from(retained), "restored") if retained else [0] * lanes
        ends = [0] * lanes if newest is None else list(newest.ends)
        retained.append([data.draw(st.integers(low, high), "row") for low, high in zip(floor, ends, strict=True)])
        while len(retained) > 1 and data.draw(st.booleans(), "subsume"):
            retained.pop(data.draw(st.integers(0, len(retained) - 2), "which"))
        positions = [{split_id("log", lane): row for lane, row in enumerate(rows)} for rows in retained]
        gone = ledger.deletable(needed_rows("log", lanes, positions))
        log.delete(gone)
        for batch in gone:
            ledger.deleted(batch)
        assert [batch.batch_id for batch in ledger.batches] == log.batch_ids()
        for rows in retained:
            for lane in range(lanes):
                window = LogWindow(log, 0.0)
                assert all(window.find(lane, row) is not None for row in range(rows[lane], ends[lane]))
                assert window.find(lane, ends[lane]) is None
        for lane in range(lanes):
            if data.draw(st.booleans(), "looks"):
                rows_left = range(retained[-1][lane], ends[lane])
                assert all(found_in_time(slow[lane], lane, row) for row in rows_left)
    store.delete_tree("")


def found_in_time(window: LogWindow, lane: int, row: int) -> bool:
    """Also where the commit after the window has gone, which a window asks now and then."""
    return any(window.find(lane, row) is not None for _ in range(LOOKS_MAX + 1))


def test_what_nobody_needs_goes_up_to_the_newest_batch() -> None:
    """Exactly that: a batch with a row that is needed stays, and so do those after it, and the newest one always."""
    batches = batches_of([[2], [2], [], [2], [2]], lanes=2)
    ledger = LogLedger(batches, 100)
    assert ledger.deletable((0, 0)) == ()
    assert ledger.deletable((1, 9)) == ()
    assert ledger.deletable((2, 0)) == tuple(batches[:1])
    assert ledger.deletable((4, 2)) == tuple(batches[:3])
    assert ledger.deletable((9, 9)) == tuple(batches[:4])


def test_needed_rows_are_the_least_of_all_and_all_of_an_unknown_lane() -> None:
    """Of several checkpoints; without one nothing is known, so everything is needed."""
    one = {split_id("log", 0): 7, split_id("log", 1): 3}
    assert needed_rows("log", 2, [one, {split_id("log", 0): 5, split_id("log", 1): 9}]) == (5, 3)
    assert needed_rows("log", 2, [one, {split_id("log", 0): 5}]) == (5, 0)
    assert needed_rows("log", 2, []) == (0, 0)


def test_a_writer_waits_for_the_newest_checkpoint_to_cover_what_is_there() -> None:
    """Until then all that is in the log counts; afterwards batches with rows that it does not cover."""
    ledger = LogLedger(batches_of([[1], [1], [1]], lanes=1), limit_bytes=FILE_BYTES)
    assert ledger.uncovered_bytes == 3 * FILE_BYTES
    came = threading.Event()

    def wait() -> None:
        ledger.await_room()
        came.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    ledger.cover((1,))
    assert ledger.uncovered_bytes == 2 * FILE_BYTES
    assert not came.is_set()
    ledger.cover((2,))
    waiter.join(240)
    assert came.is_set()
    ledger.append(batch_after(ledger.newest, 3, "query", (StagedFile("data/3/0", 1, FILE_BYTES, ""),), 1))
    assert ledger.uncovered_bytes == 2 * FILE_BYTES


def test_who_waits_for_room_stops_when_the_query_does() -> None:
    """At once, and whoever comes later too."""
    ledger = LogLedger(batches_of([[1], [1]], lanes=1), limit_bytes=0)
    stopped: list[bool] = []

    def wait() -> None:
        with pytest.raises(WriterStopped):
            ledger.await_room()
        stopped.append(True)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    ledger.stop()
    waiter.join(240)
    wait()
    assert stopped == [True, True]


def test_deleted_batches_are_no_files_any_more(tmp_path: Path) -> None:
    """The log on disk shrinks, and a reader goes on from the positions that were retained."""
    log = new_log(str(tmp_path), lanes=1)
    batches = [append(log, [n, n]) for n in range(5)]
    ledger = LogLedger(batches, 10**9)
    log.delete(ledger.deletable((6,)))
    assert log.batch_ids() == [3, 4]
    source = LogSource.open(str(tmp_path))
    assert source.reader().read(source.splits()[0], 6, 10).next_offset == 8
