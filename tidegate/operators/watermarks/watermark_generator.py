"""`WatermarkGenerator` reads timestamps from a column, and generates watermarks from them.

Rules:

- With a column of punctuations only the rows for which it is true advance event time, like Flink's punctuated
  watermarks.
- Timestamps are whole milliseconds since 1970, rounded down. Dates count from midnight UTC. Integers are milliseconds.
- The watermark is Flink's for bounded out-of-orderness: the greatest timestamp, minus the delay, minus 1 ms. The 1 ms
  is needed because a watermark promises that no row *at* its time follows, and a row with the greatest timestamp may
  follow.
- A row is judged by the watermark of the earlier rows in its split, independent of batches. A batch is cut where that
  makes a difference (`pieces_of`), and the watermark advances between the pieces.
- After a restore the watermark continues from the checkpoint, because the event time of a split is stored with the
  position in the split. In a task without a source it starts again.
- In a source with two parts the first part is read one split after the other, and its greatest timestamp is the one of
  split None. It stays the least watermark of the second part, also after a restore.
- Splits that are read in turn differ in event time, most of all when a job catches up. Each split therefore has its own
  greatest timestamp, and the smallest of these counts, without idle splits. When all are idle the greatest counts, as
  in Flink, so no task waits.

Rules of cutting a batch into pieces:

- A piece is judged by the watermark at its first row. A cut therefore comes before each row whose own watermark would
  have another effect. Such a row is behind its watermark. Ordinary data has no such rows and is not cut.
- Operators that judge rows define which watermarks make a difference (`Due`). A window ends at one time for all its
  rows, so there is at most one cut for each window that ends within the batch, for any number of late rows.
  Sessions may end at any time, so rows that could still join one are cut at each watermark.
- No piece has more than PIECE_ROWS rows: watermarks advance within a large batch, and results need not wait for its
  end.

The event time of a window's result is its last millisecond (`WindowEnd`), as in Flink, because the end of a window is
not part of it. That time is in the window, no watermark that was sent before the result has reached it, and the next
window contains it.

`EventTimeCheck` checks that a function passes on the event time of each row. Watermarks follow the times that
`assign_timestamps` has read. A later function that makes times earlier would make rows late, and they would be dropped.
Flink stores the timestamp of a record separately. Here it is a column, so a function must not change it if later steps
use it. Rules:

- It is checked only if a later step uses event time, and `assign_timestamps` is not called in between.
- It applies to functions that make rows of a single row: `map` and `flat_map`. Other functions may set their own times.
- Times are compared in milliseconds, so another unit or type of the same time is not a change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.operator import Columns, Emit, Operator, OperatorContext, together
from tidegate.operators.operator_errors import blame
from tidegate.operators.source_splits import Due, as_they_are
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.kernels.columns import fixed_values, plain, valid_mask
from tidegate.state.kernels.jit import kernel
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.units import parse_duration_ms

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

_PER_MS = {"us": 1000, "ns": 1_000_000}
_MS_PER_DAY = 86_400_000
_SECONDS_OF_2000, _SECONDS_OF_2100 = 946_684_800, 4_102_444_800
_SECONDS_MAX = ((1 << 63) - 1) // 1000


def check_timestamp_column(schema: pa.Schema, column: str) -> None:
    """Raises ConfigurationError unless a schema has this column, once, of a type that can be event time."""
    if schema.get_field_index(column) < 0:
        raise ConfigurationError(f"timestamp={column!r}: there is no such column; name one of {schema.names}")
    data_type = schema.field(column).type
    if not (pa.types.is_timestamp(data_type) or pa.types.is_date(data_type) or pa.types.is_int64(data_type)):
        raise ConfigurationError(
            f"timestamp={column!r}: a column of type {data_type} cannot be event time; it must be a timestamp, a "
            "date, or int64 (milliseconds since 1970)"
        )


def event_times_ms(batch: pa.RecordBatch, column: str) -> pa.Array:
    """Returns the timestamps of a batch as int64 milliseconds, null where the column is null.

    For a `WindowEnd` it is the millisecond before the end. Raises ConfigurationError as `check_timestamp_column` does.
    """
    check_timestamp_column(batch.schema, column)
    values = plain(batch.column(column))
    raw = fixed_values(values).astype(np.int64, copy=False)
    if pa.types.is_date32(values.type):
        raw = raw * _MS_PER_DAY
    elif pa.types.is_timestamp(values.type) and values.type.unit != "ms":
        if values.type.unit == "s":  # What milliseconds have no number for is as far away as can be.
            raw = np.clip(raw, -_SECONDS_MAX, _SECONDS_MAX) * 1000
        else:
            raw = raw // _PER_MS[values.type.unit]
    if isinstance(column, WindowEnd):
        raw = raw - 1
    mask = valid_mask(values)
    return pa.array(raw, mask=mask == 0 if len(mask) else None)


def look_like_seconds(times_ms: pa.Array | pa.ChunkedArray) -> bool:
    """Returns whether integers that should be milliseconds look like seconds of the years 2000 to 2100.

    As milliseconds they would all be in January and February 1970.
    """
    bounds = pc.min_max(times_ms).as_py()
    least, greatest = bounds["min"], bounds["max"]
    return least is not None and least >= _SECONDS_OF_2000 and greatest <= _SECONDS_OF_2100


def seconds_advice(column: str, times_ms: pa.Array | pa.ChunkedArray) -> str:
    """Returns the advice for a column that looks like seconds."""
    first = times_ms.drop_null()[0].as_py()
    return (
        f"timestamp={column!r}: int64 event times are milliseconds since 1970, and {first} is in early 1970 then. If "
        f"the column counts seconds, use timestamp=(pl.col({column!r}) * 1000).alias({column!r})"
    )


def check_event_time(schema: pa.Schema, column: str, punctuated_by: str | None) -> None:
    """Raises ConfigurationError unless a schema has the event-time column and, if named, the column of punctuations."""
    check_timestamp_column(schema, column)
    if punctuated_by is not None:
        check_punctuations(schema, punctuated_by)


def check_punctuations(schema: pa.Schema, column: str) -> None:
    """Raises ConfigurationError unless a schema has this column exactly once, and it is boolean."""
    if schema.get_field_index(column) < 0:
        raise ConfigurationError(f"punctuated_by={column!r}: there is no such column; name one of {schema.names}")
    if not pa.types.is_boolean(schema.field(column).type):
        raise ConfigurationError(
            f"punctuated_by={column!r}: the column is {schema.field(column).type}; it must be bool, and true for the "
            f"rows that advance event time: with_columns({column}=...) makes it so"
        )


def _of_marked(batch: pa.RecordBatch, column: str, times: Times) -> Times:
    """Returns the times of rows for which the column of punctuations is true, and MIN_WATERMARK_MS for all other rows.
    Raises ConfigurationError.
    """
    check_punctuations(batch.schema, column)
    marks = batch.column(column).fill_null(False).to_numpy(zero_copy_only=False)
    return np.where(marks, times, MIN_WATERMARK_MS)


class WatermarkGenerator(Operator):
    """Passes batches on in pieces, each followed by the watermark of all rows so far.

    Rows without a timestamp do not count. With `nulls_to` they go to that side output instead of being passed on.
    `punctuated_by` is a boolean column that marks the rows that count, or None if all rows with a timestamp count.
    `idleness_ms` is the time without rows after which a split of an unbounded source is idle, or None for never.
    `alignment` names the sources that wait for each other in event time. Raises ConfigurationError for a negative
    delay.
    """

    generates_watermarks = True

    def __init__(
        self,
        column: str,
        max_out_of_orderness_ms: int = 0,
        idleness_ms: int | None = None,
        nulls_to: str | None = None,
        punctuated_by: str | None = None,
        alignment: WatermarkAlignment | None = None,
    ) -> None:
        if max_out_of_orderness_ms < 0:
            raise ConfigurationError(
                f'max_out_of_orderness must not be negative: {max_out_of_orderness_ms} ms; give a duration such as "5s"'
            )
        self.column = column
        """Name of the event-time column."""
        self._delay_ms = max_out_of_orderness_ms + 1
        self.idleness_ms = idleness_ms
        self._nulls_to = nulls_to
        self._punctuated_by = punctuated_by
        self.alignment = alignment
        self.dues_behind: Sequence[Due] = (as_they_are,)
        """The rules (`Due`) by which later operators, including operators of other tasks, treat rows.
        `graph/event_time.py` sets it.
        """
        self._looked_at_unit = False
        self._newest_ms: dict[int | None, int] = {}
        """The greatest timestamp of each split. Shared with `SourceSplits`, which a checkpoint contains."""

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the needed columns, with the event-time column."""
        punctuations = () if self._punctuated_by is None else (self._punctuated_by,)
        return together(after, frozenset({self.column, *punctuations}))

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Raises ConfigurationError if `idleness` is set, but the splits of this task are unknown."""
        super().open(context, restored)
        if self.idleness_ms is not None and not context.splits.in_turn:
            raise ConfigurationError(
                f"operator {context.name!r} (uid {context.uid!r}) has idleness=, but runs in another task than its "
                "source, so it cannot see which splits have no rows. Call assign_timestamps directly after the "
                "source, before several steps use its stream"
            )
        self._newest_ms = context.splits.newest_ms.setdefault(context.uid, self._newest_ms)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the batch in pieces. Raises OperatorError if it lacks the column, or if the column's type is not an
        event time.
        """
        with blame(self.context, batch):
            dated = event_times_ms(batch, self.column)
        if not self._looked_at_unit and dated.null_count < len(dated):
            self._looked_at_unit = True
            if pa.types.is_int64(batch.schema.field(self.column).type) and look_like_seconds(dated):
                log.warning(
                    "%s (uid %r): %s",
                    self.context.name,
                    self.context.uid,
                    seconds_advice(self.column, dated),
                )
        if dated.null_count and self._nulls_to is not None:
            self.context.emit_aside(self._nulls_to, batch.filter(dated.is_null()))
            batch, dated = batch.filter(dated.is_valid()), dated.drop_null()
        if len(dated):
            self._emit_pieces(batch, dated, emit)
        self._advance()

    def _emit_pieces(self, batch: pa.RecordBatch, dated: pa.Array, emit: Emit) -> None:
        times = (dated.fill_null(MIN_WATERMARK_MS) if dated.null_count else dated).to_numpy()
        splits = self.context.splits
        split = splits.current
        self._advance({split})
        before_ms = self._newest_ms.get(split, MIN_WATERMARK_MS)
        with blame(self.context, batch):
            movers = None if self._punctuated_by is None else _of_marked(batch, self._punctuated_by, times)
            pieces = pieces_of(times, before_ms, self._delay_ms, self.dues_behind, movers)
        for piece in pieces:
            emit(batch if len(pieces) == 1 else batch.slice(piece.start, piece.stop - piece.start))
            if piece.newest_ms > MIN_WATERMARK_MS or not (dated.null_count or self._punctuated_by):
                self._newest_ms[split] = piece.newest_ms
            self._advance({split})

    def split_watermark_ms(self, split: int | None) -> int:
        """Returns the watermark of one split, MIN_WATERMARK_MS before its first row. `None` stands for splits that are
        read one after the other.
        """
        newest_ms = self._newest_ms.get(split)
        return MIN_WATERMARK_MS if newest_ms is None else self._behind(newest_ms)

    def holding_splits(self) -> set[int]:
        """Returns the splits with the lowest watermark, if other splits of the source are ahead or may be."""
        splits = self.context.splits.active
        lowest_ms = min(map(self.split_watermark_ms, splits), default=MIN_WATERMARK_MS)
        others_ms = self._behind(max(self._newest_ms.values(), default=MIN_WATERMARK_MS))
        if MIN_WATERMARK_MS < lowest_ms == others_ms and self.context.parallelism == 1:
            return set()
        return {split for split in splits if self.split_watermark_ms(split) == lowest_ms}

    def splits_moved(self) -> None:
        """Advances the watermark when a split no longer holds event time back."""
        self._advance()

    def _behind(self, newest_ms: int) -> int:
        return max(MIN_WATERMARK_MS, newest_ms - self._delay_ms)

    def _advance(self, current: Set[int | None] = frozenset()) -> None:
        """Advances the watermark to the lowest time among the splits that hold event time back.

        `current` are the splits of the rows being processed, which also hold it back.
        """
        splits = self.context.splits
        newest = self._newest_ms
        if splits.current is None:
            newest_ms = newest.get(None)
        elif splits.all_idle and not current:
            newest_ms = max(newest.values(), default=None)
        elif (held := splits.active | current) <= newest.keys():
            newest_ms = min((newest[split] for split in held), default=None)
        else:
            newest_ms = None  # A split that has had no rows so far may have any timestamp.
        first_part_ms = newest.get(None)
        if first_part_ms is not None:
            newest_ms = first_part_ms if newest_ms is None else max(first_part_ms, newest_ms)
        if newest_ms is not None:
            own_ms = self._behind(newest_ms)
            self.watermark_ms = own_ms if self.watermark_ms is None else max(self.watermark_ms, own_ms)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Ignores watermarks from upstream, except the end of event time."""
        assert watermark_ms == MAX_WATERMARK_MS, "other watermarks end before a generator"
        self.watermark_ms = watermark_ms
        return iter(())


Duration: TypeAlias = str | timedelta | int


@dataclass(frozen=True, slots=True)
class WatermarkAlignment:
    """Makes splits of this source wait for the slowest split of all sources of the job in the same group.

    This is Flink's `withWatermarkAlignment`. A split whose watermark is more than `max_drift` ahead of the lowest
    watermark in the group is not read until the slower splits have caught up. Tasks report their watermarks every
    `update_interval`, and at once when they have to wait. `max_drift` and `update_interval` are durations such as
    "30s". Raises ConfigurationError for a group without a name, and for invalid durations. Example:
    `tg.WatermarkAlignment("orders", max_drift="30s")`.
    """

    group: str
    max_drift: Duration
    update_interval: Duration = "1s"
    max_drift_ms: int = field(init=False, repr=False, compare=False)
    update_interval_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.group, str) or not self.group:
            raise ConfigurationError(f"WatermarkAlignment: group={self.group!r}: give the group a name")
        drift_ms = parse_duration_ms(self.max_drift, setting="WatermarkAlignment: max_drift")
        interval_ms = parse_duration_ms(self.update_interval, setting="WatermarkAlignment: update_interval")
        if interval_ms == 0:
            raise ConfigurationError(
                "WatermarkAlignment: update_interval must be greater than 0"
                f', such as "1s", not {self.update_interval!r}'
            )
        object.__setattr__(self, "max_drift_ms", drift_ms)
        object.__setattr__(self, "update_interval_ms", interval_ms)


class WindowEnd(str):
    """The name of a column of window ends. As event time each end stands for the millisecond before it.

    It equals a plain name, and code that only passes the name on can treat it as one. `event_times_ms` interprets it,
    and `same_time` distinguishes it from a plain column of that name.
    """

    __slots__ = ()


def same_time(one: str | None, other: str | None) -> bool:
    """Returns whether two streams have their event time in the same column, and read it in the same way."""
    return one == other and isinstance(one, WindowEnd) == isinstance(other, WindowEnd)


PIECE_ROWS = 131_072
"""Limit of rows in a piece. Results then need not wait for a whole large batch, and cuts stay rare.

