"""State and timers of process functions survive restores at any moment, at any parallelism, as if nothing happened."""

from __future__ import annotations

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import CUT, context
from process_harness import Driven, Row

from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.state.keyed_state import ListState, MapState, ValueState
from tidegate.operators.state.timers import TimeDomain
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.state.snapshot import StateTable

_KEYS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int16(): st.integers(-4, 4),
    pa.float64(): st.sampled_from([0.0, -0.0, math.nan, 1.5]),
    pa.string(): st.sampled_from(["", "a", "ü" * 20]),
    pa.bool_(): st.booleans(),
    pa.time64("ns"): st.times(dt.time(1), dt.time(1, 0, 0, 3)),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["x", "y"]),
}


class Everything(ProcessFunction):
    """Uses every kind of state and of timer, and tells all that it sees."""

    def open(self, context: ProcessContext) -> None:
        self.count = context.state(ValueState("count", pa.int64()))
        self.mean = context.state(ValueState("mean", pa.float32()))
        self.recent = context.state(ListState("recent", pa.struct({"x": pa.int64()})))
        self.seen = context.state(MapState("seen", pa.string(), pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        x, timers = row["x"], context.timer_service
        self.count.update((self.count.value() or 0) + 1)
        self.mean.update((self.mean.value() or 0) * 0.9 + x / 10)
        self.recent.add({"x": x})
        self.seen.put(str(x % 3), x)
        if x % 4 == 0:
            timers.register_event_time_timer(x * 10)
        elif x % 4 == 1:
            timers.register_processing_time_timer(context.current_processing_time + x)
        elif x % 4 == 2:
            timers.delete_event_time_timer((x - 2) * 10)
        elif x > 30:
            self.recent.clear()
            self.seen.remove("0")
        yield self._row(context, x)

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
        if context.time_domain is TimeDomain.EVENT_TIME and timestamp < 400:
            context.timer_service.register_event_time_timer(timestamp + 137)
            self.recent.update(self.recent.get()[-2:])
        elif context.time_domain is TimeDomain.PROCESSING_TIME:
            self.count.clear()
        yield self._row(context, timestamp)

    def _row(self, context: ProcessContext, x: int) -> Row:
        recent = [item["x"] for item in self.recent.get()]
        shown = [context.time_domain, self.count.value(), self.mean.value(), recent, sorted(self.seen.items())]
        return {**context.current_key, "x": x, "shown": repr(shown)}


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[str, ...], list[tuple[str, Any]]]:
    """Key columns, and what happens: batches, watermarks, the clock, and restores at some parallelism."""
    types = draw(st.lists(st.sampled_from(list(_KEYS)), min_size=1, max_size=2))
    names = tuple(f"k{i}" for i in range(len(types)))
    steps: list[tuple[str, Any]] = []
    watermark_ms = now_ms = 0
    for kind in draw(st.lists(st.sampled_from(["batch", "batch", "watermark", "clock", "restore"]), max_size=14)):
        if kind == "batch":
            rows = draw(st.integers(1, 6))
            columns = {
                name: pa.array(draw(st.lists(st.none() | _KEYS[t], min_size=rows, max_size=rows)), type=t)
                for name, t in zip(names, types, strict=True)
            }
            xs = draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows))
            steps.append((kind, pa.record_batch({**columns, "x": pa.array(xs, pa.int64())})))
        elif kind == "watermark":
            watermark_ms += draw(st.integers(1, 150))
            steps.append((kind, watermark_ms))
        elif kind == "clock":
            now_ms += draw(st.integers(1, 30))
            steps.append((kind, now_ms))
        else:
            steps.append((kind, draw(st.integers(1, 4))))
    return names, steps


def by_key(names: tuple[str, ...], rows: list[Row]) -> dict[str, list[str]]:
    """What each key told, in order; between keys there is no order."""
    told = defaultdict(list)
    for row in rows:
        told[repr([row[name] for name in names])].append(repr((row["x"], row["shown"])))
    return dict(told)


