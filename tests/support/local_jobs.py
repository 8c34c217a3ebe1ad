"""What tests of jobs on the local runtime share: quick jobs, and a source that stops where a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import polars as pl
import pyarrow as pa
from waiting import until

import tidegate as tg
from tidegate.storage.checkpoints.lease import read_lease, write_lease
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer

WAIT_S = 240
NO_RESTART = tg.RestartStrategy.none()
SMALL = tg.DataPlaneOptions(source_rows_max=50)


def local(parallelism: int = 2, rows_max: int = 50) -> tg.StreamEnvironment:
    """An environment whose sources read little at a time, so that even small inputs make many batches."""
    return tg.StreamEnvironment.local(parallelism, options=tg.DataPlaneOptions(source_rows_max=rows_max))


def config(root: str | Path, **settings: object) -> tg.CheckpointConfig:
    """Checkpoints under a folder; without an interval only those that are asked for, and the final one."""
    return tg.CheckpointConfig(storage=str(root), **settings)


def finish(env: tg.StreamEnvironment, root: str | Path, **options: object) -> tg.Job:
    """Execute what was made, and wait for its end."""
    settings = {"interval": "20ms", **options.pop("settings", {})}  # type: ignore[dict-item]
    job = env.execute("test job", checkpoints=config(root, **settings), restart=NO_RESTART, **options)  # type: ignore[arg-type]
    assert job.wait("4min") == "finished"
    return job


def numbers(rows: int, keys: int = 7, seed: int = 0) -> pa.Table:
    """Columns k (few ints), x (ints with nulls) and y (floats)."""
    random = Random(seed)
    return pa.table(
        {
            "k": pa.array([random.randrange(keys) for _ in range(rows)], pa.int64()),
            "x": pa.array([random.choice([None, *range(-50, 50)]) for _ in range(rows)], pa.int64()),
            "y": pa.array([random.random() for _ in range(rows)], pa.float64()),
        }
    )


def rows(table: pa.Table | pl.DataFrame) -> list[tuple[object, ...]]:
    """Rows in an order of their own, to compare as sets with repetition; floats to nine digits."""
    found = table if isinstance(table, pl.DataFrame) else pl.from_arrow(table)
    assert isinstance(found, pl.DataFrame)
    rounded = found.with_columns(pl.col(pl.Float64).round(9))
    return sorted(rounded.rows(), key=repr)


def await_events(job: tg.Job, name: str, count: int) -> None:
    """Read the job's log until this event has happened so often."""

    def names() -> list[str]:
        return [type(event).__name__ for event in job.events()]

    until(f"{name}, {count} times", lambda: names().count(name) >= count, names)


def thought_dead(job: tg.Job) -> None:
    """Everybody takes a running job for dead, until it renews its lease, a third of its time later."""
    store = FileSystemStore(job.root)
    lease = read_lease(store, job.job_id)
    assert lease is not None
    write_lease(store, lease.ended_at(lease.renewed_at_ms))


