"""`BatchAggregateFunction` is an aggregate that a program defines over Arrow columns.

A program derives from it and calls `tg.udaf(MyFunction(), "x")`. It works wherever other aggregates do: in running
aggregates, aggregates over everything, and all windows. Its methods are called with a whole batch:

- `state` has one row for each group of the batch, and `groups` holds the group of each row: 0, 1, 2, …
- The methods return the new state of these groups, as a record batch or a mapping with an array for each state column.
- The methods keep nothing in the object. Data outside the state is lost after a failure.

The module also has the accumulator of such functions, and the functions with which all accumulators read a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.aggregates.column_expressions import ColumnLike
from tidegate.state.common.backend import ValueColumn
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.choose import newest_chosen
from tidegate.state.kernels.columns import NO_MASK, fixed_values, plain, valid_mask
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.paged import gathered
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import owned_array

_WAITING_BYTES_MAX = 8 * 1024 * 1024
"""Size of the buffered states, in bytes, at which `_Results` computes their results."""

SEEN = "seen"
"""Name of the state column that marks whether a group has any state. Functions must not use this name."""

Groups: TypeAlias = NDArray[np.int64]
"""For each row, the index of its group in the state batch."""
NewState: TypeAlias = pa.RecordBatch | Mapping[str, Any]
"""New state of all groups: a record batch, or arrays (Arrow, NumPy or lists) by column name."""


class BatchAggregateFunction(ABC):
    """A user-defined aggregate over Arrow columns, like Flink's `AggregateFunction`.

    `tg.udaf` makes an aggregate of it.
    """

    state: pa.Schema
    """The columns of the state of a group. Any Arrow types are allowed."""
    output: pa.DataType
    """The type of the result."""
    initial: ClassVar[Mapping[str, Any]] = {}
    """Initial value of each state column for a new group. Columns that are missing start as null."""

    def validate(self, *columns: pa.DataType) -> None:  # noqa: B027 - most functions take any
        """Raises ValueError if the function does not accept input columns of these types.

        Called when the program is built.
        """

    @abstractmethod
    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Adds rows to the state of their groups, and returns the new state of all groups.

        Row i has the values `columns[...][i]`, which may be null, and belongs to group `groups[i]`, a row index of
        `state`.
        """

    @abstractmethod
    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Merges partial states into the state of their groups, and returns the new state of all groups.

        Row i of `other` belongs to group `groups[i]`. A group may appear several times. The result must equal what
        `accumulate` gives for the rows behind both states. Called for windows that share slices, for sessions that grow
        together, and for aggregates over all rows.
        """

    @abstractmethod
    def result(self, state: pa.RecordBatch) -> Any:
        """Returns the result of each group in `state`, as an array of the type `output`."""

    def retract(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Removes rows that were added before, and returns the new state of all groups.

        The parameters are like the parameters of `accumulate`. A function without this method cannot aggregate a stream
        of changes.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return type(self).__name__


def can_retract(function: BatchAggregateFunction) -> bool:
    """Returns whether a function overrides `retract`."""
    return type(function).retract is not BatchAggregateFunction.retract


def check_function(function: object) -> None:
    """Raises ConfigurationError if `function` is not a `BatchAggregateFunction` that declares its state and its result
    type.
    """
    where = f"udaf({type(function).__name__})"
    if not isinstance(function, BatchAggregateFunction):
        raise ConfigurationError(f"{where}: give an object of a class that derives from tg.BatchAggregateFunction")
    state, output = getattr(function, "state", None), getattr(function, "output", None)
    if not isinstance(state, pa.Schema) or not len(state):
        raise ConfigurationError(f'{where}: state must be a schema: state = pa.schema({{"n": pa.int64()}})')
    if not isinstance(output, pa.DataType):
        raise ConfigurationError(f"{where}: output must be the type of the results: output = pa.float64()")
    strange = sorted({*function.initial} - {*state.names})
    if strange:
        raise ConfigurationError(
            f"{where}: initial names {strange}, and state has {state.names}; name only columns of state"
        )
    if SEEN in state.names or len(set(state.names)) < len(state):
        raise ConfigurationError(
            f"{where}: state columns {state.names} must differ, and none may be called {SEEN!r}; rename them"
        )
    for name, value in function.initial.items():
        try:
            pa.scalar(value, state.field(name).type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"{where}: initial {name}={value!r} is not of type {state.field(name).type} ({error}); give a "
                "value of this type"
            ) from error


def of_nothing(function: BatchAggregateFunction) -> pa.Array:
    """Returns the result of an aggregate function for a group without rows, as an array of one value."""
    arrays = [pa.array([function.initial.get(field.name)], field.type) for field in function.state]
    result = function.result(pa.RecordBatch.from_arrays(arrays, schema=function.state))
    return _as_declared(function, "result", result, function.output, 1)


@runtime_checkable
class RunningFunction(Protocol):
    """A `BatchAggregateFunction` that can also compute the result after each row in a single call for many rows of a
    group.
    """

    def accumulate_each(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> tuple[NewState, Any]:
        """Adds rows to the state of their groups.

        Returns the new state of all groups and, for each row, the result of its group right after the row.
        """
        ...


class UserAggregate:
    """Accumulator of a `BatchAggregateFunction`.

    `columns` are the state columns of the function, followed by the column that marks which slots have state.
    """

    def __init__(
        self,
        function: BatchAggregateFunction,
        inputs: Sequence[ColumnLike],
        condition: ColumnLike | None,
        columns: Sequence[ValueColumn],
    ) -> None:
        self._function = function
        self._inputs = tuple(inputs)
        self._condition = condition
        self._columns, self._seen = columns[:-1], columns[-1]
        self._initial = [pa.scalar(function.initial.get(field.name), field.type) for field in function.state]

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Adds the rows of a batch to the state of their slots, by `accumulate` of the function."""
        self._add("accumulate", batch, slots)

    def retract(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Removes the rows of a batch from the state of their slots, by `retract` of the function."""
        self._add("retract", batch, slots)

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Merges states that other accumulators stored (`parts`) into the slots, by `merge` of the function."""
        rows = np.flatnonzero(parts[-1].to_numpy())
        if len(rows):
            taken = [part.take(pa.array(rows)) for part in parts[:-1]]
            groups, distinct = grouped(slots[rows])
            other = pa.RecordBatch.from_arrays(taken, schema=self._function.state)
            new = self._function.merge(self._state(distinct), groups.astype(np.int64), other)
            self._put("merge", distinct, new)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the result of the function for each slot in `slots`."""
        return self._result(self._state(slots))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Adds the rows of a batch. Returns, for each row, the result of its slot right after the row."""
        groups, distinct = grouped(slots)
        held = self._state(distinct)
        rows, columns = self._counted(batch, len(slots))
        counts, after = np.zeros(len(slots), dtype=np.uint8), np.empty(len(slots), dtype=np.int64)
        counts[rows] = 1
        newest_chosen(groups, counts, np.full(len(distinct), -1, dtype=np.int64), after)
        places = (np.cumsum(counts, dtype=np.int64) - 1)[after]  # the position of the newest counting row
        results = []
        if len(rows):
            results.append(self._after_each(held, distinct, groups[rows].astype(np.int64), columns))
        before = np.flatnonzero(after < 0)
        if len(before):  # their group has no counting row yet
            results.append(self._result(held.take(pa.array(groups[before]))))
            places[before] = len(rows) + np.arange(len(before))
        return pa.concat_arrays(results).take(pa.array(places))

    def _after_each(self, held: pa.RecordBatch, slots: Slots, groups: Groups, columns: Sequence[pa.Array]) -> pa.Array:
        """Adds rows one by one to the state of their groups. Returns, for each row, the result of its group after that
        row.

        `held` is the state of the groups, which belongs to the slots `slots`.

        Unless the function has `accumulate_each`, it is called several times, each time with at most one row of each
        group. The results equal the results for batches of one row each.
        """
        function = self._function
        if isinstance(function, RunningFunction):
            state, results = function.accumulate_each(held, groups, *columns)
            came = distinct_integers(groups)
            new = self._declared("accumulate_each", state, len(slots)).take(pa.array(came))
            self._put("accumulate_each", slots[came], new)
            return _as_declared(function, "accumulate_each", results, function.output, len(groups))
        turns = _Turns.of(groups)
        found = _Results(self._result)
        ended = []
        state = held.take(pa.array(turns.groups))
        for rows, ending in turns:
            given = [column.take(pa.array(rows)) for column in columns]
            made = function.accumulate(state.slice(0, len(rows)), np.arange(len(rows), dtype=np.int64), *given)
            state = self._declared("accumulate", made, len(rows))
            found.add(state)
            ended.append(state.slice(len(rows) - ending))
        self._put("accumulate", slots[turns.groups], pa.concat_batches(ended[::-1]))
        return found.all().take(pa.array(np.argsort(turns.order)))

    def _result(self, state: pa.RecordBatch) -> pa.Array:
        function = self._function
        return _as_declared(function, "result", function.result(state), function.output, state.num_rows)

    def _declared(self, method: str, new: NewState, groups: int) -> pa.RecordBatch:
        arrays = _declared_state(self._function, method, new, groups)
        return pa.RecordBatch.from_arrays(arrays, schema=self._function.state)

    def _counted(self, batch: pa.RecordBatch, rows: int) -> tuple[NDArray[np.int64], list[pa.Array]]:
        """Returns the indices of the rows of a batch for which the condition is true, and their input columns."""
        columns = [input_column(batch, column) for column in self._inputs]
        mask = row_mask(batch, self._condition)
        found = rows_in(mask, rows)
        return found, [column.take(pa.array(found)) for column in columns] if len(mask) else columns

    def _add(self, method: str, batch: pa.RecordBatch, slots: Slots) -> None:
        rows, columns = self._counted(batch, len(slots))
        slots = slots[rows]
        if len(slots):
            groups, distinct = grouped(slots)
            call = getattr(self._function, method)
            self._put(method, distinct, call(self._state(distinct), groups.astype(np.int64), *columns))

    def _state(self, slots: Slots) -> pa.RecordBatch:
        """Returns the state of the function in some slots. Slots without state have the function's initial state."""
        arrays = [column.take(slots) for column in self._columns]
        seen = self._seen.raw(slots).astype(np.bool_)
        if not seen.all():
            flags = pa.array(seen)
            arrays = [pc.if_else(flags, array, first) for array, first in zip(arrays, self._initial, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._function.state)

    def _put(self, method: str, slots: Slots, new: NewState) -> None:
        arrays = _declared_state(self._function, method, new, len(slots))
        for array, column in zip(arrays, self._columns, strict=True):
            column.put(slots, array)
        self._seen.put(slots, pa.array(np.ones(len(slots), dtype=np.uint8)))


@dataclass(frozen=True, slots=True)
class _Turns:
    """Divides rows of groups into turns: turn n has the nth row of each group that has at least n rows.

    Groups are sorted by their number of rows, largest first, so the groups of a turn are a prefix of the groups of the
    previous turn. `groups` lists the groups with rows in this order, `order` lists row indices by turn and then by
    group, and `sizes` has the number of rows of each turn. Iteration yields, for each turn, its row indices and the
    number of groups for which the turn is the last one. These groups are at the end of the prefix.
    """

    groups: NDArray[np.int64]
    order: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @staticmethod
    def of(groups: Groups) -> _Turns:
        """Divides rows into turns: turn n has the nth row of each group. `groups` has the group of each row."""
        rows = np.bincount(groups)
        by_rows = np.argsort(-rows, kind="stable")[: np.count_nonzero(rows)]
        places = np.empty(len(rows), dtype=np.int64)
        places[by_rows] = np.arange(len(by_rows))
        by_group = np.argsort(places[groups], kind="stable")
        lengths = rows[by_rows]
        turns = np.arange(len(groups)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return _Turns(by_rows, by_group[np.argsort(turns, kind="stable")], np.bincount(turns))

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], int]]:
        starts = np.cumsum(self.sizes) - self.sizes
        ending = self.sizes - np.append(self.sizes[1:], 0)
        for start, size, last in zip(starts.tolist(), self.sizes.tolist(), ending.tolist(), strict=True):
            yield self.order[start : start + size], last


