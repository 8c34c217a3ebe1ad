"""`BatchAggregateFunction`: an aggregate that a program brings along, over Arrow columns; and its accumulator.

A program derives from it and says `tg.udaf(MyFunction(), "x")`. It is used wherever other aggregates are: running
aggregates, aggregates over everything, and windows of all kinds. Its methods are called with a batch at a time:

- `state` has a row for each group that the rows are of, and `groups` says of each row which one: 0, 1, 2, …
- They return the new state of these groups: a record batch, or a mapping with an array for each column of the state.
- They keep nothing themselves: what is not in the state is gone after a failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.actors.operators.aggregates.aggregated_rows import Slots, grouped, input_column, row_mask, rows_in
from tidegate.actors.operators.aggregates.column_expressions import ColumnLike
from tidegate.actors.state_backends.common.backend import ValueColumn
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.owned_arrays import owned_array

SEEN = "seen"
"""The state column that says whether a group has any state yet; no column of a function's may be called so."""

Groups: TypeAlias = NDArray[np.int64]
"""Of each row, the position of its group in the state."""
NewState: TypeAlias = pa.RecordBatch | Mapping[str, Any]
"""The state of all groups: a record batch, or arrays (of Arrow, NumPy, or lists) by the names of its columns."""


class BatchAggregateFunction(ABC):
    """An aggregate of one's own: Flink's `AggregateFunction` over Arrow columns. `tg.udaf` makes an aggregate of it."""

    state: pa.Schema
    """The columns of a group's state, of any Arrow types."""
    output: pa.DataType
    """The type of the results."""
    initial: ClassVar[Mapping[str, Any]] = {}
    """What the state of a new group holds, by column. Null for a column that is not named."""

    def validate(self, *columns: pa.DataType) -> None:  # noqa: B027 - most functions take any
        """Raise ValueError if it cannot take columns of these types. Called when the program is made."""

    @abstractmethod
    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Add rows: row i has `columns[...][i]`, nulls included, and belongs to group `groups[i]`."""

    @abstractmethod
    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Add other states: row i of `other` belongs to group `groups[i]`, which may come several times.

        It gives what `accumulate` would have given of the rows that made them. Windows that share slices, sessions that
        grow together, and aggregates over everything are merged.
        """

    @abstractmethod
    def result(self, state: pa.RecordBatch) -> Any:
        """The result of each group: an array of the type `output`."""

    def retract(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Take rows back that came before. A function without it cannot follow a stream of changes."""
        raise NotImplementedError

    def __str__(self) -> str:
        return type(self).__name__


def can_retract(function: BatchAggregateFunction) -> bool:
    """Whether it can take rows back."""
    return type(function).retract is not BatchAggregateFunction.retract


def check_function(function: object) -> None:
    """Raise ConfigurationError if it is no function that says what it keeps and gives."""
    where = f"udaf({type(function).__name__})"
    if not isinstance(function, BatchAggregateFunction):
        raise ConfigurationError(f"{where}: it takes an object of a class that derives from tg.BatchAggregateFunction")
    state, output = getattr(function, "state", None), getattr(function, "output", None)
    if not isinstance(state, pa.Schema) or not len(state):
        raise ConfigurationError(f'{where}: state must be a schema: state = pa.schema({{"n": pa.int64()}})')
    if not isinstance(output, pa.DataType):
        raise ConfigurationError(f"{where}: output must be the type of the results: output = pa.float64()")
    strange = sorted({*function.initial} - {*state.names})
    if strange:
        raise ConfigurationError(f"{where}: initial names {strange}, and state has {state.names}")
    if SEEN in state.names or len(set(state.names)) < len(state):
        raise ConfigurationError(f"{where}: state columns {state.names} must differ, and none may be called {SEEN!r}")
    for name, value in function.initial.items():
        try:
            pa.scalar(value, state.field(name).type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"{where}: initial {name}={value!r} is no {state.field(name).type} ({error})"
            ) from error


def of_nothing(function: BatchAggregateFunction) -> pa.Array:
    """The result of a group that no row has come to."""
    arrays = [pa.array([function.initial.get(field.name)], field.type) for field in function.state]
    result = function.result(pa.RecordBatch.from_arrays(arrays, schema=function.state))
    return _as_declared(function, "result", result, function.output, 1)


class UserAggregate:
    """The accumulator of a function. `columns` are those of its state, and last whether there is any."""

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
        """Add the rows of a batch."""
        self._add("accumulate", batch, slots)

    def take_back(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Take the rows of a batch out again."""
        self._add("retract", batch, slots)

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Merge other states."""
        rows = np.flatnonzero(parts[-1].to_numpy())
        if len(rows):
            taken = [part.take(pa.array(rows)) for part in parts[:-1]]
            groups, distinct = grouped(slots[rows])
            other = pa.RecordBatch.from_arrays(taken, schema=self._function.state)
            new = self._function.merge(self._state(distinct), groups.astype(np.int64), other)
            self._put("merge", distinct, new)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """The results."""
        state = self._state(slots)
        return _as_declared(self._function, "result", self._function.result(state), self._function.output, len(slots))

    def _add(self, method: str, batch: pa.RecordBatch, slots: Slots) -> None:
        columns = [input_column(batch, column) for column in self._inputs]
        mask = row_mask(batch, self._condition)
        if len(mask):
            rows = rows_in(mask, len(slots))
            columns, slots = [column.take(pa.array(rows)) for column in columns], slots[rows]
        if len(slots):
            groups, distinct = grouped(slots)
            call = getattr(self._function, method)
            self._put(method, distinct, call(self._state(distinct), groups.astype(np.int64), *columns))

    def _state(self, slots: Slots) -> pa.RecordBatch:
        """The state of some slots, with what a function begins with where there is none."""
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


def try_accumulate(function: BatchAggregateFunction, columns: Sequence[pa.Array], rows: int) -> None:
    """Let a function accumulate rows, each in a new group of its own. Raises what it raises, and for a bad result."""
    arrays = [pa.repeat(pa.scalar(function.initial.get(field.name), field.type), rows) for field in function.state]
    state = pa.RecordBatch.from_arrays(arrays, schema=function.state)
    new = function.accumulate(state, np.arange(rows, dtype=np.int64), *columns)
    _declared_state(function, "accumulate", new, rows)


def _declared_state(function: BatchAggregateFunction, method: str, new: NewState, rows: int) -> list[pa.Array]:
    """The columns of a state that a function returned. TypeError or ValueError if it is not what it has declared."""
    state = function.state
    if not isinstance(new, pa.RecordBatch | Mapping):
        raise TypeError(
            f"{function}.{method} returned {type(new).__name__}; it returns the new state: a record batch, "
            "or a mapping of column names to arrays"
        )
    names = new.schema.names if isinstance(new, pa.RecordBatch) else list(new)
    if sorted(names) != sorted(state.names):
        raise ValueError(f"{function}.{method} returned the columns {names}; the state has {state.names}")
    return [_as_declared(function, f"{method}: {field.name}", new[field.name], field.type, rows) for field in state]


def _as_declared(
    function: BatchAggregateFunction, where: str, values: Any, data_type: pa.DataType, rows: int
) -> pa.Array:
    """What a function returned, as an array of the type that it has declared."""
    try:
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        array = array.cast(data_type)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise TypeError(f"{function}.{where} is no array of {data_type}: {error}") from error
    if len(array) != rows:
        raise ValueError(f"{function}.{where} has {len(array)} values; there are {rows} groups")
    return owned_array(array)
