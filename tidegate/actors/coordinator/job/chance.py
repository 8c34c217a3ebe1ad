"""Chance for machines, which have none of their own: numbers that the seed in the log decides."""

from __future__ import annotations

_DRAWS = 2**64


def drawn(seed: int, number: int) -> int:
    """A number in [0, 2**64) that is the same in each replay. For `number` values that differ it looks random."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % _DRAWS


def drawn_fraction(seed: int, purpose: int, number: int) -> float:
    """A number in [0, 1). Draws of different purposes have nothing to do with each other."""
    mixed = drawn(seed ^ (purpose * 0x94D049BB133111EB), number + 1) % _DRAWS
    # The finaliser of splitmix64: neighbouring numbers give draws that are far apart.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _DRAWS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _DRAWS
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53