Turns of the source and batches of slow rows are limited elsewhere. After an exchange all subtasks share each piece:
with 32,768 rows, two subtasks got batches that cost a third more for each row in windows.
"""

Times: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `[start, stop)` of a batch. `newest_ms` is the greatest time of these rows and all rows before them."""

    start: int
    stop: int
    newest_ms: int


def pieces_of(
    times: Times, before_ms: int, delay_ms: int, dues: Sequence[Due], movers: Times | None = None
) -> list[Piece]:
    """Cuts a batch whose rows have these times into pieces. A row without a time has MIN_WATERMARK_MS.

    `before_ms` is the greatest time of the rows before the batch. A watermark is the greatest time minus `delay_ms`.
    `movers` has MIN_WATERMARK_MS instead of the time for rows that do not advance event time. None means that all rows
    advance it.
    """
    rows = len(times)
    moving = times if movers is None else movers
    newest_ms = max(before_ms, int(moving.max()))
    if not _any_behind(times, moving, before_ms, delay_ms, MIN_WATERMARK_MS):
        return _in_order(moving, before_ms)
    before = np.empty(rows, np.int64)
    before[0] = before_ms
    np.maximum(np.maximum.accumulate(moving[:-1]), before_ms, out=before[1:])
    watermarks = np.maximum(before, MIN_WATERMARK_MS + delay_ms) - delay_ms
    starts = [
        start for cut, stop in _pairs(_cuts(times, watermarks, dues), rows) for start in range(cut, stop, PIECE_ROWS)
    ]
    return [Piece(start, stop, int(before[stop]) if stop < rows else newest_ms) for start, stop in _pairs(starts, rows)]