class _Results:
    """Collects function states and computes their results in large calls, each with a few megabytes of state at
    most.
    """

    def __init__(self, result: Callable[[pa.RecordBatch], pa.Array]) -> None:
        self._result = result
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._found: list[pa.Array] = []

    def add(self, state: pa.RecordBatch) -> None:
        """Adds the states of more groups. Their results are computed now or later, and returned by `all`."""
        self._waiting.append(state)
        self._waiting_bytes += state.nbytes
        if self._waiting_bytes >= _WAITING_BYTES_MAX:
            self._compute()

    def all(self) -> pa.Array:
        """Returns the results of all states that were added, in the order in which they were added."""
        self._compute()
        return pa.concat_arrays(self._found)

    def _compute(self) -> None:
        if self._waiting:
            self._found.append(self._result(pa.concat_batches(self._waiting)))
            self._waiting, self._waiting_bytes = [], 0


def try_accumulate(function: BatchAggregateFunction, columns: Sequence[pa.Array], rows: int) -> None:
    """Tries a function with sample rows: accumulates each row in a new group, and discards the state.

    Raises the exceptions of the function, and TypeError or ValueError for a state that does not fit the declaration.
    """
    arrays = [pa.repeat(pa.scalar(function.initial.get(field.name), field.type), rows) for field in function.state]
    state = pa.RecordBatch.from_arrays(arrays, schema=function.state)
    new = function.accumulate(state, np.arange(rows, dtype=np.int64), *columns)
    _declared_state(function, "accumulate", new, rows)


