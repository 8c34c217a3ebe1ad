"""Resources and slot sharing groups of steps: what Ray could reserve, and which steps share a task or slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from link import BY_X, node

from tidegate.actors.graph.resources import Resources
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.operators.operator import Operator
from tidegate.protocol.edges import OutputTag, PartitioningKind
from tidegate.storage.errors import ConfigurationError

GPU = Resources.of("step", num_gpus=1)


@pytest.mark.parametrize(
    ("given", "bundle"),
    [
        ({"num_gpus": 1}, {"CPU": 1.0, "GPU": 1.0}),
        ({"num_gpus": 0.5, "num_cpus": 0}, {"GPU": 0.5}),
        ({"num_cpus": 4}, {"CPU": 4.0}),
        ({"num_cpus": 0.25, "resources": {"tpu": 2, "big_disk": 0.1}}, {"CPU": 0.25, "big_disk": 0.1, "tpu": 2.0}),
        ({"resources": {}}, {"CPU": 1.0}),
        ({"num_gpus": 2.0}, {"CPU": 1.0, "GPU": 2.0}),
    ],
)
def test_a_bundle_holds_what_a_step_asks_for(given: dict[str, Any], bundle: dict[str, float]) -> None:
    """A CPU where nothing is said of CPUs, as in a common slot; nothing that is not needed."""
    found = Resources.of("step", **given)
    assert found is not None
    assert found.bundle == bundle


def test_a_step_that_says_nothing_has_no_resources() -> None:
    """It shares the common slots."""
    assert Resources.of("step") is None


def test_equal_resources_are_equal_however_they_are_said() -> None:
    """Steps with them may share a task."""
    assert Resources.of("a", 1, 0, {"b": 1, "a": 2}) == Resources.of("b", resources={"a": 2.0, "b": 1.0})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_cpus": -1}, "score: num_cpus=-1 is not an amount"),
        ({"num_cpus": "2"}, "score: num_cpus='2' is not an amount"),
        ({"num_gpus": True}, "score: num_gpus=True is not an amount"),
        ({"num_gpus": float("nan")}, "score: num_gpus=nan is not an amount"),
        ({"num_gpus": 1.5}, "num_gpus=1.5: Ray reserves more than one GPU only in whole numbers"),
        ({"num_gpus": 0.00001}, "is too little: Ray counts to four decimals"),
        ({"num_cpus": 0}, "num_cpus=0 reserves nothing"),
        ({"num_cpus": 0, "num_gpus": 0, "resources": {}}, "reserves nothing"),
        ({"resources": {"GPU": 1}}, "give it as num_gpus="),
        ({"resources": {"memory": 1}}, "memory cannot be reserved for a step"),
        ({"resources": {"disk": 0}}, "reserves nothing; remove 'disk'"),
        ({"resources": {"disk": "all"}}, r"resources=\{'disk': 'all'\} is not an amount"),
        ({"resources": {1: 1}}, "name each resource by a string"),
        ({"resources": ["disk"]}, "resources must be a dict of names and amounts"),
    ],
)
def test_what_ray_cannot_reserve_is_refused(given: dict[str, Any], message: str) -> None:
    """When the stream is made, by the name of the step."""
    with pytest.raises(ConfigurationError, match=message) as refused:
        Resources.of("score", **given)
    assert str(refused.value).startswith("score: ")


def step(name: str, resources: Resources | None, *inputs: Any) -> StreamNode:
    """An operator with resources."""
    pairs = [i if isinstance(i, tuple) else (i, None) for i in inputs]
    made = node(name, *pairs, parallelism=2, factory=Operator)
    return StreamNode(
        made.uid, made.name, 2, made.schema, factory=made.factory, inputs=made.inputs, resources=resources
    )


def test_steps_of_other_resources_are_tasks_of_their_own() -> None:
    """They are joined subtask by subtask, so that rows keep their order."""
    source = node("source", parallelism=2)
    clean = step("clean", None, source)
    score = step("score", GPU, clean)
    sink = step("sink", None, score)
    graph = translate([source, clean, score, sink])
    assert [(v.name, v.resources) for v in graph.vertices] == [
        ("source -> clean", None),
        ("score", GPU),
        ("sink", None),
    ]
    assert [edge.partitioning.kind for edge in graph.edges] == [PartitioningKind.FORWARD] * 2


def test_steps_of_equal_resources_are_one_task() -> None:
    """They share what it reserves; behind a repartitioning there is another one, with slots of its own."""
    source = node("source", parallelism=2)
    first = step("first", GPU, source)
    second = step("second", Resources.of("second", num_gpus=1), first)
    third = step("third", GPU, (second, BY_X))
    graph = translate([source, first, second, third])
    assert [(v.name, v.resources) for v in graph.vertices] == [
        ("source", None),
        ("first -> second", GPU),
        ("third", GPU),
    ]


def in_group(name: str, group: str | None, *inputs: Any, resources: Resources | None = None) -> StreamNode:
    """An operator that names a slot sharing group, or None."""
    return replace(step(name, resources, *inputs), slot_group=group)


def grouped(*nodes: StreamNode) -> list[tuple[str, str]]:
    """The vertices that these nodes make, and their slot sharing groups."""
    return [(vertex.name, vertex.slot_group) for vertex in translate(nodes).vertices]


def test_a_step_is_in_the_group_of_its_inputs() -> None:
    """Until a step names another one. Steps of one group that follow each other are one task."""
    source = replace(node("source", parallelism=2), slot_group="in")
    clean = in_group("clean", None, source)
    score = in_group("score", "scoring", clean)
    after = in_group("after", None, score)
    sink = in_group("sink", "default", (after, BY_X))
    assert grouped(source, clean, score, after, sink) == [
        ("source -> clean", "in"),
        ("score -> after", "scoring"),
        ("sink", "default"),
    ]


def test_a_step_with_inputs_of_several_groups_is_in_the_default_one() -> None:
    """Unless it names one itself; inputs of one group keep it there."""
    one, two = (replace(node(name, parallelism=2), slot_group=name) for name in ("one", "two"))
    other = replace(node("other", parallelism=2), slot_group="one")
    mixed = in_group("mixed", None, (one, BY_X), (two, BY_X))
    named = in_group("named", "two", (one, BY_X), (two, BY_X))
    same = in_group("same", None, (one, BY_X), (other, BY_X))
    assert grouped(one, two, other, mixed, named, same)[3:] == [("mixed", "default"), ("named", "two"), ("same", "one")]


def test_a_side_output_has_the_group_of_the_step_that_emits_it() -> None:
    """What reads it follows that step."""
    source = node("source", parallelism=2)
    check = replace(in_group("check", "checks", source), side_outputs=(OutputTag("bad", source.schema),))
    bad = in_group("bad", None, check.side_output("bad"))
    assert grouped(source, check, bad) == [("source", "default"), ("check", "checks"), ("bad", "checks")]


def test_a_step_with_resources_hands_on_the_group_of_its_inputs() -> None:
    """It has slots of its own; the step behind it is where the step before it is."""
    source = replace(node("source", parallelism=2), slot_group="in")
    score = in_group("score", None, source, resources=GPU)
    sink = in_group("sink", None, score)
    assert grouped(source, score, sink) == [("source", "in"), ("score", "in"), ("sink", "in")]


def test_a_job_without_slot_sharing_has_the_same_tasks() -> None:
    """Only their processes differ."""
    source = node("source", parallelism=2)
    shared, alone = (translate([source], slot_sharing=sharing) for sharing in (True, False))
    assert (shared.slot_sharing, alone.slot_sharing) == (True, False)
    assert shared.vertices == alone.vertices