def _in_order(times: Times, before_ms: int) -> list[Piece]:
    """Returns pieces of bounded size for a batch without rows behind the watermarks of the batch."""
    pieces = []
    for start in range(0, len(times), PIECE_ROWS):
        stop = min(start + PIECE_ROWS, len(times))
        before_ms = max(before_ms, int(times[start:stop].max()))
        pieces.append(Piece(start, stop, before_ms))
    return pieces


def _cuts(times: Times, watermarks: Times, dues: Sequence[Due]) -> list[int]:
    """Returns where pieces must begin, so that the watermark at the beginning judges every row as its own would."""
    late: list[tuple[int, int]] = []
    behind = np.flatnonzero((times <= watermarks) & (times > MIN_WATERMARK_MS))
    for due in dues:
        limits = due(times[behind], watermarks[behind])
        found = np.flatnonzero(limits <= watermarks[behind])
        late += zip(behind[found].tolist(), limits[found].tolist(), strict=True)
    cuts = [0]
    for row, limit_ms in sorted(late) if len(dues) > 1 else late:
        if limit_ms > watermarks[cuts[-1]]:
            cuts.append(row)
    return cuts


def _pairs(starts: Sequence[int], rows: int) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], rows], strict=True))


@kernel
def _any_behind(times: Times, movers: Times, newest_ms: int, delay_ms: int, least_ms: int) -> bool:
    """Returns whether any row is at or behind the watermark before it. `least_ms` marks a row without a time."""
    newest_ms = max(newest_ms, least_ms + delay_ms)
    for row in range(times.shape[0]):
        if times[row] <= newest_ms - delay_ms and times[row] != least_ms:
            return True
        newest_ms = max(newest_ms, movers[row])
    return False


