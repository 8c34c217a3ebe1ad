"""Tables as batches: all rows in one, or a clear refusal, and rows from anywhere on."""

from __future__ import annotations

import pyarrow as pa
import pytest
from huge_rows import HugeRows
from hypothesis import given
from hypothesis import strategies as st

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import one_batch, slice_from


@given(st.lists(st.lists(st.text(max_size=3), max_size=4), max_size=5))
def test_all_rows_of_a_table(chunks: list[list[str]]) -> None:
    """In their order, however the table lies in memory; of none the schema is left."""
    table = pa.table({"s": pa.chunked_array(chunks, pa.string())})
    batch = one_batch(table, "x")
    assert batch.schema.equals(table.schema)
    assert batch.to_pylist() == table.to_pylist()


def test_more_strings_than_a_column_holds_are_refused() -> None:
    """Arrow makes several batches of them: to go on with the first one would lose the rows of the others."""
    table = HugeRows(pa.table({"k": [1, 2], "s": pa.chunked_array([["a"], ["b"]])}))
    assert one_batch(table.slice(1, 1), "x").to_pylist() == [{"k": 2, "s": "b"}]
    with pytest.raises(
        ConfigurationError,
        match=r"lookup_join: 2 rows are needed at once, .* column 's' of type string; cast the column to large_string",
    ):
        one_batch(table, "lookup_join")


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(1, 5))
def test_rows_from_anywhere_on(sizes: list[int], rows_max: int) -> None:
    """Whoever reads on behind what came has all rows, in pieces of a bounded size."""
    rows = list(range(sum(sizes)))
    batches = pa.table({"x": pa.array(rows, pa.int64())}).to_batches()
    whole = batches[0] if batches else pa.record_batch({"x": pa.array([], pa.int64())})
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    batches = [whole.slice(end - size, size) for end, size in zip(ends, sizes, strict=True)]
    found: list[int] = []
    while len(found) < len(rows):
        part = slice_from(batches, len(found), rows_max)
        assert 1 <= part.num_rows <= rows_max
        found += part.column("x").to_pylist()
    assert found == rows
    with pytest.raises(IndexError):
        slice_from(batches, len(rows), rows_max)
