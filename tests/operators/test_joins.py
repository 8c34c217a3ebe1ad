"""Joins by event time are those of nested loops over the rows, through restores with other parallelism and backends."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, get_args

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import context, cut, kept_in

from tidegate.actors.task.emitter import HashPartitioner
from tidegate.operators.joins.interval_join import IntervalJoin
from tidegate.operators.joins.join_operator import JoinHow, JoinOperator, JoinSides
from tidegate.operators.windows import window_operator
from tidegate.operators.windows.window_join import WindowJoin
from tidegate.operators.windows.window_specs import Session, Sliding, Tumbling
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut

LEFT = pa.schema({"k": pa.int64(), "s": pa.string(), "t": pa.int64(), "v": pa.string()})
RIGHT = pa.schema(
    {"id": pa.int64(), "s": pa.string(), "at": pa.timestamp("ms"), "v": pa.list_(pa.int64()), "k": pa.int8()}
)
SCHEMAS = (LEFT, RIGHT)
SIDES = JoinSides((("k", "s"), ("id", "s")), ("t", "at"))
SAVEPOINT = Cut(CheckpointId(1), canonical=True)
EPOCH = datetime(1970, 1, 1)

Row = dict[str, Any]
_ROWS = st.lists(st.tuples(st.none() | st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=6)
_STEPS = st.lists(
    st.tuples(st.integers(0, 1), _ROWS)
    | st.tuples(st.just("watermark"), st.integers(0, 50))
    | st.tuples(st.just("restore"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]))),
    max_size=14,
)


class Job:
    """Subtasks of a join, whose rows come in by key, and which may be restored from a savepoint."""

    def __init__(self, make: Callable[[], JoinOperator]) -> None:
        self.emitted: list[Row] = []
        self._make = make
        self._tables: list[Any] = []
        self.watermark: int | None = None
        self._operators: list[JoinOperator] = []
        self.restore(2, "columnar")

    def rows(self, side: int, rows: list[Row]) -> None:
        """A batch comes in."""
        batch = pa.RecordBatch.from_pylist(rows, SCHEMAS[side])
        for target, part in HashPartitioner(SIDES.keys[side], 16, len(self._operators)).split(batch):
            self._operators[target].process_input(side, part, self._emit)

    def advance(self, watermark_ms: int) -> None:
        """The watermark of both inputs advances."""
        self.watermark = watermark_ms
        for operator in self._operators:
            for _ in operator.advance_watermark(watermark_ms, self._emit):
                pass

    def restore(self, parallelism: int, backend: str) -> None:
        """Go on from a savepoint; no watermark comes before the next one, as it may be in a job."""
        tables = [t for o in self._operators for state in o.snapshot(SAVEPOINT).states for t in tables_of(state)]
        self.close()
        self._operators = [self._make() for _ in range(parallelism)]
        for subtask, operator in enumerate(self._operators):
            options = kept_in(backend, tempfile.mkdtemp())
            owned = key_group_range(subtask, 16, parallelism)
            keyed = [cut(table, ("k", "s"), 16, owned) for table in tables if table.kind is StateKind.KEYED]
            restored = keyed + [table for table in tables if table.kind is not StateKind.KEYED]
            operator.open(replace(context(subtask, parallelism), backend=options), restored)

    @property
    def stored_rows(self) -> int:
        """How many rows there are, in all tables of all subtasks."""
        return sum(table.rows for operator in self._operators for table in operator.tables)

    def close(self) -> None:
        """End of the job."""
        for operator in self._operators:
            operator.close()

    def _emit(self, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        assert batch.num_rows > 0
        self.emitted += batch.to_pylist()


def run(make: Callable[[], JoinOperator], steps: list[tuple[Any, Any]]) -> tuple[list[Row], list[tuple[int, Row, int]]]:
    """Run a program. What was emitted, and the rows that came: side, row, and the watermark before it."""
    job, came, number = Job(make), [], 0
    for what, argument in steps:
        if what == "watermark":
            if job.watermark is None or argument > job.watermark:
                job.advance(argument)
        elif what == "restore":
            job.restore(*argument)
        else:
            rows = []
            for key, time in argument:
                number += 1
                rows.append(_row(what, key, time, number))
                came.append((what, rows[-1], -1 if job.watermark is None else job.watermark))
            job.rows(what, rows)
    job.advance(MAX_WATERMARK_MS)
    job.close()
    return job.emitted, came


def _row(side: int, key: int | None, time: int, number: int) -> Row:
    text = None if key == 1 else f"s{key}"  # a key of several columns, one of which may be null
    if side == 0:
        return {"k": key, "s": text, "t": time, "v": f"v{number}"}
    return {"id": key, "s": text, "at": EPOCH + timedelta(milliseconds=time), "v": [number, None], "k": number % 5}


def time_of(side: int, row: Row) -> int:
    """The event time of a row."""
    return int(row["t"] if side == 0 else (row["at"] - EPOCH) / timedelta(milliseconds=1))


def matches(left: Row, right: Row) -> bool:
    """Whether keys are equal, as in SQL."""
    key = left["k"], left["s"]
    return None not in key and key == (right["id"], right["s"])


def _side_by_side(left: Row | None, right: Row | None) -> Row:
    keys = {"k": right["id"], "s": right["s"]} if left is None and right is not None else {}
    return {
        "k": None, "s": None, "t": None, "v": None, **(left or {}), **keys,
        "at": right and right["at"], "v_right": right and right["v"], "k_right": right and right["k"],
    }  # fmt: skip


def _counted(rows: list[Row]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


def _joined(
    left: list[Row], right: list[Row], how: str, matches: Callable[[Row, Row], bool] = matches
) -> Iterator[Row]:
    """The join of these rows."""
    for row in left:
        partners = [other for other in right if matches(row, other)]
        if (how == "semi" and partners) or (how == "anti" and not partners):
            yield row
        if how in ("inner", "left", "right", "full"):
            yield from (_side_by_side(row, other) for other in partners)
            if not partners and how in ("left", "full"):
                yield _side_by_side(row, None)
    if how in ("right", "full"):
        yield from (_side_by_side(None, r) for r in right if not any(matches(row, r) for row in left))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    steps=_STEPS,
    how=st.sampled_from(get_args(JoinHow)),
    window=st.sampled_from([Tumbling(10), Tumbling(7, offset=3), Sliding(20, 10), Sliding(10, 4)]),
    fired_rows=st.sampled_from([1, 5, 1000]),
)
def test_window_joins_are_nested_loops(steps: list[Any], how: JoinHow, window: Any, fired_rows: int) -> None:
    """Each window gives the join of its rows that were not late, once; with null keys, and columns of one name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_operator, "FIRED_ROWS", fired_rows)
        emitted, came = run(lambda: WindowJoin(SIDES, SCHEMAS, window, how), steps)
    expected = []
    size, step = window.size_ms, getattr(window, "slide_ms", window.size_ms)
    for start in range(window.offset_ms - 10 * step, 60, step):
        end = start + size
        inside = [(s, r) for s, r, mark in came if start <= time_of(s, r) < end and end - 1 > mark]
        left, right = ([r for s, r in inside if s == side] for side in (0, 1))
        bounds = {"window_start": start, "window_end": end}
        expected += [row | bounds for row in _joined(left, right, how)]
    assert _counted(emitted) == _counted(expected)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    steps=_STEPS,
    how=st.sampled_from(get_args(JoinHow)),
    bounds=st.sampled_from([(-5, 10), (0, 0), (3, 8), (-9, -2), (-40, 40)]),
)
def test_interval_joins_are_nested_loops(steps: list[Any], how: JoinHow, bounds: tuple[int, int]) -> None:
    """Of rows that were not late each pair in the interval comes once, and so does each row of which it is decided."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tidegate.operators.joins.interval_join._SWEEP_MS_MIN", 1)
        emitted, came = run(lambda: IntervalJoin(SIDES, SCHEMAS, *bounds, how), steps)
    left, right = ([r for s, r, mark in came if s == side and time_of(s, r) > mark] for side in (0, 1))

    def near(one: Row, other: Row) -> bool:
        return matches(one, other) and bounds[0] <= time_of(1, other) - time_of(0, one) <= bounds[1]

    assert _counted(emitted) == _counted(list(_joined(left, right, how, near)))


def test_rows_leave_the_state_when_time_is_past_them() -> None:
    """A window's rows go when it was joined; an interval's rows when no row can meet them any more, and not before."""
    windows = WindowJoin(SIDES, SCHEMAS, Tumbling(10))
    windows.open(context(), [])
    near = IntervalJoin(SIDES, SCHEMAS, -1000, 5000)
    near.open(context(), [])
    for operator in (windows, near):
        for side in (0, 1):
            rows = [_row(side, 0, time, time) for time in (1, 9, 12)]
            operator.process_input(side, pa.RecordBatch.from_pylist(rows, SCHEMAS[side]), lambda _: None)
    list(windows.advance_watermark(8, lambda _: None))
    assert [table.rows for table in windows.tables] == [3, 3]
    list(windows.advance_watermark(9, lambda _: None))
    assert [table.rows for table in windows.tables] == [1, 1]
    list(near.advance_watermark(1008, lambda _: None))
    assert [table.rows for table in near.tables] == [3, 2]
    list(near.advance_watermark(5011, lambda _: None))
    assert [table.rows for table in near.tables] == [1, 0]
    full = Job(lambda: IntervalJoin(SIDES, SCHEMAS, -1000, 5000, "full"))
    for side in (0, 1):
        full.rows(side, [_row(side, 0, time, time) for time in (1, 9, 12)])
    full.advance(7000)
    assert full.stored_rows == 0
    full.close()


@pytest.mark.parametrize("how", get_args(JoinHow))
def test_partners_stay_until_it_is_decided(how: JoinHow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has a partner also if that could find no other one for long when the row's interval is over."""
    monkeypatch.setattr("tidegate.operators.joins.interval_join._SWEEP_MS_MIN", 1)
    for bounds, times in (((-5, 10), (10, 10)), ((-10, 5), (10, 10)), ((-9, -2), (10, 3)), ((2, 9), (3, 10))):
        job = Job(lambda bounds=bounds: IntervalJoin(SIDES, SCHEMAS, *bounds, how))  # type: ignore[misc]
        left, right = ([_row(side, 0, times[side], 1)] for side in (0, 1))
        job.rows(0, left)
        job.rows(1, right)
        for watermark in range(10, 25):
            job.advance(watermark)
        assert _counted(job.emitted) == _counted(list(_joined(left, right, how)))
        job.close()


