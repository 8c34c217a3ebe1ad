"""`lay_out`: where the vertices of a job stand in its picture, and how its edges run. Pure arithmetic.

After Sugiyama, Tagawa and Toda (1981), in three steps:
1. The rank of a vertex is the length of the longest path that leads to it.
2. An edge over several ranks gets a place of its own in each of them, so that it never runs beneath a vertex.
3. Within a rank, places are sorted by the mean of their neighbours' places, forwards and backwards, which leaves few
   crossings.

Ranks go to the right on a wide screen, and down on a narrow one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Node = int
"""A vertex by its number from 0 on; what lies behind them stands for a place that an edge passes."""

SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Measures:
    """In pixels: how large a box is, and what lies between two of them, along the ranks and across."""

    width: int
    height: int
    between_ranks: int
    between_boxes: int
    margin: int = 8


@dataclass(frozen=True, slots=True)
class Box:
    """A vertex: its upper left corner."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Curve:
    """An edge: the attribute `d` of its path, and the point where a label may stand."""

    path: str
    label_x: float
    label_y: float


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole picture. `boxes` are in the order of the vertices, `curves` in that of the edges."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]


def lay_out(vertices: int, edges: Sequence[tuple[Node, Node]], measures: Measures, downwards: bool) -> Layout:
    """The layout of a graph without cycles. Ranks go down if `downwards`, else to the right.

    Raises ValueError for a cycle.
    """
    ranks = _ranks(vertices, edges)
    chains, rows = _rows(ranks, edges)
    _sort(rows, [pair for chain in chains for pair in pairwise(chain)])
    along, across = (measures.height, measures.width) if downwards else (measures.width, measures.height)
    step, pitch = along + measures.between_ranks, across + measures.between_boxes
    widest = max((len(row) for row in rows), default=0)
    corners: dict[Node, tuple[float, float]] = {}
    for rank, row in enumerate(rows):
        first = (widest - len(row)) * pitch / 2
        for place, node in enumerate(row):
            corners[node] = (measures.margin + rank * step, measures.margin + first + place * pitch)
    length = max(0, len(rows) * step - measures.between_ranks) + 2 * measures.margin
    breadth = max(0, widest * pitch - measures.between_boxes) + 2 * measures.margin
    curves = tuple(_curve([corners[node] for node in chain], along, across, downwards) for chain in chains)
    boxes = tuple(Box(*_turned(corners[node], downwards)) for node in range(vertices))
    return Layout(*_turned((length, breadth), downwards), boxes, curves)


def _ranks(vertices: int, edges: Sequence[tuple[Node, Node]]) -> list[int]:
    ranks = [0] * vertices
    for _ in range(vertices + 1):
        late = [(source, target) for source, target in edges if ranks[target] <= ranks[source]]
        if not late:
            return ranks
        for source, target in late:
            ranks[target] = max(ranks[target], ranks[source] + 1)
    raise ValueError("the graph has a cycle")


def _rows(ranks: Sequence[int], edges: Sequence[tuple[Node, Node]]) -> tuple[list[list[Node]], list[list[Node]]]:
    """For each edge the nodes that it passes, its ends included, and for each rank its nodes."""
    rows: list[list[Node]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for node, rank in enumerate(ranks):
        rows[rank].append(node)
    chains, free = [], len(ranks)
    for source, target in edges:
        chain = [source]
        for rank in range(ranks[source] + 1, ranks[target]):
            rows[rank].append(free)
            chain.append(free)
            free += 1
        chains.append([*chain, target])
    return chains, rows


def _sort(rows: list[list[Node]], pairs: Iterable[tuple[Node, Node]]) -> None:
    before: dict[Node, list[Node]] = {}
    behind: dict[Node, list[Node]] = {}
    for source, target in pairs:
        before.setdefault(target, []).append(source)
        behind.setdefault(source, []).append(target)
    for sweep in range(SWEEPS):
        neighbours, order = (before, rows) if sweep % 2 == 0 else (behind, rows[::-1])
        for known, row in pairwise(order):
            places = {node: place / max(1, len(known) - 1) for place, node in enumerate(known)}
            own = {node: place / max(1, len(row) - 1) for place, node in enumerate(row)}
            means = {node: _mean([places[n] for n in neighbours.get(node, ())], own[node]) for node in row}
            row.sort(key=means.__getitem__)


def _mean(places: Sequence[float], otherwise: float) -> float:
    return sum(places) / len(places) if places else otherwise


def _curve(corners: Sequence[tuple[float, float]], along: float, across: float, downwards: bool) -> Curve:
    """From the end of the first box to the beginning of the last one, straight through the places on the way."""
    points: list[tuple[float, float]] = []
    for place, (rank, offset) in enumerate(corners):
        if place > 0:
            points.append((rank, offset + across / 2))
        if place < len(corners) - 1:
            points.append((rank + along, offset + across / 2))
    path = "M" + _point(points[0], downwards)
    for place in range(0, len(points), 2):
        start, end = points[place], points[place + 1]
        middle = (start[0] + end[0]) / 2
        path += (
            f" C{_point((middle, start[1]), downwards)} {_point((middle, end[1]), downwards)} {_point(end, downwards)}"
        )
        if place + 2 < len(points):
            path += f" L{_point(points[place + 2], downwards)}"
    start, end = points[-2], points[-1]
    label = _turned(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), downwards)
    return Curve(path, *label)


def _turned(point: tuple[float, float], downwards: bool) -> tuple[float, float]:
    return (point[1], point[0]) if downwards else point


def _point(point: tuple[float, float], downwards: bool) -> str:
    x, y = _turned(point, downwards)
    return f"{x:g},{y:g}"
