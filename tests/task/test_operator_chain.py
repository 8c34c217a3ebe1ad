"""In a chain everything keeps its order: batches, what timers emit, watermarks, and the ends of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.operators.operator import Emit, Operator
from tidegate.operators.watermarks.watermark_generator import WatermarkGenerator
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
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
        lambda idle: log.append(("out", "idle" if idle else "not idle")),
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


def test_a_row_comes_after_the_watermark_that_the_rows_before_it_have_made() -> None:
    """A batch is cut before the first row that this makes late, and everything goes on as between two batches."""
    log: list[Any] = []
    subject = chain(log, lambda: WatermarkGenerator("t", 10), lambda: Noting(log, "b"))
    subject.process(rows(90, 100, 89, 50, 100, 200))
    assert log == [
        ("b", "input", 0, [90, 100]), ("out", [90, 100]),
        ("b", "watermark", 89), ("out", [89]), ("out", 89),
        ("b", "input", 0, [89, 50, 100, 200]), ("out", [89, 50, 100, 200]),
        ("b", "watermark", 189), ("out", [189]), ("out", 189),
    ]  # fmt: skip


def test_watermarks_are_awaited_in_the_chain_or_behind_it() -> None:
    """Not by a step before the one that makes them, and not through another one that makes its own."""
    times, waits, rows_only = lambda: WatermarkGenerator("t"), lambda: Noting([], "a"), Doubling
    for factories, awaited, awaited_behind in (
        ([times, waits], True, True),
        ([times, rows_only], False, True),
        ([waits, times], False, True),
        ([times, times, waits], False, False),
        ([waits], False, False),
    ):
        subject = chain([], *factories)
        assert (subject.awaited_generator(False) is not None) == awaited
        assert (subject.awaited_generator(True) is not None) == awaited_behind


def test_a_generator_ends_event_time_from_before_it() -> None:
    """Its own watermark follows the rows that raised it; those from upstream stop there, except the last one."""
    log: list[Any] = []
    subject = chain(log, lambda: WatermarkGenerator("t", 10), lambda: Noting(log, "b"))
    subject.process(rows(100, 95))
    assert log == [("b", "input", 0, [100, 95]), ("out", [100, 95]), ("b", "watermark", 89), ("out", [89]), ("out", 89)]
    log.clear()
    subject.process(rows(99))
    subject.advance_watermark(5000)
    assert log == [("b", "input", 0, [99]), ("out", [99])]
    log.clear()
    subject.advance_watermark(MAX_WATERMARK_MS)
    subject.process(rows(200))
    assert [entry for entry in log if "watermark" in entry] == [("b", "watermark", MAX_WATERMARK_MS)]
    assert log[2] == ("out", MAX_WATERMARK_MS)


def test_a_task_is_idle_behind_its_last_watermark() -> None:
    """When all splits of its source are; from the next row on, and at the end, others wait for it again."""
    log: list[Any] = []
    subject = chain(log, lambda: WatermarkGenerator("t"), lambda: Noting(log, "b"))
    subject.splits.begin([0])
    subject.splits.has_rows(0)
    subject.process(rows(100))
    log.clear()
    subject.splits.has_nothing(0)
    subject.splits_moved()
    assert log == [("out", "idle")]
    subject.splits.has_rows(0)
    subject.process(rows(200))
    assert log[:2] == [("out", "idle"), ("out", "not idle")]
    subject.splits.has_nothing(0)
    subject.splits_moved()
    log.clear()
    for _ in subject.finish():
        subject.step()
    subject.advance_watermark(MAX_WATERMARK_MS)
    assert [entry for entry in log if entry[0] == "out"] == [
        ("out", [MAX_WATERMARK_MS]),
        ("out", "not idle"),
        ("out", MAX_WATERMARK_MS),
    ]


def test_processing_time_is_the_tasks() -> None:
    """The chain wants to be called for its first timer, every operator is called, and reads the clock of the task.

    Where that was set back since the timer was set, it is the time that has come until all is done.
    """
    log: list[Any] = []
    subject = chain(log, lambda: Noting(log, "a"), lambda: Noting(log, "b", 70), lambda: Noting(log, "c", 50))

    assert subject.next_processing_time_ms == 50
    subject.set_time(58)
    subject.fire_processing_time(60)
    subject.set_time(57)
    assert [(name, "clock", 60, 60) for name in "abc"] == log
    log.clear()
    subject.fire_processing_time(57)
    assert [(name, "clock", 57, 57) for name in "abc"] == log


def test_every_step_of_a_timer_reads_its_time_or_a_later_one() -> None:
    """A clock that was set back is read again when the last step is done."""

    class Stepping(Noting):
        def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
            for _ in range(3):
                self._log.append(self.context.time.now_ms)
                yield

    log: list[Any] = []
    subject = chain(log, lambda: Stepping(log, "a"))
    subject.set_time(50)
    subject.fire_processing_time(60)
    for at_ms in (51, 61, 52):
        subject.set_time(at_ms)
        subject.step()
    assert (log, subject.advancing) == ([60, 60, 61], False)
    subject.fire_processing_time(52)
    assert log == [60, 60, 61, 52]


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


class Stepping(Noting):
    """Does what time brings in two steps, each of which emits a batch."""

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        return self._steps("watermark", watermark_ms, emit)

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        return self._steps("clock", now_ms, emit)

    def finish(self, emit: Emit) -> Iterator[None]:
        return self._steps("finish", 900, emit)

    def _steps(self, kind: str, time_ms: int, emit: Emit) -> Iterator[None]:
        for number in (1, 2):
            self._log.append((self._name, kind, time_ms, number))
            emit(rows(time_ms + number))
            yield


class Doubling(Operator):
    """Emits each row alone."""

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        for number in range(batch.num_rows):
            emit(batch.slice(number, 1))


def steps_of(subject: OperatorChain, log: list[Any]) -> list[list[Any]]:
    """What each step did that was still to be done."""
    found = []
    while subject.advancing:
        log.clear()
        subject.step()
        found.append(list(log))
    return found


def test_a_watermark_goes_on_after_the_last_step() -> None:
    """The first step is done at once; the next operator gets the watermark when the one before it is done."""
    log: list[Any] = []
    subject = chain(log, lambda: Stepping(log, "a"), lambda: Noting(log, "b"))
    subject.advance_watermark(10)

    assert log == [("a", "watermark", 10, 1), ("b", "input", 0, [11]), ("out", [11])]
    assert steps_of(subject, log) == [
        [("a", "watermark", 10, 2), ("b", "input", 0, [12]), ("out", [12])],
        [("b", "watermark", 10), ("out", [10]), ("out", 10)],
    ]


def test_an_operator_catches_up_before_those_ahead_of_it_go_on() -> None:
    """A generator's watermark is done by the operators behind it before the next step of the one before it."""
    log: list[Any] = []
    subject = chain(log, lambda: Stepping(log, "a"), lambda: WatermarkGenerator("t"), lambda: Stepping(log, "b"))
    subject.advance_watermark(100)
    noted = [*log, *(entry for step in steps_of(subject, log) for entry in step)]

    assert [entry for entry in noted if entry[1] == "watermark"] == [
        ("a", "watermark", 100, 1),
        ("b", "watermark", 100, 1),
        ("b", "watermark", 100, 2),
        ("a", "watermark", 100, 2),
        ("b", "watermark", 101, 1),
        ("b", "watermark", 101, 2),
    ]


