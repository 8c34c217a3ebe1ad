"""`process(..., in_order=True)`: rows of a key and timers between them come in order of event time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg

ROWS = pa.schema({"k": pa.int64(), "at": pa.int64(), "n": pa.int64()})
SEEN = {"k": int, "seq": int, "what": str, "at": int, "n": int, "watermark": int}
AHEAD_MS = 7


class Journal(tg.ProcessFunction):
    """Emits what it sees of a key, numbered; each row sets timers `AHEAD_MS` ahead and at its own moment."""

    def open(self, context: tg.ProcessContext) -> None:
        self.seq = context.state(tg.ValueState("seq", int))

    def _seen(self, context: tg.ProcessContext, what: str, at: int, n: int) -> dict[str, Any]:
        number = (self.seq.value() or 0) + 1
        self.seq.update(number)
        key = {"k": context.current_key["k"], "seq": number, "what": what}
        return {**key, "at": at, "n": n, "watermark": context.current_watermark}

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        if row["n"] < 0:
            raise ValueError(f"row {row['n']}")
        assert context.timestamp == row["at"]
        yield self._seen(context, "row", row["at"], row["n"])
        context.timer_service.register_event_time_timer(row["at"] + AHEAD_MS)
        context.timer_service.register_event_time_timer(row["at"])

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield self._seen(context, "timer", timestamp, -1)


def expected(rows: list[tuple[int, int]]) -> list[tuple[int, str, int, int]]:
    """Key, kind, time and number of what a function sees of sorted rows: timers come before all later rows."""
    found = []
    for key in sorted({key for key, _ in rows}):
        of_key = sorted((at, n) for n, (k, at) in enumerate(rows) if k == key)
        moments = {at for at, _ in of_key} | {at + AHEAD_MS for at, _ in of_key}
        events = [(at, 0, n) for at, n in of_key] + [(at, 1, -1) for at in moments]
        found += [(key, "timer" if kind else "row", at, n) for at, kind, n in sorted(events)]
    return found


def seen(rows: list[dict[str, Any]]) -> list[tuple[int, str, int, int]]:
    """Returns the same for the rows that a job has emitted."""
    ordered = sorted(rows, key=lambda row: (row["k"], row["seq"]))
    return [(row["k"], row["what"], row["at"], row["n"]) for row in ordered]


def table_of(rows: list[tuple[int, int]]) -> pa.Table:
    """Rows of keys and times, numbered."""
    return pa.table([[k for k, _ in rows], [at for _, at in rows], list(range(len(rows)))], schema=ROWS)


def finished(env: tg.StreamEnvironment, stream: tg.Stream) -> list[dict[str, Any]]:
    """The rows of a stream, once the job has ended."""
    rows = stream.collect()
    assert env.execute("in order").wait("4min") == "finished"
    return rows.to_arrow().to_pylist()


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=40),
    st.integers(1, 10),
    st.integers(1, 2),
)
def test_a_function_sees_rows_and_timers_by_time(rows: list[tuple[int, int]], rows_max: int, parallelism: int) -> None:
    """The results equal those over sorted rows, whatever the order, the batch sizes and the parallelism."""
    with tg.StreamEnvironment.local(parallelism, options=tg.DataPlaneOptions(source_rows_max=rows_max)) as env:
        stream = env.from_batches(table_of(rows), timestamp="at", max_out_of_orderness=60)
        found = finished(env, stream.key_by("k").process(Journal(), schema=SEEN, in_order=True))
    assert seen(found) == expected(rows)
    for row in found:
        assert row["watermark"] >= row["at"] - 1


def test_late_rows_are_those_of_the_step() -> None:
    """They come to no function, are counted, and can be read beside its results and its errors."""
    late = [(1, 50), (1, 10), (2, 3), (1, 60), (2, 70)]
    rows = [*table_of(late).to_pylist(), {"k": 1, "at": 65, "n": -5}]
    with tg.StreamEnvironment.local(1, options=tg.DataPlaneOptions(source_rows_max=1)) as env:
        stream = env.from_batches(pa.Table.from_pylist(rows, ROWS), timestamp="at", max_out_of_orderness=5)
        made = stream.key_by("k").process(Journal(), schema=SEEN, in_order=True, errors_to="bad", uid="journal")
        results, bad = made.collect(), made.side_output("bad").collect()
        passed = made.late_rows().collect()
        job = env.execute("late")
        assert job.wait("4min") == "finished"
        assert [row["n"] for row in passed.to_arrow().to_pylist()] == [1, 2]
        assert passed.to_arrow().schema == ROWS
        assert [row["n"] for row in bad.to_arrow().to_pylist()] == [-5]
        found = seen(results.to_arrow().to_pylist())
    assert [n for _, what, _, n in found if what == "row"] == [0, 3, 4]


def test_a_function_by_batch_gets_sorted_batches() -> None:
    """Rows of a batch come by time, and later batches have later rows."""

    class Batches(tg.ProcessFunction):
        def process_batch(self, batch: pa.RecordBatch, context: tg.ProcessBatchContext) -> pa.RecordBatch:
            return batch

    rows = [(n % 3, (n * 37) % 101) for n in range(200)]
    with tg.StreamEnvironment.local(1, options=tg.DataPlaneOptions(source_rows_max=20)) as env:
        stream = env.from_batches(table_of(rows), timestamp="at", max_out_of_orderness=101)
        found = finished(env, stream.key_by("k").process(Batches(), schema=ROWS, in_order=True))
    assert [row["at"] for row in found] == sorted(at for _, at in rows)
    for key in range(3):
        of_key = sorted((at, n) for n, (k, at) in enumerate(rows) if k == key)
        assert [(row["at"], row["n"]) for row in found if row["k"] == key] == of_key


def test_what_cannot_be_in_order_is_refused() -> None:
    """A stream without event time, one whose columns are not known, and a second side output called late."""
    with tg.StreamEnvironment.local(1) as env:
        timeless = env.from_batches(table_of([(1, 1)])).key_by("k")
        with pytest.raises(tg.ConfigurationError, match=r"process: in_order=True .* call assign_timestamps before"):
            timeless.process(Journal(), schema=SEEN, in_order=True)
        timed = env.from_batches(table_of([(1, 1)]), timestamp="at")
        with pytest.raises(tg.ConfigurationError, match="late rows go to the side output 'late'; give the function's"):
            timed.key_by("k").process(Journal(), schema=SEEN, in_order=True, errors_to="late")
        unknown = timed.map_batches(lambda batch: batch).assign_timestamps("at").key_by("k")
        with pytest.raises(tg.ConfigurationError, match="process: the columns of the stream are not known"):
            unknown.process(Journal(), schema=SEEN, in_order=True)
