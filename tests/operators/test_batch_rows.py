"""`batch_rows` on its way from the graph into the turns and calls of a task."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from batches import batch
from link import BY_X, WORK, Subject, Summing, describe, node, work_graph

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import events as ev
from tidegate.operators.batch_rows import BatchRows
from tidegate.operators.functions.batch_functions import FlatMap
from tidegate.storage.ids import VertexId


def bounded(batch_rows: BatchRows, log: list[str]) -> JobGraph:
    """A source, and an operator with bounds that writes down what it is given."""
    source = node("source")
    work = replace(node("work", (source, BY_X), factory=lambda: Summing(log)), batch_rows=batch_rows)
    return translate([source, work])


def test_a_call_gets_no_more_than_the_most_rows() -> None:
    """The bound is in the descriptor of the task, and turns keep it from the first one on."""
    log: list[str] = []
    subject = Subject(describe(bounded(BatchRows(1, 2), log), WORK))
    subject.start()
    subject.feed(0, batch(1, 2, 3, 4, 5))
    assert log == ["open", "process [1, 2]", "process [3, 4]", "process [5]"]


def test_slow_turns_cut_nothing_below_the_least_rows() -> None:
    """A row takes a second here, and nothing else anything."""
    log: list[str] = []
    subject = Subject(describe(bounded(BatchRows(3, 9), log), WORK))
    subject.start()
    subject.arrive(0, *(batch(*range(9)) for _ in range(20)))
    rows, sizes = 0, []
    while subject.machine.runnable:
        subject.tell(ev.TurnGranted(0, last_turn_ms=1_000 * rows))
        rows = len(log[-1].split(","))
        sizes.append(rows)
    assert min(sizes) == sizes[-1] == 3


def test_rows_that_a_chain_has_made_more_are_handed_on_in_parts() -> None:
    """The bound is one on calls, not on what comes into the task alone."""
    log: list[str] = []
    source = node("source")
    more = node("more", (source, BY_X), factory=lambda: FlatMap(lambda row: [row] * 3, pa.schema([("x", pa.int64())])))
    work = replace(node("work", (more, None), factory=lambda: Summing(log)), batch_rows=BatchRows(2, 2))
    subject = Subject(describe(translate([source, more, work]), VertexId("more")))
    subject.start()
    subject.feed(0, batch(7, 8))
    assert log == ["open", "process [7, 7]", "process [7, 8]", "process [8, 8]"]


def test_without_bounds_a_batch_passes_whole() -> None:
    """As it came, where it is no larger than the first turn."""
    log: list[str] = []
    subject = Subject(describe(work_graph(lambda: Summing(log)), WORK))
    subject.start()
    subject.feed(0, batch(1, 2, 3))
    assert log == ["open", "process [1, 2, 3]"]
