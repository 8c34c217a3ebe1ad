"""`JoinOperator` is the base of joins by event time, which store the rows of each input until event time has passed
them.

Rules:

- Keys are stored under the names of the left input. Their names on the right may differ.
- A row that the watermark has passed is late. It is dropped and counted. Lateness depends only on watermarks, and not
  on how rows are divided into batches. The watermark that each key group has reached is stored as state. Without this
  state there would be no watermark after a restore until both inputs have sent one, and a row that was late before
  would be joined although its window or its partners are gone.
- State is two row tables, `left` and `right`. They store the key, the event time or the end of the window, and the
  columns of the result.

`JoinSides` describes the columns: the keys of each input, the columns of the result, and combinations that are refused.
The result has the key columns once, with the names of the left input. If both inputs have a column, the right one gets
`suffix`. A row without a partner, in joins that keep such rows, has null in the columns of the other input.

`paired` finds the pairs of two tables: it numbers the keys of both sides by one index, sorts the right rows by key,
and repeats each left row for the right rows of its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.watermarks.late_rows import LATE_RECORDS, GroupMoments
from tidegate.operators.watermarks.watermark_generator import event_times_ms
from tidegate.protocol.failures import ChangedTypeError, OperatorError
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import columns_text, own_name
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STATE_NAMES = ("left", "right")
MOMENT = own_name("join_time_ms")
"""Name of the stored column with the time, in ms, at which a row expires: its event time, or the end of its window."""

_REACHED_STATE = "join.reached"

Times = NDArray[np.int64]


class JoinOperator(RowsOperator):
    """Base class of joins by event time. Stores rows of two inputs with these `schemas`.

    Raises ConfigurationError for columns that do not match.
    """

    drops_late_rows = True
    """True if rows behind the watermark are dropped. The watermark that was reached is then part of each snapshot."""

    def __init__(self, sides: JoinSides, schemas: tuple[pa.Schema, pa.Schema], how: JoinHow) -> None:
        self.sides = sides
        self.how = how
        self.schema = sides.output_schema(*schemas, how)
        """Columns of the result, without the columns of windows."""
        self.values = sides.stored_values(*schemas, how)
        """For each input, maps its columns other than keys to their names in the result."""
        stored = {
            name: pa.schema([pa.field(MOMENT, pa.int64()), *(self.schema.field(value) for value in values.values())])
            for name, values in zip(STATE_NAMES, self.values, strict=True)
        }
        super().__init__(key_schema(schemas[LEFT], sides.keys[LEFT]), stored)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the stored rows and the watermark that each key group has reached, and creates the counter of late
        rows.
        """
        groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
        self._reached = GroupMoments(groups, _REACHED_STATE, "watermark_ms", "joins by event time")
        for table in restored:
            if table.kind is StateKind.UNION:
                self._reached.load(table)
        super().open(context, restored)
        self.late = context.metrics.counter(LATE_RECORDS)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Processes a batch of the left input."""
        self.process_input(LEFT, batch, emit)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the stored rows and of the watermark that each key group has reached."""
        frozen = self.changes(cut)
        return replace(frozen, states=(*frozen.states, self._reached.freeze())) if self.drops_late_rows else frozen

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns the changes of the stored rows since the last snapshot, without the reached watermarks."""
        return super().snapshot(cut)

    def reach(self, watermark_ms: int) -> None:
        """Records that the watermark of both inputs has reached `watermark_ms`."""
        for groups, reached_ms in [*self._reached.runs()]:
            if reached_ms < watermark_ms:  # After a restore it may have been further.
                self._reached.advance(groups, watermark_ms)

    def reached(self, keys: pa.RecordBatch) -> Times | int:
        """Returns the greatest watermark so far of each key's group, in ms, or a single number if it is equal for all
        keys.
        """
        return self._reached.of_keys(keys, self.context.max_parallelism)

    def rows_of(self, index: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Times, list[pa.Array]]:
        """Returns the keys, the event times in ms, and the stored values of a batch of the input `index`.

        Raises OperatorError for rows without a time, and ChangedTypeError for columns of other types than declared.
        """
        with blame(self.context, batch):
            keys = key_columns(batch, self.sides.keys[index]).rename_columns(self.keys.names)
            values = plain_values(batch, list(self.values[index]))
            time = self.sides.times[index]
            times = pa.repeat(0, batch.num_rows) if time is None else event_times_ms(batch, time)
        expected = self.stored[STATE_NAMES[index]].types[1:]
        if keys.schema.types != self.keys.types or [value.type for value in values] != expected:
            raise ChangedTypeError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): a batch of the {STATE_NAMES[index]} input "
                f"has other types than its stream was declared with: {batch.schema}; cast them with with_columns"
            )
        if times.null_count:
            raise OperatorError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): {times.null_count} rows of the "
                f"{STATE_NAMES[index]} input have no event time in {self.sides.times[index]!r}; filter them out before "
                "the join"
            )
        self.check_owner(keys)
        return keys, times.to_numpy(), values

    def keep(self, index: int, keys: pa.RecordBatch, moments: Times, values: Sequence[pa.Array]) -> None:
        """Appends rows to the state of the input `index`. `moments` are their times in ms."""
        self.append(index, keys, [pa.array(moments), *values])

    def result(self, left: pa.RecordBatch | None, right: pa.RecordBatch | None, rows: int) -> pa.RecordBatch:
        """Returns result rows made of stored rows: row i of `left` is joined with row i of `right`.

        `left` or `right` is None if the rows have no partner. Its columns are then null in the result. The keys come
        from `left` if it is given. `rows` is the number of rows.
        """
        found: dict[str, pa.Array] = {}
        for side in (right, left):
            found |= {} if side is None else dict(zip(side.schema.names, side.columns, strict=True))
        arrays = [found[f.name] if f.name in found else pa.nulls(rows, f.type) for f in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


JoinHow: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]

LEFT, RIGHT = 0, 1
"""Indices of the left and the right input."""


@dataclass(frozen=True, slots=True)
class JoinSides:
    """Key and event-time columns of both inputs. A join without event time has None for the time columns.

    Raises ConfigurationError if the columns of the inputs do not match each other.
    """

    keys: tuple[tuple[str, ...], tuple[str, ...]]
    times: tuple[str | None, str | None]
    suffix: str = "_right"

    def __post_init__(self) -> None:
        left, right = self.keys
        if not isinstance(self.suffix, str):
            raise ConfigurationError(
                f"join: suffix={self.suffix!r}: pass the text to append to names that both inputs have"
            )
        if not left or len(left) != len(right):
            raise ConfigurationError(
                f"join: on= needs at least one column, and as many of the right stream as of the left; they are "
                f"{list(left)} and {list(right)}"
            )

    def check_keys(self, left: pa.Schema, right: pa.Schema) -> None:
        """Raises ConfigurationError unless the key columns exist and have the same types on both sides."""
        types = [key_schema(schema, keys).types for schema, keys in zip((left, right), self.keys, strict=True)]
        for name1, name2, type1, type2 in zip(*self.keys, *types, strict=True):
            if type1 != type2:
                raise ConfigurationError(
                    f"join: key {name1!r} of the left stream is {type1} and {name2!r} of the right is {type2}; cast "
                    "one of them with with_columns"
                )

    def right_names(self, left: pa.Schema, right: pa.Schema) -> dict[str, str]:
        """Maps the columns of the right input other than keys to their names in the result.

        Raises ConfigurationError if a name would occur twice in the result.
        """
        names = {}
        for name in right.names:
            if name not in self.keys[RIGHT]:
                names[name] = name + self.suffix if name in left.names else name
        taken = [*left.names, *names.values()]
        doubles = sorted({name for name in taken if taken.count(name) > 1})
        if doubles:
            raise ConfigurationError(
                f"join: {doubles} would occur twice in the result; the left stream has {columns_text(left)}, the right "
                f"{columns_text(right)}: give another suffix=, or rename columns with select"
            )
        return names

    def output_schema(self, left: pa.Schema, right: pa.Schema, how: JoinHow) -> pa.Schema:
        """Returns the columns of the result: the columns of the left input, then the right columns without the keys.

        Raises ConfigurationError for an unknown kind of join, or for columns that do not match.
        """
        check_how(how)
        self.check_keys(left, right)
        keys = key_schema(left, self.keys[LEFT])
        fields = [keys.field(f.name) if f.name in keys.names else _plain_field(f) for f in left]
        if how in ("semi", "anti"):
            return pa.schema(fields)
        names = self.right_names(left, right)
        return pa.schema([*fields, *(_plain_field(f).with_name(names[f.name]) for f in right if f.name in names)])

    def stored_values(self, left: pa.Schema, right: pa.Schema, how: JoinHow) -> tuple[dict[str, str], dict[str, str]]:
        """Returns, for each input, its stored columns other than keys, mapped to their names in the result."""
        of_left = {name: name for name in left.names if name not in self.keys[LEFT]}
        return of_left, {} if how in ("semi", "anti") else self.right_names(left, right)


def check_how(how: str) -> None:
    """Raises ConfigurationError if `how` is not a kind of join."""
    if how not in get_args(JoinHow):
        raise ConfigurationError(f"join: how={how!r} is not one of {list(get_args(JoinHow))}; give one of them")


def plain_values(batch: pa.RecordBatch, names: Sequence[str]) -> list[pa.Array]:
    """Returns columns of a batch with dictionaries decoded."""
    columns = [batch.column(name) for name in names]
    return [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in columns]


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, decoded_type(field.type))


Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which right rows belong to each left row: the partners of left row i are the rows `order[starts[i]:starts[i] +
    counts[i]]` of the right side.

    `lonely` has the indices of the right rows that belong to no left row.
    """

    order: Positions
    starts: Positions
    counts: Positions
    lonely: Positions

    def pairs(self, rows_max: int) -> Iterator[tuple[Positions, Positions]]:
        """Yields the row indices of the pairs, as an array of left indices and an array of right indices, with up to
        about `rows_max` pairs at a time.

        Pairs are in the order of the left rows. The partners of one left row may be divided between two yields.
        """
        ends = np.cumsum(self.counts)
        total = int(ends[-1]) if len(ends) else 0
        if total <= rows_max:
            left = np.repeat(np.arange(len(ends), dtype=np.int64), self.counts)
            if total:
                yield left, self.order[self.starts[left] + _within(self.counts, ends)]
            return
        for start in range(0, total, rows_max):
            numbers = np.arange(start, min(start + rows_max, total), dtype=np.int64)
            left = np.searchsorted(ends, numbers, side="right")
            within = numbers - (ends[left] - self.counts[left])
            yield left, self.order[self.starts[left] + within]


