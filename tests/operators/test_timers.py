"""Timers fire once, in order, when their moment has come, and only for the key that registered them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_harness import MAX_PARALLELISM, Driven, Row

from tidegate.actors.kernels.hashing import hash_columns
from tidegate.actors.operators.rows.process_functions import ProcessContext, ProcessFunction, Rows
from tidegate.actors.operators.state.key_scope import EnteredKeys, KeyScope
from tidegate.actors.operators.state.keys import KeyCodec, sort_key
from tidegate.actors.operators.state.timers import TimeDomain, TimerQueue, Timers, TimerService
from tidegate.actors.protocol.errors import OperatorError
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS


class Alarms(ProcessFunction):
    """Registers or deletes what its rows say, and tells of every timer; `again` may do more when one fires."""

    def __init__(self, again: Callable[[int, ProcessContext], None] = lambda timestamp, context: None) -> None:
        self._again = again

    def process(self, row: Row, context: ProcessContext) -> Rows:
        getattr(context.timer_service, row["do"])(row["at"])
        return None

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        self._again(timestamp, context)
        assert timestamp == context.timestamp
        assert context.time_domain is not None
        return [{**context.current_key, "at": timestamp, "domain": context.time_domain.name}]


def event(k: Any, at: int, do: str = "register_event_time_timer") -> Row:
    """A row that registers an event-time timer."""
    return {"k": k, "at": at, "do": do}


def clock(k: Any, at: int, do: str = "register_processing_time_timer") -> Row:
    """A row that registers a processing-time timer."""
    return {"k": k, "at": at, "do": do}


def fired(rows: list[Row]) -> list[tuple[int, Any]]:
    """Moments and keys."""
    return [(row["at"], row["k"]) for row in rows]


def test_event_time_timers_fire_in_order_when_the_watermark_passes() -> None:
    """By moment, then by key, null last, whatever the order of registration; at the moment itself, not before it."""
    driven = Driven(Alarms())
    driven.rows(event(None, 20), event(7, 20), event(3, 30), event(-1, 20), event(5, 10), event(5, 20))

    assert driven.watermark(9) == []
    assert fired(driven.watermark(19)) == [(10, 5)]
    assert fired(driven.watermark(20)) == [(20, -1), (20, 5), (20, 7), (20, None)]
    assert fired(driven.watermark(1000)) == [(30, 3)]
    assert {row["domain"] for row in driven.out} == {"EVENT_TIME"}


def test_a_timer_is_registered_once_for_each_key_and_moment() -> None:
    """Asked for twice it fires once; the same moment in the other time domain is another timer."""
    driven = Driven(Alarms())
    driven.rows(event(1, 10), event(1, 10), event(2, 10), clock(1, 10))

    assert fired(driven.watermark(10)) == [(10, 1), (10, 2)]
    assert driven.watermark(11) == []
    assert driven.clock(10) == [{"k": 1, "at": 10, "domain": "PROCESSING_TIME"}]


def test_a_deleted_timer_does_not_fire() -> None:
    """Deleting concerns one key; registered again after that, it fires once; deleting what is not there is nothing."""
    driven = Driven(Alarms())
    driven.rows(event(1, 10), event(2, 10), clock(1, 10))
    driven.rows(
        event(1, 10, "delete_event_time_timer"),
        event(1, 99, "delete_event_time_timer"),
        event(3, 10),
        event(3, 10, "delete_event_time_timer"),
        event(3, 10),
        clock(1, 10, "delete_processing_time_timer"),
    )

    assert fired(driven.watermark(100)) == [(10, 2), (10, 3)]
    assert driven.clock(100) == []


def test_processing_time_timers_fire_by_the_clock() -> None:
    """The operator says when it wants to be called; watermarks do not concern it, the end of the input drops them."""
    driven = Driven(Alarms())
    driven.rows(clock("b", 20), clock("a", 20), clock("a", 10), clock("a", 50))
    (operator,) = driven.operators

    assert operator.next_processing_time_ms() == 10
    assert driven.watermark(1000) == []
    assert fired(driven.clock(20)) == [(10, "a"), (20, "a"), (20, "b")]
    assert operator.next_processing_time_ms() == 50
    assert driven.end() == []
    assert operator.next_processing_time_ms() is None


def test_all_event_time_timers_fire_at_the_end_of_the_input() -> None:
    """The last watermark is not before any moment that can be registered, also that at the end of time."""
    driven = Driven(Alarms())
    driven.rows(event(1, MAX_WATERMARK_MS), event(2, 5))

    assert fired(driven.end()) == [(5, 2), (MAX_WATERMARK_MS, 1)]


def test_a_moment_beyond_int64_is_the_end_of_time() -> None:
    """Python counts further than a checkpoint: such a timer fires at the end, or at once, and is stored as that."""
    timers, scope = Timers(), KeyScope()
    scope.enter(EnteredKeys(KeyCodec(pa.schema({"k": pa.string()})), None, [("k",)]))
    service = TimerService(timers, scope, lambda: 0, lambda: 0)
    service.register_event_time_timer(2**70)
    service.register_processing_time_timer(-(2**70))

    assert timers.queues[TimeDomain.EVENT_TIME].first_ms() == MAX_WATERMARK_MS
    assert timers.queues[TimeDomain.PROCESSING_TIME].first_ms() == MIN_WATERMARK_MS


def test_a_timer_can_register_the_next_one() -> None:
    """One that is due at once fires among the others, in order; a later one waits; a late one fires with the next."""
    driven = Driven(
        Alarms(lambda at, context: context.timer_service.register_event_time_timer(at + 7) if at < 30 else None)
    )
    driven.rows(event(1, 10), event(2, 18))

    assert fired(driven.watermark(20)) == [(10, 1), (17, 1), (18, 2)]
    driven.rows(event(3, 1))
    assert fired(driven.watermark(25)) == [(1, 3), (8, 3), (15, 3), (22, 3), (24, 1), (25, 2)]
    assert fired(driven.end()) == [(29, 3), (31, 1), (32, 2), (36, 3)]


def test_timers_without_end_are_an_error() -> None:
    """A timer that always registers another one never lets the input end: rather than hang, the job says so."""
    driven = Driven(Alarms(lambda at, context: context.timer_service.register_event_time_timer(at + 1)))
    driven.rows(event("k", 1))
    driven.watermark(500)

    with pytest.raises(OperatorError, match=r"register none while context\.current_watermark is tg\.MAX_WATERMARK_MS"):
        driven.end()


def test_deleted_timers_are_forgotten() -> None:
    """A key that moves its timer with each row holds one timer, not one a row: memory stays bounded."""
    queue = TimerQueue()
    queue.add(0, ("k",))
    for at in range(20_000):
        queue.add(at + 1, ("k",))
        queue.discard(at, ("k",))
    for _ in range(20_000):
        queue.add(20_000, ("k",))

    assert len(queue) == 1
    assert len(queue._heap) < 3000
    assert queue.pop_due(30_000, [("other",)]) is None
    assert queue.pop_due(30_000, [("k",)]) == (20_000, ("k",))
    assert queue.pop_due(30_000, [("k",)]) is None


_MOMENTS, _KEYS = st.integers(0, 9), st.sampled_from([("a",), ("b",), (None,)])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.just("add"), _MOMENTS, _KEYS)
        | st.tuples(st.just("discard"), _MOMENTS, _KEYS)
        | st.tuples(st.just("stage"), _MOMENTS, st.integers(0, 4))
        | st.tuples(st.just("pop"), _MOMENTS, st.sets(_KEYS)),
        max_size=60,
    )
)
def test_timers_fire_in_order_however_they_are_staged(steps: list[tuple[str, int, Any]]) -> None:
    """Staged or not, deleted and registered again meanwhile: the next one is the first that is registered."""
    queue, model = TimerQueue(), set()
    for step, at, what in steps:
        due = sorted((timer for timer in model if timer[0] <= at), key=lambda timer: (timer[0], sort_key(timer[1])))
        if step == "add":
            queue.add(at, what)
            model.add((at, what))
        elif step == "discard":
            queue.discard(at, what)
            model.discard((at, what))
        elif step == "stage":
            assert [key for _, key in due[:what]] == queue.stage(at, what)
        else:
            expected = due[0] if due and due[0][1] in what else None
            assert expected == queue.pop_due(at, what)
            model.discard(expected)  # type: ignore[arg-type]
        assert min((moment for moment, _ in model), default=None) == queue.first_ms()
        assert len(model) == len(queue)


def test_a_timer_table_is_typed_and_sorted_by_key_group() -> None:
    """Timers of both domains, with the types of the key columns, as any tool can read them."""
    driven = Driven(Alarms())
    driven.rows(event(1, 10), clock(2, 20), event(3, 30))
    (table,) = driven.snapshot()

    assert table.state == "timers"
    assert table.rows.schema.names == ["k", "timer.domain", "timer.timestamp_ms"]
    assert sorted(tuple(row.values()) for row in table.rows.to_pylist()) == [
        (1, "event_time", 10),
        (2, "processing_time", 20),
        (3, "event_time", 30),
    ]
    groups = (hash_columns(table.rows, ["k"]) % MAX_PARALLELISM).tolist()
    assert groups == sorted(groups)
    assert TimeDomain("event_time") is TimeDomain.EVENT_TIME
