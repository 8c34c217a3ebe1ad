"""Pairs of values of two dimensions that may be drawn together, and pairs that were drawn."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

from random_jobs.draw import CONTRADICTIONS, DIMENSIONS, Scenario

Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def all_pairs() -> frozenset[Pair]:
    """Every pair of values of two dimensions that may be drawn together."""
    return frozenset(
        pair
        for first, second in itertools.combinations(DIMENSIONS, 2)
        for pair in itertools.product(
            ((first, value) for value in DIMENSIONS[first]), ((second, value) for value in DIMENSIONS[second])
        )
        if pair not in CONTRADICTIONS
    )


def pairs_of(scenarios: Iterable[Scenario]) -> frozenset[Pair]:
    """The pairs that these scenarios hold."""
    return frozenset(
        ((first, s.values[first]), (second, s.values[second]))
        for s in scenarios
        for first, second in itertools.combinations(DIMENSIONS, 2)
    )
