"""Tumbling, sliding and cumulating windows give what a plain program gives, whatever the batches and restores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_harness import VALUES, Backend, Windows, dropped, follow, rows_batch, told_of

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.windows import node_reader, sliced_windows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError

Spec = Tumbling | Sliding | Cumulating
Row = tuple[int, int, int | None]
AGGREGATES = {"n": tg.count(), "total": tg.sum("x"), "least": tg.min("x"), "mean": tg.mean("x")}


def windows_of(spec: Spec, time_ms: int) -> Iterator[tuple[int, int]]:
    """The windows that hold a time, found by trying."""
    match spec:
        case Tumbling():
            starts = [time_ms - (time_ms - spec.offset_ms) % spec.size_ms]
            yield from ((start, start + spec.size_ms) for start in starts)
        case Sliding():
            for start in range(time_ms - spec.size_ms + 1, time_ms + 1):
                if (start - spec.offset_ms) % spec.slide_ms == 0:
                    yield start, start + spec.size_ms
        case Cumulating():
            first = time_ms - time_ms % spec.max_ms
            for end in range(first + spec.step_ms, first + spec.max_ms + 1, spec.step_ms):
                if time_ms < end:
                    yield first, end


class Model:
    """The same in plain Python: every window has a list of its rows."""

    def __init__(self, spec: Spec, keyed: bool, lateness_ms: int, final: bool) -> None:
        self._spec, self._keyed, self._lateness_ms, self._final = spec, keyed, lateness_ms, final
        self._rows: dict[tuple[int, int], dict[Any, list[int | None]]] = defaultdict(lambda: defaultdict(list))
        self._watermark_ms = -(10**9)
        self.late = 0
        self.emitted: Counter[tuple[Any, ...]] = Counter()

    def process(self, rows: list[Row]) -> None:
        """A batch."""
        touched: set[tuple[tuple[int, int], Any]] = set()
        for key, time_ms, value in rows:
            windows = [w for w in windows_of(self._spec, time_ms) if w[1] - 1 + self._lateness_ms > self._watermark_ms]
            self.late += not windows
            for window in windows:
                self._rows[window][key if self._keyed else None].append(value)
                touched.add((window, key if self._keyed else None))
        for window, key in touched:
            if not self._final or window[1] - 1 <= self._watermark_ms:
                self._emit(window, key)

    def watermark(self, moment_ms: int) -> None:
        """Time goes on."""
        for window, keys in self._rows.items():
            if self._final and self._watermark_ms < window[1] - 1 <= moment_ms:
                for key in keys:
                    self._emit(window, key)
        self._watermark_ms = max(self._watermark_ms, moment_ms)

    def _emit(self, window: tuple[int, int], key: Any) -> None:
        values = self._rows[window][key]
        head = (key,) if self._keyed else ()
        self.emitted[*head, *window, *told_of(values)] += 1


SPECS = (
    st.builds(lambda size, offset: Tumbling(size, offset % size), st.integers(1, 12), st.integers(0, 11))
    | st.builds(
        lambda size, slide, offset: Sliding(max(size, slide), slide, offset % slide),
        st.integers(1, 40),
        st.integers(1, 9),
        st.integers(0, 8),
    )
    | st.builds(lambda step, steps: Cumulating(step, step * steps), st.integers(1, 5), st.integers(1, 6))
)
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(-30, 60), VALUES), min_size=1, max_size=12)
STEPS = st.lists(
    st.tuples(st.just("rows"), ROWS)
    | st.tuples(st.just("watermark"), st.tuples(st.integers(-40, 80), st.none() | st.integers(1, 3)))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb"]))),
    max_size=14,
)


def played(
    spec: Spec,
    keyed: bool,
    lateness_ms: int,
    emit: Literal["final", "update"],
    steps: list[tuple[str, Any]],
    bundle_pairs: int | None = None,
) -> tuple[Counter[tuple[Any, ...]], Model, int, int]:
    """What came out, the model, how many rows were late, and how many rows of state are left after the end.

    `bundle_pairs`: windows fire together if they have no more pairs of rows than this, and in one part of key groups.
    """
    keys = ("k",) if keyed else ()
    model = Model(spec, keyed, lateness_ms, emit == "final")
    windows = Windows(lambda: SlicedWindows(keys, spec, AGGREGATES, "t", emit, lateness_ms), keys)
    with pytest.MonkeyPatch.context() as patch:
        if bundle_pairs is None:
            patch.setattr(sliced_windows, "_STEP_ROWS", 1)
        else:
            patch.setattr(node_reader, "_PAIRS_MAX", bundle_pairs)
            patch.setattr(sliced_windows, "_LARGE_WINDOWS", 1)
        windows, late = follow(windows, model, steps)
    emitted = Counter(tuple(row.values()) for row in windows.rows)
    left = windows.stored_rows()
    windows.close()
    return emitted, model, late, left


@pytest.mark.slow
@settings(max_examples=60)
@given(
    SPECS,
    st.booleans(),
    st.sampled_from([0, 0, 3, 20]),
    st.sampled_from(["final", "update"]),
    STEPS,
    st.sampled_from([None, 4, 30, 10_000]),
)
def test_windows_are_those_of_a_plain_program(
    spec: Spec,
    keyed: bool,
    lateness_ms: int,
    emit: Literal["final", "update"],
    steps: list[tuple[str, Any]],
    bundle_pairs: int | None,
) -> None:
    """Each result as often as it should be: at other parallelisms, on other backends, between two steps, and late."""
    if isinstance(spec, Cumulating):
        lateness_ms = 0
    emitted, model, late, left = played(spec, keyed, lateness_ms, emit, steps, bundle_pairs)
    assert emitted == model.emitted
    assert late == model.late
    assert left == 0, "state is left when time is over"


LONG = st.builds(lambda size, slide: Sliding(slide * size, slide), st.integers(5, 150), st.integers(1, 3)) | st.builds(
    lambda step, steps: Cumulating(step, step * steps), st.integers(1, 3), st.integers(5, 150)
)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    LONG,
    st.lists(st.tuples(st.integers(0, 2), st.integers(-300, 300), VALUES), min_size=1, max_size=40),
    st.lists(st.integers(-310, 700), max_size=4).map(sorted),
    st.sampled_from([4, 300, 10_000]),
)
def test_many_windows_that_fire_together_are_those_of_a_plain_program(
    spec: Spec, rows: list[tuple[int, int, int | None]], watermarks: list[int], bundle_pairs: int
) -> None:
    """Windows of many slices, hundreds of which end with one watermark; also with a restore between two steps."""
    half = len(rows) // 2
    steps: list[tuple[str, Any]] = [("rows", rows[: half + 1])]
    for number, moment_ms in enumerate(watermarks):
        steps += [("watermark", (moment_ms, 1 if number == 1 else None)), ("move", (1 + number % 2, "columnar"))]
    steps += [("rows", rows[half + 1 :])] if rows[half + 1 :] else []
    emitted, model, late, left = played(spec, True, 0, "final", steps, bundle_pairs)
    assert emitted == model.emitted
    assert (late, left) == (model.late, 0)


def test_a_bundle_of_large_values_is_given_up_before_all_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read for nothing takes no more memory than the bundle may; results are those of windows alone."""
    monkeypatch.setattr(node_reader, "OUTPUT_ROWS_MAX", 1)
    monkeypatch.setattr(node_reader, "_BYTES_MAX", 100)
    aggregates = {"all": tg.collect_list("x", limit=99)}
    windows = Windows(lambda: SlicedWindows(("k",), Sliding(20, 10), aggregates, "t"), ("k",))
    windows.process(rows_batch([(key, time_ms, time_ms) for key in range(10) for time_ms in range(40)]))
    drawn: list[int] = []
    operator: Any = windows.operators[0]
    table = type(operator._state.table)
    scan = table.scan_namespaces

    def counted(*given: Any) -> Iterator[Any]:
        drawn.append(0)
        for each in scan(*given):
            drawn[-1] += len(each[1])
            yield each

    monkeypatch.setattr(table, "scan_namespaces", counted)
    windows.watermark(29)
    windows.close()
    assert drawn[0] < 10
    found = sorted((row["k"], row["all"]) for row in windows.rows)
    assert found == sorted((key, [*range(max(0, end - 20), end)]) for key in range(10) for end in (10, 20, 30))