def _declared_state(function: BatchAggregateFunction, method: str, new: NewState, rows: int) -> list[pa.Array]:
    """Returns the columns of a state that a function returned, after checking them against the declared state.

    `method` is named in errors. Raises TypeError or ValueError if the columns, their types or the number of rows
    differ.
    """
    state = function.state
    if not isinstance(new, pa.RecordBatch | Mapping):
        raise TypeError(
            f"{function}.{method} returned {type(new).__name__}; it returns the new state: a record batch, "
            "or a mapping of column names to arrays"
        )
    names = new.schema.names if isinstance(new, pa.RecordBatch) else list(new)
    if sorted(names) != sorted(state.names):
        raise ValueError(
            f"{function}.{method} returned the columns {names}; the state has {state.names}"
            "; return exactly these columns"
        )
    return [_as_declared(function, f"{method}: {field.name}", new[field.name], field.type, rows) for field in state]


def _as_declared(
    function: BatchAggregateFunction, where: str, values: Any, data_type: pa.DataType, rows: int
) -> pa.Array:
    """Returns values that a function returned as an array of the declared type.

    `where` names the method in errors. Raises TypeError for values of another type, and ValueError for another number
    of rows than `rows`.
    """
    try:
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        array = array.cast(data_type)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise TypeError(
            f"{function}.{where} is not an array of {data_type}: {error}; return an array of this type"
        ) from error
    if len(array) != rows:
        raise ValueError(
            f"{function}.{where} has {len(array)} values; there are {rows} groups; return one value for each group"
        )
    return owned_array(array)


Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]


