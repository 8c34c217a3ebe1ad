"""Process functions: what they are called with, what becomes of their rows, and what they are told when they err."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from operator_harness import CUT, context
from process_harness import Driven, Row

from tidegate.operators.functions.process_functions import CoProcessFunction, ProcessContext, ProcessFunction, Rows
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.state.keyed_state import ListState, ValueState
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError


class Calls(ProcessFunction):
    """A function made of its parts."""

    def __init__(
        self,
        process: Callable[[Row, ProcessContext], Rows] = lambda row, context: None,
        on_timer: Callable[[int, ProcessContext], Rows] = lambda timestamp, context: None,
        finish: Callable[[ProcessContext], Rows] = lambda context: None,
        open: Callable[[ProcessContext], object] = lambda context: None,
    ) -> None:
        self._process, self._on_timer, self._finish, self._open = process, on_timer, finish, open

    def open(self, context: ProcessContext) -> None:
        self._open(context)

    def process(self, row: Row, context: ProcessContext) -> Rows:
        return self._process(row, context)

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        return self._on_timer(timestamp, context)

    def finish(self, context: ProcessContext) -> Rows:
        return self._finish(context)


def register(context: ProcessContext, timestamp_ms: Any) -> None:
    """Register an event-time timer."""
    context.timer_service.register_event_time_timer(timestamp_ms)


class Counting(ProcessFunction):
    """Numbers the rows of each key."""

    def open(self, context: ProcessContext) -> None:
        self.count = self.context.state(ValueState("count", pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        self.count.update((self.count.value() or 0) + 1)
        yield {**context.current_key, "n": self.count.value()}

    def finish(self, context: ProcessContext) -> Iterable[Row]:
        return [{"k": "end", "n": -1}]


def test_each_key_has_its_own_state() -> None:
    """What is kept for one key does not show for another; rows come out in the order in which they came in."""
    driven = Driven(Counting())

    assert driven.rows({"k": "a"}, {"k": "b"}, {"k": "a"}, {"k": None}) == [
        {"k": "a", "n": 1},
        {"k": "b", "n": 1},
        {"k": "a", "n": 2},
        {"k": None, "n": 1},
    ]
    assert driven.rows({"k": "a"}) == [{"k": "a", "n": 3}]
    assert driven.end() == [{"k": "end", "n": -1}]


def test_keys_are_those_of_the_hash() -> None:
    """All NaN are one key, and so are both zeros: as the rows are partitioned, so is the state."""
    driven = Driven(Counting())
    driven.rows({"k": float("nan")}, {"k": 0.0}, {"k": -float("nan")}, {"k": -0.0})

    assert [row["n"] for row in driven.out] == [1, 1, 2, 2]


def test_rows_know_their_time() -> None:
    """`context.timestamp` is the timestamp column in milliseconds, null where that is; None without such a column."""

    def seen(row: Row, context: ProcessContext) -> Rows:
        return [{"t": context.timestamp, "w": context.current_watermark}]

    schema = pa.schema({"k": pa.int64(), "t": pa.timestamp("us")})
    batch = pa.record_batch({"k": [1, 1], "t": pa.array([1_234_567, None], pa.timestamp("us"))}, schema=schema)
    timed, untimed = Driven(Calls(seen), timestamps=["t"]), Driven(Calls(seen))
    timed.watermark(77)

    assert timed.batch(batch) == [{"t": 1234, "w": 77}, {"t": None, "w": 77}]
    assert untimed.rows({"k": 1}) == [{"t": None, "w": MIN_WATERMARK_MS}]


def test_processing_time_is_what_the_task_says() -> None:
    """A function reads the time of the event that is handled, never a clock."""
    driven = Driven(Calls(lambda row, context: [{"now": context.current_processing_time}]))
    driven.clock(5000)

    assert driven.rows({"k": 1}) == [{"now": 5000}]


def test_the_output_has_the_declared_schema() -> None:
    """Rows are cast to `schema`, a None is null, and large outputs leave in several batches."""
    schema = pa.schema({"n": pa.int16(), "s": pa.string()})
    driven = Driven(Calls(lambda row, context: [{"n": 1, "s": None}] * 40_000), schema=schema)
    driven.rows({"k": 1}, {"k": 1})

    assert [schema] * len(driven.batches) == [batch.schema for batch in driven.batches]
    assert [batch.num_rows for batch in driven.batches] == [65_536, 14_464]
    assert driven.out[0] == {"n": 1, "s": None}


def test_many_last_rows_leave_in_steps() -> None:
    """`finish` may yield more than memory holds: the task waits for room after each batch."""
    driven = Driven(Calls(finish=lambda context: ({"n": n} for n in range(150_000))))
    emitted: list[pa.RecordBatch] = []
    steps = [len(emitted) for _ in driven.operators[0].finish(emitted.append)]

    assert steps == [1, 2, 3]
    assert list(range(150_000)) == [n for batch in emitted for n in batch.column("n").to_pylist()]


class Joined(CoProcessFunction):
    """Gives the rows of the second stream the names that the first stream has for their key."""

    def open(self, context: ProcessContext) -> None:
        self.name = context.state(ValueState("name", pa.string()))
        self.waiting = context.state(ListState("waiting", pa.int64()))

    def process1(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        self.name.update(row["name"])
        yield from ({"name": row["name"], "x": x} for x in self.waiting.get())
        self.waiting.clear()

    def process2(self, row: Row, context: ProcessContext) -> Rows:
        if self.name.value() is None:
            self.waiting.add(row["x"])
            return None
        return [{"name": self.name.value(), "x": row["x"]}]


def test_two_inputs_share_the_state_of_a_key() -> None:
    """Whatever the names of the key columns: rows of one key meet, from either side, at any parallelism."""
    driven = Driven(Joined(), keys=(("id",), ("ref",)), parallelism=3)
    driven.rows({"ref": 1, "x": 10}, {"ref": 2, "x": 20}, {"ref": 1, "x": 11}, input_index=1)
    assert driven.out == []
    driven.rows({"id": 1, "name": "one"})
    driven.rows({"x": 12, "ref": 1}, input_index=1)

    expected = [{"name": "one", "x": x} for x in (10, 11, 12)]
    assert expected == driven.out
    assert {("id", "waiting"), ("id", "name")} == {tuple(table.rows.schema.names) for table in driven.snapshot()}


def test_a_function_is_copied_for_each_subtask() -> None:
    """What one subtask's function remembers, no other sees, and the user's object stays as it was."""
    function = Counting()
    Driven(function, parallelism=2)

    assert not hasattr(function, "count")


def test_the_function_is_closed() -> None:
    """`close` is the function's."""
    closed: list[int] = []

    class Closing(Calls):
        def close(self) -> None:
            closed.append(1)

    Driven(Closing()).operators[0].close()
    assert closed == [1]