def test_a_row_of_a_window_that_was_joined_is_dropped() -> None:
    """Also one that comes when the watermark has just reached the end, and one after a restore: no window twice."""
    job = Job(lambda: WindowJoin(SIDES, SCHEMAS, Tumbling(10), "full"))
    job.rows(0, [_row(0, 0, 5, 1)])
    job.advance(9)
    job.rows(1, [_row(1, 0, 9, 2), _row(1, 0, 10, 3)])
    job.restore(1, "columnar")
    job.rows(1, [_row(1, 0, 8, 4)])
    job.advance(MAX_WATERMARK_MS)
    job.close()
    assert [(row["t"], row["at"]) for row in job.emitted] == [(5, None), (None, EPOCH + timedelta(milliseconds=10))]


@pytest.mark.parametrize(
    ("join", "late"),
    [
        (lambda: WindowJoin(SIDES, SCHEMAS, Tumbling(10)), 2),
        (lambda: WindowJoin(SIDES, SCHEMAS, Sliding(10, 5)), 1),  # 9 is in a window that ends at 15 as well
        (lambda: IntervalJoin(SIDES, SCHEMAS, -5, 5), 2),
    ],
)
def test_rows_that_come_too_late_are_counted(join: Callable[[], JoinOperator], late: int) -> None:
    """Once each, whatever the number of windows; of both inputs, and also one that no partner could have."""
    operator = join()
    opened = context()
    operator.open(opened, [])
    list(operator.advance_watermark(9, lambda _: None))
    for side, times in ((0, (4, 10)), (1, (9, 25))):
        key = None if side == 0 else 0
        rows = [_row(side, key, time, time) for time in times]
        operator.process_input(side, pa.RecordBatch.from_pylist(rows, SCHEMAS[side]), lambda _: None)
    assert opened.metrics.counter("numLateRecordsDropped").value == late


