"""Auctions: about 500 bytes. Three of four are of a hot seller; they last as long as 100 of them take on average."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa

from nexmark.texts import TextPool
from nexmark.workload import (
    AUCTIONS_OF,
    EPOCH_EVENTS,
    FIRST_ID,
    IN_FLIGHT,
    Workload,
    below,
    drawn_person,
    last_auction,
    last_person,
    prices,
)

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("item_name", pa.string()),
        ("description", pa.string()),
        ("initial_bid", pa.int64()),
        ("reserve", pa.int64()),
        ("date_time", pa.timestamp("ms")),
        ("expires", pa.timestamp("ms")),
        ("seller", pa.int64()),
        ("category", pa.int64()),
        ("extra", pa.string()),
    ]
)
HOT = 100
FIRST_CATEGORY = 10
CATEGORIES = 5
EXTRA = (300, 450)


def make(workload: Workload, block: int) -> pa.RecordBatch:
    """The auctions of a block."""
    numbers = workload.numbers("auction", block)
    who, what = workload.bits(numbers, 11), workload.bits(numbers, 12)
    starts = [int(bits >> np.uint64(8)) for bits in workload.bits(np.full(3, block, dtype=np.int64) + np.arange(3), 13)]
    hot = last_person(numbers) // HOT * HOT
    seller = np.where(who >> np.uint64(62) != 0, hot, drawn_person(numbers, who, 0))
    times = workload.times(numbers)
    horizon = workload.times(numbers + IN_FLIGHT * EPOCH_EVENTS // AUCTIONS_OF) - times
    lasts = workload.bits(numbers, 14) >> np.uint64(8)
    drawn = (lasts % np.maximum(2 * horizon, 1).view(np.uint64)).view(np.int64)
    initial = prices(who, 20)
    names, descriptions, extras = _pools()
    columns = [
        last_auction(numbers) + FIRST_ID,
        names.some(len(numbers), starts[0]),
        descriptions.some(len(numbers), starts[1]),
        initial,
        initial + prices(what, 0),
        pa.array(times, pa.timestamp("ms")),
        pa.array(times + 1 + drawn, pa.timestamp("ms")),
        seller + FIRST_ID,
        FIRST_CATEGORY + below(what, 24, CATEGORIES),
        extras.some(len(numbers), starts[2]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@cache
def _pools() -> tuple[TextPool, TextPool, TextPool]:
    texts = 1 << 14
    return (
        TextPool(texts, 3, 19, draw=120, between=" "),
        TextPool(texts, 3, 99, draw=122, between=" "),
        TextPool(texts, *EXTRA, draw=124),
    )
