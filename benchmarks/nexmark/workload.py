"""`Workload`: which events there are, and in what order. Everything about an event is a function of its number.

Of fifty events in a row one is a person, then three are auctions, and 46 are bids. Numbers come out of order as
published: within groups of `out_of_order` events, position i has event (953 i) modulo the size of the group. So the
order in a *block*, some whole groups and whole fifties, is the same in each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]

EPOCH_EVENTS = 50
"""One person, `AUCTIONS_OF` auctions, `BIDS_OF` bids."""
AUCTIONS_OF = 3
BIDS_OF = 46
STRIDE = 953
"""Has no divisor with the usual sizes of groups in common, so that a group is a permutation."""
FIRST_ID = 1_000
"""Of people and of auctions."""
IN_FLIGHT = 100
"""Auctions that are open at a time, and that bids are drawn from."""
ACTIVE_PEOPLE = 1_000
"""The newest people, who sell and bid."""
LEAD = 10
"""Ids that nobody has yet, but that may be drawn."""
START_MS = 1_436_918_400_000
"""2015-07-15, midnight in UTC: the first event."""
KINDS = ("person", "auction", "bid")


@dataclass(frozen=True)
class Workload:
    """`events` events, `rate` a second of event time, out of order in groups of `out_of_order` (1: in order).

    `block` is how many events are made at once; texts differ with it. `events` is a multiple of it. So many events are
    `skipped`: numbers begin behind them, and auctions and people of theirs are known to those that come.
    """

    events: int
    rate: float = 100_000.0
    out_of_order: int = 1_000
    block: int = 50_000
    seed: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if math.gcd(self.out_of_order, STRIDE) != 1:
            raise ValueError(f"groups of {self.out_of_order} events cannot be out of order by {STRIDE}")
        if self.block % math.lcm(EPOCH_EVENTS, self.out_of_order):
            raise ValueError(
                f"a block of {self.block} events is not a multiple of {EPOCH_EVENTS} and {self.out_of_order}"
            )
        if self.events <= 0 or self.events % self.block:
            raise ValueError(f"{self.events} events are not a number of whole blocks of {self.block}")
        if self.skipped % self.block:
            raise ValueError(f"{self.skipped} skipped events are not a number of whole blocks of {self.block}")

    def rows(self, kind: str, events: int | None = None) -> int:
        """How many rows of a kind some events have, which are whole blocks; without a number all events."""
        events = self.events if events is None else events
        return events // EPOCH_EVENTS * {"person": 1, "auction": AUCTIONS_OF, "bid": BIDS_OF}[kind]

    def numbers(self, kind: str, block: int) -> Numbers:
        """Numbers of the events of a kind in a block, in the order in which they come."""
        return self.skipped + block * self.block + _order(kind, self.block, self.out_of_order)

    def times(self, numbers: Numbers) -> Numbers:
        """When events happen, in ms since 1970."""
        since: Numbers = np.floor(numbers * (1_000.0 / self.rate)).astype(np.int64)
        return since + START_MS

    @property
    def disorder_ms(self) -> int:
        """How far an event may lie behind one before it."""
        return math.ceil(self.out_of_order * 1_000.0 / self.rate)

    def bits(self, numbers: Numbers, draw: int) -> Bits:
        """64 bits for each event; other ones for each `draw`. The finalizer of splitmix64."""
        mixed = numbers.view(np.uint64) + np.uint64((self.seed * 1_000 + draw) * 0x9E3779B97F4A7C15 % 2**64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@cache
def _order(kind: str, block: int, out_of_order: int) -> Numbers:
    """Numbers of the events of a kind within a block, in the order in which they come."""
    positions = np.arange(block, dtype=np.int64)
    first = positions // out_of_order * out_of_order
    numbers = first + positions * STRIDE % out_of_order
    place = numbers % EPOCH_EVENTS
    of_kind = {"person": place == 0, "auction": (place > 0) & (place <= AUCTIONS_OF), "bid": place > AUCTIONS_OF}
    order: Numbers = numbers[of_kind[kind]]
    return order


def last_person(numbers: Numbers) -> Numbers:
    """The newest person at each event, counted from 0."""
    return numbers // EPOCH_EVENTS


def last_auction(numbers: Numbers) -> Numbers:
    """The newest auction at each event that is no person, counted from 0."""
    place = numbers % EPOCH_EVENTS
    return numbers // EPOCH_EVENTS * AUCTIONS_OF + np.minimum(place, AUCTIONS_OF) - 1


def below(bits: Bits, shift: int, count: int | Numbers) -> Numbers:
    """Numbers from 0 up to `count`, which is less than 2**20, of 20 of the bits."""
    part = (bits >> np.uint64(shift)) & np.uint64(0xFFFFF)
    return (part.view(np.int64) * count) >> 20


def drawn_person(numbers: Numbers, bits: Bits, shift: int) -> Numbers:
    """One of the thousand newest people, or one of those who come next; counted from 0."""
    people = last_person(numbers) + 1
    active = np.minimum(people, ACTIVE_PEOPLE)
    return people - active + below(bits, shift, active + LEAD)


_STEPS = 4_096
_PRICES = np.rint(100.0 * 10.0 ** (np.arange(_STEPS + 1) * (6.0 / _STEPS))).astype(np.int64)


def prices(bits: Bits, shift: int) -> Numbers:
    """Prices from 100 to 100,000,000 cents, evenly spread on a logarithmic scale, of 24 of the bits.

    Straight lines between the points of a table: the same on any machine.
    """
    part = ((bits >> np.uint64(shift)) & np.uint64(0xFFFFFF)).view(np.int64)
    step = part >> 12
    low = _PRICES[step]
    price: Numbers = low + (((_PRICES[step + 1] - low) * (part & 0xFFF)) >> 12)
    return price