class GatedSource:
    """Rows 0, 1, 2, … in column `x`, with `k = x % 5`; reading stops before each of the gates until it is opened.

    There is a split for each of the lengths, and all that are long enough stop at a gate. Lives in this process alone.
    """

    schema = pa.schema([("k", pa.int64()), ("x", pa.int64())])

    def __init__(self, *lengths: int, gates: Sequence[int] = ()) -> None:
        self.lengths = lengths
        self.open_readers = 0
        self._lock = threading.Lock()
        self._gates = {row: (threading.Semaphore(0), threading.Event()) for row in gates}

    def splits(self) -> list[tg.SourceSplit]:
        """One of each length."""
        return [tg.SourceSplit(f"split {n}", str(n).encode(), length) for n, length in enumerate(self.lengths)]

    def reader(self) -> GatedReader:
        """A reader of a subtask."""
        self.count_reader(1)
        return GatedReader(self)

    def count_reader(self, change: int) -> None:
        """One more reader is open, or one less. From the thread of any task."""
        with self._lock:
            self.open_readers += change

    def await_gate(self, row: int) -> None:
        """Wait until every split has read all rows before a gate, and its task has processed them."""
        for _ in (length for length in self.lengths if length > row):
            reached = self._gates[row][0]
            until(f"gate {row}", lambda reached=reached: reached.acquire(blocking=False))  # type: ignore[misc]

    def open_gate(self, row: int) -> None:
        """Let everybody pass, for ever."""
        self._gates[row][1].set()

    def open_all(self) -> None:
        """No gate is left."""
        for row in self._gates:
            self.open_gate(row)

    def pass_gate(self, row: int) -> None:
        """Called by readers before they read this row: where there is a gate, wait for it to be opened."""
        if not self.closed_at(row):
            return
        reached, opened = self._gates[row]
        reached.release()
        assert opened.wait(WAIT_S), f"gate {row} was never opened"

    def closed_at(self, row: int) -> bool:
        """Whether there is a gate before a row, and it is closed."""
        return row in self._gates and not self._gates[row][1].is_set()

    def next_gate(self, row: int, otherwise: int) -> int:
        """The first gate after a row."""
        return min((gate for gate in self._gates if gate > row), default=otherwise)

    def table(self) -> pa.Table:
        """All rows of all splits."""
        xs = [x for length in self.lengths for x in range(length)]
        return pa.table({"k": [x % 5 for x in xs], "x": xs}, self.schema)


class GatedReader:
    """Reads up to the next gate at most, so that all rows before a gate are read before it.

    A source is read a batch or two ahead of what it has processed. So the first read at a gate gives no rows, and only
    the next one, which is asked for when the rows before it are on their way, says that the gate was reached. Whatever
    is aligned and asked for after that covers them. The first one gives the split's payload: a read that gives nothing
    at all is repeated at once by a source that waits for rows, before it has processed those that it has.
    """

    def __init__(self, source: GatedSource) -> None:
        self._source = source
        self._came_to: set[tuple[str, int]] = set()

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of a split; waits at a gate."""
        if offset < split.rows:
            if self._source.closed_at(offset) and (split.split_id, offset) not in self._came_to:
                self._came_to.add((split.split_id, offset))
                return tg.ReadResult(None, offset, False, payload=split.payload)
            self._source.pass_gate(offset)
        stop = min(offset + rows_max, self._source.next_gate(offset, split.rows), split.rows)
        xs = list(range(offset, stop))
        batch = pa.record_batch({"k": [x % 5 for x in xs], "x": xs}, schema=self._source.schema)
        return tg.ReadResult(batch if xs else None, stop, stop >= split.rows)

    def close(self) -> None:
        """Counted."""
        self._source.count_reader(-1)


class WatchedStore(FileSystemStore):
    """A store that tells, with the path, before and after it creates a file that matters to a test.

    Those are the `_metadata` of a checkpoint, and commits: entries of a table's log after its creation and claim.
    """

    def __init__(self, url: str, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        super().__init__(url)
        self._before, self._after = before, after

    def create(self, path: str, data: Buffer) -> None:
        """Conditional create."""
        matters = path.endswith("/_metadata") or is_commit(path)
        if matters:
            self._before(path)
        super().create(path, data)
        if matters:
            self._after(path)


def is_commit(path: str) -> bool:
    """Whether a file that is created is a commit to a table."""
    return path.startswith("_tidegate/log/") and int(path.rsplit("/", 1)[1]) > 1


def nothing(path: str) -> None:
    """Where nobody wants to know."""


@contextmanager
def opening(source: GatedSource) -> Iterator[GatedSource]:
    """Whatever happens in the test, no reader is left waiting at a gate."""
    try:
        yield source
    finally:
        source.open_all()


def fails_once(x: int, flag: Path, text: str = "odd") -> Callable[[dict[str, int]], dict[str, int]]:
    """Returns a function of rows that raises a ValueError at the first row with this `x`, and then creates the flag."""

    def fails(row: dict[str, int]) -> dict[str, int]:
        if row["x"] == x and not flag.exists():
            flag.touch()
            raise ValueError(text)
        return row

    return fails
