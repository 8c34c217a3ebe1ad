"""`LocalTop` and `WindowTop` give the first rows of each window once, as a plain program does, through restores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened
from test_sliced_windows import windows_of
from window_harness import Backend, Windows, dropped

from tidegate.operators.ranking.top_n import Ranking
from tidegate.operators.windows import window_operator, window_top
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.operators.windows.window_top import LocalTop, WindowTop
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.int64()), ("x", pa.int64()), ("i", pa.int64())])
SPECS = [Tumbling(10), Sliding(20, 5), Sliding(9, 6), Cumulating(5, 20)]
Spec = Tumbling | Sliding | Cumulating


class Tops:
    """The first rows by `x` of each key (or of all rows) and window: both operators, and the same in plain Python."""

    def __init__(self, spec: Spec, keyed: bool, n: int, ties: bool) -> None:
        keys = (*(("k",) if keyed else ()), "window_start", "window_end")
        ranking = Ranking(keys, n, ("x",), (True,), "place", changes=False, final=True, ties=ties)
        self.local = opened(LocalTop(ranking, SCHEMA, spec, "t"))
        self.windows = Windows(lambda: WindowTop(ranking, LocalTop(ranking, SCHEMA, spec, "t").output), keys)
        self.sent = self.late = self._count = 0
        self.model: Counter[tuple[Any, ...]] = Counter()
        self._spec, self._keyed, self._n, self._ties = spec, keyed, n, ties
        self._open: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
        self.watermark_ms = -1

    def process(self, rows: Sequence[tuple[int, int, int | None]]) -> None:
        """A batch of keys, times and values."""
        numbered = [(*row, self._count + i) for i, row in enumerate(rows)]
        self._count += len(rows)
        sent: list[pa.RecordBatch] = []
        columns = [pa.array(column, pa.int64()) for column in zip(*numbered, strict=True)]
        self.local.process(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), sent.append)
        for batch in sent:
            self.sent += batch.num_rows
            self.windows.process(batch)
        for row in numbered:
            for window in windows_of(self._spec, row[1]):
                if window[1] - 1 <= self.watermark_ms:
                    self.late += 1
                else:
                    self._open[row[0] if self._keyed else 0, *window].append(row)

    def watermark(self, moment_ms: int, steps: int | None = None) -> None:
        """Windows end, or only the first steps of that are taken."""
        self.watermark_ms = max(self.watermark_ms, moment_ms)
        list(self.local.advance_watermark(self.watermark_ms, self.windows.emit))
        self.windows.watermark(self.watermark_ms, steps)
        for key in [key for key in self._open if key[2] - 1 <= self.watermark_ms]:
            rows = self._open.pop(key)
            values = [-1 if row[2] is None else row[2] for row in rows]  # a null comes last
            for row, x in zip(rows, values, strict=True):
                others = zip(rows, values, strict=True)
                place = 1 + sum(y > x or (not self._ties and y == x and o[3] < row[3]) for o, y in others)
                if place <= self._n:
                    self.model[*row, *key[1:], place] += 1

    def emitted(self) -> Counter[tuple[Any, ...]]:
        """What has come out."""
        return Counter(tuple(row.values()) for row in self.windows.rows)


ROW = st.tuples(st.integers(0, 2), st.integers(0, 60), st.none() | st.integers(0, 3))
ROWS = st.tuples(st.just("rows"), st.lists(ROW, min_size=1))
TIME = st.tuples(st.just("time"), st.integers(0, 60))
MOVE = st.tuples(
    st.just("move"), st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]), st.integers(1, 3)
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SPECS), st.booleans(), st.integers(1, 3), st.booleans(), st.lists(ROWS | TIME | MOVE, max_size=10)
)
def test_it_gives_what_a_plain_program_gives(spec: Spec, keyed: bool, n: int, ties: bool, steps: list[Any]) -> None:
    """Each row once: at other parallelisms, on other backends, in several batches, between two steps, and late."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_operator, "FIRED_ROWS", 1)
        tops = Tops(spec, keyed, n, ties)
        for step in steps:
            match step:
                case "rows", rows:
                    tops.process(rows)
                case "time", moment_ms:
                    tops.watermark(moment_ms)
                case "move", parallelism, backend, taken:
                    tops.watermark(tops.watermark_ms + 7, taken)
                    tops.windows = tops.windows.moved(parallelism, backend)
                    tops.watermark(tops.watermark_ms)
        tops.watermark(MAX_WATERMARK_MS)
        assert tops.emitted() == tops.model
        assert dropped(tops.windows) == tops.late or any(step[0] == "move" for step in steps)
        assert tops.windows.stored_rows() == 0
        tops.windows.close()


@pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
def test_a_window_that_has_fired_does_not_open_again(backend: Backend) -> None:
    """Neither for a late row, nor for one that comes after a restore, when no watermark has come yet."""
    tops = Tops(Tumbling(10), True, 1, False)
    tops.process([(1, 3, 7), (1, 4, 7), (1, 5, 1), (1, 6, 0), (2, 5, 1), (1, 12, 2)])
    tops.watermark(9)
    assert [(row["k"], row["x"], row["i"], row["place"]) for row in tops.windows.rows] == [(1, 7, 0, 1), (2, 1, 4, 1)]
    tops.windows = tops.windows.moved(3, backend)
    tops.process([(1, 5, 100), (1, 6, 90), (1, 13, 1)])
    assert dropped(tops.windows) == 2
    tops.watermark(MAX_WATERMARK_MS)
    assert [row["x"] for row in tops.windows.rows[2:]] == [2]
    tops.windows.close()


def test_little_is_sent_and_kept() -> None:
    """Of many rows of two windows one each; rows of many keys are not compared again and again in vain."""
    tops = Tops(Tumbling(1_000), False, 1, False)
    for _ in range(3):
        tops.process([(i, i, i % 100) for i in range(2_000)])
    assert tops.sent == 3 * 2
    assert tops.windows.stored_rows() == 2
    tops.windows.close()
    many = Tops(Tumbling(1_000), True, 1, False)
    for _ in range(1 + window_top.PASSED_BATCHES):
        many.process([(i // 2, i % 2, i) for i in range(400)] + [(1_000 + i, 0, 0) for i in range(800)])
    assert many.sent == 1_000 + window_top.PASSED_BATCHES * 1_200
    many.windows.close()


def test_a_row_without_a_window_is_refused() -> None:
    """It is in no window."""
    schema = pa.schema([("window_end", pa.int64()), ("x", pa.int64())])
    ranking = Ranking(("window_end",), 1, ("x",), (True,), changes=False, final=True)
    windows = Windows(lambda: WindowTop(ranking, schema), ("window_end",))
    batch = pa.record_batch({"window_end": pa.array([None], pa.int64()), "x": pa.array([1], pa.int64())})
    with pytest.raises(OperatorError, match="is null in a row"):
        windows.process(batch)
    windows.close()


def test_what_does_not_fit_is_refused() -> None:
    """With what to do instead."""

    def first(*keys: str) -> Ranking:
        return Ranking(keys, 1, ("x",), (True,), changes=False, final=True)

    with pytest.raises(ConfigurationError, match="'window_end' must be among the keys"):
        WindowTop(first("k"), SCHEMA)
    bounds = SCHEMA.append(pa.field("window_end", pa.int64()))
    with pytest.raises(ConfigurationError, match="rename them"):
        LocalTop(first("window_end"), bounds, Tumbling(10), "t")
    with pytest.raises(ConfigurationError, match="which rows share a rank"):
        Ranking(("k",), 1, ("x",), (True,), ties=True)
