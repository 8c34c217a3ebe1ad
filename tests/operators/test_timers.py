"""Timers fire once, in order, when their moment has come, and only for the key that registered them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_harness import MAX_PARALLELISM, Driven, Row

from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction, Rows
from tidegate.operators.state import timers as timers_module
from tidegate.operators.state.keys import KeyCodec, sort_key
from tidegate.operators.state.timers import TimeDomain, TimerStep
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import DueTimers
from tidegate.state.kernels.hashing import hash_columns


class Alarms(ProcessFunction):
    """Registers or deletes what its rows say, and tells of every timer; `again` may do more when one fires."""

    def __init__(
        self, again: Callable[[int, ProcessContext], None] = lambda timestamp, context: None, factor: int = 1
    ) -> None:
        self._again = again
        self._factor = factor

    def process(self, row: Row, context: ProcessContext) -> Rows:
        getattr(context.timer_service, row["do"])(row["at"] * self._factor)
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


def test_processing_time_timers_fire_at_the_end_of_the_input_if_that_is_asked_for() -> None:
    """Once, in order, as if their moments had come; what they register of processing time is dropped, so that a timer
    that sets itself again ends, and what they register of event time still fires."""
    told: list[tuple[int, int]] = []

    def again(at: int, context: ProcessContext) -> None:
        timers = context.timer_service
        told.append((at, timers.current_processing_time()))
        assert context.current_processing_time == timers.current_processing_time()
        if context.time_domain is TimeDomain.PROCESSING_TIME:
            timers.register_event_time_timer(at + 1)
        timers.register_processing_time_timer(timers.current_processing_time() + 10)
        timers.delete_processing_time_timer(70)

    driven = Driven(Alarms(again), fire_at_end=True)
    driven.rows(clock("b", 60), clock("a", 40), clock("a", 70), clock("c", 5), event("a", 30))
    driven.clock(10)
    (operator,) = driven.operators
    del driven.out[:], told[:]

    by_event, by_clock = [(6, "c"), (30, "a")], [(20, "a"), (20, "c"), (40, "a"), (60, "b")]
    assert fired(driven.end()) == [*by_event, *by_clock, (21, "a"), (21, "c"), (41, "a"), (61, "b")]
    assert told[2:] == [*((at, at) for at, _ in by_clock), (21, 10), (21, 10), (41, 10), (61, 10)]
    assert operator.next_processing_time_ms() is None


def test_all_event_time_timers_fire_at_the_end_of_the_input() -> None:
    """The last watermark is not before any moment that can be registered, also that at the end of time."""
    driven = Driven(Alarms())
    driven.rows(event(1, MAX_WATERMARK_MS), event(2, 5))

    assert fired(driven.end()) == [(5, 2), (MAX_WATERMARK_MS, 1)]


def test_a_moment_beyond_int64_is_the_end_of_time() -> None:
    """Python counts further than a checkpoint: such a timer fires at the end, or at once, and is stored as that."""
    driven = Driven(Alarms(factor=2**70))
    driven.rows(event(1, 1), clock(1, -1))
    (operator,) = driven.operators

    assert operator.next_processing_time_ms() == MIN_WATERMARK_MS
    assert fired(driven.watermark(MAX_WATERMARK_MS - 1)) == []
    assert fired(driven.end()) == [(MAX_WATERMARK_MS, 1)]


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


def test_timers_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that always registers another one never lets the input end: rather than hang, the job says so."""
    driven = Driven(Alarms(lambda at, context: context.timer_service.register_event_time_timer(at + 1)))
    driven.rows(event("k", 1))
    driven.watermark(500)
    monkeypatch.setattr(timers_module, "_FIRES_AT_END", 3_000)
    monkeypatch.setattr(timers_module, "_FIRES_AT_END_A_TIMER", 3)

    with pytest.raises(
        OperatorError, match=r"Register no timers while context\.current_watermark is tg\.MAX_WATERMARK_MS"
    ):
        driven.end()


