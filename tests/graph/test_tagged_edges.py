"""Side outputs in the graphs: edges with names of their own, that leave chains wherever rows are tagged."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pyarrow as pa
import pytest
from link import BY_X, SCHEMA, node

from tidegate.actors.graph.graph_analysis import needed_columns, needed_rows
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.task_descriptor import describe_task
from tidegate.operators.functions.expressions import FilterExpr
from tidegate.operators.operator import Operator
from tidegate.protocol.edges import OutputTag, PartitioningKind, SideOutput, check_tags
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import AttemptNumber, OperatorUid, SubtaskIndex, VertexId

BAD = OutputTag("bad", SCHEMA)
WORST = OutputTag("worst", SCHEMA)


def checking(*before: StreamNode) -> StreamNode:
    """An operator with two side outputs."""
    return replace(node("check", *((n, None) for n in before), factory=Operator), side_outputs=(BAD, WORST))


def test_a_side_output_is_an_edge_out_of_the_middle_of_a_chain() -> None:
    """What follows the operator stays chained to it; what reads the tag does not."""
    source = node("source")
    check = checking(source)
    after = node("after", (check, None), factory=Operator)
    bad = node("read", (check.side_output("bad"), None), factory=Operator)
    graph = translate([source, check, after, bad])

    assert [vertex.name for vertex in graph.vertices] == ["source -> check -> after", "read"]
    (edge,) = graph.edges
    assert edge.side == SideOutput(OperatorUid("check"), "bad")
    assert edge.partitioning.kind is PartitioningKind.FORWARD
    assert (graph.edge_name(edge), graph.emitter(edge)) == ("check[bad]->read#0", "check")
    task = TaskId(VertexId("source"), SubtaskIndex(0))
    (out,) = describe_task(graph, task, AttemptNumber(0), (), BufferLimits(), 10).outputs
    assert out.side == edge.side


def test_edges_between_the_same_operators_have_names_of_their_own() -> None:
    """Those of the output are called as they were without side outputs, so that older checkpoints fit."""
    source = node("source")
    check = checking(source)
    bad, worst = check.side_output("bad"), check.side_output("worst")
    inputs = ((bad, BY_X), (check, BY_X), (worst, BY_X), (bad, BY_X))
    graph = translate([source, check, node("union", *inputs, factory=Operator)])

    names = ["check[bad]->union#0", "check->union#0", "check[worst]->union#0", "check[bad]->union#1"]
    assert [graph.edge_name(edge) for edge in graph.edges] == names


def test_a_tag_must_be_one_of_the_step() -> None:
    """Else the stream would be empty for ever, and nobody would know why."""
    with pytest.raises(ConfigurationError, match=r"no side output 'good': it has 'bad', 'worst'"):
        checking(node("source")).side_output("good")
    with pytest.raises(ConfigurationError, match=r"no side output 'bad': it has none"):
        node("source").side_output("bad")


@pytest.mark.parametrize("name", ["", "a b", "_x", "x" * 101, "a/b", "a[b]"])
def test_a_tag_has_a_name_that_can_stand_in_a_checkpoint(name: str) -> None:
    """It is part of the names of edges."""
    with pytest.raises(ConfigurationError, match="a side output cannot be called"):
        OutputTag(name, SCHEMA)


def test_what_is_no_tag_is_refused() -> None:
    """Each by its name."""
    with pytest.raises(ConfigurationError, match=r"takes a pa.schema, a dict of types .*, not \['x'\]"):
        OutputTag("bad", ["x"])  # type: ignore[arg-type]
    assert OutputTag("bad", {"x": int}) == OutputTag("bad", pa.schema([("x", pa.int64())]))
    with pytest.raises(ConfigurationError, match="side_outputs takes tags, such as"):
        check_tags("check", ["bad"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="two side outputs are called 'bad'"):
        check_tags("check", [BAD, BAD])


def test_before_a_side_output_that_is_read_everything_counts() -> None:
    """The rows and columns that the output alone would not need are those that may be emitted on the side."""
    schema = pa.schema([("x", pa.int64()), ("y", pa.int64())])
    source = replace(node("source"), schema=schema)
    kept = replace(
        node("keep", (source, None), factory=lambda: FilterExpr(pl.col("x") > 1)),
        schema=schema,
        side_outputs=(OutputTag("dropped", schema),),
    )
    counted = replace(node("count", (kept, None), factory=_OnlyX), schema=SCHEMA)
    assert (needed_columns([source, kept, counted]), bool(needed_rows([source, kept, counted]))) == (
        {"source": ("x",)},
        True,
    )
    read = node("read", (kept.side_output("dropped"), None), factory=_OnlyX)
    assert (needed_columns([source, kept, counted, read]), needed_rows([source, kept, counted, read])) == ({}, {})


class _OnlyX(Operator):
    """Uses one column."""

    def needed_columns(self, after: frozenset[str] | None) -> frozenset[str] | None:
        return frozenset({"x"})
