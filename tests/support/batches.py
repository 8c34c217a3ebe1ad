"""Record batches of a size that tests can reckon with."""

from __future__ import annotations

import pyarrow as pa

from tidegate.protocol.stream_elements import element_size_bytes


def batch(*values: int) -> pa.RecordBatch:
    """One column `x`."""
    return pa.record_batch({"x": pa.array(values, pa.int64())})


def values(element: object) -> list[int]:
    """The column `x` of a batch."""
    assert isinstance(element, pa.RecordBatch)
    found: list[int] = element.column("x").to_pylist()
    return found


ONE_ROW_BYTES = element_size_bytes(batch(1))
"""What any batch of one row counts against credit."""