def fussy(row: Row, context: ProcessContext) -> Rows:
    """Goes wrong with the second row."""
    if row["x"] == 2:
        raise KeyError("oops")
    return None


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (Calls(process=fussy), r"'op' .* KeyError: 'oops'; row 1 of the batch: .\{'k': 9"),
        (Calls(process=lambda row, context: {"a": 1}), "returned one row; return an iterable of rows"),
        (Calls(process=lambda row, context: ["a"]), "a row must be a dict, not str"),
        (Calls(process=lambda row, context: [{"n": 1}, {"n": "x"}]), "no common type.*first of the rows"),
        (Calls(process=lambda row, context: register(context, 1.5)), "integer in milliseconds since 1970"),
        (Calls(finish=lambda context: {}), "returned one row; return an iterable of rows"),
        (Calls(finish=lambda context: [context.current_key]), "the current key is kept per key.*not in open or"),
    ],
)
def test_errors_say_where(function: ProcessFunction, text: str) -> None:
    """An error in a function names the operator, the error, and the row."""
    driven = Driven(function)

    def run() -> None:
        driven.rows({"k": 9, "x": 1}, {"k": 9, "x": 2})
        driven.end()

    with pytest.raises((OperatorError, ConfigurationError), match=f"(?s){text}"):
        run()


def test_an_error_of_a_timer_names_its_key() -> None:
    """There is no row: the key and the moment are what tells."""
    driven = Driven(Calls(lambda row, context: register(context, 7), lambda timestamp, context: [{}["oops"]]))
    driven.rows({"k": "who"})

    with pytest.raises(OperatorError, match=r"timer at 7 of key: .\{'k': 'who'\}."):
        driven.watermark(7)


