"""`ProcessHarness` shows what a job does with the same rows: output, side output, state, timers, snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.testing import HarnessSnapshot, HarnessTimer, ProcessHarness

Row = dict[str, Any]
EVENT, CLOCK = tg.TimeDomain.EVENT_TIME, tg.TimeDomain.PROCESSING_TIME
LATE = tg.OutputTag("late", pa.schema([("user", pa.string()), ("at", pa.int64())]))


class Sums(tg.ProcessFunction):
    """Running sums of each user, with one state of each kind, and rows behind the watermark aside."""

    def open(self, context: tg.ProcessContext) -> None:
        self.total = context.state(tg.ValueState("total", int))
        self.seen = context.state(tg.ListState("seen", int))
        self.by_size = context.state(tg.MapState("by_size", str, int))
        self.largest = context.state(tg.ReducingState("largest", max, int))
        self.users = context.list_state(tg.ListState("users", str))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        if row["n"] < 0:
            raise ValueError("negative")
        if context.timestamp is not None and context.timestamp < context.current_watermark:
            context.emit("late", {"user": row["user"], "at": row["at"]})
            return
        if self.total.value() is None:
            self.users.add(row["user"])
        self.total.update((self.total.value() or 0) + row["n"])
        self.seen.add(row["n"])
        self.by_size.put("large" if row["n"] > 9 else "small", row["n"])
        self.largest.add(row["n"])
        context.timer_service.register_event_time_timer(row["at"] + 100)
        yield {"user": row["user"], "total": self.total.value()}

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        yield {"user": context.current_key["user"], "total": -timestamp}

    def finish(self, context: tg.ProcessContext) -> Iterator[Row]:
        yield {"user": "all", "total": len(self.users.get())}


def sums(**options: Any) -> ProcessHarness:
    """A harness with that function."""
    return ProcessHarness(Sums(), key="user", event_time="at", side_outputs=[LATE], **options)


def test_output_state_and_timers_are_shown() -> None:
    """After each call, by key; a key that never came has empty state."""
    with sums() as harness:
        assert harness.state("total", user="ada") is None
        rows = [{"user": "ada", "n": 5, "at": 0}, {"user": "bob", "n": 20, "at": 10}]
        assert harness.push(*rows) == [{"user": "ada", "total": 5}, {"user": "bob", "total": 20}]
        assert harness.push({"user": "ada", "n": 7, "at": 20}) == [{"user": "ada", "total": 12}]
        assert (harness.state("total", user="ada"), harness.state("total", user="bob")) == (12, 20)
        assert harness.state("seen", user="ada") == [5, 7]
        assert harness.state("by_size", user="bob") == {"large": 20}
        assert harness.state("largest", user="ada") == 7
        assert harness.state("total", user="eve") is None
        assert harness.state("seen", user="eve") == []
        assert harness.state("users") == ["ada", "bob"]
        expected = [("ada", 100), ("bob", 110), ("ada", 120)]
        assert harness.timers() == [HarnessTimer({"user": user}, at, EVENT) for user, at in expected]
        assert harness.advance_watermark(110) == [{"user": "ada", "total": -100}, {"user": "bob", "total": -110}]
        assert harness.push({"user": "bob", "n": 1, "at": 50}) == []
        assert harness.side_output("late") == harness.side_output(LATE) == [{"user": "bob", "at": 50}]
        assert harness.end() == [{"user": "ada", "total": -120}, {"user": "all", "total": 2}]
        assert harness.timers() == []
        assert len(harness.output) == 7


def test_a_snapshot_is_what_another_harness_starts_from() -> None:
    """State, timers and operator state come back; later changes are not in it."""
    with sums() as harness:
        harness.push({"user": "ada", "n": 5, "at": 0})
        saved = harness.snapshot()
        harness.push({"user": "ada", "n": 6, "at": 1}, {"user": "bob", "n": 1, "at": 2})
    with sums(restore=saved) as again:
        assert again.state("total", user="ada") == 5
        assert again.state("total", user="bob") is None
        assert again.state("users") == ["ada"]
        assert again.timers() == [HarnessTimer({"user": "ada"}, 100, EVENT)]
        assert again.push({"user": "ada", "n": 1, "at": 3}) == [{"user": "ada", "total": 6}]


class Ticks(tg.ProcessFunction):
    """Emits the clock each second."""

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        context.timer_service.register_processing_time_timer(context.current_processing_time + 1_000)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        context.timer_service.register_processing_time_timer(timestamp + 1_000)
        yield {"k": context.current_key["k"], "at": timestamp, "now": context.current_processing_time}


def test_the_clock_passes_each_moment() -> None:
    """A timer that sets the next one fires at each of its moments, however far the clock is advanced."""
    with ProcessHarness(Ticks(), key=["k"], now=datetime(1970, 1, 1, tzinfo=UTC)) as harness:
        harness.push({"k": 1})
        assert harness.advance_clock(999) == []
        ticks = harness.advance_clock(timedelta(seconds=2.5))
        assert ticks == [{"k": 1, "at": at, "now": at} for at in (1_000, 2_000, 3_000)]
        assert harness.now == 3_499
        assert [timer.domain for timer in harness.timers()] == [CLOCK]
        with pytest.raises(tg.ConfigurationError, match="cannot move back"):
            harness.advance_clock(3_000)


class Rates(tg.CoProcessFunction):
    """Amounts in euros, by the newest rate."""

    def open(self, context: tg.ProcessContext) -> None:
        self.rate = context.state(tg.ValueState("rate", float))

    def process1(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        yield {"euros": row["amount"] * (self.rate.value() or 0.0)}

    def process2(self, row: Row, context: tg.ProcessContext) -> None:
        self.rate.update(row["rate"])


def test_two_inputs_have_keys_of_their_own() -> None:
    """State is stored under the names of the first."""
    with ProcessHarness(Rates(), key="currency", key2="code") as harness:
        harness.push({"code": "USD", "rate": 0.5}, input=1)
        assert harness.push({"currency": "USD", "amount": 4}) == [{"euros": 2.0}]
        assert harness.state("rate", currency="USD") == 0.5


class Rules(tg.KeyedBroadcastProcessFunction):
    """Rows that are over a limit which all keys share."""

    def open(self, context: tg.ProcessContext) -> None:
        self.limits = context.broadcast_state(tg.MapState("limits", str, int))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        if row["n"] > (self.limits.get("n") or 0):
            yield row

    def process_broadcast(self, row: Row, context: Any) -> None:
        self.limits.put("n", row["limit"])


def test_a_broadcast_input_has_no_key() -> None:
    """Its rows change state that every key reads."""
    with ProcessHarness(Rules(), key="k") as harness:
        assert harness.push({"k": 1, "n": 5}) == [{"k": 1, "n": 5}]
        harness.push({"limit": 9}, input=1)
        assert harness.state("limits") == {"n": 9}
        assert harness.push({"k": 1, "n": 5}, {"k": 2, "n": 10}) == [{"k": 2, "n": 10}]


def test_rows_that_fail_go_aside_or_raise() -> None:
    """With `errors_to` they are rows of that tag, and leave no state; otherwise the error names the row."""
    schema = {"user": str, "total": int}
    columns = {"user": str, "n": int, "at": int}
    with sums(schema=schema, schemas=[columns], errors_to="bad") as harness:
        good, bad = {"user": "ada", "n": 1, "at": 0}, {"user": "ada", "n": -1, "at": 1}
        assert harness.push(good, bad, good) == [{"user": "ada", "total": 1}, {"user": "ada", "total": 2}]
        assert [row["n"] for row in harness.side_output("bad")] == [-1]
    with sums() as harness, pytest.raises(tg.OperatorError, match="negative"):
        harness.push({"user": "ada", "n": -1, "at": 0})


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda harness: harness.state("tota", user="ada"), "binds no state 'tota'; name one of"),
        (lambda harness: harness.state("total"), "is kept for each key"),
        (lambda harness: harness.state("total", name="ada"), "name"),
        (lambda harness: harness.push([{"user": "ada"}]), "push takes rows"),
        (lambda harness: harness.push({"user": "ada", "n": 1}), "'at'"),
        (lambda harness: harness.push({"user": "ada"}, input=1), "has 1 inputs"),
        (lambda harness: harness.advance_watermark(-1), "cannot move back"),
        (lambda harness: harness.advance_watermark(datetime(2026, 1, 1)), "time zone"),
        (lambda harness: (harness.end(), harness.end()), "has ended"),
    ],
)
def test_misuse_is_refused(misuse: Any, says: str) -> None:
    """With the name of what was meant, and before anything is processed."""
    with sums() as harness:
        harness.push({"user": "ada", "n": 1, "at": 0})
        harness.advance_watermark(50)
        with pytest.raises(tg.ConfigurationError, match=says):
            misuse(harness)


def test_wrong_functions_are_refused_when_the_harness_is_made() -> None:
    """The harness refuses what `process` refuses, and a keyed broadcast function without key=."""

    class Forgetful(tg.ProcessFunction):
        pass

    with pytest.raises(tg.ConfigurationError, match="process"):
        ProcessHarness(Forgetful())
    with pytest.raises(tg.ConfigurationError, match="needs key="):
        ProcessHarness(Rules())


class Seen(tg.ProcessFunction):
    """Emits each row that it gets, in order, and sets a timer 10 ms after it."""

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        yield {"at": row["at"], "seen": f"row {row['n']}"}
        context.timer_service.register_event_time_timer(row["at"] + 10)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        yield {"at": timestamp, "seen": "timer"}


def test_rows_in_order_wait_for_the_watermark() -> None:
    """They come sorted, with the timers between them; late ones leave aside, and what waits is in the snapshot."""

    def seen(restore: HarnessSnapshot | None = None) -> ProcessHarness:
        return ProcessHarness(Seen(), key="user", event_time="at", in_order=True, restore=restore)

    with seen() as harness:
        harness.advance_watermark(4)
        assert harness.push({"user": "ada", "at": 40, "n": 1}, {"user": "ada", "at": 20, "n": 2}) == []
        assert harness.push({"user": "bob", "at": 45, "n": 3}, {"user": "ada", "at": 4, "n": 4}) == []
        assert [row["n"] for row in harness.side_output("late")] == [4]
        assert harness.advance_watermark(19) == []
        saved = harness.snapshot()
        harness.advance_watermark(30)
    with seen(saved) as harness:
        harness.push({"user": "ada", "at": 19, "n": 5}, {"user": "ada", "at": 31, "n": 6})
        assert [row["n"] for row in harness.side_output("late")] == [5], "how far event time was is in the snapshot"
        assert [(row["at"], row["seen"]) for row in harness.advance_watermark(42)] == [
            (20, "row 2"),
            (30, "timer"),
            (31, "row 6"),
            (40, "row 1"),
            (41, "timer"),
        ]
        assert [row["at"] for row in harness.end()] == [45, 50, 55]
    with pytest.raises(
        tg.ConfigurationError, match="the snapshot has rows that wait for event time; give in_order=True"
    ):
        ProcessHarness(Seen(), key="user", event_time="at", restore=saved)
    with pytest.raises(tg.ConfigurationError, match=r"in_order=True needs a tg\.ProcessFunction, key= and event_time="):
        ProcessHarness(Seen(), key="user", in_order=True)
