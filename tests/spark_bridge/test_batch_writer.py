"""Micro-batches land once each, in their order, whatever is repeated, lost or done twice; all else is an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from batch_logs import QUERY, append, new_log, read_on, stage_rows

from tidegate.connectors.staged_parquet import StagedFile
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.spark_bridge.streams.batch_log import (
    BatchLog,
    LogClaim,
    check_free,
    log_at,
    newest_claim,
    remember_log,
    take_claim,
)
from tidegate.spark_bridge.streams.log_source import LogSource
from tidegate.spark_bridge.streams.stream_feed import BatchWriter, LogLedger, WriterStopped
from tidegate.storage.checkpoints.lease import Lease, hold_lease, release_lease, write_lease
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId
from tidegate.storage.process_id import this_process

Rows = Sequence[Sequence[int]]


class Writer:
    """A writer of the log of a folder, as a driver makes one anew whenever it starts."""

    def __init__(self, url: str, job: str = "job", between: Callable[[], object] = lambda: None) -> None:
        self.log = BatchLog(open_store(url))
        self.ledger = LogLedger([self.log.read(each) for each in self.log.batch_ids()], 10**9)
        claim = LogClaim(f"{url}-root", JobId(f"{job}-1"), job)
        self.claim = take_claim(self.log.store, claim, open_store, now_ms())
        self.staged = 0

        def stage(rows: Rows, folder: str) -> tuple[StagedFile, ...]:
            files = stage_rows(self.log.store, folder, rows)
            self.staged += 1
            between()
            return files

        self._writer = BatchWriter[Rows](self.log, 2, self.ledger, self.claim, stage)

    def write(self, batch_id: int, *rows: Sequence[int], query_id: str = QUERY) -> None:
        """A micro-batch, a file for each sequence of values."""
        self._writer.write(rows, batch_id, query_id)


def values(url: str) -> list[int]:
    """Everything that is in a log."""
    source = LogSource.open(url)
    reader = source.reader()
    return sorted(value for split in source.splits() for value in read_on(reader, split, tries=20))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where an empty log is."""
    new_log(str(tmp_path / "log"))
    return str(tmp_path / "log")


def test_batches_land_in_their_order(url: str) -> None:
    """Also those without rows, and after a restart."""
    first = Writer(url)
    first.write(0, [1, 2], [3])
    first.write(1)
    Writer(url).write(2, [4])
    assert BatchLog(open_store(url)).batch_ids() == [0, 1, 2]
    assert values(url) == [1, 2, 3, 4]


def test_a_batch_that_is_written_again_counts_once(url: str) -> None:
    """By the same writer, and by the next one after a crash: it is not even staged."""
    first = Writer(url)
    first.write(0, [1])
    first.write(0, [1])
    again = Writer(url)
    again.write(0, [1])
    assert (first.staged, again.staged) == (1, 0)
    assert values(url) == [1]


def test_of_two_writers_of_a_batch_one_counts(url: str) -> None:
    """The other drops its files, and both go on from what is there."""
    writer = Writer(url, between=lambda: append(BatchLog(open_store(url)), [1]) if writer.staged == 1 else None)
    writer.write(0, [1])
    assert len(os.listdir(f"{url}/data")) == 1
    writer.write(1, [2])
    assert values(url) == [1, 2]


def test_batches_that_came_meanwhile_are_followed(url: str) -> None:
    """Of a writer that was thought dead, whose query had still written down that they were done."""
    writer = Writer(url)
    for value in (1, 2):
        append(writer.log, [value])
    writer.write(2, [3])
    assert values(url) == [1, 2, 3]
    assert [batch.batch_id for batch in writer.ledger.batches] == [0, 1, 2]


