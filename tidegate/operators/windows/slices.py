"""Slices: time intervals of which windows consist. Each row is added to the state of one slice, and windows are
computed from slices.

All functions here are pure. `SlicedWindows` stores an accumulator for each key and node. A node is a slice, or several
adjacent slices. Its id is its start followed by six bits: 0 for a slice, else the kind of node.

- A tumbling window is one slice.
- Sliding windows share slices, whose bounds are the bounds of all windows. When two neighbouring nodes of the same
  length have ended, they are merged into a node of twice the length (the start of a node of 2**n slices is a multiple
  of 2**n slices). A window of n slices therefore has at most 2 * log2(n) nodes, and each slice is merged about twice.
  This tree of partial results works for aggregates without an inverse, costs no memory for idle keys, and stays correct
  when a late row arrives. (The two-stacks algorithm would merge less often, but each key would need a row in every
  slice.)
- Cumulating windows have, for each longest window, one node for the slices that have ended, into which each slice is
  merged when it ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tidegate.operators.windows.window_specs import (
    Cumulating,
    Sliding,
    Times,
    Tumbling,
    check_times,
    floored,
    steps_of,
)
from tidegate.state.kernels.distinct_integers import distinct_integers

_KIND_BITS = 6
_KINDS = 1 << _KIND_BITS
_HOUR_MS = 3_600_000
FEW_ENDS = 64
"""If fewer slices than this end at once, the nodes that have ended are looked up one by one."""
_FEW_NODES = 24
"""If a window contains at most this number of nodes, each of them is checked.

