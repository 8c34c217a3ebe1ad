"""`draw_graph`: the vertices of a job with their load, and the layout of the picture.

Rules:

- A colour is never the only information: text next to it has the same meaning.
- A figure that was not measured is omitted, not shown as zero.
- A picture has up to `VERTICES_MAX` vertices. A larger graph is only shown as a table.
- Names are wrapped by estimated widths in DejaVu Sans Bold; other screen fonts are narrower. A line breaks after a
  space, a hyphen, an underscore or an arrow; a word longer than a line breaks anywhere. The rest is cut, and ends in an
  ellipsis.

The layout follows Sugiyama, Tagawa and Toda (1981), in three steps:

1. The rank of a vertex is the length of the longest path to it.
2. An edge over several ranks gets a place in each of them, so that it never runs below a vertex.
3. Within a rank, places are sorted by the mean of their neighbours' places, forwards and backwards, which
   avoids most crossings.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tidegate.actors.graph.job_graph import DEFAULT_GROUP
from tidegate.web.page import texts

Node = int
"""The number of a vertex, from 0 on. Larger numbers are places through which a long edge runs."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Sizes in pixels for drawing the graph: of a box, and of the space between two boxes, along the ranks and across
    them.
    """

    width: int
    height: int
    between_ranks: int
    between_boxes: int
    margin: int = 8


VERTICES_MAX = 40

BOX = Measures(width=200, height=121, between_ranks=74, between_boxes=22)
"""Sizes on a wide screen, where ranks are arranged to the right."""

PHONE_BOX = Measures(width=152, height=117, between_ranks=36, between_boxes=10, margin=2)
"""Sizes on a phone, where ranks are arranged downwards: two boxes fit next to each other."""

PHONE_BOX_RIGHT = replace(PHONE_BOX, between_ranks=68)
"""Sizes on a phone, where ranks are arranged to the right: labels of edges are between the boxes."""

FONT = 13.5
PHONE_FONT = 12.5
"""The height of a name in pixels, as in page.css."""

EDGE = 12
PHONE_EDGE = 8
"""In pixels: the space between the frame of a box and its text."""

PHONE_WIDTH = 2 * PHONE_BOX.width + PHONE_BOX.between_boxes + 2 * PHONE_BOX.margin
"""If a downwards picture is wider than this, it is drawn to the right if that is narrower."""

BUSY = 0.8
"""A vertex counts as busy if it works for at least this part of the time."""

_PARTS = ("busy_ms_per_second", "back_pressured_ms_per_second", "idle_ms_per_second")
_LEVELS = {"low": "pressed-low", "high": "pressed-high"}
_STATES = {"low": "back-pressured: low", "high": "back-pressured: high"}
SWEEPS = 4
ELLIPSIS = "…"

_WIDTHS_EM = {
    character: em
    for characters, em in (
        ("'", 0.31),
        ("ijlIJ/|\\,. ", 0.38),
        (":;-f!()[]", 0.46),
        ('tr_`"*', 0.52),
        ("csz?", 0.6),
        ("Lvxyaek", 0.68),
        ("ohnudbpqgEFTSY$0123456789{}", 0.72),
        ("CPZBAKRVX", 0.77),
        ("wOQ&", 0.92),
        ("mM%@…", 1.04),
        ("W", 1.1),
    )
    for character in characters
}
"""Widths of characters in DejaVu Sans Bold, rounded up, as multiples of the font height."""

_OTHER_EM = 0.84
"""Width of other ASCII characters and of nearly all other letters, as a multiple of the font height."""

_FULL_EM = 1.05
_WORD = re.compile(r"\S*?(?:->|[-_/]|(?=\s)|$)\s*")


@dataclass(frozen=True, slots=True)
class Vertex:
    """A vertex in the picture of the job graph.

    `busy`, `back_pressured` and `idle` are fractions of a second, each from the subtask with the largest value.

    They are None if unknown. `means` are the busy, back-pressured and idle parts, averaged over its subtasks.
    """

    anchor: str
    name: str
    parallelism: int
    status: str
    tasks: str
    records_in: object
    records_out: object
    in_per_second: object
    out_per_second: object
    busy: float | None
    back_pressured: float | None
    idle: float | None
    means: tuple[float, float, float] | None
    heat: str
    """The CSS class of its colour."""
    state: str
    """The meaning of the colour in words."""
    queued: object
    watermark: object
    source: bool
    sink: bool
    slot_group: str = ""
    """Its slot sharing group; empty for the default group and for a vertex with its own slots."""

    @property
    def bar(self) -> list[tuple[str, float, float]]:
        """Returns the average second as a bar: CSS class, start and length of each part, in percent."""
        parts = self.means or (0.0, 0.0, 0.0)
        whole = max(1.0, sum(parts))
        bar = []
        begin = 0.0
        for kind, part in zip(("busy", "pressed", "idle"), parts, strict=True):
            if part > 0:
                bar.append((kind, round(100 * begin, 2), round(100 * part / whole, 2)))
                begin += part / whole
        return bar


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge between two vertices (indices in the list of vertices), and how rows are distributed on it."""

    source: int
    target: int
    ship: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the picture. `boxes` are in the order of the vertices, `curves` in the order of the edges."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The position of the upper left corner of a vertex, in pixels."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The line of an edge: the `d` attribute of its SVG path, and the position of its label."""

    path: str
    label_x: float
    label_y: float


@dataclass(frozen=True, slots=True)
class Picture:
    """One layout of the graph, with the sizes of its boxes.

    `font`: the font size of names. `edge`: the space between the frame of a box and its text. Both in pixels.
    """

    layout: Layout
    measures: Measures
    downwards: bool
    font: float
    edge: int

    def boxes(self, vertices: Sequence[Vertex]) -> list[tuple[Vertex, Box]]:
        """Returns each vertex with the position of its box."""
        return list(zip(vertices, self.layout.boxes, strict=True))

    def name(self, vertex: Vertex) -> list[str]:
        """Returns up to two lines of a vertex name. The first line leaves space for the parallelism."""
        line_em = (self.measures.width - 2 * self.edge) / self.font
        return wrap(vertex.name, (line_em - width_em(f" x{vertex.parallelism}"), line_em))

    def curves(self, edges: Sequence[Edge]) -> list[tuple[Edge, Curve]]:
        """Returns each edge with its line."""
        return list(zip(edges, self.layout.curves, strict=True))


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph of a job. `wide` and `narrow` are None for an empty graph and for one that is too large."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    wide: Picture | None
    narrow: Picture | None


def draw_graph(details: Mapping[str, Any], rates: Mapping[str, Mapping[str, Any]]) -> Graph:
    """Returns the graph from the results of `job_details` and `vertex_rates` of the model."""
    places = {vertex["id"]: place for place, vertex in enumerate(details["vertices"])}
    edges = tuple(
        Edge(places[source["id"]], places[node["id"]], texts.line(source.get("ship_strategy", ""), 20))
        for node in details["plan"]["nodes"]
        for source in node.get("inputs", ())
        if source["id"] in places and node["id"] in places
    )
    fed = {edge.target for edge in edges}
    feeding = {edge.source for edge in edges}
    vertices = tuple(
        _vertex(place, vertex, rates.get(vertex["id"], {}), place not in fed, place not in feeding)
        for place, vertex in enumerate(details["vertices"])
    )
    if not vertices or len(vertices) > VERTICES_MAX:
        return Graph(vertices, edges, None, None)
    pairs = [(edge.source, edge.target) for edge in edges]
    wide = Picture(lay_out(len(vertices), pairs, BOX, downwards=False), BOX, False, FONT, EDGE)
    down = Picture(lay_out(len(vertices), pairs, PHONE_BOX, downwards=True), PHONE_BOX, True, PHONE_FONT, PHONE_EDGE)
    if down.layout.width <= PHONE_WIDTH:
        return Graph(vertices, edges, wide, down)
    right_layout = lay_out(len(vertices), pairs, PHONE_BOX_RIGHT, downwards=False)
    right = Picture(right_layout, PHONE_BOX_RIGHT, False, PHONE_FONT, PHONE_EDGE)
    return Graph(vertices, edges, wide, min(down, right, key=lambda picture: picture.layout.width))


def _vertex(place: int, vertex: Mapping[str, Any], rates: Mapping[str, Any], source: bool, sink: bool) -> Vertex:
    busy = _part(rates.get("busyTimeMsPerSecond"))
    pressed = _part(rates.get("backPressuredTimeMsPerSecond"))
    status = texts.name(vertex["status"])
    slot_group = vertex["slotSharingGroupId"]
    heat, state = _heat(status, busy, str(rates.get("backpressureLevel")))
    return Vertex(
        anchor=f"vertex-{place}",
        name=texts.name(vertex["name"]),
        parallelism=vertex["parallelism"],
        status=status,
        tasks=", ".join(f"{number:,} {kind.lower()}" for kind, number in vertex["tasks"].items() if number),
        records_in=rates.get("numRecordsIn"),
        records_out=rates.get("numRecordsOut"),
        in_per_second=rates.get("numRecordsInPerSecond"),
        out_per_second=rates.get("numRecordsOutPerSecond"),
        busy=busy,
        back_pressured=pressed,
        idle=_part(rates.get("idleTimeMsPerSecond")),
        means=_means(rates.get("subtasks") or ()),
        heat=heat,
        state=state,
        queued=rates.get("queuedBytes"),
        watermark=rates.get("currentInputWatermark"),
        source=source,
        sink=sink,
        slot_group="" if slot_group in (None, DEFAULT_GROUP) else texts.name(slot_group),
    )


def _heat(status: str, busy: float | None, level: str) -> tuple[str, str]:
    if status == "FINISHED":
        return "over", "finished"
    if status != "RUNNING":
        return "not-running", status.lower()
    if level in _LEVELS:
        return _LEVELS[level], _STATES[level]
    if busy is None:
        return "unknown", "running"
    return ("working", "busy") if busy >= BUSY else ("calm", "ok")


def _part(ms_a_second: object) -> float | None:
    known = texts.number(ms_a_second)
    return None if known is None else min(1.0, known / 1_000)


def _means(subtasks: Sequence[Mapping[str, Any]]) -> tuple[float, float, float] | None:
    if not subtasks:
        return None
    busy, pressed, idle = (sum(_part(s.get(part)) or 0.0 for s in subtasks) / len(subtasks) for part in _PARTS)
    return busy, pressed, idle


def lay_out(vertices: int, edges: Sequence[tuple[Node, Node]], measures: Measures, downwards: bool) -> Layout:
    """Lays out a graph without cycles. Ranks are arranged downwards if `downwards`, otherwise to the right.

    Raises ValueError for a cycle.
    """
    ranks = _ranks(vertices, edges)
    chains, rows = _rows(ranks, edges)
    _sort(rows, [pair for chain in chains for pair in pairwise(chain)])
    along, across = (measures.height, measures.width) if downwards else (measures.width, measures.height)
    step = along + measures.between_ranks
    pitch = across + measures.between_boxes
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
    raise ValueError(
        "the graph of the job has a cycle, so its vertices have no ranks; this is a bug in tidegate, please report it"
    )


def _rows(ranks: Sequence[int], edges: Sequence[tuple[Node, Node]]) -> tuple[list[list[Node]], list[list[Node]]]:
    """Returns the nodes through which each edge runs, with its ends, and the nodes of each rank."""
    rows: list[list[Node]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for node, rank in enumerate(ranks):
        rows[rank].append(node)
    chains = []
    free = len(ranks)
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
    """Draws the line of an edge from the end of its first box to the start of its last box.

    `corners`: the corners of the first box, of the gap that each rank between the boxes has for the line, and of the
    last box. Through the gaps the line is straight.
    """
    points: list[tuple[float, float]] = []
    for place, (rank, offset) in enumerate(corners):
        if place > 0:
            points.append((rank, offset + across / 2))
        if place < len(corners) - 1:
            points.append((rank + along, offset + across / 2))
    path = "M" + _point(points[0], downwards)
    for place in range(0, len(points), 2):
        start = points[place]
        end = points[place + 1]
        middle = (start[0] + end[0]) / 2
        path += (
            f" C{_point((middle, start[1]), downwards)} {_point((middle, end[1]), downwards)} {_point(end, downwards)}"
        )
        if place + 2 < len(points):
            path += f" L{_point(points[place + 2], downwards)}"
    start = points[-2]
    end = points[-1]
    label = _turned(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), downwards)
    return Curve(path, *label)


def _turned(point: tuple[float, float], downwards: bool) -> tuple[float, float]:
    return (point[1], point[0]) if downwards else point


def _point(point: tuple[float, float], downwards: bool) -> str:
    x, y = _turned(point, downwards)
    return f"{x:g},{y:g}"


def width_em(text: str) -> float:
    """Returns the estimated width of a text, as a multiple of the font height."""
    return sum(map(_character_em, text))


def wrap(text: str, widths_em: Sequence[float]) -> list[str]:
    """Returns up to one line of text for each width, none of them wider. An empty text has no lines."""
    lines: list[str] = []
    rest = text.strip()
    for number, line_em in enumerate(widths_em):
        if not rest:
            break
        if number == len(widths_em) - 1:
            lines.append(_cut(rest, line_em))
            break
        line = _begin(rest, line_em)
        lines.append(line.rstrip())
        rest = rest[len(line) :].lstrip()
    return lines


def _begin(text: str, line_em: float) -> str:
    """Returns the first words of a text that fit into a line, or the part of a long word that fits (at least one
    character).
    """
    taken = ""
    for word in _WORD.findall(text):
        if width_em((taken + word).rstrip()) > line_em:
            break
        taken += word
    if taken:
        return taken
    return text[: max(1, _fitting(text, line_em))]


def _cut(text: str, line_em: float) -> str:
    if width_em(text) <= line_em:
        return text
    return text[: _fitting(text, line_em - width_em(ELLIPSIS))].rstrip() + ELLIPSIS


def _fitting(text: str, line_em: float) -> int:
    """Returns how many characters of a text fit into a line of the width `line_em` (in font heights)."""
    used = 0.0
    for place, character in enumerate(text):
        used += _character_em(character)
        if used > line_em:
            return place
    return len(text)


def _character_em(character: str) -> float:
    known = _WIDTHS_EM.get(character)
    if known is not None:
        return known
    if unicodedata.combining(character):
        return 0.0
    return _FULL_EM if unicodedata.east_asian_width(character) in ("W", "F") else _OTHER_EM
