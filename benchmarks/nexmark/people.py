"""People: about 200 bytes. Few states and cities, so that queries find some even in a small stream."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nexmark.texts import TextPool, picked
from nexmark.workload import FIRST_ID, Workload, below, last_person

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("email_address", pa.string()),
        ("credit_card", pa.string()),
        ("city", pa.string()),
        ("state", pa.string()),
        ("date_time", pa.timestamp("ms")),
        ("extra", pa.string()),
    ]
)
STATES = pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])
CITIES = pa.array(
    ["Boise", "Bend", "Cheyenne", "Kent", "Los Angeles", "Phoenix", "Portland", "Redmond", "San Francisco", "Seattle"]
)
FIRST_NAMES = ("Ada", "Bela", "Carl", "Dora", "Emil", "Fay", "Gus", "Hedy", "Ivo", "Jane", "Kurt")
LAST_NAMES = ("Adler", "Boole", "Curie", "Dirac", "Euler", "Fermi", "Gauss", "Hertz", "Joule")
NAMES = pa.array([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES])
EXTRA = (96, 144)


def make(workload: Workload, block: int) -> pa.RecordBatch:
    """The people of a block."""
    numbers = workload.numbers("person", block)
    bits = workload.bits(numbers, 21)
    starts = [
        int(drawn >> np.uint64(8)) for drawn in workload.bits(np.full(3, block, dtype=np.int64) + np.arange(3), 22)
    ]
    users, hosts, cards, extras = _pools()
    rows = len(numbers)
    columns = [
        last_person(numbers) + FIRST_ID,
        picked(NAMES, below(bits, 0, len(NAMES))),
        pc.binary_join_element_wise(
            users.some(rows, starts[0]), pc.binary_join_element_wise(hosts.some(rows, starts[1]), "com", "."), "@"
        ),
        picked(cards, (bits >> np.uint64(40)) % np.uint64(len(cards))),
        picked(CITIES, below(bits, 20, len(CITIES))),
        picked(STATES, (bits >> np.uint64(44)) % np.uint64(len(STATES))),
        pa.array(workload.times(numbers), pa.timestamp("ms")),
        extras.some(rows, starts[2]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@cache
def _pools() -> tuple[TextPool, TextPool, pa.StringArray, TextPool]:
    texts = 1 << 14
    numbers = np.random.Generator(np.random.PCG64(1)).integers(0, 10_000, (4_096, 4))
    cards = pa.array([" ".join(f"{part:04d}" for part in card) for card in numbers.tolist()])
    return TextPool(texts, 3, 6, draw=130), TextPool(texts, 3, 4, draw=132), cards, TextPool(texts, *EXTRA, draw=134)
