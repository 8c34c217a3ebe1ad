"""Functions and objects of a program that would do nothing if they were called: async functions, generators, classes.

Their result would count as true, or be dropped. So they are refused when the step is added, or when a call returns one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

ROWS = pa.table({"user": ["ann", "bob", "ann"], "n": [1, 2, 3]})
SCHEMA = {"n": int}
Step = Callable[[tg.Stream, Any], object]


async def waits(*_: object) -> bool:
    """An async function of any arguments."""
    return False


async def waits_and_yields(*_: object) -> Any:
    """An async generator."""
    yield False


def yields(*_: object) -> Any:
    """A generator function."""
    yield False


class Waits:
    """An object with an async call."""

    async def __call__(self, *_: object) -> bool:
        return False


class Called:
    """A class with objects that can be called."""

    def __call__(self, row: Any) -> Any:
        return row


STEPS: dict[str, Step] = {
    "filter": lambda stream, fn: stream.filter(fn),
    "branch": lambda stream, fn: stream.branch(fn),
    "peek": lambda stream, fn: stream.peek(fn),
    "map": lambda stream, fn: stream.map(fn, schema=SCHEMA),
    "flat_map": lambda stream, fn: stream.flat_map(fn, schema=SCHEMA),
    "map_batches": lambda stream, fn: stream.map_batches(fn, schema=SCHEMA),
    "reduce": lambda stream, fn: stream.key_by("user").reduce(fn),
    "stateful_map": lambda stream, fn: stream.key_by("user").stateful_map(fn, state=int, schema=SCHEMA),
    "map_groups": lambda stream, fn: stream.key_by("user").map_groups(fn, schema=SCHEMA),
    "apply": lambda stream, fn: stream.key_by("user").window(tg.Count(2)).apply(fn, schema=SCHEMA),
    "for_each_checkpoint": lambda stream, fn: stream.for_each_checkpoint(fn),
}
MAY_YIELD = {"flat_map", "map_groups", "apply"}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    "fn",
    [waits, waits_and_yields, functools.partial(waits, 1), Waits()],
    ids=["function", "generator", "partial", "object"],
)
def test_a_step_refuses_an_async_function(name: str, fn: object) -> None:
    """A filter would keep all rows, because the object that an async function returns counts as true."""
    with tg.StreamEnvironment.local() as env, pytest.raises(tg.ConfigurationError, match=f"{name}.*async function"):
        STEPS[name](env.from_batches(ROWS), fn)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_refuses_a_generator_unless_it_reads_the_items(name: str) -> None:
    """`flat_map` and functions of groups may yield rows."""
    with tg.StreamEnvironment.local() as env:
        stream = env.from_batches(ROWS)
        if name in MAY_YIELD:
            STEPS[name](stream, yields)
            return
        with pytest.raises(tg.ConfigurationError, match=f"{name}.*generator function"):
            STEPS[name](stream, yields)


@pytest.mark.parametrize("name", ["filter", "peek", "map", "map_batches", "map_async", "map_groups"])
def test_a_step_refuses_a_class(name: str) -> None:
    """Ray Data takes classes. Here an object is given, which says with which arguments it was made."""
    steps = {**STEPS, "map_async": lambda stream, fn: stream.map_async(fn)}
    with (
        tg.StreamEnvironment.local() as env,
        pytest.raises(tg.ConfigurationError, match=r"pass an object of it, Called"),
    ):
        steps[name](env.from_batches(ROWS), Called)


@pytest.mark.parametrize(
    ("name", "fn", "called"),
    [
        ("map", lambda a, b: a, r"fn is called as fn\(row\)"),
        ("filter", lambda: True, r"fn is called as fn\(row\)"),
        ("reduce", lambda row: row, r"fn is called as fn\(before, row\)"),
        ("stateful_map", lambda row: row, r"fn is called as fn\(state, row\)"),
        ("map_batches", lambda batch, context: batch, r"fn is called as fn\(batch\)"),
        ("map_groups", lambda key, rows: rows, r"fn is called as fn\(rows\)"),
        ("for_each_checkpoint", lambda df: None, r"fn is called as fn\(df, checkpoint_id\)"),
    ],
)
def test_a_step_refuses_a_function_of_other_arguments(name: str, fn: object, called: str) -> None:
    """Without the check the first row would fail the job."""
    with tg.StreamEnvironment.local() as env, pytest.raises(tg.ConfigurationError, match=called):
        STEPS[name](env.from_batches(ROWS), fn)


def test_a_decorator_may_change_the_arguments() -> None:
    """`functools.wraps` leaves the signature of the decorated function behind, which does not count."""

    def with_user(fn: Callable[[Any, str], Any]) -> Callable[[Any], Any]:
        @functools.wraps(fn)
        def call(row: Any) -> Any:
            return fn(row, row["user"])

        return call

    with tg.StreamEnvironment.local() as env:
        found = env.from_batches(ROWS).filter(with_user(lambda row, user: user == "ann")).collect()
        env.execute("decorated", progress="off").wait("4min")
        assert found.to_arrow()["n"].to_pylist() == [1, 3]


@pytest.mark.parametrize(("name", "fn"), [("filter", waits), ("filter", yields), ("peek", waits)])
def test_a_function_that_returns_such_an_object_fails_the_job(name: str, fn: Callable[..., Any]) -> None:
    """A lambda around an async function is found by its first result."""
    with tg.StreamEnvironment.local() as env:
        rows = env.from_batches(ROWS)
        stream: Any = STEPS[name](rows, lambda row: fn(row))
        stream.collect()
        with pytest.raises(tg.JobFailedError, match=r"returned a (coroutine|generator), which nothing would run"):
            env.execute(f"returns-{name}", progress="off").wait("4min")


class AsyncBatches(tg.BatchFunction):
    """A function of batches with an async `open`."""

    async def open(self, context: Any) -> None:  # type: ignore[override]
        """Never awaited."""

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the batch."""
        return batch


