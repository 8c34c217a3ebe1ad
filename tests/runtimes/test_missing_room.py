"""What a cluster lacks, in words, and what it could never hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.ray.reservation import (
    NODES_SHOWN_MAX,
    Amounts,
    Need,
    NodeRoom,
    missing_room,
    never_fits,
)

GPU = Need.of({"CPU": 1.0, "GPU": 1.0}, "score")


def node(name: str, free: Amounts, total: Amounts | None = None) -> NodeRoom:
    """A node; empty unless it has less free than in all."""
    return NodeRoom(name, free, free if total is None else total)


def test_the_text_says_how_many_of_what_why_and_where() -> None:
    """Each kind of bundle on its own, each resource by its first cause, each node with what is needed of it."""
    needs = [GPU, GPU, Need.of({"CPU": 1.0, "memory": 2.0**30}, "a Spark executor")]
    nodes = [
        node("south (2)", {"CPU": 1.0, "memory": 2.0**31}, {"CPU": 8.0, "memory": 2.0**32, "disk": 1.0}),
        node("north (1)", {"CPU": 4.0, "GPU": 0.5}, {"CPU": 4.0, "GPU": 2.0, "memory": 0.0}),
    ]
    assert missing_room(needs, nodes) == (
        "2 bundles of 1 CPU + 1 GPU for score and 1 bundle of 1 CPU + 1,024 MiB of memory for a Spark executor have "
        "no node. 2 GPU needed, and 0.5 GPU free of 2 GPU. Free on the nodes that live (2): "
        "north (1): 4 of 4 CPU, 0.5 of 2 GPU, 0 of 0 MiB of memory; "
        "south (2): 1 of 8 CPU, 0 of 0 GPU, 2,048 of 4,096 MiB of memory"
    )


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node("a", {"CPU": 4.0})], "No node has any GPU."),
        ([node("a", {"CPU": 4.0, "GPU": 0.5})], "No node has 1 GPU, not even when it is empty."),
        ([node("a", {"CPU": 4.0, "GPU": 1.0})], "All nodes together have 1 GPU, and 2 are needed."),
        (
            [node("a", {"CPU": 4.0, "GPU": 0.5}, {"CPU": 4.0, "GPU": 1.0}) for _ in range(4)],
            "1 GPU needed on one node, and no node has more than 0.5 free.",
        ),
        ([node("a", {"CPU": 4.0}), node("b", {"GPU": 2.0})], "No node has all of a bundle free at once."),
    ],
)
def test_the_first_cause_is_told(nodes: list[NodeRoom], why: str) -> None:
    """What can never be comes before what is taken at the moment."""
    assert f"have no node. {why} Free on" in missing_room([GPU, GPU], nodes)


def test_what_must_be_on_one_node_says_so() -> None:
    """Though there is enough in all."""
    nodes = [node("a", {"CPU": 1.0, "GPU": 1.0}), node("b", {"CPU": 1.0, "GPU": 1.0})]
    text = missing_room([GPU, GPU], nodes, one_node=True)
    assert "They must be on one node (strict_pack), and none has 2 CPU + 2 GPU free." in text
    apart = [node("a", {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}), node("b", {"GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0})]
    assert "No node has all of a bundle free at once." in missing_room([GPU], apart, one_node=True)


def test_a_large_cluster_makes_no_long_text() -> None:
    """Texts become events of the log, which are bounded."""
    nodes = [node(f"node {number:02}", {"CPU": 0.0}) for number in range(NODES_SHOWN_MAX + 12)]
    text = missing_room([GPU], nodes)
    assert text.endswith("node 07: 0 of 0 CPU, 0 of 0 GPU; and 12 more")
    assert missing_room([GPU], []).endswith("No node lives")


@pytest.mark.parametrize(
    ("totals", "one_node", "never"),
    [
        ([{"CPU": 2.0, "GPU": 2.0}], False, False),
        ([{"CPU": 2.0, "GPU": 2.0}], True, False),
        ([{"CPU": 1.0, "GPU": 1.0}] * 2, False, False),
        ([{"CPU": 1.0, "GPU": 1.0}] * 2, True, True),
        ([{"CPU": 1.0, "GPU": 1.0}], False, True),
        ([{"CPU": 9.0}], False, True),
        ([{"CPU": 9.0}, {"GPU": 2.0}], False, True),
    ],
)
def test_what_could_never_fit_is_known(totals: list[Amounts], one_node: bool, never: bool) -> None:
    """By what nodes have in all, whoever has it now."""
    nodes = [NodeRoom("a", {}, total) for total in totals]
    assert never_fits([GPU, GPU], nodes, one_node=one_node) is never


amounts = st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.integers(1, 4).map(float), min_size=1)


@given(st.lists(st.lists(amounts, max_size=3), min_size=1, max_size=3), st.booleans())
def test_what_fits_is_never_said_not_to(placed: list[list[Amounts]], one_node: bool) -> None:
    """Nodes that have just what is placed on them can hold it."""
    placed = placed[:1] if one_node else placed
    nodes = [
        NodeRoom("a", {}, {kind: sum(bundle.get(kind, 0.0) for bundle in on_node) for kind in ("CPU", "GPU")})
        for on_node in placed
    ]
    needs = [Need.of(bundle, "x") for on_node in placed for bundle in on_node]
    assert not never_fits(needs, nodes, one_node=one_node)
