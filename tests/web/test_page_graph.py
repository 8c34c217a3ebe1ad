"""The vertices of a job as its page shows them."""

from __future__ import annotations

from dataclasses import replace

import page_answers as answers
import pytest

from tidegate.web.page.graph import VERTICES_MAX, Graph, Vertex, draw_graph


def drawn(level: str = "ok", busy: float = 700.0, pressed: float = 100.0, status: str = "RUNNING") -> Vertex:
    """The keyed vertex of a job whose tasks have this state."""
    details = answers.details()
    details["vertices"][2]["status"] = status
    return draw_graph(details, {"keyed": answers.rate(level, busy, pressed)}).vertices[2]


@pytest.mark.parametrize(
    ("vertex", "heat", "state"),
    [
        (drawn(busy=100), "calm", "ok"),
        (drawn(busy=801), "working", "busy"),
        (drawn("low", pressed=200), "pressed-low", "back-pressured: low"),
        (drawn("high", pressed=900, busy=100), "pressed-high", "back-pressured: high"),
        (drawn(status="FINISHED"), "over", "finished"),
        (drawn(status="CREATED"), "not-running", "created"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_colour_has_words(vertex: Vertex, heat: str, state: str) -> None:
    """Back-pressure counts for more than being busy, and neither where tasks do not run."""
    assert (vertex.heat, vertex.state) == (heat, state)


def test_the_bar_is_the_second_in_parts() -> None:
    """One part behind the other; what was not measured has none, and no part leaves the bar."""
    assert drawn().bar == [("busy", 0.0, 70.0), ("pressed", 70.0, 10.0), ("idle", 80.0, 20.0)]
    assert drawn(busy=1_400, pressed=1_000).bar == [("busy", 0.0, 50.0), ("pressed", 50.0, 50.0)]


def test_the_bar_is_the_mean_and_the_numbers_are_the_most() -> None:
    """One of two subtasks works, and the other one waits: the vertex is busy, and half of it idle."""
    rates = answers.rate(busy=1_000, pressed=0)
    rates["subtasks"].append({"busy_ms_per_second": 0, "back_pressured_ms_per_second": 0, "idle_ms_per_second": 1_000})
    vertex = draw_graph(answers.details(), {"keyed": rates}).vertices[2]
    assert vertex.bar == [("busy", 0.0, 50.0), ("idle", 50.0, 50.0)]
    assert (vertex.busy, vertex.state) == (1.0, "busy")


def test_what_was_not_measured_is_not_known() -> None:
    """A job that has just begun."""
    vertices = draw_graph(answers.details(), {"keyed": answers.UNMEASURED}).vertices
    for vertex in vertices:
        assert (vertex.busy, vertex.back_pressured, vertex.in_per_second, vertex.bar) == (None, None, None, [])
        assert (vertex.heat, vertex.state) == ("unknown", "running")


def test_sources_and_sinks_are_known() -> None:
    """A source has no rows in from others, a sink sends none."""
    graph = draw_graph(answers.details(), answers.rates())
    assert [(v.source, v.sink) for v in graph.vertices] == [(True, False), (True, False), (False, True)]
    assert [(e.source, e.target, e.ship) for e in graph.edges] == [(0, 2, "HASH"), (1, 2, "HASH")]


def test_a_slot_sharing_group_is_shown_where_it_is_not_the_default_one() -> None:
    """Nor is there one where a vertex has slots of its own."""
    details = answers.details()
    for vertex, group in zip(details["vertices"], ("default", "scoring", None), strict=True):
        vertex["slotSharingGroupId"] = group
    assert [vertex.slot_group for vertex in draw_graph(details, {}).vertices] == ["", "scoring", ""]


def chain(length: int) -> Graph:
    """Vertices, one behind the other."""
    details = answers.details()
    names = [f"v{place}" for place in range(length)]
    details["vertices"] = [answers.vertex(name, name) for name in names]
    details["plan"]["nodes"] = [
        answers.node(name, *names[max(0, place - 1) : place]) for place, name in enumerate(names)
    ]
    return draw_graph(details, {})


def test_a_large_graph_is_no_picture() -> None:
    """It would be unreadable; the table has all vertices."""
    assert chain(VERTICES_MAX).wide is not None
    large = chain(VERTICES_MAX + 1)
    assert (large.wide, large.narrow, len(large.vertices)) == (None, None, VERTICES_MAX + 1)
    assert chain(0).wide is None


def fan(breadth: int) -> Graph:
    """A source that feeds this many vertices."""
    details = answers.details()
    names = [f"v{place}" for place in range(breadth)]
    details["vertices"] = [answers.vertex(name, name) for name in ("source", *names)]
    details["plan"]["nodes"] = [answers.node("source"), *(answers.node(name, "source") for name in names)]
    return draw_graph(details, {})


def test_a_broad_graph_goes_to_the_right_on_a_phone() -> None:
    """Ranks go down while two boxes are beside each other at most. Of more, the less wide picture is taken."""
    downwards = {}
    for graph, name in ((fan(2), "two"), (fan(3), "three"), (chain(9), "chain")):
        assert graph.narrow is not None
        downwards[name] = graph.narrow.downwards
    assert downwards == {"two": True, "three": False, "chain": True}


def test_a_name_has_two_lines() -> None:
    """The first one leaves room for the parallelism, and what does not fit is cut."""
    vertex = drawn()
    wide = draw_graph(answers.details(), {}).wide
    assert wide is not None
    assert wide.name(replace(vertex, name="sum by key")) == ["sum by key"]
    assert wide.name(replace(vertex, name="enrich orders with customers 7")) == ["enrich orders with", "customers 7"]
    first, second = wide.name(replace(vertex, name="W" * 80))
    assert set(first) == {"W"}
    assert second.strip("W") == "…"
    wider = wide.name(replace(vertex, name="W" * 80, parallelism=1_000))
    assert len(wider[0]) < len(first)
