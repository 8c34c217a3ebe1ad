"""Process functions over batches: what they see of state and time, and what they are told when they err."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from process_harness import Driven, Row

from tidegate.operators.functions.process_functions import ProcessBatchContext, ProcessContext, ProcessFunction
from tidegate.operators.functions.process_operator import process_operator
from tidegate.operators.state.keyed_state import ListState, ValueState
from tidegate.operators.state.state_types import Pickled
from tidegate.operators.state.timers import TimeDomain
from tidegate.operators.state.ttl import StateTtl
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError

_RECORD = pa.struct({"n": pa.int64(), "last": pa.int64()})
_TTL = StateTtl(1_000)
_SHOWN: Any = "return_expired_if_not_cleaned_up"


class Seen(ProcessFunction):
    """Calls a function with each batch, with its states."""

    def __init__(self, call: Callable[[Seen, pa.RecordBatch, ProcessBatchContext], Any], dtype: Any = int) -> None:
        self._call, self._dtype = call, dtype

    def open(self, context: ProcessContext) -> None:
        self.value = context.state(ValueState("value", self._dtype))
        self.items = context.state(ListState("items", int))

    def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> Any:
        return self._call(self, batch, context)


def _driven(call: Callable[[Seen, pa.RecordBatch, ProcessBatchContext], Any], dtype: Any = int) -> Driven:
    return Driven(Seen(call, dtype), schema=None)


def _rows(*keys: str) -> list[Row]:
    return [{"k": key, "x": number} for number, key in enumerate(keys)]


def test_a_key_may_come_several_times_in_a_batch() -> None:
    """State is what it was before the batch for each of its rows, and the last of several values counts; groups have
    each key once, in the order in which they came."""
    told: list[Any] = []

    def call(function: Seen, batch: pa.RecordBatch, context: ProcessBatchContext) -> None:
        groups = context.groups()
        told.append(function.value.get_many().to_pylist())
        told.append((len(groups), groups.keys.to_pylist(), groups.index.tolist()))
        told.append((groups.first_rows.tolist(), groups.last_rows.tolist()))
        function.value.put_many(batch["x"])
        told.append(function.value.get_many(groups).to_pylist())

    _driven(call).rows(*_rows("b", "a", "b", "b"))

    assert told == [
        [None] * 4,
        (2, [{"k": "b"}, {"k": "a"}], [0, 1, 0, 0]),
        ([0, 1], [3, 1]),
        [3, 1],
    ]


def test_nulls_clear_and_the_last_counts() -> None:
    """A null among values of one key is a clear, if no value follows."""
    told = []

    def call(function: Seen, batch: pa.RecordBatch, context: ProcessBatchContext) -> None:
        told.append(function.value.get_many().to_pylist())
        function.value.put_many([1, None, None, 4][: batch.num_rows])

    driven = _driven(call)
    driven.rows(*_rows("a", "a", "b", "b"))
    driven.rows(*_rows("a", "b"))
    driven.rows(*_rows("a", "b"))

    assert told == [[None] * 4, [None, 4], [1, None]]


def test_one_key_can_be_chosen() -> None:
    """Then the states that are not used by the batch, and single timers, are those of that key."""

    class Lists(Seen):
        def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
            yield {**context.current_key, "at": timestamp, "items": self.items.get(), "value": self.value.value()}

    def call(function: Seen, batch: pa.RecordBatch, context: ProcessBatchContext) -> None:
        for row, x in enumerate(batch["x"].to_pylist()):
            context.choose_key(row)
            function.items.add(x)
            function.value.update((function.value.value() or 0) + x)
            context.timer_service.register_event_time_timer(x + 1)
            assert context.current_key == {"k": batch["k"][row].as_py()}

    driven = Driven(Lists(call))
    driven.rows(*_rows("a", "b", "a"))

    assert driven.end() == [
        {"k": "a", "at": 1, "items": [0, 2], "value": 2},
        {"k": "b", "at": 2, "items": [1], "value": 1},
        {"k": "a", "at": 3, "items": [0, 2], "value": 2},
    ]


def test_timers_by_the_batch() -> None:
    """Moments are milliseconds or timestamps, one or many; a timer that a call registers comes in a later one, and one
    that is deleted never; processing time has its own."""
    calls: list[Any] = []

    class Timed(Seen):
        def on_timer_batch(self, keys: pa.RecordBatch, context: ProcessBatchContext) -> None:
            assert context.timestamps is not None
            calls.append((context.time_domain, context.timestamps.to_pylist(), keys["k"].to_pylist()))
            late = context.timestamps.to_numpy() < 20
            context.timer_service.register_many(context.timestamps.to_numpy()[late] + 15, late)

    def call(function: Seen, batch: pa.RecordBatch, context: ProcessBatchContext) -> None:
        timers = context.timer_service
        timers.register_many(pa.array([10, 20], pa.timestamp("ms")).cast(pa.timestamp("ns")))
        timers.register_many(10, context.groups(), TimeDomain.PROCESSING_TIME)
        timers.delete_many([20], [1])

    driven = Driven(Timed(call))
    driven.rows(*_rows("b", "a"))
    driven.watermark(30)
    driven.clock(10)

    event, processing = TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME
    assert calls == [(event, [10], ["b"]), (event, [25], ["b"]), (processing, [10, 10], ["a", "b"])]


@pytest.mark.parametrize("fires", [True, False])
def test_timers_by_the_batch_at_the_end_of_the_input(fires: bool) -> None:
    """Those of processing time that are left come together if that is asked for, as if the last moment had come; those
    that the call registers do not."""
    calls: list[Any] = []

    class Timed(Seen):
        def on_timer_batch(self, keys: pa.RecordBatch, context: ProcessBatchContext) -> None:
            calls.append((context.current_processing_time, keys["k"].to_pylist()))
            context.timer_service.register_many(90, None, TimeDomain.PROCESSING_TIME)

    def call(function: Seen, batch: pa.RecordBatch, context: ProcessBatchContext) -> None:
        context.timer_service.register_many([50, 40], None, TimeDomain.PROCESSING_TIME)

    driven = Driven(Timed(call), fire_at_end=fires)
    driven.rows(*_rows("b", "a"))
    driven.end()

    assert calls == ([(50, ["a", "b"])] if fires else [])
    assert driven.operators[0].next_processing_time_ms() is None


def test_timestamps_come_with_the_batch() -> None:
    """Event time of each row, null where it has none; no array where the stream has no event time."""
    told = []

    def call(function: Seen, batch: pa.RecordBatch, context: ProcessBatchContext) -> None:
        told.append(None if context.timestamps is None else context.timestamps.to_pylist())

    batch = pa.record_batch({"k": ["a", "b"], "t": pa.array([5, None], pa.timestamp("s"))})
    Driven(Seen(call), timestamps=["t"]).batch(batch)
    Driven(Seen(call)).batch(batch)

    assert told == [[5_000, None], None]


def test_without_keys_there_are_batches_alone() -> None:
    """A function over batches may process a stream without keys, with side outputs and what `finish` leaves."""

    class Plain(ProcessFunction):
        def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> pa.Table:
            return pa.table({"x": batch["x"]})

        def finish(self, context: ProcessContext) -> Iterator[Row]:
            yield {"x": -1}

    driven = Driven(Plain(), keys=((),))
    driven.rows(*_rows("a", "b"))
    driven.end()

    assert driven.out == [{"x": 0}, {"x": 1}, {"x": -1}]


_WRONG: dict[str, tuple[Any, Any, str]] = {
    "one key": (int, lambda f, b, c: f.value.value(), r"Use get_many, put_many, clear_many .* context\.choose_key"),
    "current key": (int, lambda f, b, c: c.current_key, r"process_batch works on many"),
    "a text": (int, lambda f, b, c: f.value.put_many(["a", "b"]), r"state 'value' keeps int64"),
    "a fraction": (int, lambda f, b, c: f.value.put_many(np.array([0.5, 1.0])), r"state 'value' keeps int64"),
    "too few": (int, lambda f, b, c: f.value.put_many([1]), r"given 1 values for 2 rows"),
    "no such row": (int, lambda f, b, c: f.value.get_many([2]), r"no row 2 in a batch of 2 rows"),
    "a negative row": (int, lambda f, b, c: f.value.get_many([-1]), r"no row -1 in a batch of 2 rows"),
    "a short mask": (int, lambda f, b, c: f.value.get_many(np.array([True])), r"a mask of 1 rows"),
    "no rows": (int, lambda f, b, c: f.value.get_many(["a"]), r"chosen by their numbers or a mask"),
    "pickles": (Pickled, lambda f, b, c: f.value.get_many(), r"keeps pickled objects"),
    "no moment": (
        int,
        lambda f, b, c: c.timer_service.register_many([1, None]),
        r"one of the times for timers is null",
    ),
    "one moment": (int, lambda f, b, c: c.timer_service.register_many([1]), r"1 times .* timers of 2 rows"),
    "no batch": (int, lambda f, b, c: 5, r"the function returned int; it must return a pyarrow RecordBatch"),
}


@pytest.mark.parametrize("what", sorted(_WRONG))
def test_errors_name_the_operator_and_a_row(what: str) -> None:
    """Whatever goes wrong in a call."""
    dtype, call, message = _WRONG[what]
    with pytest.raises((OperatorError, ConfigurationError), match=message) as caught:
        _driven(call, dtype).rows(*_rows("a", "b"))
    assert "first row of the batch" in str(caught.value) or isinstance(caught.value.__cause__, ConfigurationError)


def test_rows_are_for_batches_alone() -> None:
    """A function by row, and `finish`, cannot read by the batch."""

    class Rows(ProcessFunction):
        def open(self, context: ProcessContext) -> None:
            self.value = context.state(ValueState("value", int))

        def process(self, row: Row, context: ProcessContext) -> None:
            self.value.get_many()

    with pytest.raises(OperatorError, match="works on a whole batch: it can be used in process_batch"):
        Driven(Rows()).rows(*_rows("a"))


def test_a_function_says_how_it_is_called() -> None:
    """By row or by batch, and timers likewise; what could be meant either way is refused."""

    def method(*arguments: object) -> None: ...

    def made(name: str, *methods: str) -> Any:
        return type(name, (ProcessFunction,), dict.fromkeys(methods, method))()

    for function, message in (
        (made("Both", "process", "process_batch"), "Both defines both process and process_batch"),
        (
            made("BothTimers", "process_batch", "on_timer", "on_timer_batch"),
            "BothTimers defines both on_timer and on_timer_batch",
        ),
        (made("TimersAlone", "process", "on_timer_batch"), "TimersAlone defines on_timer_batch without process_batch"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            process_operator(function, (("k",),))


def test_expired_values_are_gone_after_a_while() -> None:
    """Reading finds none, and what nobody reads is removed bit by bit; a read may renew, and may show it once more."""
    told: list[Any] = []

    class Lasting(ProcessFunction):
        def open(self, context: ProcessContext) -> None:
            self.states = [
                context.state(ValueState("plain", _RECORD, ttl=_TTL)),
                context.state(ValueState("renewed", int, ttl=StateTtl(1_000, update="on_read_and_write"))),
                context.state(ValueState("shown", int, ttl=StateTtl(1_000, visibility=_SHOWN))),
            ]

        def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> None:
            told.append([state.get_many().to_pylist() for state in self.states])
            if batch["x"][0].as_py() == 0:
                self.states[0].put_many([{"n": 1, "last": None}])
                self.states[1].put_many([2])
                self.states[2].put_many([3])

    driven = Driven(Lasting())
    for now_ms, x in ((0, 0), (600, 1), (1_500, 1), (1_500, 1)):
        driven.clock(now_ms)
        driven.rows({"k": "a", "x": x})
    driven.rows({"k": "b", "x": 0})
    driven.clock(5_000)
    driven.rows({"k": "c", "x": 1})

    record = {"n": 1, "last": None}
    assert told[:4] == [
        [[None], [None], [None]],
        [[record], [2], [3]],
        [[None], [2], [3]],
        [[None], [2], [None]],
    ]
    assert [table.state for table in driven.snapshot()] == []