@pytest.mark.parametrize("timers", [1, 1500])
def test_many_timers_without_end_are_an_error_too(timers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are due at the start, and also where they are counted several times; chains that end are none."""
    monkeypatch.setattr(timers_module, "_CHAINED_TIMERS_MAX", 3)
    finite = Driven(Alarms(lambda at, ask: ask.timer_service.register_event_time_timer(at + 1) if at < 3 else None))
    finite.rows(*(event(k, 1) for k in range(timers)))
    assert len(finite.end()) == 3 * timers

    endless = Driven(Alarms(lambda at, ask: ask.timer_service.register_event_time_timer(at)))
    endless.rows(*(event(k, 1) for k in range(timers)))
    with pytest.raises(OperatorError, match=r"passed \(1 ms since 1970 or earlier\): more than 3 fired for each"):
        endless.watermark(5)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 30])
@pytest.mark.parametrize("domain", ["event_time", "processing_time"])
def test_a_heartbeat_survives_a_quiet_hour(keys: int, domain: str) -> None:
    """A timer a second for each key catches up with hours in which no watermark came, or in which the job stood."""
    hours_ms = (6 if keys == 1 else 1) * 3_600_000

    def again(at: int, context: ProcessContext) -> None:
        if context.time_domain is TimeDomain.EVENT_TIME:
            context.timer_service.register_event_time_timer(at + 1_000)
        else:
            context.timer_service.register_processing_time_timer(at + 1_000)

    driven = Driven(Alarms(again))
    driven.rows(*((event if domain == "event_time" else clock)(k, 1) for k in range(keys)))
    fires = driven.watermark(hours_ms) if domain == "event_time" else driven.clock(hours_ms)
    assert len(fired(fires)) == keys * hours_ms // 1_000


@pytest.mark.parametrize("keys", [1, 30])
def test_chains_that_end_may_be_long_at_the_end_of_the_input(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose timers end one after the other are progress, however long it takes."""
    monkeypatch.setattr(timers_module, "_FIRES_AT_END", 1_000)
    monkeypatch.setattr(timers_module, "_FIRES_AT_END_A_TIMER", 60)

    def until_its_own_end(at: int, context: ProcessContext) -> None:
        if at < 50 * (context.current_key["k"] + 1):
            context.timer_service.register_event_time_timer(at + 1)

    driven = Driven(Alarms(until_its_own_end))
    driven.rows(*(event(k, 1) for k in range(keys)))
    assert len(driven.end()) == sum(50 * (k + 1) for k in range(keys))


_MOMENTS, _NUMBERS = st.integers(0, 9), st.integers(0, 2)
_STEP_KEYS = pa.record_batch({"k": pa.array(["a", "b", None])})


@settings(max_examples=200, deadline=None)
@given(
    due=st.sets(st.tuples(_MOMENTS, _NUMBERS), min_size=1),
    told_max=st.integers(1, 6),
    steps=st.lists(st.tuples(st.sampled_from(["register", "delete", "pop"]), _MOMENTS, _NUMBERS), max_size=40),
)
def test_timers_fire_in_order_within_a_step(
    due: set[tuple[int, int]], told_max: int, steps: list[tuple[str, int, int]]
) -> None:
    """Deleted and registered again meanwhile: the next one is the first that is registered, up to the last one that was
    told; what comes after that one waits for the next step."""
    time_ms = 7
    first = sorted(timer for timer in due if timer[0] <= time_ms)
    told = first[:told_max]
    moments, rows = [moment for moment, _ in told], [number for _, number in told]
    keys = _STEP_KEYS.take(pa.array(rows, pa.int64()))
    step = TimerStep(0, time_ms, DueTimers(moments, keys, more=len(first) > len(told)), KeyCodec(_STEP_KEYS.schema))
    known = {key: number for number, key in enumerate(step.keys)}
    assert step.columns.to_pylist() == [{"k": key} for (key,) in step.keys]
    model = {(moment, known[_STEP_KEYS.to_pylist()[number]["k"],]) for moment, number in told}

    def order(timer: tuple[int, int]) -> tuple[int, Any]:
        return timer[0], sort_key(step.keys[timer[1]])

    last = max(map(order, model), default=None) if len(first) > len(told) else (time_ms + 1, ())
    for what, moment, number in steps:
        if what == "pop":
            expected = min(model, key=order, default=None)
            assert step.pop() == expected
            model.discard(expected)  # type: ignore[arg-type]
        elif number < len(step.keys):
            getattr(step, what)(moment, number)
            if what == "delete":
                model.discard((moment, number))
            elif moment <= time_ms and last is not None and order((moment, number)) <= last:
                model.add((moment, number))


def test_a_timer_table_is_typed_and_sorted_by_key_group() -> None:
    """Timers of both domains, with the types of the key columns, as any tool can read them."""
    driven = Driven(Alarms())
    driven.rows(event(1, 10), clock(2, 20), event(3, 30))
    (table,) = driven.snapshot()

    assert table.state == "_tidegate_timers"
    assert table.rows.schema.names == ["k", "_tidegate_timer_domain", "_tidegate_timer_timestamp_ms"]
    assert sorted(tuple(row.values()) for row in table.rows.to_pylist()) == [
        (1, "event_time", 10),
        (2, "processing_time", 20),
        (3, "event_time", 30),
    ]
    groups = (hash_columns(table.rows, ["k"]) % MAX_PARALLELISM).tolist()
    assert groups == sorted(groups)
    assert TimeDomain("event_time") is TimeDomain.EVENT_TIME
