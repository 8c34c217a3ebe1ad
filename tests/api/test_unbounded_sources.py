"""Sources whose splits go on: rows that come while the job runs, pauses, event time of each split, and restores."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config, local
from waiting import until

import tidegate as tg

SCHEMA = pa.schema([("k", pa.int64()), ("at", pa.int64())])


class FedSource:
    """Splits that a test adds rows to. Lives in this process alone."""

    schema = SCHEMA
    unbounded = True

    def __init__(self, splits: int) -> None:
        self.rows: list[list[dict[str, int]]] = [[] for _ in range(splits)]
        self.asked_at: set[tuple[str, int]] = set()
        """Places at which there was nothing."""

    def add(self, split: int, *times: int) -> None:
        """Rows that are there from now on."""
        self.rows[split] += [{"k": split, "at": time} for time in times]

    def splits(self) -> list[tg.SourceSplit]:
        """All of them."""
        return [tg.SourceSplit(str(number), b"") for number in range(len(self.rows))]

    def reader(self) -> FedSource:
        """One for all."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """What there is by now."""
        found = self.rows[int(split.split_id)][offset : offset + rows_max]
        if not found:
            self.asked_at.add((split.split_id, offset))
            return tg.ReadResult(None, offset, at_end=False)
        return tg.ReadResult(pa.RecordBatch.from_pylist(found, SCHEMA), offset + len(found), at_end=False)

    def close(self) -> None:
        """Nothing to release."""

    def await_nothing(self, split: int, offset: int) -> None:
        """Wait until all rows before one were read, and it was asked for in vain."""
        place = str(split), offset
        until(f"a read at {place}", lambda: place in self.asked_at, lambda: self.asked_at)


class Alarm(tg.ProcessFunction):
    """Says when event time has got to the timestamp of a row."""

    rang = threading.Event()

    def process(self, row: dict[str, int], context: tg.ProcessContext) -> None:
        """Wait for it."""
        context.timer_service.register_event_time_timer(row["at"])

    def on_timer(self, timestamp_ms: int, context: tg.ProcessContext) -> None:
        """It is there."""
        self.rang.set()


def test_rows_that_come_later_are_each_there_once(tmp_path: Path) -> None:
    """Also behind a stop with a savepoint, from which the next job goes on at another parallelism."""
    source, path, table = FedSource(3), None, None
    for parallelism in (2, 1):
        with local(parallelism) as env:
            table = env.from_source(source, uid="source").to_table(
                str(tmp_path / "out"), uid="out", if_exists="error" if path is None else "append"
            )
            job = env.execute("job", checkpoints=config(tmp_path / "root"), restart=NO_RESTART, restore=path)
            for times in (1, 2, 3), (4, 5):
                for split in range(3):
                    source.add(split, *times)
                    source.await_nothing(split, len(source.rows[split]))
            path = job.stop(savepoint=str(tmp_path / f"savepoint-{parallelism}"))
            assert job.wait("4min") == "suspended"

    assert table is not None
    shown = sorted((row["k"], row["at"]) for row in table.to_arrow().to_pylist())
    assert shown == sorted((split, time) for split in range(3) for time in (1, 2, 3, 4, 5) for _ in range(2))


@pytest.mark.parametrize("idleness", [None, "1ms"])
def test_a_split_without_rows_holds_event_time_back_until_it_is_idle(tmp_path: Path, idleness: str | None) -> None:
    """In the subtask that reads it, and for those behind other subtasks too."""
    source, Alarm.rang = FedSource(4), threading.Event()
    with local(2) as env:
        stream = env.from_source(source, uid="source").assign_timestamps("at", idleness=idleness)
        stream.key_by("k").process(Alarm(), schema=SCHEMA, uid="alarm").collect()
        job = env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.add(0, 100, 200)
        source.await_nothing(0, 2)
        if idleness is None:
            # Nothing is to be waited for: the last row of another split says as well that the first one was processed.
            for split in (1, 2, 3):
                assert not Alarm.rang.is_set()
                source.add(split, 150)
        until("the first alarm", lambda: Alarm.rang.is_set() or job.status() == "failed", job.progress)
        assert job.progress().reason is None
        job.cancel()


def test_an_idleness_elsewhere_is_refused() -> None:
    """Behind another step, and of a source whose splits are read one after the other."""
    with local(2) as env:
        stream = env.from_source(FedSource(1), uid="source")
        for wrong in (stream.map(lambda row: row, schema=SCHEMA), env.from_batches(pa.table({"at": [1]}))):
            with pytest.raises(tg.ConfigurationError, match="directly after an unbounded source"):
                wrong.assign_timestamps("at", idleness="1s")
        with pytest.raises(tg.ConfigurationError, match="directly after"):
            stream.assign_timestamps("at", idleness="1s", parallelism=1)
