"""Rows that were combined by their sender give what the rows themselves give: to the bit, in the same batches."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from aggregate_cases import AGGREGATES, batch_of, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import Subtasks, opened, run
from window_harness import Windows, rows_batch

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.changing_aggregate import ChangingAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.combined_rows import COMBINED, is_combined
from tidegate.operators.combiner import Combiner
from tidegate.operators.local_aggregation import LOOKED_AT, PAUSE_MIN, ROWS_MIN, LocalAggregation
from tidegate.operators.watermarks.late_rows import LATE_RECORDS
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

_OF_FLOATS = ("mean_f",)
EXACT = {
    name: aggregate
    for name, aggregate in AGGREGATES.items()
    if LocalAggregation(("k",), {name: aggregate}).is_exact and name not in _OF_FLOATS
}
Spec = Tumbling | Sliding | Cumulating


def combiner(
    keys: tuple[str, ...], aggregates: dict[str, Aggregate], spec: Spec | None = None, time: str | None = None
) -> Combiner:
    """One that combines whatever it may."""
    return Combiner(LocalAggregation(keys, aggregates, spec, time, mode="on"))


def test_many_kinds_are_combined() -> None:
    """Else the tests below would say little."""
    kinds = {"n", "n_w", "sum_i", "mean_i", "min_d", "max_u", "every", "first_by", "last_tags", "least", "max_name"}
    assert kinds <= EXACT.keys()
    combined = combiner(("k",), EXACT).combine(batch_of([_ROW, {**_ROW, "i": 3}]))
    assert is_combined(combined.schema)
    assert combined.column(COMBINED).to_pylist() == [2]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(rows(), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(["update", "final", "changes"]),
    st.integers(0, 6),
)
def test_aggregates_emit_the_same(
    parts: list[tuple[list[dict[str, Any]], bool]], emit: Literal["update", "final", "changes"], cut_at: int
) -> None:
    """After each batch, in the same order, whichever batches are combined, and through a restore between them."""
    sender = combiner(("k",), EXACT)
    batches = [(batch_of(part), combines) for part, combines in parts if part]

    def make() -> KeyedAggregate:
        return ChangingAggregate(("k",), EXACT, emit) if emit == "changes" else KeyedAggregate(("k",), EXACT, emit)

    found = []
    for sent in ([b for b, _ in batches], [sender.combine(b) if combines else b for b, combines in batches]):
        first = Subtasks(make, ("k",), 2)
        first.process(sent[:cut_at])
        second = Subtasks(make, ("k",), 1, restored=first.snapshot())
        second.process(sent[cut_at:])
        second.finish()
        found.append([(batch.schema, repr(batch.to_pylist())) for batch in (*first.emitted, *second.emitted)])
    assert found[0] == found[1]


_SPECS = st.sampled_from([Tumbling(5, 2), Sliding(12, 4), Sliding(10, 3), Cumulating(3, 9), Tumbling(100)])
_STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-10, 40), st.integers(-9, 9)), min_size=1, max_size=9)
    | st.integers(-10, 50),
    max_size=10,
)
_OF_WINDOWS = {"n": tg.count(), "total": tg.sum("x"), "mean": tg.mean("x"), "last": tg.last("x"), "most": tg.max("x")}


@settings(max_examples=80, deadline=None)
@given(_SPECS, st.booleans(), st.sampled_from([0, 4]), st.sampled_from(["final", "update"]), _STEPS)
def test_windows_emit_the_same(
    spec: Spec, keyed: bool, lateness_ms: int, emit: Literal["final", "update"], steps: list[Any]
) -> None:
    """With late rows, of which as many are counted, and with those that change what has come out."""
    keys = ("k",) if keyed else ()
    # What chooses a row is combined for tumbling windows alone.
    aggregates = {n: a for n, a in _OF_WINDOWS.items() if LocalAggregation(keys, {n: a}, spec, "t").is_exact}
    assert len(aggregates) >= 4
    if isinstance(spec, Cumulating):
        lateness_ms = 0
    found = []
    for combiners in ([], [combiner(keys, aggregates, spec, "t")]):
        windows = Windows(lambda: SlicedWindows(keys, spec, aggregates, "t", emit, lateness_ms), keys)
        for step in (*steps, MAX_WATERMARK_MS):
            if isinstance(step, int):
                windows.watermark(step)
            else:
                batch = rows_batch(step, pa.timestamp("us"))
                for sender in combiners:
                    batch = sender.combine(batch)
                windows.process(batch)
        late = [m.value for o in windows.operators for m in o.context.metrics.read(o.context.uid)]
        found.append((windows.rows, late))
        windows.close()
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [Sliding(8, 2), Cumulating(2, 8)], ids=str)
def test_late_rows_of_several_slices_keep_their_order(spec: Spec) -> None:
    """Rows for slices that have ended meet in one node: the last of them is the last that came, whatever its slice."""
    results = []
    combines = LocalAggregation(("k",), {"last": tg.last("x")}, spec, "t", mode="on")
    for sender in (None, Combiner(combines) if combines.is_exact else None):
        windows = Windows(lambda: SlicedWindows(("k",), spec, {"last": tg.last("x")}, "t"))
        windows.process(rows_batch([(1, 0, 1), (1, 2, 2)]))
        windows.watermark(4)
        late = rows_batch([(1, 0, 3), (1, 2, 4), (1, 0, 5)])
        windows.process(late if sender is None else sender.combine(late))
        windows.watermark(MAX_WATERMARK_MS)
        results.append(windows.rows)
        windows.close()
    assert results[0] == results[1]


def test_late_rows_count_each() -> None:
    """A combined row that is late is as many late rows as it stands for."""
    spec = Tumbling(10)
    windows = Windows(lambda: SlicedWindows(("k",), spec, _OF_WINDOWS, "t"))
    windows.process(rows_batch([(1, 15, 1)]))
    windows.watermark(12)
    late = combiner(("k",), _OF_WINDOWS, spec, "t").combine(rows_batch([(1, 3, 1), (1, 4, 1), (1, 14, 1)]))
    assert is_combined(late.schema)
    windows.process(late)
    (metric,) = windows.operators[0].context.metrics.read(windows.operators[0].context.uid)
    assert (metric.name, metric.value) == (LATE_RECORDS, 2)
    windows.close()


_ROW: dict[str, Any] = {"k": 1, "i": 2}


@pytest.mark.parametrize(
    "aggregate",
    [
        tg.sum("f"),
        tg.mean("f"),
        tg.var_pop("i"),
        tg.collect_list("i", limit=2),
        AGGREGATES["product"],
    ],
    ids=str,
)
def test_what_depends_on_order_is_sent_as_it_is(aggregate: Aggregate) -> None:
    """Sums of floats, and what is merged otherwise than added to. One such aggregate among others is enough."""
    batch = batch_of([_ROW, _ROW])
    spec = LocalAggregation(("k",), {"n": tg.count(), "x": aggregate}, mode="on")
    assert not spec.is_exact or Combiner(spec).combine(batch) is batch


def _large(n: int) -> pa.RecordBatch:
    return pa.record_batch({"k": [1, 1, 1], "x": [n, n, -n]})


@pytest.mark.parametrize(
    ("batch", "aggregates"),
    [
        (_large(2**62), {"x": tg.sum("x")}),
        (pa.record_batch({"k": [1, 1], "x": pa.array([2**63, 0], pa.uint64())}), {"x": tg.sum("x")}),
        (pa.record_batch({"k": [1, 1], "x": ["a", "b"]}), {"x": tg.sum("x")}),
        (pa.record_batch({"k": [[1], [1]], "x": [1, 2]}), {"x": tg.sum("x")}),
        (pa.record_batch({"k": [1, 1]}), {"x": tg.sum("x")}),
    ],
    ids=["a sum of the batch", "a value", "a type", "a key", "no column"],
)
def test_what_is_wrong_is_for_the_aggregate_to_say(batch: pa.RecordBatch, aggregates: dict[str, Aggregate]) -> None:
    """The rows are sent then, so the error is the one that there always was."""
    assert combiner(("k",), aggregates).combine(batch) is batch
    with pytest.raises(OperatorError):
        run(opened(KeyedAggregate(("k",), aggregates)), [batch])


def test_rows_without_a_time_are_sent() -> None:
    """The windows say what is wrong with them."""
    batch = pa.record_batch({"k": [1, 1], "t": pa.array([None, 1], pa.timestamp("ms")), "x": [1, 2]})
    assert combiner(("k",), _OF_WINDOWS, Tumbling(5), "t").combine(batch) is batch


def test_combined_rows_of_other_aggregates_are_refused() -> None:
    """As they may be in flight in a checkpoint of a program that had others."""
    sent = combiner(("k",), {"n": tg.count()}).combine(batch_of([_ROW, _ROW]))
    with pytest.raises(OperatorError, match="combined for other aggregates"):
        run(opened(KeyedAggregate(("k",), {"m": tg.count()})), [sent])


def test_columns_may_change_from_batch_to_batch() -> None:
    """Each schema is looked at anew; one that cannot be combined passes, the next one does not suffer."""
    sender = combiner(("k",), {"x": tg.sum("x")})
    kinds = [pa.int32(), pa.float64(), pa.int64()]
    batches = [pa.record_batch({"k": [1, 1], "x": pa.array([1, 2], kind)}) for kind in kinds]
    assert [is_combined(sender.combine(batch).schema) for batch in batches] == [True, False, True]


def test_a_count_that_begins_badly_is_over() -> None:
    """Of a batch a quarter is grouped first. If that makes more groups than all may have while it pays, batches pass
    as after a count that came to nothing, and the next count begins anew: without that batch."""
    sender = Combiner(LocalAggregation(("k",), {"n": tg.count()}))
    rows = 4 * ROWS_MIN
    badly = pa.record_batch({"k": np.arange(rows) % (rows // 3)})
    well = pa.record_batch({"k": np.arange(rows) % 10})
    assert sender.combine(badly) is badly
    sent = [sender.combine(well) for _ in range(PAUSE_MIN + LOOKED_AT)]
    assert [is_combined(batch.schema) for batch in sent] == [False] * (PAUSE_MIN + LOOKED_AT - 1) + [True]
