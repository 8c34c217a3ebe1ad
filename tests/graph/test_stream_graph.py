"""From the logical graph to the job graph: what is chained, how edges partition, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link import BY_X, node

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.stream_graph import StreamNode, default_max_parallelism, translate
from tidegate.operators.operator import Operator
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import ChannelId
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT

REBALANCE, BROADCAST, FORWARD = (
    Partitioning(kind) for kind in (PartitioningKind.REBALANCE, PartitioningKind.BROADCAST, PartitioningKind.FORWARD)
)


def step(name: str, *inputs: StreamNode | tuple[StreamNode, Partitioning | None], parallelism: int = 1) -> StreamNode:
    """An operator; an input alone has no partitioning of its own."""
    pairs = [i if isinstance(i, tuple) else (i, None) for i in inputs]
    return node(name, *pairs, parallelism=parallelism, factory=Operator)


def vertices(graph: JobGraph) -> list[str]:
    """Names of the vertices."""
    return [v.name for v in graph.vertices]


def edges(graph: JobGraph) -> list[tuple[str, str, PartitioningKind]]:
    """Edges as (upstream, downstream, partitioning)."""
    return [(e.upstream, e.downstream, e.partitioning.kind) for e in graph.edges]


def test_operators_in_a_row_are_one_vertex() -> None:
    """Equal parallelism, no repartitioning, one reader: batches pass by a call, and no edge is left."""
    source = node("source", parallelism=2)
    first = step("first", source, parallelism=2)
    graph = translate([source, first, step("second", first, parallelism=2)])

    assert vertices(graph) == ["source -> first -> second"]
    assert edges(graph) == []
    (vertex,) = graph.vertices
    assert (vertex.vertex, vertex.parallelism) == ("source", 2)
    assert [o.uid for o in vertex.operators] == ["first", "second"]
    assert [i.uid for i in graph.operator_infos()] == ["source", "first", "second"]


@pytest.mark.parametrize(
    ("partitioning", "kind"),
    [(BY_X, PartitioningKind.HASH), (REBALANCE, PartitioningKind.REBALANCE), (BROADCAST, PartitioningKind.BROADCAST)],
)
def test_repartitioning_begins_a_new_vertex(partitioning: Partitioning, kind: PartitioningKind) -> None:
    """Also from one subtask to one subtask: the program may run at another parallelism tomorrow."""
    source = node("source")
    work = step("work", (source, partitioning))
    graph = translate([source, work, step("after", work)])

    assert vertices(graph) == ["source", "work -> after"]
    assert edges(graph) == [("source", "work", kind)]


def test_a_stream_with_two_readers_is_chained_to_neither() -> None:
    """Fan-out crosses channels: both readers get every batch, each at its own pace."""
    source = node("source", parallelism=2)
    left, right = step("left", source, parallelism=2), step("right", source, parallelism=2)
    graph = translate([source, left, right])

    assert vertices(graph) == ["source", "left", "right"]
    assert edges(graph) == [
        ("source", "left", PartitioningKind.FORWARD),
        ("source", "right", PartitioningKind.FORWARD),
    ]


def test_a_union_is_not_chained() -> None:
    """An operator with several inputs has a channel to each; a stream united with itself counts twice."""
    a, b = node("a"), node("b")
    graph = translate([a, b, step("both", a, b)])
    twice = translate([a, step("twice", a, a)])

    assert edges(graph) == [("a", "both", PartitioningKind.FORWARD), ("b", "both", PartitioningKind.FORWARD)]
    assert [e.index for e in twice.edges] == [0, 1]
    assert vertices(twice) == ["a", "twice"]


@pytest.mark.parametrize("given", [None, FORWARD])
def test_another_parallelism_deals_batches_out_anew(given: Partitioning | None) -> None:
    """Forward needs equal parallelism; where it differs, batches are rebalanced."""
    source = node("source", parallelism=2)
    graph = translate([source, step("work", (source, given), parallelism=3)])

    assert edges(graph) == [("source", "work", PartitioningKind.REBALANCE)]


def test_channels_of_an_edge() -> None:
    """A forward edge joins equal subtasks, any other edge all with all; both ends of a channel can be looked up."""
    source = node("source", parallelism=2)
    left, right = step("left", source, parallelism=2), step("right", (source, BY_X), parallelism=3)
    graph = translate([source, left, right])
    forward, hashed = graph.edges

    def ends(channels: tuple[ChannelId, ...]) -> list[tuple[int, int]]:
        return [(c.upstream, c.downstream) for c in channels]

    assert ends(graph.channels(forward)) == [(0, 0), (1, 1)]
    assert ends(graph.channels(hashed)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    channel = ChannelId(1, SubtaskIndex(1), SubtaskIndex(2))
    assert (str(graph.sender(channel)), str(graph.receiver(channel))) == ("source[1]", "right[2]")
    assert len(graph.tasks()) == 7


def test_two_operators_of_one_uid_are_refused() -> None:
    """State is matched by uid, so a uid names one operator; the error names both."""
    source = node("source")
    with pytest.raises(ConfigurationError, match="'same' and 'same' both have uid 'same'"):
        translate([source, step("same", source), step("same", source)])


@pytest.mark.parametrize("parallelism", [0, -1, 129])
def test_a_parallelism_out_of_range_is_refused(parallelism: int) -> None:
    """At least one subtask, and no more than there are key groups."""
    source = node("source")
    with pytest.raises(ConfigurationError, match=rf"'work': parallelism {parallelism} is not between 1 and 128"):
        translate([source, step("work", source, parallelism=parallelism)], 128)


@given(st.integers(1, MAX_PARALLELISM_LIMIT))
def test_a_job_has_room_to_grow_by_half(parallelism: int) -> None:
    """Without a number of its own it has a power of two of key groups, 128 at least, as in Flink."""
    groups = translate([node("source", parallelism=parallelism)]).max_parallelism
    assert groups == default_max_parallelism(parallelism)
    assert groups.bit_count() == 1
    assert 128 <= groups <= MAX_PARALLELISM_LIMIT
    assert groups == MAX_PARALLELISM_LIMIT or groups >= parallelism * 3 // 2
    assert groups == 128 or groups < parallelism * 3


def test_a_job_without_a_source_is_refused() -> None:
    """An empty program has nothing to run."""
    with pytest.raises(ConfigurationError, match="has no source"):
        translate([])


def test_edges_know_the_input_by_which_they_come() -> None:
    """Several edges may share an input; one stream may come by both, over channels of its own."""
    a, b = node("a"), node("b")
    both = StreamNode(
        OperatorUid("both"),
        "both",
        1,
        None,
        factory=Operator,
        inputs=((a, BY_X), (b, BY_X), (a, None)),
        ordinals=(0, 0, 1),
    )
    graph = translate([a, b, both, step("one", (a, BY_X))])

    assert [(e.upstream, e.input) for e in graph.edges] == [("a", 0), ("b", 0), ("a", 1), ("a", 0)]
    channels = [channel for edge in graph.edges for channel in graph.channels(edge)]
    assert len(set(channels)) == 4


@pytest.mark.parametrize(
    ("partitionings", "expected"),
    [
        ([BY_X], [True]),
        ([REBALANCE, BY_X], [True, True]),
        ([FORWARD, FORWARD], [False, False]),
        ([BROADCAST], [False]),
        ([BY_X, BROADCAST, REBALANCE], [False, False, False]),
        ([BY_X, FORWARD], [False, False]),
    ],
)
def test_barriers_overtake_only_where_all_edges_of_a_vertex_allow_it(
    partitionings: list[Partitioning], expected: list[bool]
) -> None:
    """A forward or broadcast edge forbids it to itself and to its neighbours, not to other vertices."""
    sources = [node(f"s{n}") for n in range(len(partitionings))]
    work = step("work", *zip(sources, partitionings, strict=True))
    graph = translate([*sources, work, step("after", (work, BY_X))])

    assert [graph.supports_unaligned(edge) for edge in graph.edges] == [*expected, True]


def test_steps_of_one_name_are_called_by_their_uids() -> None:
    """Pages, commands and the dashboard tell three tables apart; a name that only one step has stays as it is."""
    source = node("source")
    sinks = [replace(step(f"table-{number}", source), name="to_table") for number in range(3)]

    graph = translate([source, *sinks], 8)

    assert [vertex.name for vertex in graph.vertices] == ["source", "table-0", "table-1", "table-2"]
    assert [spec.name for vertex in graph.vertices for spec in vertex.operators][-1] == "table-2"
