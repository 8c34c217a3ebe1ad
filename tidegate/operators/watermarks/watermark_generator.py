"""`WatermarkGenerator` reads timestamps from a column, and generates watermarks from them.

Rules:

- If a boolean column marks punctuations, only rows for which it is true advance event time, like Flink's punctuated
  watermarks.
- Timestamps are whole milliseconds since 1970, rounded down. Dates count from midnight UTC. Integers are milliseconds.
- The watermark is Flink's for bounded out-of-orderness: the greatest timestamp, minus the delay, minus 1 ms. The 1 ms
  is needed because a watermark promises that no row *at* its time follows, and a row with the greatest timestamp may
  follow.
- Whether a row is late depends on the watermark of the earlier rows in its split, and not on how rows are divided into
  batches. A batch is cut into pieces where this makes a difference (`pieces_of`), and the watermark advances between
  the pieces.
- After a restore the watermark continues from the checkpoint, because the event time of a split is stored with the
  position in the split. In a task without a source it starts again.
- A source with two parts reads the first part split after split. The greatest timestamp of the first part is stored for
  the split None. It is a lower bound of the watermark of the second part, also after a restore.
- Splits that are read alternately differ in event time, most of all when a job catches up. Each split therefore has its
  own greatest timestamp. The smallest of them, without idle splits, determines the watermark. When all splits are idle
  the greatest timestamp determines it, as in Flink, so no task waits.

Rules of cutting a batch into pieces:

- Later operators treat all rows of a piece by the watermark before the piece. A cut is therefore made before each row
  that its own watermark would treat differently. Such a row is behind its watermark. Most data has no such rows, so
  most batches are not cut.
- Operators define which watermarks make a difference for a row (`Due`). A window ends at one time for all its rows, so
  there is at most one cut for each window that ends within the batch, for any number of late rows. Sessions may end at
  any time, so there is a cut at each watermark for rows that could still join a session.
- No piece has more than PIECE_ROWS rows: watermarks advance within a large batch, and results need not wait for its
  end.

The event time of a window's result is its last millisecond (`WindowEnd`), as in Flink, because the end of a window is
not part of it. This time is part of the window, is later than all watermarks that were sent before the result, and
belongs to exactly one window of a following windowed step.

`EventTimeCheck` checks that a function does not change the event time of a row. Watermarks follow the times that
`assign_timestamps` has read. A later function that makes times earlier would make rows late, and they would be dropped.
Flink stores the timestamp of a record separately. Here it is a column, so a function must not change it if later steps
use it. Rules:

- The check is made only if a later step uses event time, and `assign_timestamps` is not called in between.
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
from tidegate.operators.row_values import returned_rows
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
    """Raises ConfigurationError unless a schema has this column exactly once, with a type that can be event time."""
    if schema.get_field_index(column) < 0:
        raise ConfigurationError(f"timestamp={column!r}: there is no such column; name one of {schema.names}")
    data_type = schema.field(column).type
    if not (pa.types.is_timestamp(data_type) or pa.types.is_date(data_type) or pa.types.is_int64(data_type)):
        raise ConfigurationError(
            f"timestamp={column!r}: a column of type {data_type} cannot be event time; it must be a timestamp, a "
            "date, or int64 (milliseconds since 1970)"
        )


def event_times_ms(batch: pa.RecordBatch, column: str) -> pa.Array:
    """Returns the event times of a batch as int64 milliseconds since 1970, null where the column is null.

    For a column of window ends (`WindowEnd`) it is the millisecond before the end. Raises ConfigurationError if the
    column is missing, or if its type cannot be event time.
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
    """Returns the text of a warning for an event-time column whose values look like seconds."""
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
    """Raises ConfigurationError unless a schema has this column exactly once, with type bool.

    `column` marks punctuations.
    """
    if schema.get_field_index(column) < 0:
        raise ConfigurationError(f"punctuated_by={column!r}: there is no such column; name one of {schema.names}")
    if not pa.types.is_boolean(schema.field(column).type):
        raise ConfigurationError(
            f"punctuated_by={column!r}: the column is {schema.field(column).type}; it must be bool, and true for the "
            f"rows that advance event time: with_columns({column}=...) makes it so"
        )


