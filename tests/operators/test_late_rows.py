"""The same rows are late, and the others count in the same windows, at any batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from random_jobs.window_models import Row, Timed, judged, late_in_split, read_in_order

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.operators.aggregates.aggregate import count, sum
from tidegate.operators.operator import Operator
from tidegate.operators.watermarks.watermark_generator import WatermarkGenerator
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Cumulating, Session, Sliding, Tumbling
from tidegate.protocol.edges import SideOutput
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.ids import OperatorUid, SubtaskIndex

BOUND = 5
WINDOWS: tuple[Timed, ...] = (Tumbling(10), Sliding(20, 10), Sliding(35, 15), Cumulating(5, 15), Session(7))


def windows_of(spec: Timed) -> Callable[[], Operator]:
    """Aggregates of windows, as `Stream.window` makes them."""
    made = SessionWindows if isinstance(spec, Session) else SlicedWindows
    return lambda: made(("k",), spec, {"n": count(), "total": sum("v")}, "t")  # type: ignore[arg-type]


class Task:
    """Watermarks are made of rows, and windows go by them. What comes out is in `late` and `results`."""

    def __init__(self, spec: Timed) -> None:
        self.late: list[Row] = []
        self.results: list[dict[str, Any]] = []
        make = windows_of(spec)

        def generator() -> WatermarkGenerator:
            made = WatermarkGenerator("t", BOUND)
            made.dues_behind = make().dues
            return made

        specs = [
            OperatorSpec(OperatorUid(f"op{number}"), f"op{number}", each)
            for number, each in enumerate((generator, make))
        ]

        def aside(side: SideOutput, batch: pa.RecordBatch) -> None:
            self.late += [(row["k"], row["v"], row["t"]) for row in batch.to_pylist()]

        def out(batch: pa.RecordBatch) -> None:
            self.results += batch.to_pylist()

        self.chain = OperatorChain(specs, SubtaskIndex(0), 1, 16, out, output_aside=aside)
        self.chain.open({})

    def read(self, rows: Sequence[Row]) -> None:
        """A batch."""
        columns = zip(*rows, strict=True)
        arrays = {name: pa.array(column, pa.int64()) for name, column in zip("kvt", columns, strict=True)}
        self.chain.process(pa.record_batch(arrays))
        self._go_on()

    def end(self) -> None:
        """The input is over, and event time with it."""
        self.chain.advance_watermark(MAX_WATERMARK_MS)
        self._go_on()

    def _go_on(self) -> None:
        while self.chain.advancing:
            self.chain.step()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 120)), min_size=1, max_size=60),
    st.sampled_from(WINDOWS),
    st.integers(1, 61),
    st.integers(0, 2**32),
)
def test_the_same_rows_are_late(rows: list[Row], spec: Timed, rows_max: int, seed: int) -> None:
    """Those that a loop over the rows finds; every other row counts in the windows that are not over when it comes."""
    chance, task, left = Random(seed), Task(spec), list(rows)
    while left:
        size = chance.randint(1, rows_max)
        task.read(left[:size])
        left = left[size:]
    task.end()
    own = judged(rows, BOUND, [True] * len(rows))
    assert sorted(task.late) == sorted(late_in_split(spec, 0, own))
    expected = [(*window, *sums) for window, of in read_in_order(spec, 0, own).items() for sums in of]
    names = ("k", "window_start", "window_end", "n", "total")
    assert sorted(tuple(row[name] for name in names) for row in task.results) == sorted(expected)
