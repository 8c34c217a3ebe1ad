"""`in_time`: takes late rows out of a stream before it is partitioned for windows."""

from __future__ import annotations

from functools import partial

from tidegate.actors.operators.watermarks.late_rows import LATE, LastEnd, LateRows
from tidegate.actors.protocol.side_outputs import OutputTag
from tidegate.api.streams.stream import Stream
from tidegate.storage.errors import ConfigurationError


def in_time(stream: Stream, last_end_ms: LastEnd, allowed_lateness_ms: int, uid: str | None = None) -> Stream:
    """The rows of a stream that are in time for windows; the late ones are its `side_output("late")`.

    `last_end_ms`: that of the windows (`EventTimeWindow.last_end_ms`). Chained to the step before, so that behind a
    source a row is judged by its own split. ConfigurationError if the stream has no event time, or its columns are not
    known.
    """
    if stream.timestamp is None:
        raise ConfigurationError(
            "windows of event time need a column of event time: name it with timestamp= of the source, or with "
            "assign_timestamps, and keep the column"
        )
    if stream.schema is None:
        raise ConfigurationError(
            "windows need to know the columns: give schema= to the step before, which calls a function"
        )
    return stream._then(
        partial(LateRows, stream.timestamp, last_end_ms, allowed_lateness_ms),
        stream.schema,
        "late_rows",
        None if uid is None else f"{uid}-late",
        stream._inputs[0][0].parallelism,
        side_outputs=(OutputTag(LATE, stream.schema),),
    )