def _of_marked(batch: pa.RecordBatch, column: str, times: Times) -> Times:
    """Returns the times of the rows for which the punctuation column is true, and MIN_WATERMARK_MS for all other rows.

    Raises ConfigurationError if the column is missing or is not boolean.
    """
    check_punctuations(batch.schema, column)
    marks = batch.column(column).fill_null(False).to_numpy(zero_copy_only=False)
    return np.where(marks, times, MIN_WATERMARK_MS)


class WatermarkGenerator(Operator):
    """Emits each batch in pieces, and after each piece the watermark of all rows so far.

    Rows without a timestamp do not advance event time. With `nulls_to` they go to that side output instead of being
    emitted. `punctuated_by` is a boolean column that marks the rows that advance event time, or None if all rows with a
    timestamp do. `idleness_ms` is the time without rows after which a split of an unbounded source is idle, or None for
    never. `alignment` names the sources that wait for each other in event time. Raises ConfigurationError for a
    negative `max_out_of_orderness_ms`.
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
        """The rules by which later operators, also in other tasks, treat rows depending on the watermark (`Due`).

        `graph/graph_analysis.py` sets them.
        """
        self._looked_at_unit = False
        self._newest_ms: dict[int | None, int] = {}
        """The greatest timestamp of each split, in ms. `SourceSplits` has the same dict, and checkpoints store it."""

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the columns that later steps read (`after`), and the event-time and punctuation columns."""
        punctuations = () if self._punctuated_by is None else (self._punctuated_by,)
        return together(after, frozenset({self.column, *punctuations}))

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the generator.

        Raises ConfigurationError if `idleness` is set, but the task has no source, so that its splits are unknown.
        """
        super().open(context, restored)
        if self.idleness_ms is not None and not context.splits.in_turn:
            raise ConfigurationError(
                f"operator {context.name!r} (uid {context.uid!r}) has idleness=, but runs in another task than its "
                "source, so it cannot see which splits have no rows. Call assign_timestamps directly after the "
                "source, before several steps use its stream"
            )
        self._newest_ms = context.splits.newest_ms.setdefault(context.uid, self._newest_ms)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the batch in parts, and advances the watermark after each part.

        Raises OperatorError if the event-time column is missing, or if its type cannot be event time.
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
        """Returns the watermark of one split, in ms. MIN_WATERMARK_MS before its first row.

        `split` is None for splits that are read one after the other, which share a watermark.
        """
        newest_ms = self._newest_ms.get(split)
        return MIN_WATERMARK_MS if newest_ms is None else self._behind(newest_ms)

    def holding_splits(self) -> set[int]:
        """Returns the splits with the lowest watermark.

        Empty if this is the only subtask and all of its splits have the same watermark.
        """
        splits = self.context.splits.active
        lowest_ms = min(map(self.split_watermark_ms, splits), default=MIN_WATERMARK_MS)
        others_ms = self._behind(max(self._newest_ms.values(), default=MIN_WATERMARK_MS))
        if MIN_WATERMARK_MS < lowest_ms == others_ms and self.context.parallelism == 1:
            return set()
        return {split for split in splits if self.split_watermark_ms(split) == lowest_ms}

    def splits_moved(self) -> None:
        """Advances the watermark after the set of splits that hold event time back has changed."""
        self._advance()

    def _behind(self, newest_ms: int) -> int:
        return max(MIN_WATERMARK_MS, newest_ms - self._delay_ms)

    def _advance(self, current: Set[int | None] = frozenset()) -> None:
        """Advances the watermark to the lowest watermark among the splits that hold event time back.

        `current` are the splits of the rows that are being processed, which also hold event time back.
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
        """Handles the end of event time. The operator chain passes no other upstream watermark to a generator."""
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
    """The name of a column with window ends. Used as event time, each window end represents the millisecond before it.

    The object equals the plain name, so most code can treat it as a string. `event_times_ms` interprets it, and
    `same_time` distinguishes it from a plain column name.
    """

    __slots__ = ()