def test_a_commit_whose_answer_was_lost_counts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store repeats a create that had worked: what is there is what was written, and its files stay."""
    writer = Writer(url)
    commit = writer.log.commit

    def twice(batch: object) -> None:
        commit(batch)  # type: ignore[arg-type]
        commit(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(writer.log, "commit", twice)
    writer.write(0, [1])
    assert values(url) == [1]


@pytest.mark.parametrize("batch_id", [0, 3])
def test_a_batch_that_cannot_follow_is_refused(url: str, batch_id: int) -> None:
    """An older one, and one after a gap: nothing is written, and the error says what to do."""
    writer = Writer(url)
    for each in range(2):
        writer.write(each, [each])
    with pytest.raises(SparkBridgeError, match=rf"sends batch {batch_id}, and .* continues with batch 2: .*checkpoint"):
        writer.write(batch_id, [9])
    assert values(url) == [0, 1]


def test_an_empty_log_begins_with_the_first_batch(url: str) -> None:
    """Spark's checkpoint is there already, and its log is not."""
    with pytest.raises(SparkBridgeError, match=r"sends batch 5, and .* continues with batch 0"):
        Writer(url).write(5, [9])


@pytest.mark.parametrize("batch_id", [0, 1])
def test_another_query_is_refused(url: str, batch_id: int) -> None:
    """Spark's checkpoint was deleted: its first batch is not the one that the log has, whatever its number."""
    Writer(url).write(0, [1])
    with pytest.raises(SparkBridgeError, match="query another is not the one that has written"):
        Writer(url).write(batch_id, [2], query_id="another")
    assert values(url) == [1]


def test_a_failed_attempt_leaves_nothing_that_counts(url: str) -> None:
    """The next one writes the batch, and what is left of the failed one goes at the next start."""

    def fail() -> None:
        raise OSError("the executor is gone")

    with pytest.raises(OSError, match="executor"):
        Writer(url, between=fail).write(0, [1])
    writer = Writer(url)
    writer.write(0, [1])
    assert values(url) == [1]
    assert writer.log.delete_leftovers(writer.ledger.batches) == 1
    assert len(os.listdir(f"{url}/data")) == 1


def test_a_stopped_writer_writes_nothing(url: str) -> None:
    """Not even what it is asked for afterwards."""
    writer = Writer(url)
    writer.ledger.stop()
    with pytest.raises(WriterStopped):
        writer.write(0, [1])
    assert writer.staged == 0


# --- claims -------------------------------------------------------------------------------------------------------


def test_a_writer_stops_when_another_has_claimed_the_log(url: str) -> None:
    """It was thought dead; nothing of it lands any more."""
    old = Writer(url)
    old.write(0, [1])
    new = Writer(url, "successor")
    with pytest.raises(SparkBridgeError, match=r"job 'successor' \(successor-1\) feeds the log .* now"):
        old.write(1, [2])
    new.write(1, [3])
    assert values(url) == [1, 3]


def test_a_log_of_a_job_that_lives_is_refused(url: str) -> None:
    """To a job of another name; one of the same name has made sure that the other is dead."""
    Writer(url)
    store = open_store(url)
    job_id, token = JobId("job-1"), "token"
    hold_lease(token)
    try:
        write_lease(open_store(f"{url}-root"), Lease(job_id, "job", this_process(), token, now_ms(), 30_000))
        with pytest.raises(ConfigurationError, match=r"job 'job' \(job-1\) feeds the log .* stop or cancel that one"):
            check_free(store, "other", open_store, now_ms())
        assert check_free(store, "job", open_store, now_ms()) == 1
    finally:
        release_lease(token)
    assert check_free(store, "other", open_store, now_ms()) == 1
    assert newest_claim(store)[0] == 1


def test_a_log_is_found_from_the_folder_of_every_job_of_its_line(tmp_path: Path) -> None:
    """The first job's is the log itself; later ones have a note, which may be written again."""
    first, later = str(tmp_path / "first"), str(tmp_path / "later")
    new_log(first)
    for folder in (first, later, later):
        remember_log(folder, open_store(first).url)
    assert log_at(first).url == log_at(later).url == open_store(first).url
    assert log_at(str(tmp_path / "none")).url == open_store(str(tmp_path / "none")).url
    assert not (tmp_path / "first" / "_log_at").exists()
