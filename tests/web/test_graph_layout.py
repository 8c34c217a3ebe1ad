"""`lay_out`: where vertices stand, and how edges run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.web.page.graph import Layout, Measures, lay_out

MEASURES = Measures(width=200, height=100, between_ranks=60, between_boxes=20)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Graphs without cycles; their vertices come in any order."""
    vertices = draw(st.integers(1, 9))
    order = draw(st.permutations(range(vertices)))
    pairs = [(order[a], order[b]) for a in range(vertices) for b in range(a + 1, vertices)]
    return vertices, draw(st.lists(st.sampled_from(pairs), max_size=14, unique=True)) if pairs else []


def points(path: str) -> list[tuple[float, float]]:
    """The points that a path goes through, without those that only bend it."""
    found = [tuple(map(float, point.split(","))) for point in re.findall(r"[-\d.e]+,[-\d.e]+", path)]
    kept, place = [found[0]], 1
    for command in re.findall(r"[CL]", path):
        place += 3 if command == "C" else 1
        kept.append(found[place - 1])
    return [(x, y) for x, y in kept]


def inside(layout: Layout, x: float, y: float) -> bool:
    """Whether a point is inside of a box, or leaves the picture."""
    strictly = any(b.x < x < b.x + MEASURES.width and b.y < y < b.y + MEASURES.height for b in layout.boxes)
    return strictly or not (0 <= x <= layout.width and 0 <= y <= layout.height)


@given(graphs(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_boxes_are_apart_and_edges_run_between_them(graph: tuple[int, list[tuple[int, int]]], downwards: bool) -> None:
    """Whatever the graph: no box lies on another, each edge goes from box to box, beside all others."""
    vertices, edges = graph
    layout = lay_out(vertices, edges, MEASURES, downwards)
    for number, box in enumerate(layout.boxes):
        assert 0 <= box.x <= layout.width - MEASURES.width
        assert 0 <= box.y <= layout.height - MEASURES.height
        for other in layout.boxes[:number]:
            assert abs(box.x - other.x) >= MEASURES.width or abs(box.y - other.y) >= MEASURES.height
    for (source, target), curve in zip(edges, layout.curves, strict=True):
        way = points(curve.path)
        a, b = layout.boxes[source], layout.boxes[target]
        if downwards:
            assert way[0] == (a.x + MEASURES.width / 2, a.y + MEASURES.height)
            assert way[-1] == (b.x + MEASURES.width / 2, b.y)
        else:
            assert way[0] == (a.x + MEASURES.width, a.y + MEASURES.height / 2)
            assert way[-1] == (b.x, b.y + MEASURES.height / 2)
        assert not any(inside(layout, x, y) for x, y in way)


def test_ranks_follow_the_longest_path() -> None:
    """A vertex stands behind all that lead to it, however short the shortest way is."""
    layout = lay_out(3, [(0, 1), (1, 2), (0, 2)], MEASURES, downwards=False)
    assert [box.x for box in layout.boxes] == [8, 268, 528]
    assert (layout.width, layout.height) == (736, 236)


def test_a_narrow_picture_is_the_wide_one_turned() -> None:
    """On a phone ranks go down, and the sizes of boxes stay."""
    layout = lay_out(3, [(0, 1), (1, 2)], MEASURES, downwards=True)
    assert [(box.x, box.y) for box in layout.boxes] == [(8, 8), (8, 168), (8, 328)]
    assert (layout.width, layout.height) == (216, 436)


def test_edges_do_not_cross_without_need() -> None:
    """Two chains, of which the second vertices come in the other order, lie side by side."""
    layout = lay_out(4, [(0, 3), (1, 2)], MEASURES, downwards=False)
    assert layout.boxes[0].y == layout.boxes[3].y
    assert layout.boxes[1].y == layout.boxes[2].y


def test_a_graph_without_vertices_is_a_small_empty_picture() -> None:
    """Before a job has told its graph there is none."""
    layout = lay_out(0, [], MEASURES, downwards=False)
    assert (layout.boxes, layout.curves) == ((), ())
    assert (layout.width, layout.height) == (16, 16)


def test_a_cycle_is_refused() -> None:
    """It has no longest path."""
    with pytest.raises(ValueError, match="cycle"):
        lay_out(2, [(0, 1), (1, 0)], MEASURES, downwards=False)