def test_a_timer_needs_a_method_that_it_calls() -> None:
    """Without `on_timer` it would fire without effect, and its state would never go. Deleting a timer needs none."""

    class Timed(ProcessFunction):
        def process(self, row: Row, context: ProcessContext) -> None:
            context.timer_service.delete_event_time_timer(row["at"])
            if row["at"] > 1:
                register(context, row["at"])

    driven = Driven(Timed())
    driven.rows({"k": 1, "at": 1})
    with pytest.raises(OperatorError, match="Timed has no method on_timer, but a timer is registered; add the method"):
        driven.rows({"k": 1, "at": 2})


def test_state_is_bound_in_open_and_once() -> None:
    """Later it could not be restored; two of one name would be one in a checkpoint; key columns have their names."""
    n = ValueState("n", pa.int64())
    late = Driven(Calls(process=lambda row, context: context.state(n)))
    with pytest.raises(OperatorError, match="bound too late"):
        late.rows({"k": 1})
    for names, text in (
        (["n", "n"], "two states of the operator are named 'n'"),
        (["_tidegate_timers"], "are reserved"),
        (["k"], "key column"),
    ):
        function = Calls(open=lambda context, names=names: [context.state(ValueState(m, pa.int8())) for m in names])
        with pytest.raises(ConfigurationError, match=text):
            Driven(function)
    with pytest.raises(OperatorError, match="is declared but not bound"):
        Driven(Calls(process=lambda row, context: [{"n": n.value()}])).rows({"k": 1})


def test_without_keys_there_is_no_state_and_no_timer() -> None:
    """As in Flink: such a function is stateless, and a snapshot of it is nothing."""
    with pytest.raises(ConfigurationError, match="needs a keyed stream"):
        Driven(Counting(), keys=((),))
    driven = Driven(Calls(lambda row, context: [row]), keys=((),))
    assert driven.rows({"k": 1}) == [{"k": 1}]
    assert driven.operators[0].snapshot(CUT) is None
    timed = Driven(Calls(lambda row, context: register(context, 1)), keys=((),))
    with pytest.raises(OperatorError, match="a timer is kept per key"):
        timed.rows({"k": 1})


def test_a_function_of_the_wrong_kind_is_refused() -> None:
    """When the job is planned, not when it runs."""
    with pytest.raises(ConfigurationError, match=r"derived from tg\.ProcessFunction"):
        ProcessOperator(Joined())
    with pytest.raises(ConfigurationError, match=r"derived from tg\.CoProcessFunction"):
        ProcessOperator(Counting(), keys=((), ()), timestamps=(None, None))
    with pytest.raises(ConfigurationError, match=r"derived from tg\.ProcessFunction"):
        ProcessOperator(Counting)
    locked = Counting()
    locked.lock = threading.Lock()
    with pytest.raises(ConfigurationError, match="Counting cannot be copied"):
        ProcessOperator(locked)


def test_keys_must_be_this_subtasks_and_keep_their_type() -> None:
    """A wrong partitioning and a changed type are errors; both would split the state of a key."""
    alone = ProcessOperator(Counting(), keys=(("k",),))
    alone.open(context(subtask=1, parallelism=4), ())
    with pytest.raises(OperatorError, match="must be partitioned by"):
        alone.process(pa.record_batch({"k": list(range(20))}), lambda batch: None)
    driven = Driven(Counting())
    driven.rows({"k": 1})
    with pytest.raises(OperatorError, match="keys of types int64 and was given keys of string"):
        driven.rows({"k": "1"})


def test_the_last_watermark_is_seen() -> None:
    """At the end of the input event time is `MAX_WATERMARK_MS`, in timers and in `finish`."""
    driven = Driven(
        Calls(
            lambda row, context: register(context, 5),
            lambda timestamp, context: [{"w": context.current_watermark}],
            lambda context: [{"w": context.current_watermark}],
        )
    )
    driven.rows({"k": 1})
    assert driven.end() == [{"w": MAX_WATERMARK_MS}] * 2