def same_time(one: str | None, other: str | None) -> bool:
    """Returns whether two streams have their event time in the same column, and interpret the column in the same
    way.
    """
    return one == other and isinstance(one, WindowEnd) == isinstance(other, WindowEnd)


PIECE_ROWS = 131_072
"""Greatest number of rows in a piece of a batch. Results then need not wait for a whole large batch, and cuts stay
rare.

Measured after an exchange, where all subtasks share each piece: with 32,768 rows, two subtasks got batches that cost a
third more for each row in windows.
"""

Times: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a batch: the rows with indices from `start` to `stop` (exclusive).

    `newest_ms` is the greatest time of these rows and of all rows before them.
    """

    start: int
    stop: int
    newest_ms: int


def pieces_of(
    times: Times, before_ms: int, delay_ms: int, dues: Sequence[Due], movers: Times | None = None
) -> list[Piece]:
    """Divides a batch into pieces, after each of which the watermark advances.

    The pieces are so small that later operators treat each row as if the watermark had advanced before every row.

    `times` has the time of each row in ms, MIN_WATERMARK_MS for rows without a time. `before_ms` is the greatest time
    of the rows before the batch. A watermark is the greatest time minus `delay_ms`. `dues` are the rules by which later
    operators treat rows. `movers` is like `times`, with MIN_WATERMARK_MS for rows that do not advance event time. None
    means that all rows advance it.
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
    """Divides a batch into pieces of bounded size. The batch must have no rows that are behind their watermarks."""
    pieces = []
    for start in range(0, len(times), PIECE_ROWS):
        stop = min(start + PIECE_ROWS, len(times))
        before_ms = max(before_ms, int(times[start:stop].max()))
        pieces.append(Piece(start, stop, before_ms))
    return pieces


def _cuts(times: Times, watermarks: Times, dues: Sequence[Due]) -> list[int]:
    """Returns the indices of the rows at which pieces must begin.

    Later operators then treat each row as if the watermark had advanced right before it.
    """
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
    """Returns whether the time of any row is at or before the watermark before the row.

    `least_ms` is the time of rows without a time, which are ignored.
    """
    newest_ms = max(newest_ms, least_ms + delay_ms)
    for row in range(times.shape[0]):
        if times[row] <= newest_ms - delay_ms and times[row] != least_ms:
            return True
        newest_ms = max(newest_ms, movers[row])
    return False


@dataclass(slots=True, eq=False)
class EventTimeCheck:
    """Checks that a function does not change the event time of rows.

    `used` is True if later steps use the column as event time.

    `used` is set when such a step is added to the program. The function's operator refers to the same `EventTimeCheck`.
    """

    column: str
    used: bool = False

    def check(self, before: pa.RecordBatch, after: pa.RecordBatch) -> None:
        """Raises ConfigurationError if a row of `after` has another event time than the row of `before` with the same
        index.
        """
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
        """Returns a wrapper of `fn`, which returns any number of rows for a row, that checks the event times of its
        results.
        """
        return self._checked(fn) if self.used else fn

    def _checked(self, fn: Callable[[dict[str, Any]], Iterable[Row]]) -> Callable[[dict[str, Any]], Iterator[Row]]:
        column = self.column

        def checked(row: dict[str, Any]) -> Iterator[Row]:
            time = row.get(column)
            for result in returned_rows(fn(row)):
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
    """Returns whether two values of one type are the same time.

    When clocks are set back, an hour occurs twice. Python compares its two occurrences as equal, so `fold` is compared
    as well.
    """
    return time == other and getattr(time, "fold", 0) == getattr(other, "fold", 0)
