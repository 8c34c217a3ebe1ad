"""`Plan`: a translated program, ready to run, which notebooks show as a picture of its graph.

The picture has the layout of the graph on the job's web page. Its colours are fixed, because a notebook shows it as an
image, without style sheets.
"""

from __future__ import annotations

from dataclasses import fields
from html import escape

from tidegate.actors.graph.job_graph import DEFAULT_GROUP, JobVertex
from tidegate.actors.runtimes.job_snapshot import About
from tidegate.actors.runtimes.running_job import Submission
from tidegate.web.page.graph import VERTICES_MAX, Box, Measures, lay_out, width_em, wrap

BOX = Measures(width=210, height=74, between_ranks=84, between_boxes=18)
FONT, SMALL_FONT, EDGE, LINE = 13, 11, 10, 17
NAME_LINES = 3

_FONTS = 'font-family="DejaVu Sans, Verdana, sans-serif"'
_TEXT, _MUTED, _FRAME, _GROUND, _CARD = "#1a232e", "#51606f", "#4b5866", "#eceff3", "#ffffff"


class Plan(Submission):
    """A translated program, ready to run.

    A notebook shows it as a picture of its graph: the vertices with their parallelism, and the edges with their
    partitioning.
    """

    @classmethod
    def of(cls, submission: Submission) -> Plan:
        """Returns the plan of a submission."""
        return cls(**{field.name: getattr(submission, field.name) for field in fields(submission)})

    def __repr__(self) -> str:
        graph = self.context.graph
        lines = [f"Plan of {self.spec.job_name!r}, {len(graph.vertices)} vertices, {len(graph.tasks())} tasks"]
        for vertex in graph.vertices:
            inputs = [
                f"{graph.vertex(edge.upstream).name!r} by {edge.partitioning.kind.value.upper()}"
                for edge in graph.edges
                if edge.downstream == vertex.vertex
            ]
            of = f", of {', '.join(inputs)}" if inputs else ""
            lines.append(f"  {vertex.name!r} x{vertex.parallelism}{_in_group(vertex)}{of}")
        return "\n".join(lines)

    def _repr_svg_(self) -> str | None:
        """Returns the picture of the graph as SVG, or None if the graph is too large.

        A notebook then shows the text of `repr`.
        """
        about = About.of(self.context, self.spec)
        vertices = about.vertices
        if not vertices or len(vertices) > VERTICES_MAX:
            return None
        places = {vertex.vertex: place for place, vertex in enumerate(vertices)}
        pairs = [(places[edge.upstream], places[edge.downstream]) for edge in about.edges]
        layout = lay_out(len(vertices), pairs, BOX, downwards=False)
        width, height = layout.width, layout.height
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        words = f'role="img" aria-label="{escape(repr(self))}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONTS} font-size="{FONT}" {words}>',
            '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">',
            f'<path d="M0,0 L9,4 L0,8 z" fill="{_MUTED}"/></marker></defs>',
            f'<rect width="100%" height="100%" fill="{_CARD}"/>',
        ]
        for edge, curve in zip(about.edges, layout.curves, strict=True):
            parts.append(f'<path d="{curve.path}" fill="none" stroke="{_MUTED}" marker-end="url(#tip)"/>')
            place = f'x="{curve.label_x:g}" y="{curve.label_y - 6:g}" text-anchor="middle"'
            halo = f'stroke="{_CARD}" stroke-width="4" paint-order="stroke"'
            label = escape(edge.ship_strategy)
            parts.append(f'<text {place} font-size="{SMALL_FONT}" fill="{_MUTED}" {halo}>{label}</text>')
        for vertex, box in zip(vertices, layout.boxes, strict=True):
            parts += _box(vertex.name, vertex.parallelism, box)
        return "".join([*parts, "</svg>"])


def _in_group(vertex: JobVertex) -> str:
    """Returns ` in slot sharing group NAME` for the text of a plan.

    Returns "" for the default group, and for a vertex with its own resources.
    """
    shown = vertex.resources is None and vertex.slot_group != DEFAULT_GROUP
    return f" in slot sharing group {vertex.slot_group!r}" if shown else ""


def _box(name: str, parallelism: int, box: Box) -> list[str]:
    line_em = (BOX.width - 2 * EDGE) / FONT
    first_em = line_em - width_em(f" x{parallelism}")
    parts = [
        f'<g transform="translate({box.x:g},{box.y:g})"><title>{escape(name)}</title>',
        f'<rect width="{BOX.width}" height="{BOX.height}" rx="6" fill="{_GROUND}" stroke="{_FRAME}"/>',
        f'<text x="{BOX.width - EDGE}" y="23" font-weight="700" text-anchor="end" fill="{_TEXT}">x{parallelism}</text>',
    ]
    for number, line in enumerate(wrap(name, (first_em, *[line_em] * (NAME_LINES - 1)))):
        parts.append(
            f'<text x="{EDGE}" y="{23 + number * LINE}" font-weight="700" fill="{_TEXT}">{escape(line)}</text>'
        )
    return [*parts, "</g>"]
