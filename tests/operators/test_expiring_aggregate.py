"""Running aggregates with a time to live give what a plain model does, whatever batches, backends and restores."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened, run
from ranking_harness import Running

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates import expiring_aggregate
from tidegate.operators.aggregates.expiring_aggregate import ExpiringAggregate
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

_SCHEMA = pa.schema([("k", pa.string()), ("t", pa.int64()), ("x", pa.int64()), ("s", pa.string())])
_TTL = 20
_WHAT = {"n": tg.count(), "total": tg.sum("x"), "least": tg.min("s"), "every": tg.collect_list("x", limit=3)}


class _Model:
    """The same in plain Python, a row at a time; it forgets a key only when the key begins anew."""

    def __init__(self) -> None:
        self.watermark = -(10**9)
        self.late = 0
        self._lives: dict[Any, tuple[int, list[dict[str, Any]]]] = {}

    def process(self, rows: list[dict[str, Any]], now: int | None = None) -> dict[Any, dict[str, Any]]:
        """The results of the keys of a batch; in processing time if it is given."""
        touched = {}
        for row in rows:
            time = row["t"] if now is None else now
            if now is None and time <= self.watermark - _TTL:
                self.late += 1
                continue
            moment, life = self._lives.get(row["k"], (None, []))
            if moment is not None and time - moment >= _TTL:
                moment, life = None, []
            self._lives[row["k"]] = (time if moment is None else max(moment, time), [*life, row])
            touched[row["k"]] = None
        return {key: _results(self._lives[key][1]) for key in touched}


def _results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = [row["x"] for row in rows if row["x"] is not None]
    texts = [row["s"] for row in rows if row["s"] is not None]
    return {
        "n": len(rows),
        "total": sum(numbers) if numbers else None,
        "least": min(texts, default=None),
        "every": numbers[:3],
    }


_ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.integers(-30, 90),
        st.none() | st.integers(0, 9),
        st.none() | st.sampled_from(["x", "yy", ""]),
    ),
    max_size=10,
)
_MOVES = st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "incremental", "rocksdb"]))


def _batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(_SCHEMA.names, row, strict=True)) for row in rows], _SCHEMA)


def _by_key(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    found = {row.pop("k"): row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(_ROWS | st.integers(-40, 120) | _MOVES, max_size=12))
def test_event_time(steps: list[Any]) -> None:
    """Keys begin anew within a batch and across batches; watermarks clean up, and change nothing that comes out.

    A restore at another parallelism changes nothing either: what was late stays late, before any watermark comes.
    """
    with tempfile.TemporaryDirectory() as folder:
        running, model = Running(lambda: ExpiringAggregate(("k",), _WHAT, _TTL, "t"), folder), _Model()
        for step in steps:
            if isinstance(step, list):
                batch = _batch(step)
                found = _by_key(running.process(batch)) if batch.num_rows else {}
                assert found == model.process(batch.to_pylist())
            elif isinstance(step, tuple):
                running.restart(*step)
            elif step > model.watermark:
                model.watermark = step
                assert running.advance(step) == []
        running.close()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_ROWS, st.integers(0, 30)) | _MOVES, max_size=10))
def test_processing_time(steps: list[Any]) -> None:
    """The same by the clock of the tasks, which sweep when the clock says so; what a key has outlives restores."""
    with tempfile.TemporaryDirectory() as folder:
        running, model, now = Running(lambda: ExpiringAggregate(("k",), _WHAT, _TTL), folder), _Model(), 1_000
        for first, second in steps:
            if isinstance(second, str):
                running.restart(first, second)
                continue
            now += second
            for operator in running.operators:
                operator.context.time.now_ms = now
                due_ms = operator.next_processing_time_ms()
                if due_ms is not None and due_ms <= now:
                    list(operator.on_processing_time(now, lambda batch: None))
            batch = _batch(first)
            found = _by_key(running.process(batch)) if batch.num_rows else {}
            assert found == model.process(batch.to_pylist(), now)
        running.close()


def _keys(operator: ExpiringAggregate) -> int:
    return sum(len(slots) for _, slots in operator._table.scan(100)) if operator._table is not None else 0


def test_what_has_expired_goes() -> None:
    """In event time when the watermark is so far behind it that no row can continue it, in steps; the end of event time
    forgets nothing. In processing time at the next sweep."""
    by_event = cast(ExpiringAggregate, opened(ExpiringAggregate(("k",), _WHAT, _TTL, "t")))
    run(by_event, [_batch([("a", 0, 1, "s"), ("b", 15, 1, "s")])], finish=False)
    for watermark, keys in ((1, 2), (39, 2), (44, 1), (49, 1), (55, 0)):
        list(by_event.advance_watermark(watermark, lambda batch: None))
        assert _keys(by_event) == keys, watermark
    run(by_event, [_batch([("c", 60, 1, "s")])], finish=False)
    list(by_event.advance_watermark(MAX_WATERMARK_MS, lambda batch: None))
    assert _keys(by_event) == 1

    by_clock = cast(ExpiringAggregate, opened(ExpiringAggregate(("k",), _WHAT, _TTL)))
    assert by_clock.next_processing_time_ms() is None
    by_clock.context.time.now_ms = 100
    run(by_clock, [_batch([("a", 0, 1, "s")])], finish=False)
    for now, keys in ((105, 1), (119, 1), (124, 0)):
        by_clock.context.time.now_ms = now
        assert by_clock.next_processing_time_ms() is not None
        list(by_clock.on_processing_time(now, lambda batch: None))
        assert _keys(by_clock) == keys, now


@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_a_key_that_comes_between_two_steps_of_a_sweep_stays(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a scan shows what was there when it began."""
    monkeypatch.setattr(expiring_aggregate, "OUTPUT_ROWS_MAX", 1)
    running, now = Running(lambda: ExpiringAggregate(("k",), _WHAT, _TTL), str(tmp_path)), 100
    running.restart(1, backend)
    (operator,) = running.operators
    batch = _batch([(key, 0, 1, "s") for key in "abcdef"])
    operator.context.time.now_ms = now
    running.process(batch)
    operator.next_processing_time_ms()
    operator.context.time.now_ms = now = now + _TTL
    steps = operator.on_processing_time(now, lambda batch: None)
    next(steps)
    assert {row["n"] for row in running.process(batch)} == {1}
    list(steps)
    assert {row["n"] for row in running.process(batch)} == {2}


def test_late_rows_are_counted() -> None:
    """Those that are a time to live or more behind the watermark."""
    operator = opened(ExpiringAggregate(("k",), _WHAT, _TTL, "t"))
    list(operator.advance_watermark(100, lambda batch: None))
    (out,) = run(operator, [_batch([("a", 80, 1, "s"), ("a", 81, 1, "s")])], finish=False)
    assert out.column("n").to_pylist() == [1]
    assert [metric.value for metric in operator.context.metrics.read(operator.context.uid)] == [1]
    assert run(operator, [_batch([("a", 80, 1, "s")])], finish=False) == []


def test_what_cannot_be_is_refused() -> None:
    """A row without event time, and names and durations that are taken or none."""
    operator = opened(ExpiringAggregate(("k",), _WHAT, _TTL, "t"))
    with pytest.raises(OperatorError, match="column 't' is null in a row"):
        run(operator, [_batch([("a", None, 1, "s")])])
    with pytest.raises(ConfigurationError, match="greater than 0"):
        ExpiringAggregate(("k",), _WHAT, 0)
