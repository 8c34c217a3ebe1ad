"""In a chain everything keeps its order: batches, what timers emit, watermarks, and the ends of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from tidegate.actors.elements import MAX_WATERMARK_MS
from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.operators.base import Emit, Operator
from tidegate.actors.operators.watermarks import WatermarkGenerator
from tidegate.actors.task.chain import OperatorChain
from tidegate.storage.ids import OperatorUid, SubtaskIndex


class Noting(Operator):
    """Notes everything that happens to it, and passes batches on; what time brings, it emits as `t`."""

    def __init__(self, log: list[Any], name: str, due_ms: int | None = None) -> None:
        self._log, self._name, self._due_ms = log, name, due_ms

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        self._log.append((self._name, "input", index, batch.column("t").to_pylist()))
        emit(batch)

    def end_input(self, index: int, emit: Emit) -> None:
        self._log.append((self._name, "end", index))

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        self._log.append((self._name, "watermark", watermark_ms))
        emit(pa.record_batch({"t": [watermark_ms]}))
        return iter(())

    def next_processing_time_ms(self) -> int | None:
        return self._due_ms

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        self._log.append((self._name, "clock", now_ms, self.context.time.now_ms))
        return iter(())

    def finish(self, emit: Emit) -> Iterator[None]:
        self._log.append((self._name, "finish"))
        yield


def chain(log: list[Any], *factories: Callable[[], Operator]) -> OperatorChain:
    """An opened chain; its output is noted too."""
    specs = [OperatorSpec(OperatorUid(f"op{n}"), f"op{n}", factory) for n, factory in enumerate(factories)]
    made = OperatorChain(
        specs,
        SubtaskIndex(0),
        1,
        16,
        lambda batch: log.append(("out", batch.column("t").to_pylist())),
        lambda watermark_ms: log.append(("out", watermark_ms)),
    )
    made.open({})
    return made


def rows(*times: int) -> pa.RecordBatch:
    """A batch of timestamps."""
    return pa.record_batch({"t": pa.array(times, pa.int64())})


def test_only_the_head_has_several_inputs() -> None:
    """The operators after it get everything by their only input."""
    log: list[Any] = []
    subject = chain(log, lambda: Noting(log, "a"), lambda: Noting(log, "b"))
    subject.process(rows(1), 1)
    subject.process(rows(), 1)

    assert log == [("a", "input", 1, [1]), ("b", "input", 0, [1]), ("out", [1])]


def test_a_chain_without_operators_passes_everything_on() -> None:
    """A source alone."""
    log: list[Any] = []
    subject = chain(log)
    subject.process(rows(1))
    subject.advance_watermark(5)
    subject.end_input(0)

    assert log == [("out", [1]), ("out", 5)]
    assert list(subject.finish()) == []
    assert subject.next_processing_time_ms is None


def test_what_a_watermark_brings_comes_before_it() -> None:
    """Each operator emits what waited, the next one processes that, and only then gets the watermark."""
    log: list[Any] = []
    chain(log, lambda: Noting(log, "a"), lambda: Noting(log, "b")).advance_watermark(9)

    assert log == [
        ("a", "watermark", 9),
        ("b", "input", 0, [9]),
        ("out", [9]),
        ("b", "watermark", 9),
        ("out", [9]),
        ("out", 9),
    ]


def test_a_generator_ends_event_time_from_before_it() -> None:
    """Its own watermark follows the batch that raised it; those from upstream stop there, except the last one."""
    log: list[Any] = []
    subject = chain(log, lambda: WatermarkGenerator("t", 10), lambda: Noting(log, "b"))
    subject.process(rows(100, 50))
    assert log == [("b", "input", 0, [100, 50]), ("out", [100, 50]), ("b", "watermark", 89), ("out", [89]), ("out", 89)]
    log.clear()
    subject.process(rows(99))
    subject.advance_watermark(5000)
    assert log == [("b", "input", 0, [99]), ("out", [99])]
    log.clear()
    subject.advance_watermark(MAX_WATERMARK_MS)
    subject.process(rows(200))
    assert [entry for entry in log if "watermark" in entry] == [("b", "watermark", MAX_WATERMARK_MS)]
    assert log[2] == ("out", MAX_WATERMARK_MS)


def test_processing_time_is_the_tasks() -> None:
    """The chain wants to be called for its first timer, every operator is called, and reads the time of the event."""
    log: list[Any] = []
    subject = chain(log, lambda: Noting(log, "a"), lambda: Noting(log, "b", 70), lambda: Noting(log, "c", 50))

    assert subject.next_processing_time_ms == 50
    subject.fire_processing_time(60)
    assert log == [(name, "clock", 60, 60) for name in "abc"]


def test_no_timer_fires_while_the_chain_finishes() -> None:
    """From the end of the input on, processing time has nothing to say any more, for any operator."""
    log: list[Any] = []
    subject = chain(log, lambda: Noting(log, "a", 5), lambda: Noting(log, "b", 6))
    finishing = subject.finish()
    subject.fire_processing_time(10)

    assert subject.next_processing_time_ms is None
    assert log == []
    list(finishing)
    assert [entry[:2] for entry in log] == [("a", "end"), ("a", "finish"), ("b", "end"), ("b", "finish")]


def test_each_input_ends_once_and_before_finish() -> None:
    """The head is told by input, the operators after it when all before them have finished."""
    log: list[Any] = []
    subject = chain(log, lambda: Noting(log, "a"), lambda: Noting(log, "b"))
    subject.end_input(1)
    subject.end_input(0)
    subject.end_input(1)
    list(subject.finish())

    assert log == [
        ("a", "end", 1),
        ("a", "end", 0),
        ("a", "finish"),
        ("b", "end", 0),
        ("b", "finish"),
    ]
