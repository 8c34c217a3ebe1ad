"""Slices have numbers that tell them apart as their nodes do, and that stay near each other."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tidegate.actors.operators.windows.slices import slices_of
from tidegate.actors.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.actors.protocol.stream_elements import MIN_WATERMARK_MS

_HOUR_MS = 3_600_000
_AROUND_ZERO: NDArray[np.int64] = np.arange(-200, 200, dtype=np.int64)
_YEARS: NDArray[np.int64] = np.arange(-365 * 24, 50 * 365 * 24, dtype=np.int64) * _HOUR_MS
"""The hours of half a century: in some zones a day has 23 or 25 of them, and one was left out."""


@pytest.mark.parametrize(
    ("spec", "times"),
    [
        (Tumbling(1), _AROUND_ZERO),
        (Tumbling(7, 3), _AROUND_ZERO),
        (Sliding(12, 8), _AROUND_ZERO),
        (Sliding(30, 10, 7), _AROUND_ZERO),
        (Cumulating(5, 20), _AROUND_ZERO),
        (Tumbling("1d", timezone="Europe/London"), _YEARS),
        (Tumbling("2d", "5h", timezone="Pacific/Apia"), _YEARS),
    ],
    ids=str,
)
def test_two_times_have_one_number_if_they_are_in_one_slice(
    spec: Tumbling | Sliding | Cumulating, times: NDArray[np.int64]
) -> None:
    """Before 1970 as well; numbers grow with time."""
    slices = slices_of(spec)
    nodes = slices.targets(times, MIN_WATERMARK_MS)[0].nodes
    others = np.flatnonzero(np.diff(nodes))
    steps = np.diff(slices.numbers(times))
    assert len(others) > 20
    assert (np.flatnonzero(steps) == others).all()
    assert (steps >= 0).all()


@pytest.mark.parametrize("spec", [Tumbling(1_000, 300), Sliding(4_000, 1_000), Cumulating(1_000, 3_000)], ids=str)
def test_numbers_of_neighbours_follow_one_another(spec: Tumbling | Sliding | Cumulating) -> None:
    """A few slices need a few places."""
    numbers = slices_of(spec).numbers(np.arange(-2_700, 5_300, 1_000, dtype=np.int64))
    assert np.diff(numbers).tolist() == [1] * 7
