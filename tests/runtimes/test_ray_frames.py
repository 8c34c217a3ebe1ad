"""The process of a task on Ray, without Ray: frames whose rows lie in memory that another process has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from ray_fakes import FIRST, LAST_ATTEMPT, ROWS, SINK, Process, task_processes

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.stream_elements import EndOfData, EndOfPartition
from tidegate.actors.runtimes.ray.exchange.frames import FrameWriter
from tidegate.actors.runtimes.ray.exchange.shared_segment import OwnSegment
from tidegate.actors.runtimes.ray.process.outcomes import Outcome

SIZE_BYTES = 256 * 1024

Seen = list[pa.RecordBatch]


@pytest.fixture
def seen() -> Seen:
    """What the function of the sink has seen."""
    return []


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> Iterator[Process]:
    """The process of a sink that runs."""

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch)
        return batch

    with task_processes(monkeypatch, function) as make:
        process: Callable[[TaskId], Process] = make
        yield process(SINK).start()


def offer(sink: Process, segment: OwnSegment, attempt: int = FIRST) -> str:
    """The sender offers memory; gives the answer."""
    actor: Any = sink.actor
    answer: str = actor.offer((attempt, 0, 0, 0, 0), segment.offer("node"))
    return answer


def send(sink: Process, writer: FrameWriter, first_sequence: int, rows: pa.RecordBatch, head: int = FIRST) -> None:
    """A frame of one batch comes in."""
    place = writer.write([rows])
    assert place is not None
    sink.actor.frame((head, 0, 0, 0, first_sequence), (), tuple(place))


def test_frames_in_memory_keep_their_place_among_others(sink: Process, seen: Seen) -> None:
    """Sequences are those of one channel, whichever way the rows come, and a call that comes twice changes nothing."""
    own = OwnSegment(SIZE_BYTES)
    assert offer(sink, own) == ""
    writer, parts = FrameWriter(own), [ROWS.slice(start, 10) for start in range(0, 50, 10)]
    sink.receive(0, parts[0])
    send(sink, writer, 1, parts[1])
    sink.receive(2, parts[2])
    place = writer.write([parts[3], parts[4]])
    assert place is not None
    for _ in range(2):
        sink.actor.frame((FIRST, 0, 0, 0, 3), ((2, EndOfData(drain=True)), (3, EndOfPartition())), tuple(place))
    sink.await_report(co.TaskReachedEndOfData)
    assert pa.Table.from_batches(seen).combine_chunks() == pa.Table.from_batches(parts).combine_chunks()


def test_what_another_attempt_offers_or_sends_is_dropped(sink: Process, seen: Seen) -> None:
    """A sender that was given up may live on. What it writes is never taken for rows of this attempt."""
    zombie, own = OwnSegment(SIZE_BYTES), OwnSegment(SIZE_BYTES)
    assert "another attempt" in offer(sink, zombie, LAST_ATTEMPT)
    assert offer(sink, own) == ""
    send(sink, FrameWriter(zombie), 0, ROWS.slice(500, 10), LAST_ATTEMPT)
    send(sink, FrameWriter(own), 0, ROWS.slice(0, 10))
    sink.receive(1, EndOfData(drain=True), EndOfPartition())
    sink.await_report(co.TaskReachedEndOfData)
    assert seen == [ROWS.slice(0, 10)]


def test_a_frame_in_memory_that_nobody_has_taken_fails_the_task(sink: Process) -> None:
    """Its rows must not get lost silently."""
    send(sink, FrameWriter(OwnSegment(SIZE_BYTES)), 0, ROWS)
    outcome: Outcome = sink.outcome()
    assert "never taken" in (outcome.reason or "")