def input_column(batch: pa.RecordBatch, column: ColumnLike | None) -> pa.Array:
    """Returns the batch column called `column`, with dictionaries decoded.

    Expressions have been computed into columns before, so `column` is a name.
    """
    assert isinstance(column, str), f"{column!r} is no name of a column"
    return plain(batch.column(column))


def row_mask(batch: pa.RecordBatch, condition: ColumnLike | None, *columns: pa.Array) -> Mask:
    """Returns a mask with 1 for each row for which the condition is true and no column is null.

    Returns `NO_MASK` if all entries would be 1.
    """
    masks = [mask for mask in map(valid_mask, columns) if len(mask)]
    if condition is not None:
        masks.append(fixed_values(input_column(batch, condition).fill_null(False).cast(pa.uint8())))
    if not masks:
        return NO_MASK
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    return mask


def mark(column: ValueColumn, slots: Slots, mask: Mask) -> None:
    """Records in the validity column that these slots have a value, so that they are no longer null.

    Until the first null arrives, nothing is stored, because a new slot always gets a value from its first row.
    """
    if len(mask) > 0:
        accumulate.mark(column.track_nulls(), slots, mask)
    elif len(valid_pages := column.valid_pages) > 0:
        accumulate.mark(valid_pages, slots, mask)


def running_valid(column: ValueColumn, slots: Slots, mask: Mask) -> Mask | None:
    """Marks the slots that receive a value, as `mark` does.

    Returns, for each row, 1 if its slot has a value after the row, else 0. None if all slots have a value.
    """
    valid_pages = column.track_nulls() if len(mask) else column.valid_pages
    if not len(valid_pages):
        return None
    after = np.empty(len(slots), dtype=np.uint8)
    accumulate.mark(valid_pages, slots, mask, after)
    return after


def valid_of(column: ValueColumn, slots: NDArray[Any]) -> Mask | None:
    """Returns a mask with 1 for each of the slots that has a value, or None if all have one."""
    return gathered(column.valid_pages, slots, np.dtype(np.uint8)) if len(column.valid_pages) else None


def grouped(slots: Slots) -> tuple[NDArray[np.int32], Slots]:
    """Returns, for each entry of `slots`, its index among the distinct slots, and the distinct slots in order of first
    appearance.
    """
    encoded = pa.array(slots).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_numpy()


def counted_so_far(groups: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts, for each row i, the rows in `rows` that belong to the group of row i and are not after row i.

    `groups[i]` is the group of row i. `rows` has the indices of the rows to count.
    """
    counted = np.zeros(len(groups), dtype=np.int64)
    counted[rows] = 1
    order = np.argsort(groups, kind="stable")
    counted = counted[order]
    totals = np.cumsum(counted)
    first = np.flatnonzero(np.diff(groups[order], prepend=-1))
    found = np.empty(len(groups), dtype=np.int64)
    found[order] = totals - np.repeat(totals[first] - counted[first], np.diff(first, append=len(groups)))
    return found


def rows_in(mask: Mask, rows: int) -> NDArray[np.int64]:
    """Returns the indices of the rows whose mask is 1, or of all rows for `NO_MASK`. `rows` is the number of rows."""
    return np.flatnonzero(mask) if len(mask) else np.arange(rows)
