"""Splits of bounded sources are assigned while the job runs: to who asks, and after a restore where nobody had them."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, WAIT_S, config, local
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.storage.ids import OperatorUid

SPLITS, ROWS = 8, 20
"""So many splits of so many rows."""
UID = OperatorUid("in")


class SlowSource:
    """Numbered rows, in order. Who reads split 0 waits in the middle of it until it is let on, or the last split was
    read.
    """

    schema = pa.schema([("x", pa.int64())])

    def __init__(self, splits: int = SPLITS, *, static: bool = False) -> None:
        self.count = splits
        self.static_splits = static
        self.in_the_middle, self.go_on = threading.Event(), threading.Event()

    def splits(self) -> list[tg.SourceSplit]:
        """The numbers, in ranges."""
        return [tg.SourceSplit(f"split {number}", b"%d" % number, ROWS) for number in range(self.count)]

    def reader(self) -> SlowSource:
        """Itself: it is used by one job in one process."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Half a split at most."""
        number, rows = int(split.payload), min(rows_max, ROWS // 2, ROWS - offset)
        if number == 0 and offset:
            self.in_the_middle.set()
            assert self.go_on.wait(WAIT_S), "the other subtask has not read the other splits"
        start = number * ROWS + offset
        batch = pa.record_batch({"x": pa.array(range(start, start + rows), pa.int64())})
        if number == self.count - 1 and offset + rows == ROWS and not self.static_splits:
            self.go_on.set()
        return tg.ReadResult(batch, offset + rows, at_end=offset + rows == ROWS)

    def close(self) -> None:
        """Nothing to release."""


def program(env: tg.StreamEnvironment, source: SlowSource, folder: Path) -> tg.OutputTable:
    """Its rows in a table."""
    return env.from_source(source, uid=UID).to_table(str(folder / "out"), uid="out")


def interrupt(folder: Path, *, static: bool = False) -> str:
    """A savepoint of the moment at which both subtasks wait in the middle of what they read; the job ends there."""

    class Held(SlowSource):
        def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
            if split.payload == b"1" and offset:
                assert self.go_on.wait(WAIT_S)
            return super().read(split, offset, rows_max)

    source = Held(static=static)
    with local(2) as env:
        program(env, source, folder)
        job = env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART)
        until("a read", source.in_the_middle.is_set)
        path = job.savepoint(str(folder / "savepoints"))
        job.cancel()
        source.go_on.set()
        assert job.wait("4min") == "cancelled"
    return path


def resume(folder: Path, savepoint: str, source: SlowSource, parallelism: int) -> list[int]:
    """Go on to the end; the values in the table."""
    source.go_on.set()
    with local(parallelism) as env:
        table = program(env, source, folder)
        job = env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=savepoint)
        assert job.wait("4min") == "finished"
    return sorted(table.to_arrow()["x"].to_pylist())


def test_a_subtask_that_is_slow_leaves_the_splits_to_the_others(tmp_path: Path) -> None:
    """One waits in the first split until all others were read: dealt out before, half of them would wait behind it."""
    with local(2) as env:
        table = program(env, SlowSource(), tmp_path)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(SPLITS * ROWS))


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_what_nobody_had_is_read_after_a_restore(tmp_path: Path, parallelism: int) -> None:
    """It is in the pool of the savepoint. At any parallelism each row counts once."""
    savepoint = interrupt(tmp_path)
    pool = [split.split_id for split in recovery.inspect(savepoint).metadata.pool_of(UID)]
    assert pool
    assert pool == [f"split {number}" for number in range(SPLITS)][-len(pool) :]
    assert resume(tmp_path, savepoint, SlowSource(), parallelism) == list(range(SPLITS * ROWS))


def test_splits_that_were_dealt_out_stay_where_they_are(tmp_path: Path) -> None:
    """The subtasks have every split, and nothing is assigned twice."""
    savepoint = interrupt(tmp_path, static=True)
    assert recovery.inspect(savepoint).metadata.pools == ()
    assert resume(tmp_path, savepoint, SlowSource(), 2) == list(range(SPLITS * ROWS))


@pytest.mark.parametrize("splits", [SPLITS - 1, SPLITS + 1])
def test_other_splits_are_refused(tmp_path: Path, splits: int) -> None:
    """Those that nobody had begun are compared, too."""
    savepoint = interrupt(tmp_path)
    number = min(splits, SPLITS)
    with pytest.raises(tg.ConfigurationError, match=f"not what it was .*: split 'split {number}' and 0 more"):
        resume(tmp_path, savepoint, SlowSource(splits), 2)