class AsyncTimers(tg.ProcessFunction):
    """A process function with an async `on_timer`."""

    def process(self, row: Any, context: Any) -> list[Any]:
        """Returns no rows."""
        return []

    async def on_timer(self, timestamp: int, context: Any) -> None:  # type: ignore[override]
        """Never awaited."""


class AsyncWrites(tg.Sink):
    """A sink whose `write` is async: all rows would be lost."""

    async def write(self, batch: pa.RecordBatch) -> None:  # type: ignore[override]
        """Never awaited."""

    def prepare(self) -> list[bytes]:
        """Returns nothing to commit."""
        return []


class YieldingCommits(tg.Sink):
    """A sink whose `commit` is a generator: nothing would be committed."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Drops rows."""

    def prepare(self) -> list[bytes]:
        """Returns nothing to commit."""
        return []

    def commit(self, committables: Any, context: Any) -> Any:
        """Never runs."""
        yield committables


@pytest.mark.parametrize(
    ("add", "method"),
    [
        (lambda stream: stream.map_batches(AsyncBatches(), schema=SCHEMA), "AsyncBatches.open is an async"),
        (
            lambda stream: stream.key_by("user").process(AsyncTimers(), schema=SCHEMA),
            "AsyncTimers.on_timer is an async",
        ),
        (lambda stream: stream.to_sink(AsyncWrites()), "AsyncWrites.write is an async"),
        (lambda stream: stream.to_sink(YieldingCommits()), "YieldingCommits.commit is a generator"),
    ],
)
def test_an_object_with_such_a_method_is_refused(add: Callable[[tg.Stream], object], method: str) -> None:
    """The methods that tidegate calls are checked, whatever else the object has."""
    with tg.StreamEnvironment.local() as env, pytest.raises(tg.ConfigurationError, match=method):
        add(env.from_batches(ROWS))


class AsyncSource:
    """A source whose reader is asked for in an async function."""

    schema = ROWS.schema

    def splits(self) -> list[tg.SourceSplit]:
        """Returns one split."""
        return [tg.SourceSplit("all", b"", 3)]

    async def reader(self) -> None:
        """Never awaited."""


class _Reader:
    async def read(self, split: Any, offset: int, rows_max: int) -> None:
        """Never awaited."""

    def close(self) -> None:
        """Nothing to release."""


class AsyncReads(AsyncSource):
    """A source whose readers are async."""

    def reader(self) -> _Reader:  # type: ignore[override]
        """Returns a reader whose `read` is async."""
        return _Reader()


def test_an_async_source_is_refused() -> None:
    """The methods of the source are checked when the stream is made, and those of its reader when it is opened."""
    with tg.StreamEnvironment.local() as env:
        with pytest.raises(tg.ConfigurationError, match=r"AsyncSource\.reader is an async function"):
            env.from_source(AsyncSource())  # type: ignore[arg-type]
        env.from_source(AsyncReads()).collect()  # type: ignore[arg-type]
        with pytest.raises(tg.JobFailedError, match=r"_Reader\.read is an async function"):
            env.execute("reads", progress="off").wait("4min")


class _Writer(tg.CommittingWriter):
    async def write(self, batch: pa.RecordBatch) -> None:  # type: ignore[override]
        """Never awaited."""

    def prepare(self, checkpoint_id: int) -> list[tg.Committable]:
        """Returns nothing to commit."""
        return []

    def close(self) -> None:
        """Nothing to release."""


class AsyncWriter(tg.CommittingSink):
    """A sink whose writer is async."""

    buckets = 1

    def open_writer(self, context: Any) -> tg.CommittingWriter:
        """Returns the writer."""
        return _Writer()

    def open_committer(self, context: Any) -> tg.Committer:
        """Returns no committer: nothing is committed."""
        raise NotImplementedError


def test_the_writer_of_a_sink_is_checked_when_it_is_opened() -> None:
    """It exists in its task only."""
    with tg.StreamEnvironment.local() as env:
        env.from_batches(ROWS).to_sink(AsyncWriter())
        with pytest.raises(tg.JobFailedError, match=r"_Writer\.write is an async function"):
            env.execute("writes", progress="off").wait("4min")
