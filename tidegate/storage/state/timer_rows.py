"""Timers as they are stored: a row a timer, which is told apart by all its columns: key, clock and moment.

Rules: in the canonical order rows are sorted by key group, clock, moment and then key, which is the order in which they
fire: values of a key column ascend, NaN comes after them and null last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import CorruptionError
from tidegate.storage.schemas.reserved_names import own_name

TIMERS_STATE = own_name("timers")
"""Name of the table of timers, which lies beside those of the states."""

TIMER_DOMAIN, TIMER_MOMENT = own_name("timer_domain"), own_name("timer_timestamp_ms")
TIMER_COLUMNS = pa.schema([(TIMER_DOMAIN, pa.string()), (TIMER_MOMENT, pa.int64())])
"""What a row has beside its key."""

DOMAINS = ("event_time", "processing_time")
"""Clocks by their number."""


def timers_schema(keys: pa.Schema) -> pa.Schema:
    """The columns of the table for some key columns."""
    return pa.schema([*keys, *TIMER_COLUMNS])


def check_timers(rows: pa.RecordBatch, keys: pa.Schema) -> None:
    """Raise CorruptionError if rows have other columns."""
    expected = timers_schema(keys)
    found = rows.schema
    if [(field.name, field.type) for field in found] != [(field.name, field.type) for field in expected]:
        raise CorruptionError(f"stored timers have columns {found.names}, not {expected.names}")


def domain_column(numbers: NDArray[Any]) -> pa.Array:
    """The column of clocks with these numbers."""
    return pa.array(DOMAINS, pa.string()).take(pa.array(numbers))


def domain_numbers(column: pa.Array) -> NDArray[np.uint8]:
    """The number of each clock of a column. CorruptionError for one that there is not."""
    names = column.dictionary_encode()
    known = names.dictionary.to_pylist()
    if names.null_count or any(name not in DOMAINS for name in known):
        raise CorruptionError(f"stored timers wait for {sorted(map(str, known))}; there are {sorted(DOMAINS)}")
    numbers = np.array([DOMAINS.index(name) for name in known], dtype=np.uint8)
    positions: NDArray[Any] = names.indices.to_numpy(zero_copy_only=False)
    found: NDArray[np.uint8] = numbers[positions]
    return found
