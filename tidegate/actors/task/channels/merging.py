"""Which batches at the head of a channel's queue are handed to the operators as one.

A call of an operator has a fixed cost, some tenths of a millisecond. Batches of a few hundred rows, as joins and
aggregates emit them, cost more by that than by their rows. `InputChannel.take` asks here. Rules:

- Only neighbours are put together, in their order: a watermark, a barrier or any other element ends them.
- Only what is there already: nothing waits for more.
- The result has no more rows than the job says (`MERGED_ROWS_MAX` by default), no more than `MERGED_BYTES_MAX` bytes,
  and no more than half of the channel's window. From there on copying costs more than a call, so a large batch is never
  copied.
- Batches of different schemas stay apart. So do those with dictionaries, each of which would have to be read whole, and
  what Arrow cannot put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from tidegate.protocol.stream_elements import Element, element_size_bytes

MERGED_ROWS_MAX = 32_768
MERGED_BYTES_MAX = 1024 * 1024


def neighbours(elements: Iterable[Element], rows_max: int, bytes_max: int) -> list[tuple[pa.RecordBatch, int]]:
    """The first elements that may be one batch within these limits, each with its size; none unless there are two."""
    found: list[tuple[pa.RecordBatch, int]] = []
    rows = size_bytes = 0
    for element in elements:
        if not isinstance(element, pa.RecordBatch) or (rows := rows + element.num_rows) > rows_max:
            break
        if found and not _alike(found[0][0].schema, element.schema):
            break
        own_bytes = element_size_bytes(element)
        if (size_bytes := size_bytes + own_bytes) > bytes_max:
            break
        found.append((element, own_bytes))
    return found if len(found) > 1 else []


def merged(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch | None:
    """The rows of all batches, in their order. None where Arrow cannot do it."""
    try:
        return pa.concat_batches(batches)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _alike(schema: pa.Schema, other: pa.Schema) -> bool:
    return bool(schema.equals(other)) and not any(pa.types.is_dictionary(field.type) for field in schema)
