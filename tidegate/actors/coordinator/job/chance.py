"""Randomness for machines, which have no source of their own: every draw follows from the seed in the event log.

`checkpoint_keeper.py` draws the delay of the first periodic checkpoint, `restarts.py` the jitter of a restart.
"""

from __future__ import annotations

_DRAWS = 2**64


def drawn(seed: int, number: int) -> int:
    """A number in [0, 2**64), the same in every replay. Different values of `number` give numbers that look random."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % _DRAWS


def drawn_fraction(seed: int, purpose: int, number: int) -> float:
    """A number in [0, 1). Draws for different purposes are independent."""
    mixed = drawn(seed ^ (purpose * 0x94D049BB133111EB), number + 1) % _DRAWS
    # The finaliser of splitmix64: neighbouring numbers give draws that are far apart.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _DRAWS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _DRAWS
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53
