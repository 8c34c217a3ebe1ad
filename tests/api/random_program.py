"""A program over keyed state whose every effect a plain dictionary can follow, and a source that stops on demand.

Rows of a key come in one order, from one of two splits. What a row does to the state of its key, and what it tells, is
decided by the rows before it; when a timer of event time fires between rows is not. So near timers touch a state of
their own, of which only the end is compared, and far ones fire at the end of the input.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from waiting import until

import tidegate as tg

Row = dict[str, Any]
DOINGS = ("put", "clear", "clear", "append", "replace", "set", "discard", "fold", "near", "far", "unfar")
KEYS = (None, *"abcde")
ROW = pa.schema([("k", pa.string()), ("do", pa.string()), ("x", pa.int64()), ("n", pa.int64()), ("t", pa.int64())])
TOLD = pa.schema([("k", pa.string()), ("n", pa.int64()), ("shown", pa.string())])
STATES = ("value", "items", "entries", "low", "lasting")
ROWS_MAX = 1000
FAR_MS = 10**9
"""No row has a timestamp as late as that."""


def numbered(doings: Sequence[tuple[str | None, str, int]]) -> list[Row]:
    """Rows of (key, what to do, with which number), with their own number and a timestamp."""
    return [{"k": k, "do": do, "x": x, "n": n, "t": n * ROWS_MAX} for n, (k, do, x) in enumerate(doings)]


def near_ms(row: Row) -> int:
    """When the near timer of a row fires: a moment that no other row asks for."""
    at_ms: int = (row["n"] + row["x"]) * ROWS_MAX + row["n"]
    return at_ms


class Program(tg.ProcessFunction):
    """Does what its rows say to the state of their key, and tells all of it."""

    source: ClassVar[StoppingSource]

    def open(self, context: tg.ProcessContext) -> None:
        self.value = context.state(tg.ValueState("value", pa.struct({"x": pa.int64(), "tag": pa.string()})))
        self.items = context.state(tg.ListState("items", int))
        self.entries = context.state(tg.MapState("entries", str, float))
        self.low = context.state(tg.ReducingState("low", min, int))
        self.lasting = context.state(tg.ListState("lasting", str, ttl=tg.StateTtl("1d")))
        self.fired = context.state(tg.ReducingState("fired", lambda a, b: a + b, int))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        self.source.fail_at(row["n"])
        x, timers = row["x"], context.timer_service
        match row["do"]:
            case "put":
                self.value.update({"x": x, "tag": "t" * x})
            case "clear":
                for name in STATES[x % 5 :]:
                    getattr(self, name).clear()
            case "append":
                self.items.add_all(range(x % 4))
                self.lasting.add(str(x))
            case "replace":
                self.items.update([*self.items.get()[x % 3 :], x])
                self.lasting.update([])
            case "set":
                self.entries.put_all({str(x % 3): float(x), "all": float(x)})
            case "discard":
                self.entries.remove(str(x % 3))
                self.entries.put("all", None)
            case "fold":
                self.low.add(x)
            case "near":
                timers.register_event_time_timer(near_ms(row))
            case "far":
                timers.register_event_time_timer(FAR_MS + x % 3)
            case "unfar":
                timers.delete_event_time_timer(FAR_MS + x % 3)
        yield {"k": row["k"], "n": row["n"], "shown": self._shown()}

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        key = context.current_key["k"]
        if timestamp < FAR_MS:
            self.fired.add(1)
            yield {"k": key, "n": -timestamp, "shown": ""}
            return
        yield {"k": key, "n": -timestamp, "shown": f"{self._shown()} {self.fired.get()}"}
        self.value.clear()
        self.items.add(timestamp - FAR_MS)

    def _shown(self) -> str:
        value = self.value.value()
        return repr(
            (
                None if value is None else (value["x"], value["tag"]),
                self.items.get(),
                sorted(self.entries.items()),
                self.low.get(),
                self.lasting.get(),
            )
        )


@dataclass
class Key:
    """What the program keeps for one key, in plain Python, and the running aggregates of its rows."""

    value: tuple[int, str] | None = None
    items: list[int] = field(default_factory=list)
    entries: dict[str, float] = field(default_factory=dict)
    low: int | None = None
    lasting: list[str] = field(default_factory=list)
    near: set[int] = field(default_factory=set)
    far: set[int] = field(default_factory=set)
    xs: list[int] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """What the program tells of it."""
        return repr((self.value, self.items, sorted(self.entries.items()), self.low, self.lasting))

    @property
    def sums(self) -> tuple[int, int, int]:
        """Number, sum and minimum of the numbers of its rows."""
        return len(self.xs), sum(self.xs), min(self.xs)

    def do(self, row: Row) -> None:
        """What the program does."""
        x = row["x"]
        self.xs.append(x)
        match row["do"]:
            case "put":
                self.value = x, "t" * x
            case "clear":
                fresh = Key()
                for name in STATES[x % 5 :]:
                    setattr(self, name, getattr(fresh, name))
            case "append":
                self.items += range(x % 4)
                self.lasting.append(str(x))
            case "replace":
                self.items, self.lasting = [*self.items[x % 3 :], x], []
            case "set":
                self.entries |= {str(x % 3): float(x), "all": float(x)}
            case "discard":
                self.entries.pop(str(x % 3), None)
                self.entries.pop("all", None)
            case "fold":
                self.low = x if self.low is None else min(self.low, x)
            case "near":
                self.near.add(near_ms(row))
            case "far":
                self.far.add(FAR_MS + x % 3)
            case "unfar":
                self.far.discard(FAR_MS + x % 3)


@dataclass
class Model:
    """The program on a dictionary; `told` are the rows that it has emitted."""

    keys: dict[str | None, Key] = field(default_factory=dict)
    told: list[tuple[str | None, int, str]] = field(default_factory=list)

    @staticmethod
    def after(rows: Sequence[Row]) -> Model:
        """What is there when these rows have been processed."""
        model = Model()
        for row in rows:
            key = model.keys.setdefault(row["k"], Key())
            key.do(row)
            model.told.append((row["k"], row["n"], key.shown))
        return model

    def end(self) -> None:
        """The end of the input: all timers fire."""
        for name, key in self.keys.items():
            self.told += [(name, -at_ms, "") for at_ms in key.near]
            for at_ms in sorted(key.far):
                self.told.append((name, -at_ms, f"{key.shown} {len(key.near) or None}"))
                key.value = None
                key.items.append(at_ms - FAR_MS)


class StoppingSource:
    """The rows in two splits, read up to a limit that a test moves on; after a failure that it asked for, again.

    Keys are dealt out to the splits. Lives in this process alone, and for one job.
    """

    schema = ROW
    SPLITS = 2

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [
            [row for row in rows if KEYS.index(row["k"]) % self.SPLITS == split] for split in range(self.SPLITS)
        ]
        self.failures = 0
        self.over = False
        self._limit = 0
        self._armed: set[int] = set()
        self._expected_failures = 0
        self._reached: set[int] = set()
        self._changed = threading.Condition()

    def splits(self) -> list[tg.SourceSplit]:
        """Both."""
        return [tg.SourceSplit(f"split {n}", str(n).encode()) for n in range(self.SPLITS)]

    def reader(self) -> StoppingReader:
        """A reader of a subtask of this attempt."""
        return StoppingReader(self, self.failures)

    def read_up_to(self, job: tg.Job, limit: int, fail_at: int | None = None) -> None:
        """Let rows before `limit` pass, and wait until the job has read them; it fails once at `fail_at`, if any."""
        with self._changed:
            if fail_at is not None:
                self._armed.add(fail_at)
                self._expected_failures += 1
            self._limit = limit
            self._reached.clear()
            self._changed.notify_all()
        until(f"the rows before {limit}", self._is_read_up_to_limit, job.progress)

    def _is_read_up_to_limit(self) -> bool:
        with self._changed:
            return self.failures >= self._expected_failures and len(self._reached) == self.SPLITS

    def end(self) -> None:
        """The splits end where they were read to, and whoever waits is let go."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def fail_at(self, number: int) -> None:
        """Called by the program with each row: raises where it was told to."""
        with self._changed:
            if number not in self._armed:
                return
            self._armed.remove(number)
            self.failures += 1
            self._reached.clear()
            self._changed.notify_all()
        raise RuntimeError("as told")

    def await_rows(self, split: int, offset: int, attempt: int) -> int:
        """Wait until there are rows at an offset, or there is no reason to wait; where the rows end now."""
        with self._changed:
            while True:
                stop = sum(int(row["n"] < self._limit) for row in self.rows[split])
                if stop > offset or self.over or attempt != self.failures:
                    return stop
                if split not in self._reached:
                    self._reached.add(split)
                    self._changed.notify_all()
                self._changed.wait()


class StoppingReader:
    """Reads up to the limit."""

    def __init__(self, source: StoppingSource, attempt: int) -> None:
        self._source = source
        self._attempt = attempt

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of a split; waits at the limit."""
        number = int(split.payload)
        stop = min(offset + rows_max, self._source.await_rows(number, offset, self._attempt))
        rows = self._source.rows[number][offset:stop]
        batch = pa.RecordBatch.from_pylist(rows, ROW) if rows else None
        return tg.ReadResult(batch, max(offset, stop), self._source.over and not rows)

    def close(self) -> None:
        """Nothing is open."""
