"""A batch log as a source: exact rows from any offset, in the order of the batches, and no silence about lost ones."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import cloudpickle
import pytest
from batch_logs import Clock, append, new_log, read_on
from hypothesis import given, settings
from hypothesis import strategies as st
from source_contract import check_source

from tidegate.connectors.source import SourceSplit
from tidegate.spark_bridge.errors import QueryFailedError
from tidegate.spark_bridge.streams.batch_log import BatchLog
from tidegate.spark_bridge.streams.log_source import LOOKS_MAX, LogReader, LogSource, LogWindow, failure_path
from tidegate.storage.errors import ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import open_store


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[LogSource, list[list[int]]]:
    """Thirty batches of none to five files in three lanes, and the rows of each lane."""
    url = str(tmp_path_factory.mktemp("log"))
    written, dice = new_log(url, lanes=3), random.Random(1)
    lanes: list[list[int]] = [[], [], []]
    value = 0
    for batch_id in range(30):
        files = []
        for index in range(dice.randrange(6)):
            rows = list(range(value, value + dice.randrange(1, 10)))
            value += len(rows)
            files.append(rows)
            lanes[(batch_id + index) % 3] += rows
        append(written, *files)
    return LogSource.open(url), lanes


@settings(max_examples=60)
@given(data=st.data())
def test_any_sequence_of_reads_returns_exactly_the_rows(
    log: tuple[LogSource, list[list[int]]], data: st.DataObject
) -> None:
    """Whatever was read before, an answer has the rows from its offset on, or none; and rows do come."""
    source, lanes = log
    reader = LogReader(source, Clock(step_s=1.0))
    splits = source.splits()
    for _ in range(12):
        lane = data.draw(st.integers(0, 2))
        offset = data.draw(st.integers(0, len(lanes[lane])))
        rows_max = data.draw(st.integers(1, 20))
        for _ in range(8):
            result = reader.read(splits[lane], offset, rows_max)
            if result.batch is not None:
                break
        rows = [] if result.batch is None else result.batch.column("x").to_pylist()
        assert result.next_offset == offset + len(rows)
        assert rows == lanes[lane][offset : offset + len(rows)]
        assert len(rows) <= rows_max
        assert bool(rows) == (offset < len(lanes[lane]))
    reader.close()


def test_lanes_read_in_turn_come_in_the_order_of_their_batches(tmp_path: Path) -> None:
    """A lane with little does not run ahead of one with much: values are those of batches, in their order."""
    written = new_log(str(tmp_path))
    for batch_id in range(8):
        append(written, [batch_id] * (30 if batch_id % 2 else 1))
    source = LogSource.open(str(tmp_path))
    reader, offsets, seen = source.reader(), [0, 0], []
    while len(seen) < 4 * 31:
        for lane, split in enumerate(source.splits()):
            result = reader.read(split, offsets[lane], 2)
            offsets[lane] = result.next_offset
            seen += [] if result.batch is None else result.batch.column("x").to_pylist()
    assert seen == sorted(seen)


def test_a_lane_that_nobody_reads_any_more_holds_up_nobody(tmp_path: Path) -> None:
    """Its rows are of older batches; after a few answers without rows the others go on."""
    written = new_log(str(tmp_path))
    append(written, list(range(10)))
    append(written, [10])
    source = LogSource.open(str(tmp_path))
    reader, (slow, quick) = source.reader(), source.splits()
    assert reader.read(slow, 0, 1).next_offset == 1
    assert reader.read(quick, 0, 1).batch is None
    assert read_on(reader, quick) == [10]


def test_rows_come_when_their_batch_does(tmp_path: Path) -> None:
    """An empty log, and one that was read to its end, have nothing now; a reader sees what is committed later."""
    written = new_log(str(tmp_path))
    source = LogSource.open(str(tmp_path))
    reader, (first, second) = LogReader(source, Clock(step_s=1.0)), source.splits()
    assert read_on(reader, first, tries=3) == []
    append(written, [1, 2])
    assert read_on(reader, first, tries=5) == [1, 2]
    assert read_on(reader, first, 2, tries=3) == []
    append(written, [3], [4])
    assert read_on(reader, second, tries=9) == [3]
    assert read_on(reader, first, 2, tries=9) == [4]


class CountedLog(BatchLog):
    """Counts how often commits are asked for."""

    asked = 0

    def read(self, batch_id: int) -> object:  # type: ignore[override]
        """A commit."""
        self.asked += 1
        return super().read(batch_id)


def test_an_idle_log_is_asked_after_each_pause_only(tmp_path: Path) -> None:
    """However often its lanes are read."""
    append(new_log(str(tmp_path)), [1])
    log, clock = CountedLog(open_store(str(tmp_path))), Clock()
    window = LogWindow(log, poll_s=10.0, clock=clock)
    assert window.find(0, 1) is None
    asked = log.asked
    for _ in range(50):
        assert window.find(0, 1) is None
    assert log.asked == asked
    clock.now_s = 10.0
    assert window.find(0, 1) is None
    assert log.asked == asked + 1


def test_rows_that_are_there_do_not_wait_for_those_of_other_lanes(tmp_path: Path) -> None:
    """A lane that has nothing now makes the next look wait; an older row of another lane is found at once."""
    written = new_log(str(tmp_path))
    for value in range(4):
        append(written, [value])
    window = LogWindow(BatchLog(open_store(str(tmp_path))), poll_s=10.0, clock=Clock())
    assert window.find(0, 2) is None
    place = window.find(1, 0)
    assert place is not None
    assert place.batch_id == 1


def test_a_window_holds_few_commits_and_finds_every_row(tmp_path: Path) -> None:
    """Rows far apart, in both directions; the first look at a long log reads few of its commits."""
    written, previous = new_log(str(tmp_path)), None
    for value in range(64):
        previous = append(written, [value], previous=previous)
    log = CountedLog(open_store(str(tmp_path)))
    window = LogWindow(log, 0.0, batches_max=3)
    assert window.find(1, 20) is not None
    assert log.asked <= 9
    for row in (*range(32), *reversed(range(32))):
        place = window.find(1, row)
        assert place is not None
        assert place.batch_id == 2 * row + 1
        assert len(window._batches) <= 3


def look_again_and_again(window: LogWindow, row: int = 0, looks: int = LOOKS_MAX) -> None:
    """For a row of lane 1; by default as often as it takes to ask what has become of it."""
    for _ in range(looks):
        assert window.find(1, row) is None


def test_deleted_rows_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """For who restores an old savepoint, and for who was overtaken by a deletion."""
    written = new_log(str(tmp_path))
    batches = [append(written, [n, n]) for n in range(4)]
    source = LogSource.open(str(tmp_path))
    overtaken = LogWindow(BatchLog(open_store(str(tmp_path))), 0.0)
    assert overtaken.find(0, 0) is not None
    written.delete(batches[:2])
    with pytest.raises(
        ConfigurationError, match=r"rows 1 to 2 of lane 0 are no longer in .* begins with batch 2.*Restore a"
    ):
        source.reader().read(source.splits()[0], 1, 10)
    assert source.reader().read(source.splits()[0], 2, 10).batch is not None
    with pytest.raises(ConfigurationError, match=r"rows 0 to 2 of lane 1 are no longer in .* begins with batch 2"):
        look_again_and_again(overtaken)


def test_a_lane_goes_on_behind_batches_that_had_nothing_for_it(tmp_path: Path) -> None:
    """They go when the lanes with rows in them were read: whoever comes later finds the next rows of this one."""
    written = new_log(str(tmp_path))
    batches = [append(written, [0], [1])]
    window = LogWindow(BatchLog(open_store(str(tmp_path))), 0.0)
    assert window.find(1, 1) is None
    batches += [append(written), append(written, [2]), append(written, [3])]
    written.delete(batches[:3])

    look_again_and_again(window, row=1, looks=LOOKS_MAX - 2)
    place = window.find(1, 1)

    assert place is not None
    assert (place.batch_id, place.start) == (3, 1)


def test_a_log_that_was_emptied_is_an_error(tmp_path: Path) -> None:
    """A position beyond what an empty log can have."""
    new_log(str(tmp_path))
    source = LogSource.open(str(tmp_path))
    with pytest.raises(ConfigurationError, match="row 3 of lane 1 was read before"):
        source.reader().read(source.splits()[1], 3, 10)


def test_what_is_not_of_this_log_is_refused(tmp_path: Path) -> None:
    """A lane of another log, and rows that nobody can have."""
    append(new_log(str(tmp_path)), [1])
    source = LogSource.open(str(tmp_path))
    reader = source.reader()
    with pytest.raises(ConfigurationError, match="is not a lane of the log"):
        reader.read(SourceSplit("other-lane-000", b"0"), 0, 10)
    for offset, rows_max in ((-1, 10), (0, 0)):
        with pytest.raises(ConfigurationError, match="cannot read"):
            reader.read(source.splits()[0], offset, rows_max)


@pytest.mark.parametrize(("damage", "error"), [("gone", NotFoundError), ("flipped", CorruptionError)])
def test_a_damaged_file_gives_no_row(tmp_path: Path, damage: str, error: type[Exception]) -> None:
    """Files are checked when they are opened."""
    batch = append(new_log(str(tmp_path)), [1, 2, 3])
    path = tmp_path / batch.files[0].path
    if damage == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[9] ^= 1
        path.write_bytes(data)
    source = LogSource.open(str(tmp_path))
    with pytest.raises(error, match=path.name):
        source.reader().read(source.splits()[0], 0, 10)


def test_a_failed_query_fails_who_has_read_everything(tmp_path: Path) -> None:
    """Of the run that it fed: a later run of the job does not see it. Rows that are there come first."""
    append(new_log(str(tmp_path)), [1])
    open_store(str(tmp_path)).create(failure_path("run-1"), b"the query broke: no such file")
    fed, later = LogSource.open(str(tmp_path), "run-1"), LogSource.open(str(tmp_path), "run-2")
    reader = fed.reader()
    assert reader.read(fed.splits()[0], 0, 10).next_offset == 1
    with pytest.raises(QueryFailedError, match="no such file"):
        reader.read(fed.splits()[0], 1, 10)
    assert later.reader().read(later.splits()[0], 1, 10).batch is None


def test_a_log_source_can_be_pickled(tmp_path: Path) -> None:
    """To tasks in other processes."""
    append(new_log(str(tmp_path)), [1, 2])
    source = cloudpickle.loads(cloudpickle.dumps(LogSource.open(str(tmp_path), "run")))
    assert source == LogSource.open(str(tmp_path), "run")
    assert source.unbounded
    assert read_on(source.reader(), source.splits()[0], tries=2) == [1, 2]


class QuickLog(LogSource):
    """A log at which nobody pauses before looking again."""

    def reader(self) -> LogReader:
        """With a clock that is a second later at each look."""
        return LogReader(self, itertools.count().__next__)


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    """Lanes of several batches, and one in which a lane has nothing."""
    written = new_log(str(tmp_path))
    for batch_id in range(4):
        append(written, [batch_id] * (5 * batch_id))
    source = LogSource.open(str(tmp_path))
    quick = QuickLog(source.url, source.log_id, source.lanes, source.schema)
    assert len(check_source(quick)) == 30