def test_watermarks_that_wait_merge_into_the_newest() -> None:
    """An operator that is not done with one is told of the last of those that have come meanwhile."""
    log: list[Any] = []
    subject = chain(log, lambda: Stepping(log, "b"))
    for watermark_ms in (10, 20, 30):
        subject.advance_watermark(watermark_ms)

    assert [e for e in log if e[0] == "b"][:3] == [("b", "watermark", *of) for of in ((10, 1), (10, 2), (30, 1))]


def test_rows_of_several_batches_of_one_call_meet_the_watermark_before_them() -> None:
    """Where one call emits several batches into a generator, all that a watermark brings comes before the next one."""
    log: list[Any] = []
    subject = chain(log, Doubling, lambda: WatermarkGenerator("t"), lambda: Stepping(log, "b"))
    subject.process(rows(10, 20, 30))

    assert [e for e in log if e[0] == "b"] == [
        ("b", "input", 0, [10]),
        ("b", "watermark", 9, 1),
        ("b", "watermark", 9, 2),
        ("b", "input", 0, [20]),
        ("b", "watermark", 19, 1),
        ("b", "watermark", 19, 2),
        ("b", "input", 0, [30]),
        ("b", "watermark", 29, 1),
    ]
    assert [e for step in steps_of(subject, log) for e in step] == [
        ("b", "watermark", 29, 2),
        ("out", [31]),
        ("out", 29),
    ]


def test_what_comes_between_two_steps_waits_for_the_last_one() -> None:
    """As when an operator emits before a barrier: both watermarks go on, each after its own steps."""
    log: list[Any] = []
    subject = chain(log, lambda: WatermarkGenerator("t"), lambda: Stepping(log, "b"))
    subject.process(rows(10))
    subject.process(rows(20))
    steps = [*log, *(entry for step in steps_of(subject, log) for entry in step)]

    assert [e for e in steps if not isinstance(e[1], list)] == [
        ("b", "input", 0, [10]),
        ("b", "watermark", 9, 1),
        ("b", "watermark", 9, 2),
        ("out", 9),
        ("b", "input", 0, [20]),
        ("b", "watermark", 19, 1),
        ("b", "watermark", 19, 2),
        ("out", 19),
    ]


@pytest.mark.parametrize("drain", [True, False])
def test_the_end_waits_for_the_steps_of_watermarks_and_drops_those_of_the_clock(drain: bool) -> None:
    """Also of the watermarks that come of what operators leave; suspended, the operators do not finish."""
    log: list[Any] = []
    subject = chain(log, lambda: Stepping(log, "a", 5), lambda: WatermarkGenerator("t"), lambda: Stepping(log, "b"))
    subject.fire_processing_time(10)
    log.clear()
    list(subject.finish(drain))
    noted = [entry for entry in log if entry[0] != "out" and entry[1] != "input"]

    finished = [
        ("a", "end", 0),
        ("a", "finish", 900, 1),
        ("b", "watermark", 900, 1),
        ("b", "watermark", 900, 2),
        ("a", "finish", 900, 2),
        ("b", "watermark", 901, 1),
        ("b", "watermark", 901, 2),
        ("b", "end", 0),
        ("b", "finish", 900, 1),
        ("b", "finish", 900, 2),
    ]
    assert noted == [("b", "watermark", 10, 1), ("b", "watermark", 10, 2), *(finished if drain else [])]
