"""The query of a streaming DataFrame when Spark is lost, without Spark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_spark import FakeContext, fake_context
from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]

from tidegate.spark_bridge.dataframes.staging import marked_reason, reason_of
from tidegate.spark_bridge.errors import SparkLostError
from tidegate.spark_bridge.spark_calls import DRIVER_TIMEOUT, EXECUTOR_TIMEOUT
from tidegate.spark_bridge.streams.stream_feed import MicroBatch, StreamingQuery
from tidegate.storage.user_values import shown_text, unmarked

SHORT_S, LONG_S = 0.001, 240.0


class FakeWriter:
    """Of a streaming DataFrame. It is its own query, which ends when `end` is called."""

    id = "query"

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.batch: Callable[[Any, int], None]

    def foreachBatch(self, batch: Callable[[Any, int], None]) -> FakeWriter:
        """What Spark calls for each batch."""
        self.batch = batch
        return self

    def queryName(self, name: str) -> FakeWriter:
        """It has none."""
        return self

    option = trigger = lambda self, *args, **settings: self

    def start(self) -> FakeWriter:
        """It runs."""
        return self

    def awaitTermination(self) -> None:
        """Spark waits without end."""
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """It ends well."""
        self.ended.set()

    def fail(self, error: Exception) -> None:
        """It ends with an error."""
        self.error = error
        self.ended.set()


@pytest.fixture
def context() -> Iterator[FakeContext]:
    """A session whose driver lives."""
    with fake_context() as context:
        yield context


def started(
    context: FakeContext, write: Callable[[MicroBatch], None] = lambda batch: None
) -> tuple[StreamingQuery, FakeWriter]:
    """A query that runs."""
    writer = FakeWriter()
    df: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context), writeStream=writer)
    query = StreamingQuery(df, write)
    query.start("name", "checkpoint", 50)
    return query, writer


def ends_with(query: StreamingQuery) -> BaseException:
    """What is raised to whoever waits for its end."""
    while True:
        try:
            assert not query.ended(SHORT_S)
        except (SparkLostError, Py4JNetworkError) as error:
            return error


def test_a_query_without_rows_needs_no_executors(context: FakeContext) -> None:
    """It goes on for as long as the driver answers."""
    context.executors = 0
    context.settings[EXECUTOR_TIMEOUT] = "1ms"
    query, _ = started(context)
    assert [query.ended(SHORT_S) for _ in range(20)] == [False] * 20
    query.stop()
    while not query.ended(SHORT_S):
        pass


def test_a_driver_that_was_killed_ends_the_query(context: FakeContext) -> None:
    """Also where PySpark hears nothing of it; and the reason names the process."""
    query, _ = started(context)
    context.kill_driver()
    error = ends_with(query)
    assert isinstance(error, SparkLostError)
    assert f"(Java process {context.driver.pid}) has ended, by SIGKILL" in query.reason(error)
    query.stop()


def test_a_broken_connection_is_told_as_the_end_of_the_driver(context: FakeContext) -> None:
    """What PySpark says of that is no reason: `Answer from Java side is empty`."""
    query, writer = started(context)
    context.kill_driver()
    writer.fail(Py4JNetworkError("Answer from Java side is empty"))
    with pytest.raises(Py4JNetworkError) as raised:
        query.ended(LONG_S)
    assert "has ended, by SIGKILL" in query.reason(raised.value)


@pytest.mark.slow
def test_a_driver_that_does_not_answer_ends_the_query(context: FakeContext) -> None:
    """After its time. To stop the query then is tried for a bounded time."""
    context.settings[DRIVER_TIMEOUT] = "5ms"
    query, _ = started(context)
    context.answers.clear()
    assert "has not answered" in query.reason(ends_with(query))
    query.stop()


def test_a_stopped_session_ends_the_query(context: FakeContext) -> None:
    """A context that was stopped has lost its attributes; nobody is asked to stop the query then."""
    query, writer = started(context)
    context._jsc = None
    assert "the Spark session was stopped" in query.reason(ends_with(query))
    query.stop()
    assert not writer.ended.is_set()


def test_a_query_that_is_stopped_prints_no_error(context: FakeContext, caplog: pytest.LogCaptureFixture) -> None:
    """Neither Spark, whose level is back afterwards, nor py4j, which logs what a batch raises."""
    name = "org.apache.spark.sql.execution.streaming.MicroBatchExecution"
    context._jvm.levels[name] = "WARN"
    in_batch, stopped = threading.Event(), threading.Event()

    def write(batch: MicroBatch) -> None:
        in_batch.set()
        assert stopped.wait(LONG_S)
        raise Py4JNetworkError("the job was cancelled")

    query, writer = started(context, write)
    levels: list[object] = []
    stop = writer.stop

    def stop_late() -> None:
        levels.append(context._jvm.levels[name])
        stopped.set()
        stop()

    writer.stop = stop_late  # type: ignore[method-assign]

    def run() -> None:
        try:
            writer.batch(None, 3)
        except Exception:
            logging.getLogger("py4j.clientserver").exception("There was an exception in the Python Proxy")

    thread = threading.Thread(target=run)
    thread.start()
    assert in_batch.wait(LONG_S)
    query.stop()
    thread.join(LONG_S)
    assert levels == ["OFF"]
    assert context._jvm.levels[name] == "WARN"
    assert caplog.messages == []
    logging.getLogger("py4j.clientserver").error("something else")
    assert caplog.messages == ["something else"]


LOST = "[STREAM_FAILED] Query [id = 1] terminated with exception: Partition x-0's offset was changed from 20 to 5"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'{LOST}.\nSome data may have been lost.\n source option "failOnDataLoss" to "false".\n', LOST),
        ("It was thrown:\nTraceback (most recent call last):\n  line\nValueError: of a row\n", "ValueError: of a row"),
        ("", "Py4JError"),
    ],
)
def test_the_line_that_names_the_cause_is_the_reason(text: str, reason: str) -> None:
    """The last line that names an error, or else the first one: hints come after the cause."""
    assert reason_of(Py4JError(text)) == reason


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("org.x.JsonParseException: Unrecognized token 'no'", "org.x.JsonParseException: <withheld>"),
        (
            "AnalysisException: [CAST_INVALID_INPUT] 'abc' is no bigint",
            "AnalysisException: [CAST_INVALID_INPUT] <withheld>",
        ),
        ("[STREAM_FAILED] offset 7", "[STREAM_FAILED] <withheld>"),
        ("Job aborted", "<withheld>"),
    ],
)
def test_logs_have_the_name_of_a_reason_alone(reason: str, shown: str) -> None:
    """Spark's text may have values of rows. The driver of the program has all of it."""
    assert shown_text(marked_reason(reason), rows=False) == shown
    assert shown_text(marked_reason(reason), rows=True) == reason


def test_a_failed_query_is_logged_without_values_of_rows(context: FakeContext) -> None:
    """What Spark itself reports of it has marks around its text."""
    query, writer = started(context, lambda batch: None)
    writer.fail(Py4JNetworkError("It was thrown:\nValueError: 'secret' is no number"))
    reason = query.reason(ends_with(query))
    assert shown_text(reason, rows=False) == "ValueError: <withheld>"
    assert unmarked(reason) == "ValueError: 'secret' is no number"


def test_what_a_batch_has_raised_is_the_reason(context: FakeContext) -> None:
    """Rather than what Spark makes of it."""

    def write(batch: MicroBatch) -> None:
        raise SparkLostError(f"staging batch {batch.batch_id} was given up")

    query, writer = started(context, write)
    with pytest.raises(SparkLostError):
        writer.batch(None, 3)
    writer.fail(Py4JNetworkError("a stack trace of Java"))
    assert query.reason(ends_with(query)) == "SparkLostError: staging batch 3 was given up"
