"""`draw_graph`: the vertices of a job with what they do, and where they stand in the picture.

Rules:
- A colour never says anything alone: the words beside it say the same.
- What was not measured is left out, not zero.
- A picture has `VERTICES_MAX` vertices at most. A larger graph is a table alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidegate.actors.graph.job_graph import DEFAULT_GROUP
from tidegate.web.page import texts
from tidegate.web.page.box_text import width_em, wrap
from tidegate.web.page.graph_layout import Box, Curve, Layout, Measures, lay_out

VERTICES_MAX = 40
BOX = Measures(width=200, height=121, between_ranks=74, between_boxes=22)
"""On a wide screen, where ranks go to the right."""
PHONE_BOX = Measures(width=152, height=117, between_ranks=36, between_boxes=10, margin=2)
"""On a phone, where ranks go down: two boxes fit beside each other."""
PHONE_BOX_RIGHT = replace(PHONE_BOX, between_ranks=68)
"""On a phone where ranks go to the right: labels of edges stand between the boxes."""

FONT, PHONE_FONT = 13.5, 12.5
"""The height of a name, in pixels, as page.css has it."""

EDGE, PHONE_EDGE = 12, 8
"""What lies between the frame of a box and its text."""

PHONE_WIDTH = 2 * PHONE_BOX.width + PHONE_BOX.between_boxes + 2 * PHONE_BOX.margin
"""A picture that goes down and is wider goes to the right instead where that is less wide."""

BUSY = 0.8
"""From here on a vertex counts as busy: it has little to spare."""

_PARTS = ("busy_ms_per_second", "back_pressured_ms_per_second", "idle_ms_per_second")
_LEVELS = {"low": "pressed-low", "high": "pressed-high"}
_STATES = {"low": "back-pressured: low", "high": "back-pressured: high"}


@dataclass(frozen=True, slots=True)
class Vertex:
    """A vertex. Parts of a second are those of its subtask that has most of them; None: not known.

    `means`: the same parts on the average of its subtasks, which together are a second.
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
    """The class of its colour."""
    state: str
    """What the colour says, in words."""
    queued: object
    watermark: object
    source: bool
    sink: bool
    slot_group: str = ""
    """Its slot sharing group; empty if that is the default one, or if it has slots of its own."""

    @property
    def bar(self) -> list[tuple[str, float, float]]:
        """Its mean second as a bar: for each part its class, where it begins, and how long it is, in percent."""
        parts = self.means or (0.0, 0.0, 0.0)
        whole = max(1.0, sum(parts))
        bar, begin = [], 0.0
        for kind, part in zip(("busy", "pressed", "idle"), parts, strict=True):
            if part > 0:
                bar.append((kind, round(100 * begin, 2), round(100 * part / whole, 2)))
                begin += part / whole
        return bar


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge, by the places of its vertices, and how rows are dealt out on it."""

    source: int
    target: int
    ship: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One layout of the graph, with the sizes of its boxes. `font`: the height of a name. `edge`: left of each text."""

    layout: Layout
    measures: Measures
    downwards: bool
    font: float
    edge: int

    def boxes(self, vertices: Sequence[Vertex]) -> list[tuple[Vertex, Box]]:
        """The vertices and where they stand."""
        return list(zip(vertices, self.layout.boxes, strict=True))

    def name(self, vertex: Vertex) -> list[str]:
        """The lines of a name: two at most, the first of which leaves room for the parallelism."""
        line_em = (self.measures.width - 2 * self.edge) / self.font
        return wrap(vertex.name, (line_em - width_em(f" x{vertex.parallelism}"), line_em))

    def curves(self, edges: Sequence[Edge]) -> list[tuple[Edge, Curve]]:
        """The edges and how they run."""
        return list(zip(edges, self.layout.curves, strict=True))


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph of a job. `wide` and `narrow` are None if there is nothing to draw, or too much."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    wide: Picture | None
    narrow: Picture | None


def draw_graph(details: Mapping[str, Any], rates: Mapping[str, Mapping[str, Any]]) -> Graph:
    """The graph of `job_details` with what `rates` has measured, both as the model gives them."""
    places = {vertex["id"]: place for place, vertex in enumerate(details["vertices"])}
    edges = tuple(
        Edge(places[source["id"]], places[node["id"]], texts.line(source.get("ship_strategy", ""), 20))
        for node in details["plan"]["nodes"]
        for source in node.get("inputs", ())
        if source["id"] in places and node["id"] in places
    )
    fed, feeding = {edge.target for edge in edges}, {edge.source for edge in edges}
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
