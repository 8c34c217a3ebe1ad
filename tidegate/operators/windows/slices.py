"""Slices: the time intervals that windows are made of, so that each row is added to the state once.

All functions here are pure. `SlicedWindows` stores an accumulator for each key and node. A node is a slice, or several
adjacent slices. Its id is its start followed by six bits: 0 for a slice, else the kind of node.

- A tumbling window is one slice.
- Sliding windows share slices, whose bounds are the bounds of all windows. When a node ends, it is merged with its
  neighbour into a node of twice the length (the start of a node of 2**n slices is a multiple of 2**n slices). A window
  of n slices therefore has at most 2 * log2(n) nodes, and each slice is merged about twice. This tree of partial
  results works for aggregates without an inverse, costs no memory for idle keys, and stays correct when a late row
  arrives. (Two stacks would merge less often, but each key would have a row in every slice.)
- Cumulating windows have one node for the slices so far, into which each slice is merged as it ends.
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

_KIND_BITS = 6
_KINDS = 1 << _KIND_BITS
_HOUR_MS = 3_600_000
_FEW_ENDS = 64
"""Number of ended slices below which the ended nodes are looked up one by one."""
_FEW_NODES = 24
"""Number of nodes in a window below which each node is checked. Above it, the nodes that the window needs are looked
up.
"""
_FEW_WINDOWS = 3
"""Number of windows below which the nodes are looked up window by window."""
_NO_NODE = -(1 << 63)
_RUNNING = 1
"""Kind of the node of a cumulating window that covers all slices so far."""
_PAIRED, _WHOLE = 2, _KINDS - 1
"""Kinds of nodes of cumulating windows that exist only in memory: of two, four and more slices, and of all slices that
end.
"""


class Window(NamedTuple):
    """Bounds of a window in milliseconds. The end is exclusive."""

    start_ms: int
    end_ms: int


class Merge(NamedTuple):
    """A node to be created by merging other nodes. With `taken` those nodes are not needed afterwards."""

    node: int
    parts: tuple[int, ...]
    taken: bool


class Bundle(NamedTuple):
    """Describes how several windows, which end one after another, are composed of nodes."""

    levels: list[list[Merge]]
    """The nodes to create in memory, level by level. The parts of a merge are nodes of earlier levels or of the
    state.
    """
    parts: list[tuple[int, ...]]
    """The nodes of each window."""
    stored: list[tuple[int, int]]
    """The nodes to store, and the node of the state into which each is merged."""
    taken: list[int]
    """Nodes of the state that are not needed afterwards."""


class Target(NamedTuple):
    """The node to which each row is added. `rows` are indices of rows, or None for all rows."""

    rows: NDArray[np.int32] | None
    nodes: Times


class Slices(Protocol):
    """Describes how windows are composed of nodes. `nodes` are the ids of the nodes in the state, ascending."""

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns where rows of these times belong after all merges up to `fired_ms`. Raises ConfigurationError."""
        ...

    def numbers(self, times: Times) -> Times:
        """Returns a number for the slice of each time, near the numbers of its neighbours. Raises ConfigurationError.

        Two times have one number if and only if they are in one slice.
        """
        ...

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the first window with rows whose last moment is after `fired_ms`, or None."""
        ...

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges to make, in order, when time advances from one moment to another."""
        ...

    def parts(self, nodes: Times, window: Window, fired_ms: int) -> tuple[int, ...]:
        """Returns the nodes of a window after all merges up to `fired_ms`. Rows may still be added to them."""
        ...

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns how the next windows after `fired_ms` are composed, with all merges up to the end of the last one."""
        ...

    def over(self, nodes: Times, fired_ms: int) -> Times:
        """Returns the nodes that are part of no window after `fired_ms`."""
        ...


def node_starts(nodes: Times) -> Times:
    """Returns the start of each node, in ms."""
    return nodes >> _KIND_BITS


def _position(nodes: Times | list[int], start_ms: int) -> int:
    """Returns the index of the first node that starts at a time or later."""
    return bisect_left(nodes, start_ms << _KIND_BITS)


def _is_among(nodes: Times, node: int) -> bool:
    position = bisect_left(nodes, node)
    return position < len(nodes) and int(nodes[position]) == node


def with_nodes(nodes: Times, more: Sequence[int] | Times) -> Times:
    """Returns the union of two sets of nodes, ascending. `nodes` must be ascending."""
    if not len(more):
        return nodes
    added = np.asarray(more, dtype=np.int64)
    if len(added) > 1:
        added = np.unique(added)
    places = np.searchsorted(nodes, added)
    known = places < len(nodes)
    known[known] = nodes[places[known]] == added[known]
    return nodes if known.all() else np.insert(nodes, places[~known], added[~known])


def due(slices: Slices, nodes: Times, fired_ms: int, until_ms: int, count: int) -> list[Window]:
    """Returns the first windows with rows that end after one moment and not after another."""
    windows: list[Window] = []
    while len(windows) < count:
        window = slices.next_window(nodes, fired_ms)
        if window is None or window.end_ms - 1 > until_ms:
            break
        windows.append(window)
        fired_ms = window.end_ms - 1
    return windows


def slices_of(spec: Tumbling | Sliding | Cumulating) -> Slices:
    """Returns the slices for a kind of windows."""
    if isinstance(spec, Tumbling):
        return TumblingSlices(spec)
    return SlidingSlices(spec) if isinstance(spec, Sliding) else CumulatingSlices(spec)


class TumblingSlices:
    """Slices of tumbling windows: each window is one slice."""

    def __init__(self, spec: Tumbling) -> None:
        self._spec = spec

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns the window of each time."""
        return [Target(None, self._spec.bounds_ms(times)[0] << _KIND_BITS)]

    def numbers(self, times: Times) -> Times:
        """Returns the number of each window, which grows by one from window to window. Days of a time zone count as at
        least an hour apart.
        """
        spec = self._spec
        if spec.timezone is not None:
            return steps_of(spec.bounds_ms(times)[0], _HOUR_MS, 0)
        check_times(times)
        return steps_of(times, spec.size_ms, spec.offset_ms)

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the first window that has not ended."""
        starts, ends = self._spec.bounds_ms(node_starts(nodes))
        later = np.flatnonzero(ends - 1 > fired_ms)
        return Window(int(starts[later[0]]), int(ends[later[0]])) if len(later) else None

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns no merges."""
        return []

    def parts(self, nodes: Times, window: Window, fired_ms: int) -> tuple[int, ...]:
        """Returns the only node of the window: its slice."""
        return (window.start_ms << _KIND_BITS,)

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns a bundle in which each window is one slice."""
        return Bundle([], [(window.start_ms << _KIND_BITS,) for window in windows], [], [])

    def over(self, nodes: Times, fired_ms: int) -> Times:
        """Returns the windows that have ended."""
        _, ends = self._spec.bounds_ms(node_starts(nodes))
        return nodes[ends - 1 <= fired_ms]


class SlidingSlices:
    """Slices of sliding windows, with a tree of nodes over them."""

    def __init__(self, spec: Sliding) -> None:
        self._spec = spec
        self._slice_ms = math.gcd(spec.size_ms, spec.slide_ms)
        self._offset_ms = spec.offset_ms % self._slice_ms
        self._levels = (spec.size_ms // self._slice_ms).bit_length() - 1

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns the slice of each time, and the nodes above it that have ended and therefore exist already."""
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
        """Returns the number of each slice, which grows by one from slice to slice."""
        check_times(times)
        return steps_of(times, self._slice_ms, self._offset_ms)

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the first window, of the first slice that belongs to a window which has not fired."""
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
        """Returns the start, in ms, of the first window that ends after `fired_ms`. Times from there on are in windows
        that have not fired.
        """
        spec = self._spec
        after_ms = fired_ms + 1 - spec.size_ms
        return after_ms - (after_ms - spec.offset_ms) % spec.slide_ms + spec.slide_ms

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges that create the nodes which end between the two times, short nodes first."""
        if (until_ms - fired_ms) // self._slice_ms < _FEW_ENDS:
            return self._few_merges(nodes, fired_ms, until_ms)
        return self._many_merges(nodes, fired_ms, until_ms)

    def _few_merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges if few slices end: checks the few nodes that can have ended, and stops at the first level
        without any.
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
        """Returns the merges if many slices end: checks all nodes that can be part of a node that ends."""
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
        """Returns the longest nodes that fit into the window and have ended, from left to right."""
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
        """Returns the parts of many windows, each at the time of its end, with a few calls for all of them."""
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
        """Returns True if a node fits between two slices and has ended, and the node of twice its length does not."""
        start, level = ((node >> _KIND_BITS) - self._offset_ms) // self._slice_ms, node % _KINDS
        end = start + (1 << level)
        if start < first or end > last or (level and end > ended):
            return False
        wider = 2 << level
        start -= start % wider
        return level == self._levels or start < first or start + wider > min(last, ended)

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns a bundle that stores the nodes that end by then. Each window is made as if it were alone."""
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
        """Returns the nodes that no window needs any more, because all windows that contain their start have fired."""
        return nodes[: _position(nodes, self._first_needed_ms(fired_ms))]


class _Pairs:
    """A tree over the slices of one longest window, in memory: pairs of slices, pairs of pairs, and so on."""

    def __init__(self, slices: list[int]) -> None:
        self._rows = [slices]
        self.levels: list[list[Merge]] = []
        while len(below := self._rows[-1]) > 1:
            kind = _PAIRED + len(self.levels)
            pairs = zip(below[::2], below[1::2], strict=False)
            self.levels.append([Merge(left - left % _KINDS + kind, (left, right), False) for left, right in pairs])
            self._rows.append([merge.node for merge in self.levels[-1]])

    def first(self, count: int) -> tuple[int, ...]:
        """Returns the fewest nodes that together cover the first `count` slices, from left to right."""
        nodes, start = [], 0
        for level in range(count.bit_length() - 1, -1, -1):
            if count >> level & 1:
                nodes.append(self._rows[level][start >> level])
                start += 1 << level
        return tuple(nodes)


class CumulatingSlices:
    """Slices of cumulating windows: slices that have not ended and, for each longest window, a node of all its slices
    that have ended.
    """

    def __init__(self, spec: Cumulating) -> None:
        self._spec = spec

    def targets(self, times: Times, fired_ms: int) -> list[Target]:
        """Returns the slice of each time or, if that slice has ended, the node of its longest window."""
        check_times(times)
        slices = floored(times, self._spec.step_ms, 0)
        so_far = floored(times, self._spec.max_ms, 0)
        ended = slices + self._spec.step_ms - 1 <= fired_ms
        return [Target(None, np.where(ended, (so_far << _KIND_BITS) + _RUNNING, slices << _KIND_BITS))]

    def numbers(self, times: Times) -> Times:
        """Returns the number of each slice, which grows by one from slice to slice."""
        check_times(times)
        return steps_of(times, self._spec.step_ms, 0)

    def next_window(self, nodes: Times, fired_ms: int) -> Window | None:
        """Returns the next window of the first longest window that has windows left."""
        spec = self._spec
        position = _position(nodes, self._first_needed_ms(fired_ms))
        if position == len(nodes):
            return None
        start_ms = int(nodes[position]) >> _KIND_BITS
        after_ms = max(start_ms, fired_ms + 1)
        end_ms = after_ms - after_ms % spec.step_ms + spec.step_ms
        return Window(start_ms - start_ms % spec.max_ms, end_ms)

    def _first_needed_ms(self, fired_ms: int) -> int:
        """Returns the start, in ms, of the first window of the greatest size that ends after `fired_ms`."""
        return fired_ms + 1 - (fired_ms + 1) % self._spec.max_ms

    def merges(self, nodes: Times, fired_ms: int, until_ms: int) -> list[Merge]:
        """Returns the merges of the slices that end between the two times, each into the node of its longest window."""
        before = nodes[: _position(nodes, until_ms + 2 - self._spec.step_ms)]
        ended = before[before % _KINDS == 0]
        into = (floored(node_starts(ended), self._spec.max_ms, 0) << _KIND_BITS) + _RUNNING
        return [Merge(node, (part,), True) for node, part in zip(into.tolist(), ended.tolist(), strict=True)]

    def parts(self, nodes: Times, window: Window, fired_ms: int) -> tuple[int, ...]:
        """Returns the node of the slices so far, and the slices that have not ended."""
        within = nodes[_position(nodes, window.start_ms) : _position(nodes, window.end_ms)].tolist()
        so_far = (window.start_ms << _KIND_BITS) + _RUNNING
        waiting = [node for node in within if not node % _KINDS]
        return (*([so_far] if so_far in within else []), *waiting)

    def bundle(self, nodes: Times, windows: Sequence[Window], fired_ms: int) -> Bundle:
        """Returns a bundle that joins ended slices in pairs, and pairs of pairs, so that a window needs few nodes."""
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
        """Returns the nodes of longest windows that have ended."""
        return nodes[: _position(nodes, self._first_needed_ms(fired_ms))]
