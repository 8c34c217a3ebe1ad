"""A program in its former form has the nodes of older versions, and everything else as it is."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from link import BY_X, node

from tidegate.actors.graph.former_form import in_former_form
from tidegate.actors.graph.stream_graph import FormerForm, StreamNode, translate
from tidegate.actors.operators.operator import Operator
from tidegate.actors.protocol.side_outputs import OutputTag


def _step(name: str, *inputs: StreamNode) -> StreamNode:
    return node(name, *((each, BY_X) for each in inputs), factory=Operator)


def test_nothing_else_changes() -> None:
    """What stands before and behind keeps its uids and reads what stands there now, side outputs too."""
    source = node("source")
    tagged = replace(_step("tagged", source), side_outputs=(OutputTag("late", pa.schema({"x": pa.int64()})),))
    select = _step("select", tagged)
    old_select, first = (lambda made: (made, _step("first", made)))(_step("select", tagged))
    second = _step("second", first)
    shared = replace(_step("shared", select), former=FormerForm((old_select, first, second), instead_of=2))
    sink, aside = _step("sink", shared), _step("aside", tagged.side_output("late"))

    nodes = in_former_form([source, tagged, select, shared, sink, aside])

    assert nodes is not None
    assert [each.uid for each in nodes] == ["source", "tagged", "select", "first", "second", "sink", "aside"]
    graph = translate(nodes)
    ends = {graph.edge_name(edge) for edge in graph.edges}
    assert ends == {
        "source->tagged#0", "tagged->select#0", "select->first#0", "first->second#0", "second->sink#0",
        "tagged[late]->aside#0",
    }  # fmt: skip
    assert {edge.upstream for edge in translate([source, tagged, select, shared, sink, aside]).edges} >= {"shared"}


def test_two_aggregates_behind_each_other() -> None:
    """Both take their former form, the second behind that of the first."""
    source = node("source")
    one, old_one = _step("one", source), _step("old one", source)
    one = replace(one, former=FormerForm((old_one,), instead_of=1))
    two = replace(_step("two", one), former=FormerForm((_step("old two", one),), instead_of=1))

    nodes = in_former_form([source, one, two])

    assert nodes is not None
    assert [each.uid for each in nodes] == ["source", "old one", "old two"]
    assert nodes[2].inputs[0][0] is nodes[1]


def test_a_program_that_was_always_the_same_has_none() -> None:
    """Then there is nothing to choose."""
    source = node("source")
    assert in_former_form([source, _step("work", source)]) is None
