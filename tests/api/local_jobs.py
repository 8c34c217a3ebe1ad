"""What tests of jobs on the local runtime share: quick jobs, and a source that stops where a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import polars as pl
import pyarrow as pa

import tidegate as tg
from tidegate.storage.filesystem import FileSystemStore
from tidegate.storage.store import Buffer

WAIT_S = 60
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
    assert job.wait("60s") == "finished"
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


class GatedSource:
    """Rows 0, 1, 2, … in column `x`, with `k = x % 5`; reading stops before each of the gates until it is opened.

    All splits stop at the same gates. Lives in this process alone.
    """

    schema = pa.schema([("k", pa.int64()), ("x", pa.int64())])

    def __init__(self, rows: int, gates: Sequence[int], splits: int = 1) -> None:
        self.rows = rows
        self.parts = splits
        self._gates = {row: (threading.Semaphore(0), threading.Event()) for row in gates}

    def splits(self) -> list[tg.SourceSplit]:
        return [tg.SourceSplit(f"split {n}", str(n).encode(), self.rows) for n in range(self.parts)]

    def reader(self) -> GatedReader:
        return GatedReader(self)

    def await_gate(self, row: int) -> None:
        """Wait until every split has read all rows before a gate."""
        for _ in range(self.parts):
            assert self._gates[row][0].acquire(timeout=WAIT_S), f"gate {row} was not reached"

    def open_gate(self, row: int) -> None:
        """Let everybody pass, for ever."""
        self._gates[row][1].set()

    def open_all(self) -> None:
        """No gate is left."""
        for row in self._gates:
            self.open_gate(row)

    def pass_gate(self, row: int) -> None:
        """Called by readers."""
        reached, opened = self._gates[row]
        if not opened.is_set():
            reached.release()
            assert opened.wait(WAIT_S), f"gate {row} was never opened"

    def next_gate(self, row: int) -> int:
        """The first gate at or after a row, or the end."""
        return min((g for g in self._gates if g > row), default=self.rows)

    def has_gate(self, row: int) -> bool:
        """Whether there is a gate before this row."""
        return row in self._gates

    def table(self) -> pa.Table:
        """All rows of all splits."""
        xs = list(range(self.rows)) * self.parts
        return pa.table({"k": [x % 5 for x in xs], "x": xs}, self.schema)


class GatedReader:
    """Reads up to the next gate at most, so that all rows before a gate are read before it."""

    def __init__(self, source: GatedSource) -> None:
        self._source = source

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of a split; waits at a gate."""
        if self._source.has_gate(offset):
            self._source.pass_gate(offset)
        stop = min(offset + rows_max, self._source.next_gate(offset), split.rows)
        xs = list(range(offset, stop))
        batch = pa.record_batch({"k": [x % 5 for x in xs], "x": xs}, schema=self._source.schema)
        return tg.ReadResult(batch if xs else None, stop, stop >= split.rows)

    def close(self) -> None:
        """Nothing to release."""


class WatchedStore(FileSystemStore):
    """A store that tells before and after it creates an entry of a table's log beyond its creation and claim."""

    def __init__(self, url: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__(url)
        self._before, self._after = before, after

    def create(self, path: str, data: Buffer) -> None:
        """Conditional create."""
        commit = path.startswith("_tidegate/log/") and int(path.rsplit("/", 1)[1]) > 1
        if commit:
            self._before()
        super().create(path, data)
        if commit:
            self._after()


@contextmanager
def opening(source: GatedSource) -> Iterator[GatedSource]:
    """Whatever happens in the test, no reader is left waiting at a gate."""
    try:
        yield source
    finally:
        source.open_all()