@pytest.mark.parametrize("spec", [Sliding(20, 1), Cumulating(1, 20)])
def test_windows_fire_together_again_after_large_ones(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window with too many rows for a bundle makes the next few fire alone, and no others."""
    monkeypatch.setattr(sliced_windows, "_LARGE_WINDOWS", 4)
    monkeypatch.setattr(node_reader, "_ROWS_MAX", 0)
    windows = Windows(lambda: SlicedWindows(("k",), spec, AGGREGATES, "t"), ("k",))
    windows.process(rows_batch([(1, time_ms, 1) for time_ms in range(100)]))
    windows.watermark(50)
    monkeypatch.setattr(node_reader, "_ROWS_MAX", 1_000)
    bundles = []
    read = node_reader.BundleReader.read

    def counted(self: Any, bundle: Any, groups: Any) -> Any:
        bundles.append(len(bundle.parts))
        return read(self, bundle, groups)

    monkeypatch.setattr(node_reader.BundleReader, "read", counted)
    windows.watermark(MAX_WATERMARK_MS)
    windows.close()
    assert max(bundles, default=0) > 10


BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
MIXED = [
    ("rows", [(1, 3, 10), (2, 4, 20), (1, 12, 30), (1, 17, 1)]),
    ("watermark", (9, None)),
    ("move", (3, "columnar")),
    ("rows", [(1, 8, 1000), (1, 13, 5)]),
    ("watermark", (14, 1)),
]


@BACKENDS
@pytest.mark.parametrize("spec", [Tumbling(10), Sliding(20, 5), Sliding(9, 6), Cumulating(5, 20)], ids=str)
def test_a_window_fires_once_and_a_slice_counts_once(spec: Spec, backend: Backend) -> None:
    """Through a restore at another parallelism, and one between two steps."""
    steps = [*MIXED[:2], ("move", (3, backend)), *MIXED[3:]]
    emitted, model, late, left = played(spec, True, 0, "final", steps)
    assert (emitted, late, left) == (model.emitted, model.late, 0)
    assert set(emitted.values()) == {1}


@BACKENDS
def test_a_late_row_within_the_lateness_gives_a_new_result(backend: Backend) -> None:
    """At once, for its key alone; afterwards the window is over and never opens again."""
    windows = Windows(lambda: SlicedWindows(("k",), Tumbling(10), AGGREGATES, "t", "final", 5), backend=backend)
    windows.process(rows_batch([(1, 3, 1), (2, 3, 1)]))
    windows.watermark(9)
    assert sorted((row["k"], row["n"]) for row in windows.rows) == [(1, 1), (2, 1)]
    windows = windows.moved(2, backend)
    windows.process(rows_batch([(1, 4, 1)]))
    assert [(row["k"], row["n"]) for row in windows.rows[2:]] == [(1, 2)]
    windows.watermark(13)
    windows.process(rows_batch([(2, 4, 1)]))
    windows.watermark(14)
    windows.process(rows_batch([(1, 5, 1), (2, 5, 1)]))
    windows.watermark(MAX_WATERMARK_MS)
    assert [(row["k"], row["n"]) for row in windows.rows[3:]] == [(2, 2)]
    assert dropped(windows) == 2
    windows.close()


def test_a_sliding_window_is_read_from_few_nodes() -> None:
    """Of 120 slices, not from each: what is read for a window grows with the logarithm."""
    operator = SlicedWindows(("k",), Sliding(1200, 10), AGGREGATES, "t")
    windows = Windows(lambda: operator)
    windows.process(rows_batch([(1, time, 1) for time in range(0, 2400, 10)]))
    windows.watermark(1999)
    assert windows.rows[-1] == {"k": 1, "window_start": 800, "window_end": 2000} | {
        "n": 120,
        "total": 120,
        "least": 1,
        "mean": 1.0,
    }
    slices = operator._slices
    parts = slices.parts(operator._state.namespaces, sliced_windows.Window(810, 2010), 2009)
    assert 1 < len(parts) <= 2 * 7
    assert windows.stored_rows() < 4 * 120
    windows.close()


@pytest.mark.parametrize(
    ("time_type", "bounds"),
    [
        (pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("us", "Asia/Tokyo")),
        (pa.timestamp("ns"), pa.timestamp("ns")),
        (pa.timestamp("s"), pa.timestamp("ms")),
        (pa.date32(), pa.timestamp("ms")),
    ],
)
def test_bounds_have_the_type_of_event_time(time_type: pa.DataType, bounds: pa.DataType) -> None:
    """Dates have no time of day; seconds no milliseconds. Also when a restored window fires before the first row."""
    spec = Tumbling(86_400_500)
    batch = rows_batch([(1, 86_400_000, 1)], time_type)
    operator = SlicedWindows(("k",), spec, AGGREGATES, "t")
    assert operator.output_schema(batch.schema).field("window_start").type == bounds
    windows = Windows(lambda: SlicedWindows(("k",), spec, AGGREGATES, "t"))
    windows.process(batch)
    windows = windows.moved(1, "columnar")
    emitted: list[pa.RecordBatch] = []
    list(windows.operators[0].advance_watermark(MAX_WATERMARK_MS, emitted.append))
    assert [batch.schema for batch in emitted] == [operator.output_schema(batch.schema)]
    assert emitted[0].column("window_end").cast(pa.timestamp("ms")).cast(pa.int64()).to_pylist() == [86_400_500]
    windows.close()


def test_rows_without_a_time_are_refused() -> None:
    """With the column, and what to do."""
    batch = pa.record_batch({"k": [1, 2], "t": pa.array([1, None], pa.int64()), "x": [1, 1]})
    windows = Windows(lambda: SlicedWindows(("k",), Tumbling(10), AGGREGATES, "t"))
    with pytest.raises(OperatorError, match=r"1 rows have no event time \(null in column 't'\)"):
        windows.process(batch)
    windows.close()


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"aggregates": {}}, "at least one aggregate"),
    ({"emit": "sometimes"}, "emit must be"),
    ({"keys": ("window_start",)}, "different names"),
    ({"aggregates": {"k": tg.count()}}, "different names"),
    ({"spec": Cumulating(1, 2), "allowed_lateness_ms": 1}, "allowed_lateness is not supported"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_what_is_refused(changed: Mapping[str, Any], words: str) -> None:
    """Before anything runs."""
    plain = {"keys": ("k",), "spec": Tumbling(1), "aggregates": AGGREGATES, "time": "t"}
    with pytest.raises(ConfigurationError, match=words):
        SlicedWindows(**{**plain, **changed})  # type: ignore[arg-type]


def test_state_of_another_program_is_refused() -> None:
    """Its columns are others; so are columns whose types have changed."""
    windows = Windows(lambda: SlicedWindows(("k",), Tumbling(10), {"n": tg.count()}, "t"))
    windows.process(rows_batch([(1, 3, 10)]))
    with pytest.raises(OperatorError, match="has changed its type"):
        windows.process(rows_batch([(1, 3, 10)]).set_column(0, "k", pa.array(["a"])))
    stored = windows.stored()
    windows.close()
    with pytest.raises(IncompatibleStateError, match="has the aggregates"):
        Windows(lambda: SlicedWindows(("k",), Tumbling(10), {"other": tg.count()}, "t"), restored=stored)
