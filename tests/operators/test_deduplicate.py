"""`Deduplicate` emits what a plain model does, whatever the batches, the backend, the parallelism and the restores."""

from __future__ import annotations

import tempfile
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import context, opened, run
from ranking_harness import Running, stored_by

from tidegate.operators.ranking.deduplicate import Deduplicate, Keep
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError

_SCHEMA = pa.schema([("k", pa.string()), ("v", pa.float64()), ("t", pa.int64()), ("row", pa.int64())])
_TTL = 20


class _Model:
    """Deduplication in plain Python; it forgets nothing."""

    def __init__(self, by: str | None, keep: Keep, ttl: int | None) -> None:
        self._by, self._keep, self._ttl = by, keep, ttl
        self._kept: dict[Any, dict[str, Any]] = {}
        self.watermark = -(10**9)

    def process(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows that are emitted for a batch."""
        won = []
        for row in rows:
            if self._ttl is not None and row["t"] <= self.watermark - self._ttl:
                continue
            before = self._kept.get(row["k"])
            if (
                before is None
                or (self._ttl is not None and row["t"] - before["t"] >= self._ttl)
                or self._beats(row, before)
            ):
                self._kept[row["k"]] = row
                won.append(row)
        if self._by is None and self._keep == "first":
            return won
        return list({row["k"]: row for row in won}.values())

    def _beats(self, row: dict[str, Any], before: dict[str, Any]) -> bool:
        if self._by is None:
            return self._keep == "last"
        new, old = (_ordered(r[self._by]) for r in (row, before))
        return new < old if self._keep == "first" else new >= old


def _ordered(value: float) -> tuple[bool, float]:
    return (True, 0.0) if value != value else (False, value)


_ROWS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", None]),
        st.sampled_from([-1.5, -0.0, 0.0, 2.0, float("nan"), float("inf")]),
        st.integers(-5, 60),
    ),
    max_size=12,
)
_STEPS = st.lists(
    _ROWS
    | st.integers(-10, 90)
    | st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "incremental", "rocksdb", "crowded"])),
    max_size=10,
)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([None, "v", "t"]), st.sampled_from(["first", "last"]), st.booleans(), _STEPS)
def test_it_emits_what_a_model_does(by: str | None, keep: Keep, limited: bool, steps: list[Any]) -> None:
    """Rows, watermarks and restores in any order: each batch gives the model's rows."""
    ttl = _TTL if limited and not (by is None and keep == "last") else None
    model, number = _Model(by, keep, ttl), 0
    with tempfile.TemporaryDirectory() as directory:
        running = Running(lambda: Deduplicate(("k",), by, keep, "t", ttl), directory)
        for step in steps:
            if isinstance(step, tuple):
                running.restart(*step)
            elif isinstance(step, int):
                model.watermark = max(model.watermark, step)
                assert running.advance(model.watermark) == []
            elif step:
                rows = [{"k": k, "v": v, "t": t, "row": number + i} for i, (k, v, t) in enumerate(step)]
                number += len(rows)
                found = running.process(pa.RecordBatch.from_pylist(rows, _SCHEMA))
                assert sorted(r["row"] for r in model.process(rows)) == sorted(r["row"] for r in found)
        running.close()


def _batch(*rows: tuple[str, float, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "v": v, "t": t, "row": i} for i, (k, v, t) in enumerate(rows)], _SCHEMA)


@pytest.mark.parametrize("backend", ["columnar", "incremental", "rocksdb", "crowded"])
def test_state_of_old_keys_is_swept(backend: str, tmp_path: Any) -> None:
    """Two times to live behind the watermark nothing is kept of a key any more; what is younger is."""
    running = Running(lambda: Deduplicate(("k",), None, "first", "t", _TTL), str(tmp_path))
    running.start(2, backend, [])
    running.process(_batch(*((f"k{n}", 0.0, n) for n in range(100))))
    running.advance(2 * _TTL + 89)
    keyed = [table for table in running.stored() if table.kind is StateKind.KEYED]
    kept = sorted(key for table in keyed for key in table.rows.column("k").to_pylist())
    assert [f"k{n}" for n in range(90, 100)] == kept
    running.advance(MAX_WATERMARK_MS)  # the end of the input is no time at which anything expires
    assert len(kept) == sum(t.rows.num_rows for t in running.stored() if t.kind is StateKind.KEYED)
    running.close()


def test_rows_that_are_too_late_are_counted() -> None:
    """A row a time to live behind the watermark is dropped, one that is a millisecond younger is not."""
    operator = Deduplicate(("k",), None, "first", "t", _TTL)
    where = context()
    operator.open(where, [])
    list(operator.advance_watermark(100, lambda batch: None))
    (out,) = run(operator, [_batch(("a", 0.0, 80), ("b", 0.0, 81))])
    assert out.column("k").to_pylist() == ["b"]
    assert where.metrics.counter("numLateRecordsDropped").value == 1


def test_a_row_that_is_too_late_stays_so_after_a_restore(tmp_path: Any) -> None:
    """Also before a watermark has come again: what was known of its key is gone, and it would come twice."""
    running = Running(lambda: Deduplicate(("k",), None, "first", "t", _TTL), str(tmp_path))
    assert len(running.process(_batch(("a", 0.0, 10)))) == 1
    running.advance(10 + 3 * _TTL)
    running.restart(2, "columnar")
    assert running.process(_batch(("a", 0.0, 10))) == []
    running.close()


def test_a_null_in_the_order_is_an_error() -> None:
    """A row without a place in the order, or without a time where there is a time to live, is an error that says so."""
    for ttl, missing in ((None, "v"), (_TTL, "t")):
        row = {"k": "a", "v": 1.0, "t": 1, "row": 0, missing: None}
        operator = opened(Deduplicate(("k",), "v", "first", "t", ttl))
        with pytest.raises(OperatorError, match=f"column '{missing}' is null"):
            run(operator, [pa.RecordBatch.from_pylist([row], _SCHEMA)])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"keep": "newest"}, "keep must be"),
        ({"ttl_ms": 0, "time": "t"}, "greater than 0"),
        ({"ttl_ms": 5}, "call assign_timestamps"),
        ({"ttl_ms": 5, "time": "t", "keep": "last"}, "without state"),
        ({"keys": ()}, "at least one key"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, Any], reason: str) -> None:
    """At submission, with what to do."""
    with pytest.raises(ConfigurationError, match=reason):
        Deduplicate(**{"keys": ("k",), **arguments})


def test_columns_that_have_no_order_are_refused() -> None:
    """Strings and missing columns."""
    for by, reason in (("k", "cannot be ordered"), ("x", "no column 'x'")):
        with pytest.raises(ConfigurationError, match=reason):
            Deduplicate(("k",), by).validate(_SCHEMA)


def test_another_type_of_the_order_is_refused_after_a_restore() -> None:
    """Words of floats and of integers cannot be compared."""
    first = opened(Deduplicate(("k",), "v"))
    run(first, [_batch(("a", 1.0, 1))])
    second = opened(Deduplicate(("k",), "v"), stored_by([first]))
    changed = _batch(("a", 1.0, 1)).set_column(1, "v", pa.array([1], pa.int64()))
    with pytest.raises(OperatorError, match="has changed its type"):
        run(second, [changed])
