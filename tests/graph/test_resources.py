"""Resources of a step: what Ray could reserve, and which steps share a task."""

from __future__ import annotations

from typing import Any

import pytest
from link import BY_X, node

from tidegate.actors.graph.resources import Resources
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.operators.operator import Operator
from tidegate.actors.protocol.partitioning import PartitioningKind
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
        ({"num_cpus": -1}, "score: num_cpus=-1 is no amount"),
        ({"num_cpus": "2"}, "score: num_cpus='2' is no amount"),
        ({"num_gpus": True}, "score: num_gpus=True is no amount"),
        ({"num_gpus": float("nan")}, "score: num_gpus=nan is no amount"),
        ({"num_gpus": 1.5}, "num_gpus=1.5: more than one GPU can only be had whole"),
        ({"num_gpus": 0.00001}, "is too little: Ray counts to four decimals"),
        ({"num_cpus": 0}, "num_cpus=0 reserves nothing"),
        ({"num_cpus": 0, "num_gpus": 0, "resources": {}}, "reserves nothing"),
        ({"resources": {"GPU": 1}}, "give it as num_gpus="),
        ({"resources": {"memory": 1}}, "memory cannot be reserved for a step"),
        ({"resources": {"disk": 0}}, "leave out what is not needed"),
        ({"resources": {"disk": "all"}}, r"resources=\{'disk': 'all'\} is no amount"),
        ({"resources": {1: 1}}, "a name is a string"),
        ({"resources": ["disk"]}, "is no dict of names and amounts"),
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