def _within(counts: Positions, ends: Positions) -> Positions:
    """Returns, for each pair, the position of its right row among the partners of its left row.

    `ends` are the cumulative sums of `counts`.
    """
    within: Positions = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - counts, counts)
    return within


def paired(left: pa.RecordBatch, right: pa.RecordBatch, keys: Sequence[str]) -> Pairing:
    """Pairs the rows of two batches of key columns that have equal values.

    A row with a null in one of `keys` has no partner.
    """
    index = KeyIndex(tuple(left.schema.names))
    of_left = index.upsert(left).slots
    of_right = index.upsert(right).slots
    numbers = index.size
    matching = without_nulls(right.select(list(keys)))
    order = np.argsort(of_right, kind="stable")
    order = order[matching[order]].astype(np.int64)
    per_key = np.bincount(of_right[order], minlength=numbers)
    starts = np.concatenate(([0], np.cumsum(per_key)))[:-1]
    met = np.zeros(numbers, dtype=np.bool_)
    met[of_left] = True
    lonely = np.flatnonzero(~(met[of_right] & matching))
    return Pairing(order, starts[of_left], per_key[of_left].astype(np.int64), lonely)


def without_nulls(keys: pa.RecordBatch) -> NDArray[np.bool_]:
    """Returns a mask that is True for the rows without any null."""
    whole = np.ones(keys.num_rows, dtype=np.bool_)
    for column in keys.columns:
        if column.null_count:
            whole &= column.is_valid().to_numpy(zero_copy_only=False)
    return whole