@settings(max_examples=50, deadline=None)
@given(histories())
def test_restored_runs_equal_an_uninterrupted_run(case: tuple[tuple[str, ...], list[tuple[str, Any]]]) -> None:
    """Snapshots are taken of a run that goes on for a while (all that is lost again), then of the restored one."""
    names, steps = case
    whole, restored = Driven(Everything(), keys=(names,)), Driven(Everything(), keys=(names,))
    told: list[Row] = []
    now_ms = 0
    for kind, value in steps:
        if kind == "restore":
            frozen = [operator.snapshot(CUT) for operator in restored.operators]
            told += restored.out
            restored.end()
            states = [state for snapshot in frozen if snapshot is not None for state in snapshot.states]
            tables = [table for state in states for table in tables_of(state)]
            restored = Driven(Everything(), keys=(names,), parallelism=value, restored=tables)
            restored.clock(now_ms)
        else:
            now_ms = value if kind == "clock" else now_ms
            for driven in (whole, restored):
                getattr(driven, kind)(value)
    whole.end()
    restored.end()

    assert by_key(names, whole.out) == by_key(names, told + restored.out)


def snapshot_of(*keys: int) -> list[StateTable]:
    """A snapshot in which each of the keys has all states and timers."""
    driven = Driven(Everything())
    driven.rows(*({"k": key, "x": x} for key in keys for x in (4, 5)))
    return driven.snapshot()


@pytest.mark.parametrize("parallelism", [1, 2, 5, 16])
def test_state_and_timers_move_with_their_key_group(parallelism: int) -> None:
    """After rescaling each key's state and timers are in the one subtask that gets its rows."""
    keys = list(range(40))
    tables = snapshot_of(*keys)
    moved = Driven(Everything(), parallelism=parallelism, restored=tables)

    assert {table.state for table in tables} == {"count", "mean", "recent", "seen", "_tidegate_timers"}
    assert [table.rows.num_rows for table in tables] == [40, 40, 40, 40, 80]
    fired = moved.watermark(40)
    assert sorted(row["k"] for row in fired) == keys
    assert {row["shown"] for row in moved.rows(*({"k": key, "x": 7} for key in keys))} == {
        repr([None, 3, moved_mean(), [4, 5, 7], [("1", 7), ("2", 5)]])
    }


def moved_mean() -> float:
    """What `mean` is after 4, 5 and 7, rounded to float32 each time."""
    mean = 0.0
    for x in (4, 5, 7):
        mean = pa.scalar(mean * 0.9 + x / 10, pa.float32()).as_py()
    return mean


def test_nanoseconds_of_a_key_are_kept() -> None:
    """A key that Python's own types cannot hold is stored, and found again, exactly."""
    moments = pa.array([1, 2, 1], pa.int64()).cast(pa.timestamp("ns", "Europe/Berlin"))
    batch = pa.record_batch({"k": moments, "x": pa.array([3, 3, 3], pa.int64())})
    driven = Driven(Everything())
    driven.batch(batch)
    tables = driven.snapshot()
    again = Driven(Everything(), restored=tables)
    again.batch(batch)

    assert sorted(table.rows.num_rows for table in tables) == [2, 2, 2, 2]
    assert tables[0].rows.schema.field("k").type == moments.type
    assert sorted(again.snapshot()[0].rows.column("count").to_pylist()) == [2, 4]


def test_tables_that_overlap_are_refused() -> None:
    """A key in two tables would be two states: the checkpoint, or what reads it, is wrong."""
    tables = snapshot_of(1)
    for table in tables:
        with pytest.raises(CorruptionError, match="twice"):
            Driven(Everything(), restored=[table, table])


def test_keys_of_other_subtasks_are_refused() -> None:
    """State in the wrong subtask would never be seen again."""
    operator = ProcessOperator(Everything(), keys=(("k",),))
    with pytest.raises(OperatorError, match="belongs to subtask"):
        operator.open(context(subtask=0, parallelism=2), snapshot_of(*range(20)))


class Other(ProcessFunction):
    """Binds one state that `Everything` has, with another type."""

    def open(self, context: ProcessContext) -> None:
        context.state(ValueState("count", pa.string()))


def test_a_changed_program_is_refused() -> None:
    """A state that changed its type, is no longer bound, or has other key columns is named, not dropped."""
    count, mean, *_ = snapshot_of(1)
    with pytest.raises(ConfigurationError, match=r"(?s)state 'count' of operator 'op-uid'.*int64.*string"):
        Driven(Other(), restored=[count])
    with pytest.raises(ConfigurationError, match="a state 'mean' that the function does not bind"):
        Driven(Other(), restored=[mean])
    with pytest.raises(ConfigurationError, match=r"keyed by \['id'\], but state 'count'"):
        Driven(Everything(), keys=(("id",),), restored=[count])