def test_what_cannot_be_joined_is_refused() -> None:
    """At planning: keys of other types, columns that would come twice, windows and kinds that there are not."""
    with pytest.raises(ConfigurationError, match="key 'v' of the left stream is string and 'id' of the right is int64"):
        WindowJoin(JoinSides((("v",), ("id",)), ("t", "at")), SCHEMAS, Tumbling(10))
    with pytest.raises(ConfigurationError, match=r"\['k', 'v'\] would occur twice in the result"):
        WindowJoin(JoinSides((("k", "s"), ("id", "s")), ("t", "at"), suffix=""), SCHEMAS, Tumbling(10))
    with pytest.raises(ConfigurationError, match="how='outer' is not one of"):
        WindowJoin(SIDES, SCHEMAS, Tumbling(10), "outer")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"give tg\.Tumbling or tg\.Sliding"):
        WindowJoin(SIDES, SCHEMAS, Session(10))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the first bound must not be the later one"):
        IntervalJoin(SIDES, SCHEMAS, 5, 4)


def test_rows_without_event_time_are_refused() -> None:
    """The error says how many, of which input, and what to do."""
    operator = WindowJoin(SIDES, SCHEMAS, Tumbling(10))
    operator.open(context(), [])
    batch = pa.RecordBatch.from_pylist([_row(1, 0, 1, 1) | {"at": None}], RIGHT)
    with pytest.raises(OperatorError, match="1 rows of the right input have no event time in 'at'; filter them out"):
        operator.process_input(1, batch, lambda _: None)