Otherwise the nodes that the window needs are computed and looked up.
"""
_FEW_WINDOWS = 3
"""Up to this number of windows, the nodes are looked up window by window."""
_NO_NODE = -(1 << 63)
_RUNNING = 1
"""Kind of the node of a cumulating window that covers all slices so far."""
_PAIRED, _WHOLE = 2, _KINDS - 1
"""Kinds of nodes of cumulating windows that exist only in memory: of two, four and more slices, and of all slices that
end.
"""


class Window(NamedTuple):
    """Bounds of a window in ms since 1970. The end is exclusive."""

    start_ms: int
    end_ms: int


class Merge(NamedTuple):
    """Describes how to create a node of window state, by merging the nodes `parts`. With `taken`, these nodes are not
    needed afterwards.
    """

    node: int
    parts: tuple[int, ...]
    taken: bool


class Bundle(NamedTuple):
    """Lists the nodes of which several consecutive windows consist, and the nodes that must be created for them."""

    levels: list[list[Merge]]
    """The nodes to create in memory, level by level.

    A node is merged from nodes of earlier levels or nodes of the state.
    """
    parts: list[tuple[int, ...]]
    """For each window, the nodes of which it consists."""
    stored: list[tuple[int, int]]
    """For each node to store, the created node, and the node of the state into which it is merged."""
    taken: list[int]
    """Nodes of the state that are not needed afterwards."""


class Target(NamedTuple):
    """The nodes to which rows are added.

    `rows` has the indices of the rows, or is None for all rows. `nodes` has the node to which each of these rows is
    added.
    """

    rows: NDArray[np.int32] | None
    nodes: Times


class Slices(Protocol):
    """Base class for the slices of one kind of window: describes of which nodes each window consists.

    A node is one slice, or several merged slices. In all methods, `nodes` are the ids of the nodes in the state,
    ascending.
    """

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns to which nodes rows with these times are added, when all nodes that end up to `fired_ms` were merged.

        Raises ConfigurationError for times that are out of range.
        """
        ...

    def numbers(self, times: Times) -> Times:
        """Returns the number of the slice of each time. Two times have the same number if and only if they are in the
        same slice.

        Adjacent slices have close numbers. Raises ConfigurationError for times that are out of range.
        """
        ...

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the first window with rows whose last millisecond is after `fired_ms`, or None if there is none."""
        ...

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges, in order, that are necessary when windows that end after `fired_ms` and not after
        `until_ms` fire.
        """
        ...

    def parts(self, nodes: Times, window: Window, fired_ms: int) -> tuple[int, ...]:
        """Returns the nodes of which a window consists, when all nodes that end up to `fired_ms` were merged.

        Late rows may still be added to these nodes.
        """
        ...

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns the nodes of which each of the next windows after `fired_ms` consists, and the merges of nodes up to
        the end of the last of these windows.
        """
        ...

    def over(self, nodes: Times, fired_ms: int) -> Times:
        """Returns the nodes that belong to no window that ends after `fired_ms`."""
        ...


def node_starts(nodes: Times) -> Times:
    """Returns the start of each node of window state, in ms. `nodes` are ids of nodes."""
    return nodes >> _KIND_BITS


def _position(nodes: Times | list[int], start_ms: int) -> int:
    """Returns the index of the first node that starts at `start_ms` or later."""
    return bisect_left(nodes, start_ms << _KIND_BITS)


def _is_among(nodes: Times, node: int) -> bool:
    position = bisect_left(nodes, node)
    return position < len(nodes) and int(nodes[position]) == node


def with_nodes(nodes: Times, more: Sequence[int] | Times) -> Times:
    """Returns the union of two sets of nodes, ascending. `nodes` must be ascending and without duplicates."""
    if not len(more):
        return nodes
    added = np.asarray(more, dtype=np.int64)
    if len(added) > 1:
        added = distinct_integers(added)
    places = np.searchsorted(nodes, added)
    known = places < len(nodes)
    known[known] = nodes[places[known]] == added[known]
    return nodes if known.all() else np.insert(nodes, places[~known], added[~known])


def due(slices: Slices, nodes: Times, fired_ms: int, until_ms: int, count: int) -> list[Window]:
    """Returns the first windows with rows, up to `count`, that end after `fired_ms` and not after `until_ms`."""
    windows: list[Window] = []
    while len(windows) < count:
        window = slices.next_window(nodes, fired_ms)
        if window is None or window.end_ms - 1 > until_ms:
            break
        windows.append(window)
        fired_ms = window.end_ms - 1
    return windows


def slices_of(spec: Tumbling | Sliding | Cumulating) -> Slices:
    """Returns the object that describes the slices of these windows."""
    if isinstance(spec, Tumbling):
        return TumblingSlices(spec)
    return SlidingSlices(spec) if isinstance(spec, Sliding) else CumulatingSlices(spec)


class TumblingSlices:
    """Slices of tumbling windows: each window is one slice."""

    def __init__(self, spec: Tumbling) -> None:
        self._spec = spec

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns the slice of each time, which is its window."""
        return [Target(None, self._spec.bounds_ms(times)[0] << _KIND_BITS)]

    def numbers(self, times: Times) -> Times:
        """Returns the number of the window of each time, which grows by one from window to window.

        In a time zone, windows are numbered by the hour of their start, because days have different lengths.
        """
        spec = self._spec
        if spec.timezone is not None:
            return steps_of(spec.bounds_ms(times)[0], _HOUR_MS, 0)
        check_times(times)
        return steps_of(times, spec.size_ms, spec.offset_ms)

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the first window with rows whose last millisecond is after `fired_ms`, or None if there is none."""
        starts, ends = self._spec.bounds_ms(node_starts(nodes))
        later = np.flatnonzero(ends - 1 > fired_ms)
        return Window(int(starts[later[0]]), int(ends[later[0]])) if len(later) else None

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns no merges, because a tumbling window is a single slice."""
        return []

    def parts(self, nodes: Times, window: Window, fired_ms: int) -> tuple[int, ...]:
        """Returns the only node of the window: its slice."""
        return (window.start_ms << _KIND_BITS,)

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns a bundle of windows in which each window is one slice."""
        return Bundle([], [(window.start_ms << _KIND_BITS,) for window in windows], [], [])

    def over(self, nodes: Times, fired_ms: int) -> Times:
        """Returns the nodes of windows that have ended at `fired_ms`."""
        _, ends = self._spec.bounds_ms(node_starts(nodes))
        return nodes[ends - 1 <= fired_ms]


class SlidingSlices:
    """Slices of sliding windows, with a tree of merged nodes over them."""

    def __init__(self, spec: Sliding) -> None:
        self._spec = spec
        self._slice_ms = math.gcd(spec.size_ms, spec.slide_ms)
        self._offset_ms = spec.offset_ms % self._slice_ms
        self._levels = (spec.size_ms // self._slice_ms).bit_length() - 1

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns the nodes to which each time is added: its slice, and the larger nodes that contain the time.

        A larger node exists only if it had ended at `fired_ms`.
        """
        check_times(times)
        found = [Target(None, floored(times, self._slice_ms, self._offset_ms) << _KIND_BITS)]
        for level in range(1, self._levels + 1):
            size_ms = self._slice_ms << level
            if int(floored(times.min(keepdims=True), size_ms, self._offset_ms)[0]) + size_ms - 1 > fired_ms:
                break
            starts = floored(times, size_ms, self._offset_ms)
            rows = np.flatnonzero(starts + size_ms - 1 <= fired_ms)
            found.append(Target(rows.astype(np.int32), (starts[rows] << _KIND_BITS) + level))
        return found

    def numbers(self, times: Times) -> Times:
        """Returns the number of the slice of each time, which grows by one from slice to slice."""
        check_times(times)
        return steps_of(times, self._slice_ms, self._offset_ms)

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the first window with rows whose last millisecond is after `fired_ms`, or None if there is none."""
        spec = self._spec
        position = _position(nodes, self._first_needed_ms(fired_ms))
        while position < len(nodes) and nodes[position] % _KINDS:
            position += 1
        if position == len(nodes):
            return None
        # Window starts are after this moment: the windows before it have fired, or end before the slice does.
        after_ms = max(int(nodes[position]) >> _KIND_BITS, fired_ms + 1) - spec.size_ms
        start_ms = after_ms - (after_ms - spec.offset_ms) % spec.slide_ms + spec.slide_ms
        return Window(start_ms, start_ms + spec.size_ms)

    def _first_needed_ms(self, fired_ms: int) -> int:
        """Returns the start, in ms, of the first window that ends after `fired_ms`.

        Windows that have not fired contain no earlier times.
        """
        spec = self._spec
        after_ms = fired_ms + 1 - spec.size_ms
        return after_ms - (after_ms - spec.offset_ms) % spec.slide_ms + spec.slide_ms

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges that create the nodes which end after `fired_ms` and not after `until_ms`, short nodes
        first.
        """
        if (until_ms - fired_ms) // self._slice_ms < FEW_ENDS:
            return self._few_merges(nodes, fired_ms, until_ms)
        return self._many_merges(nodes, fired_ms, until_ms)

    def _few_merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges if few slices end: checks only the nodes that can end, and stops at the first level at
        which no node ends.
        """
        found: list[Merge] = []
        made: set[int] = set()
        for level in range(1, self._levels + 1):
            size_ms = self._slice_ms << level
            # A node ends where the next one begins.
            end_ms = fired_ms + 1 - (fired_ms + 1 - self._offset_ms) % size_ms + size_ms
            if end_ms - 1 > until_ms:
                break
            for start_ms in range(end_ms - size_ms, until_ms + 2 - size_ms, size_ms):
                halves = ((s << _KIND_BITS) + level - 1 for s in (start_ms, start_ms + size_ms // 2))
                children = tuple(half for half in halves if half in made or _is_among(nodes, half))
                if children:
                    found.append(Merge((start_ms << _KIND_BITS) + level, children, False))
                    made.add(found[-1].node)
        return found

    def _many_merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges if many slices end: checks all nodes of the state that can be part of a node that ends."""
        found: list[Merge] = []
        made: Times = nodes[:0]
        for level in range(1, self._levels + 1):
            size_ms = self._slice_ms << level
            near = nodes[_position(nodes, fired_ms + 2 - size_ms) : _position(nodes, until_ms + 1)]
            below = with_nodes(near[near % _KINDS == level - 1], made)
            starts = floored(node_starts(below), size_ms, self._offset_ms)
            ended = (starts + size_ms - 1 > fired_ms) & (starts + size_ms - 1 <= until_ms)
            below, starts = below[ended], starts[ended]
            firsts = np.flatnonzero(np.diff(starts, prepend=starts[:1] - 1))
            made = (starts[firsts] << _KIND_BITS) + level
            bounds = [*firsts.tolist(), len(below)]
            children = [tuple(below[start:stop].tolist()) for start, stop in pairwise(bounds)]
            found += [Merge(node, of, False) for node, of in zip(made.tolist(), children, strict=True)]
        return found

    def parts(self, nodes: Times, window: Window, fired_ms: int) -> tuple[int, ...]:
        """Returns the longest nodes that are inside the window and have ended at `fired_ms`, from left to right."""
        there = nodes[_position(nodes, window.start_ms) : _position(nodes, window.end_ms)]
        first = (window.start_ms - self._offset_ms) // self._slice_ms
        last = (window.end_ms - self._offset_ms) // self._slice_ms
        # What has not ended is not merged yet.
        ended = (fired_ms + 1 - self._offset_ms) // self._slice_ms
        if len(there) <= _FEW_NODES:
            return tuple(node for node in there.tolist() if self._is_longest(node, first, last, ended))
        wanted = []
        while first < last:
            level = min((first & -first).bit_length() - 1 if first else self._levels, self._levels)
            level = min(level, (last - first).bit_length() - 1)
            level = min(level, max(1, ended - first).bit_length() - 1)
            wanted.append(((first * self._slice_ms + self._offset_ms) << _KIND_BITS) + level)
            first += 1 << level
        places = np.minimum(np.searchsorted(there, wanted), len(there) - 1)
        return tuple(node for node, found in zip(wanted, (there[places] == wanted).tolist(), strict=True) if found)

    def _parts_of_many(self, nodes: Times, bounds: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Returns the nodes of many windows, as `parts` does at the end of each window, with a few NumPy calls for all
        windows.

        `bounds` has the start and end of each window in ms, of shape (n, 2).
        """
        first, last = ((bounds - self._offset_ms) // self._slice_ms).T
        wanted: list[Times] = []
        while (left := last - first).max() > 0:
            # The longest node that begins here: its start is a multiple of its size, and it fits. Of 2**n, n is the
            # exponent less 1. Of 0 each size is a divisor.
            aligned = np.where(first == 0, 1 << self._levels, first & -first)
            size = np.minimum(np.minimum(aligned, 1 << self._levels), np.maximum(left, 1))
            level = np.frexp(size.astype(np.float64))[1].astype(np.int64) - 1
            wanted.append(
                np.where(left > 0, ((first * self._slice_ms + self._offset_ms) << _KIND_BITS) + level, _NO_NODE)
            )
            first = np.where(left > 0, first + (1 << level), first)
        of_window = np.stack(wanted, axis=1)
        places = np.minimum(np.searchsorted(nodes, of_window), len(nodes) - 1)
        known = nodes[places] == of_window
        found = of_window[known].tolist()
        ends = np.cumsum(known.sum(axis=1)).tolist()
        return [tuple(found[start:stop]) for start, stop in pairwise([0, *ends])]

    def _is_longest(self, node: int, first: int, last: int, ended: int) -> bool:
        """Returns whether a node belongs to the nodes of a window: it is inside the window and has ended, and this is
        not true of the node of twice its length.

        `first` and `last` are the numbers of the first slice and the end slice of the window, and `ended` is the number
        of the first slice that has not ended.
        """
        start, level = ((node >> _KIND_BITS) - self._offset_ms) // self._slice_ms, node % _KINDS
        end = start + (1 << level)
        if start < first or end > last or (level and end > ended):
            return False
        wider = 2 << level
        start -= start % wider
        return level == self._levels or start < first or start + wider > min(last, ended)

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns the nodes of each window, and all merges of nodes that end up to the end of the last window. The
        merged nodes are stored.

        Each window consists of the same nodes as without a bundle.
        """
        merges = self.merges(nodes, fired_ms, windows[-1].end_ms - 1)
        levels: dict[int, list[Merge]] = {}
        for merge in merges:
            levels.setdefault(merge.node % _KINDS, []).append(merge)
        everything = with_nodes(nodes, [merge.node for merge in merges])
        if len(windows) > _FEW_WINDOWS:
            parts = self._parts_of_many(everything, np.array(windows, dtype=np.int64))
        else:
            parts = [self.parts(everything, window, window.end_ms - 1) for window in windows]
        return Bundle([*levels.values()], parts, [(merge.node, merge.node) for merge in merges], [])

    def over(self, nodes: Times, fired_ms: int) -> Times:
        """Returns the nodes that no window needs any more, because all windows that contain their start have ended at
        `fired_ms`.
        """
        return nodes[: _position(nodes, self._first_needed_ms(fired_ms))]


class _Pairs:
    """A binary tree in memory over the slices of one longest cumulating window. Its nodes merge two slices, four
    slices, and so on.
    """

    def __init__(self, slices: list[int]) -> None:
        self._rows = [slices]
        self.levels: list[list[Merge]] = []
        while len(below := self._rows[-1]) > 1:
            kind = _PAIRED + len(self.levels)
            pairs = zip(below[::2], below[1::2], strict=False)
            self.levels.append([Merge(left - left % _KINDS + kind, (left, right), False) for left, right in pairs])
            self._rows.append([merge.node for merge in self.levels[-1]])

    def first(self, count: int) -> tuple[int, ...]:
        """Returns the fewest nodes that together contain the first `count` slices, from left to right."""
        nodes, start = [], 0
        for level in range(count.bit_length() - 1, -1, -1):
            if count >> level & 1:
                nodes.append(self._rows[level][start >> level])
                start += 1 << level
        return tuple(nodes)


class CumulatingSlices:
    """Slices of cumulating windows: the slices that have not ended and, for each longest window, one node of all its
    slices that have ended.
    """

    def __init__(self, spec: Cumulating) -> None:
        self._spec = spec

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns the slice of each time or, if that slice has ended at `fired_ms`, the node of its longest window."""
        check_times(times)
        slices = floored(times, self._spec.step_ms, 0)
        so_far = floored(times, self._spec.max_ms, 0)
        ended = slices + self._spec.step_ms - 1 <= fired_ms
        return [Target(None, np.where(ended, (so_far << _KIND_BITS) + _RUNNING, slices << _KIND_BITS))]

    def numbers(self, times: Times) -> Times:
        """Returns the number of the slice of each time, which grows by one from slice to slice."""
        check_times(times)
        return steps_of(times, self._spec.step_ms, 0)

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the first window with rows whose last millisecond is after `fired_ms`, or None if there is none."""
        spec = self._spec
        position = _position(nodes, self._first_needed_ms(fired_ms))
        if position == len(nodes):
            return None
        start_ms = int(nodes[position]) >> _KIND_BITS
        after_ms = max(start_ms, fired_ms + 1)
        end_ms = after_ms - after_ms % spec.step_ms + spec.step_ms
        return Window(start_ms - start_ms % spec.max_ms, end_ms)

    def _first_needed_ms(self, fired_ms: int) -> int:
        """Returns the start, in ms, of the first longest window that ends after `fired_ms`."""
        return fired_ms + 1 - (fired_ms + 1) % self._spec.max_ms

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges of the slices that have ended at `until_ms`, each into the node of its longest window."""
        before = nodes[: _position(nodes, until_ms + 2 - self._spec.step_ms)]
        ended = before[before % _KINDS == 0]
        into = (floored(node_starts(ended), self._spec.max_ms, 0) << _KIND_BITS) + _RUNNING
        return [Merge(node, (part,), True) for node, part in zip(into.tolist(), ended.tolist(), strict=True)]

    def parts(self, nodes: Times, window: Window, fired_ms: int) -> tuple[int, ...]:
        """Returns the node of the slices that have ended, if there is one, and the slices of the window that have not
        ended.
        """
        within = nodes[_position(nodes, window.start_ms) : _position(nodes, window.end_ms)].tolist()
        so_far = (window.start_ms << _KIND_BITS) + _RUNNING
        waiting = [node for node in within if not node % _KINDS]
        return (*([so_far] if so_far in within else []), *waiting)

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns of which nodes the windows consist.

        Ended slices are joined in pairs, pairs of pairs and so on, so that each window needs few nodes.
        """
        merges = self.merges(nodes, fired_ms, windows[-1].end_ms - 1)
        slices: dict[int, list[int]] = {}
        for merge in merges:
            slices.setdefault(merge.node, []).extend(merge.parts)
        trees = {so_far: _Pairs(of) for so_far, of in slices.items()}
        depth = max((len(tree.levels) for tree in trees.values()), default=0)
        levels = [
            [merge for tree in trees.values() if level < len(tree.levels) for merge in tree.levels[level]]
            for level in range(depth)
        ]
        parts, whole, stored = [], [], []
        for window in windows:
            so_far = (window.start_ms << _KIND_BITS) + _RUNNING
            before = trees[so_far].first(_position(slices[so_far], window.end_ms)) if so_far in trees else ()
            parts.append((*((so_far,) if _is_among(nodes, so_far) else ()), *before))
        for so_far, tree in trees.items():
            of = tree.first(len(slices[so_far]))
            if len(of) > 1:
                whole.append(Merge(so_far - _RUNNING + _WHOLE, of, False))
            stored.append((whole[-1].node if len(of) > 1 else of[0], so_far))
        return Bundle(
            [*levels, whole] if whole else levels, parts, stored, [p for m in merges if m.taken for p in m.parts]
        )

    def over(self, nodes: Times, fired_ms: int) -> Times:
        """Returns the nodes of longest windows that have ended at `fired_ms`."""
        return nodes[: _position(nodes, self._first_needed_ms(fired_ms))]
