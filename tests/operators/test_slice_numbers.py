"""Slices have numbers that tell them apart as their nodes do, and that stay near each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.operators.windows.slices import Merge, SlidingSlices, due, slices_of, with_nodes
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS

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


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 11),
    st.lists(st.integers(-60, 400), min_size=1, max_size=40),
    st.lists(st.integers(1, 90), max_size=12),
)
def test_few_nodes_are_looked_up_as_many_are(
    size: int, slide: int, offset: int, times: list[int], steps: list[int]
) -> None:
    """Nodes that are looked up one by one, and all nodes of a level at once: the same merges, parts and next window."""
    slices = SlidingSlices(Sliding(max(size, slide), slide, offset % slide))
    nodes, fired_ms = np.unique(slices.targets(np.array(times), -100)[0].nodes), -100
    for step in steps:
        until_ms = fired_ms + step
        merges, few_merges = (merges_of(slices, nodes, fired_ms, until_ms, few_ends) for few_ends in (0, 1 << 60))
        assert few_merges == merges
        nodes = np.union1d(nodes, np.array([merge.node for merge in merges], np.int64))
        fired_ms = until_ms
        window = slices.next_window(nodes, fired_ms)
        ends = [end for time in times for _, end in windows_of_time(slices, time) if end - 1 > fired_ms]
        assert (None if window is None else window.end_ms) == min(ends, default=None)
        if window is not None:
            few = slices.parts(nodes, window, fired_ms)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tidegate.operators.windows.slices._FEW_NODES", -1)
                assert slices.parts(nodes, window, fired_ms) == few
            ended = due(slices, nodes, fired_ms, fired_ms + 100, 9)
            if ended:
                bundle = slices.bundle(nodes, ended, fired_ms)
                merged = with_nodes(nodes, [made for made, _ in bundle.stored])
                assert bundle.parts == [slices.parts(merged, each, each.end_ms - 1) for each in ended]
        over = slices.over(nodes, fired_ms)
        nodes = np.setdiff1d(nodes, over)


def merges_of(slices: SlidingSlices, nodes: Any, fired_ms: int, until_ms: int, few_ends: int) -> list[Merge]:
    """The merges, where fewer ends than these count as few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidegate.operators.windows.slices.FEW_ENDS", few_ends)
        return slices.merges(nodes, fired_ms, until_ms)


def windows_of_time(slices: SlidingSlices, time_ms: int) -> list[tuple[int, int]]:
    """The windows of a moment."""
    spec = slices._spec
    first = (time_ms - spec.offset_ms) // spec.slide_ms * spec.slide_ms + spec.offset_ms
    starts = range(first, time_ms - spec.size_ms, -spec.slide_ms)
    return [(start, start + spec.size_ms) for start in starts]
