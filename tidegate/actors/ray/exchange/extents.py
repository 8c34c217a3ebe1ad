"""`Extents`: which parts of a piece of memory are taken. Pure; `FrameWriter` asks it where the next frame goes.

Rules: parts are given back in any order, and the lowest gap that is large enough is taken. So memory that nobody
needs is never touched, and what is touched stays warm.
"""

from __future__ import annotations

ALIGNMENT = 64
"""Arrow reads fastest from addresses that are multiples of this."""


class Extents:
    """The parts of `size_bytes` bytes that are taken, each under a number that the caller has chosen."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken: dict[int, tuple[int, int]] = {}
        """Begin and end of each part."""
        self.taken_bytes = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the parts that are taken."""
        return tuple(self._taken)

    def gap(self, least_bytes: int) -> tuple[int, int] | None:
        """Begin and end of the lowest gap of at least this size; None: there is none."""
        begin = 0
        for taken_begin, taken_end in sorted(self._taken.values()):
            if taken_begin - begin >= least_bytes:
                return begin, taken_begin
            begin = taken_end
        return (begin, self._size_bytes) if self._size_bytes - begin >= least_bytes else None

    def take(self, number: int, begin: int, size_bytes: int) -> None:
        """Take the first bytes of a gap."""
        assert number not in self._taken and begin % ALIGNMENT == 0
        end = min(begin + -(-size_bytes // ALIGNMENT) * ALIGNMENT, self._size_bytes)
        self._taken[number] = begin, end
        self.taken_bytes += end - begin

    def give_back(self, number: int) -> None:
        """Nobody needs this part any more."""
        begin, end = self._taken.pop(number)
        self.taken_bytes -= end - begin
