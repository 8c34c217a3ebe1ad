"""`batch_rows` in a program: refused where it is given, kept where functions are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

ROWS = pa.table({"k": list(range(100))})


class One(tg.ProcessFunction):
    """Drops all rows."""

    def process(self, row: Any, context: Any) -> None: ...


class Two(tg.CoProcessFunction):
    """Drops all rows of two streams."""

    def process1(self, row: Any, context: Any) -> None: ...

    def process2(self, row: Any, context: Any) -> None: ...


METHODS: dict[str, Callable[..., object]] = {
    "map_batches": lambda s, **k: s.map_batches(lambda batch: batch, **k),
    "map": lambda s, **k: s.map(lambda row: row, **k),
    "flat_map": lambda s, **k: s.flat_map(lambda row: [row], **k),
    "filter": lambda s, **k: s.filter(lambda row: True, **k),
    "process": lambda s, **k: s.process(One(), **k),
    "keyed process": lambda s, **k: s.key_by("k").process(One(), **k),
    "connected process": lambda s, **k: s.connect(s).process(Two(), **k),
}


@pytest.mark.parametrize("method", METHODS)
def test_bounds_that_are_none_are_refused_where_they_are_given(method: str) -> None:
    """With the name of the operator, before anything runs."""
    with tg.StreamEnvironment.local() as env:
        stream = env.from_batches(ROWS)
        with pytest.raises(tg.ConfigurationError, match=r"score: .*batch_rows=\(9, 3\)"):
            METHODS[method](stream, name="score", batch_rows=(9, 3))


@pytest.mark.parametrize("least", [1, 10])
def test_a_function_is_called_with_no_more_rows_than_its_user_says(least: int) -> None:
    """All of them, in calls of ten; where fewer are allowed, some may be smaller, because a small call may be tried."""
    sizes: list[int] = []

    def count(batch: pa.RecordBatch) -> pa.RecordBatch:
        sizes.append(batch.num_rows)
        return batch

    with tg.StreamEnvironment.local() as env:
        source = env.from_batches(ROWS, splits=1)
        rows = source.map_batches(count, schema=ROWS.schema, batch_rows=(least, 10)).collect()
        env.execute("calls").wait()
        assert rows.to_arrow().num_rows == 100
    assert (sum(sizes), max(sizes)) == (100, 10)
    assert least == 1 or sizes == [10] * 10
