"""Bids: auction, bidder, price, channel, url, date_time, extra; about 100 bytes besides channel and url.

Every other bid is for a hot auction, three of four come from a hot bidder, every other from one of four hot channels.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa

from nexmark.texts import TextPool, picked
from nexmark.workload import (
    FIRST_ID,
    IN_FLIGHT,
    LEAD,
    Workload,
    below,
    drawn_person,
    last_auction,
    last_person,
    prices,
)

SCHEMA = pa.schema(
    [
        ("auction", pa.int64()),
        ("bidder", pa.int64()),
        ("price", pa.int64()),
        ("channel", pa.string()),
        ("url", pa.string()),
        ("date_time", pa.timestamp("ms")),
        ("extra", pa.string()),
    ]
)
HOT = 100
"""One auction, and one person, of so many is a hot one."""
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
CHANNELS = 10_000
WITH_CHANNEL_ID = 0.9
EXTRA = (54, 81)
"""Least and greatest length: with four numbers about 100 bytes."""


def make(workload: Workload, block: int) -> pa.RecordBatch:
    """The bids of a block."""
    numbers = workload.numbers("bid", block)
    who, what = workload.bits(numbers, 1), workload.bits(numbers, 2)
    newest = last_auction(numbers)
    oldest = np.maximum(newest - IN_FLIGHT, 0)
    drawn = oldest + below(what, 0, newest - oldest + 1 + LEAD)
    auction = np.where(what >> np.uint64(63) == 0, newest // HOT * HOT, drawn)
    bidder = np.where(who >> np.uint64(62) != 0, last_person(numbers) // HOT * HOT + 1, drawn_person(numbers, who, 0))
    hot = (what >> np.uint64(62)) & np.uint64(1)
    channel = np.where(hot != 0, CHANNELS + below(what, 20, len(HOT_CHANNELS)), below(what, 20, CHANNELS))
    names, urls = _channels()
    columns = [
        auction + FIRST_ID,
        bidder + FIRST_ID,
        prices(who, 20),
        picked(names, channel),
        picked(urls, channel),
        pa.array(workload.times(numbers), pa.timestamp("ms")),
        _extras().some(len(numbers), _start(workload, block)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _start(workload: Workload, block: int) -> int:
    return int(workload.bits(np.array([block], dtype=np.int64), 3)[0] >> np.uint64(8))


@cache
def _extras() -> TextPool:
    return TextPool(1 << 17, *EXTRA, draw=100)


@cache
def _channels() -> tuple[pa.StringArray, pa.StringArray]:
    """Names and urls of all channels, the hot ones at the end. One of ten that are not hot has no id in its url."""
    count = CHANNELS + len(HOT_CHANNELS)
    folders = [TextPool(1 << 15, 3, 4, draw, between="_").some(count, 0).to_pylist() for draw in (110, 112, 114)]
    urls = [f"https://www.nexmark.com/{a}/{b}/{c}/item.htm?query=1" for a, b, c in zip(*folders, strict=True)]
    for channel in range(CHANNELS):
        if channel % 10 < WITH_CHANNEL_ID * 10:
            urls[channel] += f"&channel_id={channel * 0x9E3779B1 % 2**31}"
    names = [*(f"channel-{channel}" for channel in range(CHANNELS)), *HOT_CHANNELS]
    return pa.array(names, pa.string()), pa.array(urls, pa.string())