@dataclass(slots=True, eq=False)
class EventTimeCheck:
    """Checks that a function keeps the event time of each row. `used` is True if later steps use the column.

    A program sets `used` when it adds such a step. The function's operator has the same object.
    """

    column: str
    used: bool = False

    def check(self, before: pa.RecordBatch, after: pa.RecordBatch) -> None:
        """Raises ConfigurationError if the rows of `after`, one for each row of `before`, have other times."""
        if not self.used or after.schema.get_field_index(self.column) < 0:
            return
        if before.column(self.column).equals(after.column(self.column)):
            return  # most functions: quicker than to make milliseconds of both
        old, new = event_times_ms(before, self.column), event_times_ms(after, self.column)
        if old.equals(new):
            return
        differ = np.fromiter((a != b for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)), bool, len(old))
        row = int(np.flatnonzero(differ)[0])
        raise self._changed(before.column(self.column)[row], after.column(self.column)[row])

    def results(self, fn: Callable[[dict[str, Any]], Iterable[Row]]) -> Callable[[dict[str, Any]], Iterable[Row]]:
        """Wraps `fn`, which returns any number of rows for one row, so that the times of its results are checked."""
        return self._checked(fn) if self.used else fn

    def _checked(self, fn: Callable[[dict[str, Any]], Iterable[Row]]) -> Callable[[dict[str, Any]], Iterator[Row]]:
        column = self.column

        def checked(row: dict[str, Any]) -> Iterator[Row]:
            time = row.get(column)
            for result in fn(row):
                if column in result and type(result[column]) is type(time) and not _same(time, result[column]):
                    raise self._changed(time, result[column])
                yield result

        return checked

    def _changed(self, before: object, after: object) -> ConfigurationError:
        return ConfigurationError(
            f"the function has changed the column of event time, {self.column!r}, from {before} to {after}; watermarks "
            "follow the former times, so later steps would treat the row as late. Give the new time another name, or "
            "call assign_timestamps after the function"
        )


def _same(time: object, other: object) -> bool:
    """Returns whether two values of one type are the same moment.

    When clocks are set back, an hour occurs twice. Python treats its two occurrences as equal, so `fold` is compared.
    """
    return time == other and getattr(time, "fold", 0) == getattr(other, "fold", 0)
